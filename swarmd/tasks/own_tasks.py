"""Own tasks: curricula of task plug-ins that a node's configuration names (docs/own-tasks.md).

No code of a plug-in runs in this process: a contained process loads the plug-in, generates its questions and
scores answers (sandbox/plugin_process.py).
"""

import hashlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from swarmd.config.curriculum_name import EXPECTED, curriculum_name
from swarmd.errors import ConfigError, SwarmdError
from swarmd.tasks import answers
from swarmd.tasks.curriculum import CURRICULA, EXAMPLES, TASKS_VERSION, Curriculum, DrawnTasks, OwnReward
from swarmd.tasks.data_set import fetched
from swarmd.tasks.sandbox.client import Verifier, describe
from swarmd.tasks.sandbox.pipe import PluginDescription
from swarmd.terminal import printable
from swarmd.types import Completion, Observe, Task, TaskRef

PLUGIN_PROCESS = "swarmd.tasks.sandbox.plugin_process"
# Number of failed draws of one question after which the plug-in is given up.
MAX_TRIES = 16

# The curricula that come with swarmd as plug-ins.
ENVIRONMENTS = {"tools-6": Path(__file__).with_name("tools.py")}

log = logging.getLogger(__name__)


class NoQuestion(SwarmdError):
    """The task plug-in makes no questions."""


@dataclass(frozen=True, kw_only=True)
class OwnCurriculum(Curriculum):
    """A plug-in's description of itself, as a curriculum.

    A source both generates the questions and scores the answers, so nodes with different sources never meet,
    even if their own rewards are equal.
    """

    # A path (possibly in the hub's cache), or the name of an entry point of an installed package.
    source: str
    plugin: PluginDescription
    examples: tuple[tuple[str, str], ...] = ()

    @property
    def turns(self) -> int:
        return self.plugin.limits.turns if self.plugin.environment else 1

    @property
    def command(self) -> Sequence[str]:
        return (PLUGIN_PROCESS, self.source, self.plugin.digest, *(self.own_reward or ()))

    @property
    def patience(self) -> float:
        return self.plugin.limits.seconds + super().patience

    @cached_property
    def questions(self) -> str:
        plugin = self.plugin
        document = json.dumps(["own", TASKS_VERSION, plugin.version, plugin.specialties, plugin.digest])
        return hashlib.sha256(document.encode()).hexdigest()[:16]

    def read(self, specialty: str, text: str) -> str | answers.GradeReason:  # noqa: ARG002
        limits = self.plugin.limits
        return answers.read_own(text, limits.longest_answer, whole=limits.whole)

    def in_form(
        self,
        specialty: str,
        completions: Sequence[Completion],
        rewards: Sequence[float],
        observations: Sequence[Sequence[str]] = (),
    ) -> Sequence[bool]:
        if self.turns == 1:
            return super().in_form(specialty, completions, rewards)
        return [reward > 0 or bool(seen) for reward, seen in zip(rewards, observations, strict=True)]

    def answer_end(self, text: str) -> int | None:
        return None if self.plugin.limits.whole else super().answer_end(text)


def find_curriculum(text: str, reward: str = "") -> Curriculum:
    """Return the curriculum that a configuration names.

    The name is a curriculum of swarmd, a file, a data set of the hub, or an entry point of an installed
    package. For a plug-in, a contained process is started once, and its description is cached for the life
    of this process.

    Args:
        text: the configured name.
        reward: the file with the node's own reward; "" for the curriculum's.

    Raises:
        ConfigError: if there is no such curriculum, or it cannot be used.
    """
    try:
        name = curriculum_name(text)
    except ValueError as error:
        raise ConfigError(
            f"no curriculum is called {text!r}: {error}{'.' * (str(error)[-1] != '?')} There are"
            f" {EXPECTED.removeprefix('auto, ')}."
        ) from None
    if name == "auto":
        raise ConfigError(
            f"auto stands for the curriculum of a node's model. Name one: {EXPECTED.removeprefix('auto, ')}."
        )
    if reward:
        return _rewarded(name, reward)
    return CURRICULA.get(name) or _own(str(ENVIRONMENTS.get(name, name)))


@lru_cache
def _rewarded(name: str, file: str) -> Curriculum:
    try:
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"tasks.reward: {file}: {error.strerror or error}. Correct the path, or leave tasks.reward out."
        ) from None
    found = replace(find_curriculum(name), own_reward=OwnReward(file, digest))
    describe(found.command, f"tasks.reward cannot be used: {file}", "leave tasks.reward out")
    return found


@lru_cache
def _own(source: str) -> OwnCurriculum:
    file = str(fetched(source)) if source.startswith("hf:") else source
    described = describe(
        (PLUGIN_PROCESS, file, ""), f"own tasks cannot be used: {source}", "name other tasks"
    )
    assert described is not None
    configs: Mapping[str, Mapping[str, Any]] = {specialty: {} for specialty in described.specialties}
    # The built-in examples show <answer>…</answer>, in which the other tasks' answers do not stand.
    tagged = not (described.environment or described.limits.whole)
    examples = described.examples or (EXAMPLES if tagged else ())
    found = OwnCurriculum(described.name, configs, source=file, plugin=described, examples=examples)
    for note in described.notes:
        log.warning("%s: %s", source, printable(note))
    if found.name in (*CURRICULA, "auto"):
        raise ConfigError(
            f"{source}: its name is {found.name!r}, as of tasks of swarmd. Rename the file, or set"
            " another name in it."
        )
    return found


class OwnTasks(DrawnTasks):
    """Draws from an own curriculum, and regenerates any item of it.

    Drawing raises NoQuestion if the plug-in generates no question.
    """

    def __init__(self, curriculum: OwnCurriculum, maker: Verifier, asked: Sequence[str] = ()) -> None:
        """Open an own curriculum.

        maker: generates the questions in a contained process.
        """
        super().__init__(curriculum, asked)
        self._source, self._maker = curriculum.source, maker

    def task(self, ref: TaskRef) -> Task | None:
        """Return the task, or None if there is none.

        The facts that score an answer stay in the contained process.
        """
        if not self.curriculum.names(ref.specialty, ref.n):
            return None
        question = self._maker.make(ref).question
        return None if question is None else Task(ref, question, {})

    def play(
        self, items: Sequence[tuple[TaskRef, Sequence[Completion]]]
    ) -> Sequence[tuple[tuple[str, ...], ...]]:
        if self.curriculum.turns == 1:
            return super().play(items)
        return [tuple(each.observations for each in row) for row in self._maker.judge(items)]

    def observer(self, refs: Sequence[TaskRef]) -> Observe | None:
        return partial(self._observe, refs) if self.curriculum.turns > 1 else None

    def _observe(
        self, refs: Sequence[TaskRef], asked: Sequence[tuple[int, tuple[str, ...]]]
    ) -> Sequence[str | None]:
        played = self.play([(refs[i], [Completion(t[-1], True, t[:-1])]) for i, t in asked])
        # An episode goes on if the last text has an observation, too.
        return [
            replies[-1] if len(replies) == len(texts) else None
            for (_, texts), (replies,) in zip(asked, played, strict=True)
        ]

    def solution(self, ref: TaskRef) -> tuple[str, ...] | None:
        """Return the texts of a right answer by turn; None if the plug-in gives none."""
        return self._maker.make(ref).answer

    def _draw(self, low: int, high: int, rng: random.Random, specialties: Sequence[str]) -> Task:
        fault = ""
        for _ in range(MAX_TRIES):
            ref = TaskRef(rng.choice(specialties), rng.randrange(low, high))
            made = self._maker.make(ref)
            if made.question is not None:
                return Task(ref, made.question, {})
            fault = made.fault
        raise NoQuestion(
            f"the task plug-in {self._source} made no question in {MAX_TRIES} tries; the last: {fault}."
            " Fix it, and join again."
        )
