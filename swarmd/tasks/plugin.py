"""The interface of task plug-ins, and their loader. Authors of plug-ins read docs/own-tasks.md.

This module is used only in the contained process (sandbox/plugin_process.py). A plug-in is a Python file, an
object that an installed package offers under the entry point group `swarmd.tasks`, a taskset or task file of
another project (foreign/), or a file of questions and answers (question_file.py).
"""

import hashlib
import importlib.abc
import random
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, SupportsFloat, TypeVar

import msgspec

from swarmd.config.curriculum_name import GROUP
from swarmd.tasks.answers import GradeReason, ScoredAnswer
from swarmd.tasks.curriculum import OWN_REWARD_S
from swarmd.tasks.data_set import lines, mathematics
from swarmd.tasks.foreign.harness_task import open_harness_task
from swarmd.tasks.foreign.taskset import PREFIX, open_taskset
from swarmd.tasks.question_file import NAME, QuestionFile, same_answer
from swarmd.tasks.sandbox.pipe import MAX_WHOLE_CHARACTERS, PluginDescription, ScoreItem, TaskLimits
from swarmd.tasks.sandbox.worker import Marker, PluginRefused, Prepared, TaskFault, Work
from swarmd.terminal import printable

MAX_SPECIALTIES = 256
# Answers that are scored at the start, because many rewards written for other frameworks are negative for
# wrong answers.
SAMPLES = (("",), ("0",))
# Prefix of a data set's folder in the hub's cache.
_HUB = "datasets--"
_T = TypeVar("_T")
# A specialty may have a level, which nodes choose by their own success.
_SPECIALTY = re.compile(NAME.pattern + r"(\.[1-9])?")


class LoadedPlugin:
    """A plug-in with its description. Every error in a call to the plug-in becomes a TaskFault.

    A plug-in is a module or an object with these attributes; `name`, `version`, `limits` and `examples` are
    optional:

        specialties, name, version, limits      strings, and a dict of `pipe.TaskLimits`
        examples                                turns before a question: pairs of a user's and a model's text
        generate(specialty, seed)               return a question, and the facts that `score` needs
        score(facts, answer)                    return a reward from 0 to 1; 0.999 or more means right
        solution(facts)                         optional: return a right answer, shown by `swarmd task show`

    An environment, a task of several turns, has in place of `generate` and `score`:

        reset(specialty, seed)                  return the first observation (the question), and a state
        step(state, text)                       return the next observation, a reward, and whether that is all
        solution(state)                         optional: return the texts of a right answer by turn
    """

    def __init__(self, plugin: Any, name: str, digest: str, notes: Sequence[str] = ()) -> None:
        """Check a plug-in's attributes.

        Args:
            plugin: the module or object.
            name: the curriculum's name if the plug-in does not give one.
            digest: of the plug-in's source.
            notes: sentences about input that was left out.

        Raises:
            PluginRefused: if an attribute is missing or of the wrong type.
        """
        environment = hasattr(plugin, "step")
        self._begin, scoring = ("reset", "step") if environment else ("generate", "score")
        if missing := [what for what in ("specialties", self._begin, scoring) if not hasattr(plugin, what)]:
            raise PluginRefused(f"it has no {', no '.join(missing)}")
        if uncalled := [what for what in (self._begin, scoring) if not callable(getattr(plugin, what))]:
            raise PluginRefused(f"{uncalled[0]} is no function")
        name, version = getattr(plugin, "name", name), getattr(plugin, "version", "")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise PluginRefused(
                f"its name is {name!r}; it has at most 64 lower-case letters, digits, hyphens and underscores"
            )
        if not isinstance(version, str):
            raise PluginRefused(f"its version is {version!r}, no text")
        limits = _converted("limits", getattr(plugin, "limits", {}), TaskLimits)
        examples = _converted("examples", getattr(plugin, "examples", ()), tuple[tuple[str, str], ...])
        if environment:
            # The environment reads the whole text of a turn.
            limits = msgspec.structs.replace(limits, whole=True, longest_answer=MAX_WHOLE_CHARACTERS)
        self._plugin = plugin
        specialties = _specialties(plugin.specialties)
        self.description = PluginDescription(
            name, version, specialties, limits, digest, tuple(notes), environment, examples
        )

    def prepare(self, curriculum: str, specialty: str, n: int) -> Prepared | None:  # noqa: ARG002
        """Generate a question, as `sandbox.worker.Work.prepare` requires."""
        if specialty not in self.description.specialties:
            return None
        question, facts = self._begun(specialty, n)
        score = partial(reward, self._plugin, "score", facts)
        play = partial(self._play, specialty, n) if self.description.environment else None
        return Prepared(question, score, facts, partial(self._solution, facts), play)

    def _begun(self, specialty: str, n: int) -> tuple[str, Any]:
        """Return a question, and its facts or the state of a new episode. Raises TaskFault."""
        # Seed the global generator, which some plug-ins use by mistake.
        random.seed(n)
        made, call = called(self._plugin, self._begin, specialty, n), f"{self._begin}({specialty!r}, {n})"
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], str)):
            raise TaskFault(f"{call} gave {_shown(made)}, not a question and its facts or state")
        self._check_text(call, "a question", made[0])
        return made

    def _check_text(self, call: str, kind: str, text: str) -> None:
        longest = self.description.limits.longest_question
        if not 0 < len(text) <= longest:
            raise TaskFault(f"{call} gave {kind} of {len(text):,} characters (limit: 1 to {longest:,})")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise TaskFault(f"{call} gave {kind} that is no text: it has lone surrogates")

    def _play(self, specialty: str, n: int, texts: Sequence[str]) -> ScoredAnswer:
        """Play an episode from its start with these texts. Its reward is the sum of the steps' rewards.

        Texts after the end of the episode earn nothing: no model was asked for them. Raises TaskFault.
        """
        _, state = self._begun(specialty, n)
        observations: list[str] = []
        total = 0.0
        for turn, text in enumerate(texts, 1):
            given = called(self._plugin, "step", state, text)
            if not (isinstance(given, tuple) and len(given) == 3 and isinstance(given[0], str)):
                raise TaskFault(
                    f"step gave {_shown(given)}, not an observation, a reward and whether it ends"
                )
            observation, earned, done = given
            total += number_of("step", earned)
            if done or turn == self.description.limits.turns:
                extra = turn < len(texts)
                score = ScoredAnswer.of(GradeReason.TOO_LONG if extra else min(1.0, total))
                return score._replace(observations=tuple(observations))
            self._check_text("step", "an observation", observation)
            observations.append(observation)
        return ScoredAnswer.of(min(1.0, total))._replace(observations=tuple(observations))

    def _solution(self, facts: object) -> Sequence[str] | None:
        if not callable(getattr(self._plugin, "solution", None)):
            return None
        right = called(self._plugin, "solution", facts)
        return tuple(map(str, right)) if isinstance(right, list | tuple) else (str(right),)


def _converted(name: str, given: object, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise PluginRefused(f"{name}: {error}") from None


def called(plugin: Any, function: str, *arguments: object) -> Any:
    """Call a function of a plug-in. Everything that it raises becomes a TaskFault."""
    try:
        return getattr(plugin, function)(*arguments)
    except BaseException as error:
        # This includes SystemExit and MemoryError: the fault is the plug-in's, and the worker reports it.
        raise TaskFault(f"{function}: {_describe(error)}", fatal=isinstance(error, MemoryError)) from None


def reward(plugin: Any, function: str, *arguments: object) -> float:
    """Call a function of a plug-in that returns a reward. Raises TaskFault."""
    return number_of(function, called(plugin, function, *arguments))


def number_of(function: str, given: object) -> float:
    """Return a reward that a plug-in's function gave. Raises TaskFault if it is no number from 0 to 1."""
    # Scalars of numpy and torch are not `float`; arrays and tensors with dimensions are no numbers.
    found = float(given) if isinstance(given, SupportsFloat) and not getattr(given, "ndim", 0) else -1.0
    # Rounding: parts of a reward that should sum to 1 can sum to slightly more, as in 0.4 + 0.2 + 0.3 + 0.1.
    number = round(found, 9)
    if not 0 <= number <= 1:
        # This comparison also rejects NaN.
        raise TaskFault(
            f"{function} gave {_shown(given)}, not a number from 0 to 1: give (r - least) / (most - least)"
        )
    return number


def load(source: str) -> LoadedPlugin:
    """Load a plug-in: a file, a taskset of verifiers, or an entry point of an installed package.

    Runs the plug-in's code. Raises PluginRefused.
    """
    path = Path(source.removeprefix(PREFIX).partition("@")[0] if source.startswith(PREFIX) else source)
    if source.startswith(PREFIX) or path.suffix == ".yaml":
        try:
            opened = open_harness_task(path) if path.suffix == ".yaml" else open_taskset(source)
        except PluginRefused:
            raise
        except BaseException as error:
            raise PluginRefused(_describe(error)) from None
        files = _files(opened.file, inside=opened.file.name == "__init__.py")
        digest = _digest("foreign", *opened.identity, *files)
        return LoadedPlugin(opened.plugin, _slug(path), digest, opened.notes)
    if path.suffix in (".jsonl", ".parquet"):
        content = _read(path)
        found, note = lines(content) if path.suffix == ".parquet" else (content, "")
        # The digest covers the kind, as the kinds compare answers differently. So a .jsonl file copied out of
        # the hub's cache has another digest, and its nodes form another swarm.
        data_set = path.suffix == ".parquet" or bool(_of_hub(path))
        same, kind = (mathematics(same_answer), "data set") if data_set else (same_answer, "questions")
        asked = QuestionFile(found, same)
        notes = [note] if note else asked.notes
        return LoadedPlugin(asked, _slug(path), _digest(kind, asked.canonical), notes)
    if path.suffix == ".py":
        content = _read(path)
        return LoadedPlugin(_run_file(path, content), _slug(path), _digest("file", _source(path, content)))
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if source not in offered:
        raise PluginRefused(
            f"no installed package offers it (entry points {GROUP}: {', '.join(sorted(offered)) or 'none'})"
        )
    return _load_installed(offered[source])


def rewarded(
    work: Work, curriculum: str, specialties: Sequence[str], file: str = "", digest: str = ""
) -> Work:
    """Return the work with a node's own reward in place of the curriculum's scoring.

    Args:
        work: returned unchanged if `file` is "".
        curriculum: the name that `check` passes to the worker.
        specialties: checked at the start, with the answers "" and "0" to question 1 of each.
        file: a Python file with `reward(facts, answer, score)`.
        digest: the SHA-256 that the file must have.

    Raises:
        PluginRefused: if the file cannot be used. `check` raises it if a reward fails.
    """
    if not file:
        return work
    if work.plugin and work.plugin.environment:
        raise PluginRefused("tasks of several turns are scored by their `step`: put the reward there")
    content = _read(Path(file))
    if hashlib.sha256(content).hexdigest() != digest:
        raise PluginRefused(f"{file} has changed since this node started; stop the node and join again")
    own = _run_file(Path(file), content)
    if not callable(getattr(own, "reward", None)):
        raise PluginRefused("it has no function reward(facts, answer, score)")

    def prepare(name: str, specialty: str, n: int) -> Prepared | None:
        if (made := work.prepare(name, specialty, n)) is None:
            return None
        return made._replace(mark=partial(mark, made))

    def mark(made: Prepared, answer: str) -> float:
        return reward(own, "reward", made.facts, answer, ScoredAnswer.of(made.mark(answer)).reward)

    def check(marker: Marker) -> None:
        work.check(marker)
        for specialty in specialties:
            _, fault = marker.mark(curriculum, ScoreItem(specialty, 1, SAMPLES))
            if fault:
                raise PluginRefused(f"{specialty}, question 1: {fault}")

    return replace(work, prepare=prepare, seconds=work.seconds + OWN_REWARD_S, check=check)


class _FileLoader(importlib.abc.SourceLoader):
    """Loads a module from bytes that are already read, never from a cache.

    So the digest covers exactly the code that runs.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:  # noqa: ARG002
        return self._content


def _run_file(path: Path, content: bytes) -> Any:
    module = ModuleType("swarmd_own_tasks")
    module.__file__ = str(path)
    # Dataclasses look up their module in `sys.modules`.
    sys.modules[module.__name__] = module
    try:
        _FileLoader(path, content).exec_module(module)
    except BaseException as error:
        raise PluginRefused(_describe(error)) from None
    return module


def _load_installed(point: EntryPoint) -> LoadedPlugin:
    """Load a plug-in of an installed package.

    Its digest covers the package's name and version, and all files in the folder of the entry point's module
    (only the module's file if it is a top-level module).
    """
    try:
        plugin = point.load()
    except BaseException as error:
        raise PluginRefused(_describe(error)) from None
    assert point.dist is not None
    file = Path(str(sys.modules[point.module].__file__))
    parts = _files(file, inside=file.name == "__init__.py" or "." in point.module)
    return LoadedPlugin(
        plugin, point.name, _digest("package", point.dist.name.encode(), point.dist.version.encode(), *parts)
    )


def _files(module: Path, *, inside: bool) -> Sequence[bytes]:
    """Return the name and content of the module's file, or with `inside` of all files in its folder."""
    found = (f for f in module.parent.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    files = sorted(found) if inside else [module]
    return [
        part for f in files for part in (str(f.relative_to(module.parent)).encode(), _source(f, _read(f)))
    ]


def _source(path: Path, content: bytes) -> bytes:
    """Normalize a source file's line ends and byte order mark, so that its copies have equal digests."""
    if path.suffix not in (".py", ".yaml"):
        return content
    return content.removeprefix(BOM_UTF8).replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PluginRefused(error.strerror or str(error)) from None


def _digest(*parts: str | bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
    return whole.hexdigest()


def _of_hub(path: Path) -> str:
    """Return the data set's name if the file is in the hub's cache, else ""."""
    return next((part[len(_HUB) :] for part in path.parts if part.startswith(_HUB)), "")


def _slug(path: Path) -> str:
    return re.sub(r"[^a-z0-9]+", "-", (_of_hub(path) or path.stem).lower()).strip("-")[:64] or "own"


def _specialties(named: Any) -> tuple[str, ...]:
    if isinstance(named, str | Mapping) or not isinstance(named, Sequence | set | frozenset) or not named:
        raise PluginRefused(f"specialties is {_shown(named)}, not a list of names")
    if wrong := [name for name in named if not isinstance(name, str) or not _SPECIALTY.fullmatch(name)]:
        raise PluginRefused(
            f"{_shown(wrong[0])} is no specialty's name: at most 64 lower-case letters, digits, hyphens and"
            " underscores, and perhaps a level from .1 to .9"
        )
    if len(named) > MAX_SPECIALTIES or len(set(named)) < len(named):
        raise PluginRefused(f"{len(named)} specialties; there may be {MAX_SPECIALTIES}, none twice")
    return tuple(sorted(named))


def _describe(error: BaseException) -> str:
    """Describe an exception on one line: type, text, and the last line outside of Python and swarmd."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return text
    frames = [(Path(frame.f_code.co_filename), line) for frame, line in walk_tb(error.__traceback__)]
    places = [
        f" ({file.name}, line {line})"
        for file, line in frames
        if not str(file).startswith((sys.base_prefix, "<")) and Path(__file__).parent not in file.parents
    ]
    return printable(text[:200]) + (places[-1] if places else "")


def _shown(value: object) -> str:
    """Describe a value that a plug-in returned: its type, and the value if it is short."""
    if value is None:
        return "None"
    text = repr(value) if isinstance(value, str | int | float) else ""
    return f"{type(value).__name__} {printable(text)}" if 0 < len(text) < 80 else type(value).__name__
