"""Tasksets of verifiers v1 (`verifiers:NAME@VERSION`) as own tasks, of one turn or several.

This module runs in the contained process. A taskset of one turn becomes a file of questions
(question_file.py), a taskset of several turns or tools an environment (episode.py). A taskset that
needs a sandbox, a judge model or a second player is rejected before its tasks are loaded, since another node
could not score its answers again.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swarmd.errors import command_for
from swarmd.tasks.foreign.episode import PURE, Environment, Recorder, text_of, total
from swarmd.tasks.question_file import QuestionFile, left_out
from swarmd.tasks.sandbox.pipe import MAX_OWN_QUESTION_CHARACTERS, MAX_WHOLE_CHARACTERS
from swarmd.tasks.sandbox.worker import PluginRefused

PREFIX = "verifiers:"
# Maximum number of tasks of a taskset that are used; a taskset may be infinite.
MAX_TASKS = 50_000
# The arguments that a reward may take.
_GIVEN = {"task", "trace"}


class OpenedTaskset(NamedTuple):
    plugin: Any  # with the interface that `plugin.LoadedPlugin` describes
    identity: Sequence[str]  # covered by the digest, in addition to the files of the package
    file: Path  # the taskset's module
    notes: Sequence[str]  # sentences about tasks that were left out


def open_taskset(source: str) -> OpenedTaskset:
    """Load the taskset that `verifiers:NAME@VERSION` names. Raises PluginRefused."""
    name, _, version = source.removeprefix(PREFIX).partition("@")
    try:
        import verifiers.v1 as vf

        there = distribution(name).version
    except (ModuleNotFoundError, PackageNotFoundError):
        raise PluginRefused(
            f"verifiers or {name} is not installed: run `{command_for('verifiers')}`, and install"
            f" {name} {version} from its index or repository"
        ) from None
    if there != version:
        raise PluginRefused(f"{name} {there} is installed: install {version}, from its index or repository")
    module = vf.import_taskset(name)
    env = vf.load_environment(vf.env_config_type(name)(taskset={"id": name}))
    if why := next(_reasons(vf, module, env), ""):
        raise PluginRefused(f"it needs {why}, and every node scores answers again. {PURE}")
    keep_game(env.taskset.config)
    tasks = list(islice(env.taskset, MAX_TASKS + 1))
    notes = [f"tasks after the first {MAX_TASKS:,} left out"] if len(tasks) > MAX_TASKS else []
    del tasks[MAX_TASKS:]
    plugin: Any
    if type(env) is not vf.SingleAgentEnv or _toolsets(env.taskset):
        plugin = Environment(vf, env, _toolsets, tasks)
    else:
        plugin = one_turn([_question(vf, task) for task in tasks], Rewards(vf, tasks), notes)
    identity = [name, version, *(task.hash for task in tasks)]
    return OpenedTaskset(plugin, identity, Path(str(module.__file__)), notes)


def one_turn(questions: Sequence[str], score: Callable[[str, str], float], notes: list[str]) -> QuestionFile:
    """Return tasks of one turn, scored by the whole text, as a plug-in.

    Args:
        questions: by task; repeated questions are left out.
        score: called with a task's index, as text, and a reply.
        notes: gets a sentence about questions that are left out.

    Raises:
        PluginRefused: if no question is left.
    """
    first: dict[str, int] = {}
    dropped = Counter[str]()
    for place, question in enumerate(questions):
        if not question or len(question) > MAX_OWN_QUESTION_CHARACTERS:
            dropped[f"empty or over {MAX_OWN_QUESTION_CHARACTERS:,} characters"] += 1
        elif first.setdefault(question, place) != place:
            dropped["repeated"] += 1
    said = left_out(dropped, len(questions), "tasks")
    if not first:
        raise PluginRefused(said or "it has no tasks")
    notes += filter(None, [said])
    for reply in ("", "0"):
        # Trigger lazy imports now: the contained worker cannot import anything.
        score("0", reply)
    lines = [msgspec.json.encode({"question": q, "answer": place}) for q, place in first.items()]
    made = QuestionFile(b"\n".join(lines), score)
    made.limits = made.limits | {"longest_answer": MAX_WHOLE_CHARACTERS, "whole": True}
    # The file's answers are indices of tasks, so there is no right answer to show.
    made.solution = None  # type: ignore[assignment,method-assign]
    return made


def keep_game(config: Any) -> None:
    """Make a game of TextArena only once: it reads word lists, which a contained process cannot do.

    Its `reset` starts it again, and a worker plays one episode at a time.
    """
    games = sys.modules.get("textarena.envs.registration")
    if games and (found := games.ENV_REGISTRY.get(getattr(config, "game", ""))):
        game = games.make(f"{config.game}-raw")
        found.entry_point = lambda **_: game


def _toolsets(taskset: Any) -> Sequence[Any]:
    """Return new toolsets of the taskset and of one of its tasks."""
    config, kind = taskset.config, type(taskset).task_type()
    return [*type(taskset).toolsets(config), *kind.toolsets(config.task)]


def _reasons(vf: Any, module: Any, env: Any) -> Iterator[str]:
    """Yield the needs of a taskset beyond questions and texts, without loading its tasks."""
    config, kind = env.taskset.config, type(env.taskset).task_type()
    exported = [getattr(module, name, None) for name in getattr(module, "__all__", ())]
    if any(isinstance(item, type) and issubclass(item, vf.Harness) for item in exported):
        yield "a harness (an agent)"
    if len(Environment.players(env)) > 1:
        yield "more than one player"
    if any(getattr(type(env), hook) is not getattr(vf.Env, hook) for hook in ("start", "finalize")):
        yield "an environment with its own service or verdict"
    for tools in _toolsets(env.taskset):
        if not isinstance(tools, vf.Toolset) or type(tools).setup is not vf.Toolset.setup or tools.config.url:
            yield "tools on another machine, or tools that are set up first"
    hooks = ("setup", "finalize", "stage_verifier")
    if kind.NEEDS_CONTAINER or any(getattr(kind, hook) is not getattr(vf.Task, hook) for hook in hooks):
        yield "a sandbox"
    values = [value for part in (config, config.task) for _, value in part]
    if any(isinstance(value, vf.JudgeConfig | vf.Judge) for value in values) or config.task.judges:
        yield "a judge model"
    found = kind.__new__(kind)
    found.config = config.task
    rewards = found.hooks("reward")
    if not rewards and type(env) is vf.SingleAgentEnv:
        yield "a reward: it has none"
    for reward in rewards:
        for parameter in inspect.signature(reward).parameters.values():
            if parameter.default is parameter.empty and parameter.name not in _GIVEN:
                yield f"{parameter.name} for its reward {reward.__name__} (a sandbox, or other answers)"


def _question(vf: Any, task: Any) -> str:
    """Return a task's system prompt and its prompt as one text. Raises PluginRefused."""
    return "\n\n".join(filter(None, (task.data.system_prompt, text_of(vf, task.data.prompt))))


class Rewards:
    """Scores the reply to a task of one turn."""

    def __init__(self, vf: Any, tasks: Sequence[Any]) -> None:
        self._vf, self._tasks, self._recorder = vf, tasks, Recorder(vf)

    def __call__(self, place: str, reply: str) -> float:
        task = self._tasks[int(place)]
        trace = self._recorder.trace(task)
        self._recorder.add(trace, self._vf.UserMessage(content=task.data.prompt_text))
        self._recorder.add(trace, self._vf.AssistantMessage(content=reply))
        self._recorder.record(task, trace)
        return total(trace)
