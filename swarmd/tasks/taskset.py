"""Tasksets of verifiers v1 (`verifiers:NAME@VERSION`) as own tasks: one turn, scored by the text alone.

This module runs in the contained process, which turns a taskset into a file of questions (question_file.py).
A taskset that needs a sandbox, a judge model, tools or several turns is rejected before its tasks are loaded,
since another node could not score its answers again.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swarmd.errors import command_for
from swarmd.tasks.question_file import left_out
from swarmd.tasks.sandbox.pipe import MAX_OWN_QUESTION_CHARACTERS
from swarmd.tasks.sandbox.worker import PluginRefused

PREFIX = "verifiers:"
# Maximum number of tasks of a taskset that are used; a taskset may be infinite.
MAX_TASKS = 50_000
# The arguments that a reward may take.
_GIVEN = {"task", "trace"}
_PURE = "Name one whose rewards are functions of the task and the text"


class OpenedTaskset(NamedTuple):
    lines: bytes  # of a question file; each answer is an index into `score`'s tasks
    score: Callable[[str, str], float]
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
    taskset = vf.load_taskset(vf.taskset_config_type(name)(id=name))
    if why := next(_reasons(vf, module, taskset), ""):
        raise PluginRefused(f"it needs {why}, and every node scores answers again. {_PURE}")
    tasks = list(islice(taskset, MAX_TASKS + 1))
    more = [f"tasks after the first {MAX_TASKS:,} left out"] if len(tasks) > MAX_TASKS else []
    del tasks[MAX_TASKS:]
    lines, notes = question_lines([_question(vf, task) for task in tasks])
    rewards = Rewards(vf, tasks)
    for reply in ("", "0"):
        # Trigger lazy imports now: the contained worker cannot import anything.
        rewards("0", reply)
    identity = [name, version, *(task.hash for task in tasks)]
    return OpenedTaskset(lines, rewards, identity, Path(str(module.__file__)), [*more, *notes])


def question_lines(questions: Sequence[str]) -> tuple[bytes, Sequence[str]]:
    """Return the lines of a question file: each question once, with its index as the answer.

    Also returns a sentence about questions that are left out. Raises PluginRefused if none is left.
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
    lines = [msgspec.json.encode({"question": q, "answer": place}) for q, place in first.items()]
    return b"\n".join(lines), [said] if said else []


def _reasons(vf: Any, module: Any, taskset: Any) -> Iterator[str]:
    """Yield the needs of a taskset beyond a question and a text, without loading its tasks."""
    kind, config = type(taskset).task_type(), taskset.config
    exported = [getattr(module, name, None) for name in getattr(module, "__all__", ())]
    if any(isinstance(item, type) and issubclass(item, vf.Env | vf.Harness) for item in exported):
        yield "an environment or a harness (several turns or agents)"
    if getattr(kind, "user", None) is not None:
        yield "a simulated user (several turns)"
    if type(taskset).toolsets(config) or kind.toolsets(config.task):
        yield "tools"
    hooks = ("setup", "finalize", "stage_verifier")
    if kind.NEEDS_CONTAINER or any(getattr(kind, hook) is not getattr(vf.Task, hook) for hook in hooks):
        yield "a sandbox"
    values = [value for part in (config, config.task) for _, value in part]
    if any(isinstance(value, vf.JudgeConfig | vf.Judge) for value in values) or config.task.judges:
        yield "a judge model"
    found = kind.__new__(kind)
    found.config = config.task
    rewards = found.hooks("reward")
    if not rewards:
        yield "a reward: it has none"
    for reward in rewards:
        for parameter in inspect.signature(reward).parameters.values():
            if parameter.default is parameter.empty and parameter.name not in _GIVEN:
                yield f"{parameter.name} for its reward {reward.__name__} (a sandbox, or other answers)"


def _question(vf: Any, task: Any) -> str:
    """Return a task's system prompt and its one user prompt as text. Raises PluginRefused for more turns."""
    data, prompt = task.data, task.data.prompt
    if not isinstance(prompt, str):
        turns = [message for message in prompt or () if not isinstance(message, vf.SystemMessage)]
        if len(turns) != 1 or not isinstance(getattr(turns[0], "content", None), str):
            raise PluginRefused(f"task {data.idx} has a prompt of {len(turns)} turns, and a question is one")
    return "\n\n".join(part for part in (data.system_prompt, data.prompt_text) if part)


class Rewards:
    """Scores a reply by all rewards of its task: their weighted sum over the sum of weights, at least 0."""

    def __init__(self, vf: Any, tasks: Sequence[Any]) -> None:
        self._vf, self._tasks = vf, tasks
        self._common = {"agent": vf.AgentInfo(config=vf.AgentConfig())}
        # Read once here: reading it runs git, which a contained process cannot do.
        self._common["verifiers"] = self._trace(tasks[0]).verifiers

    def __call__(self, place: str, reply: str) -> float:
        task = self._tasks[int(place)]
        trace, total, weights = self._trace(task, reply), 0.0, 0.0
        given = {"task": task.data, "trace": trace}
        for reward in task.hooks("reward"):
            wanted = inspect.signature(reward).parameters.keys() & given.keys()
            found = _finished(reward(**{name: given[name] for name in wanted}))
            scores = found.values() if isinstance(found, Mapping) else [found]
            total += reward._vf_weight * sum(map(float, scores))
            weights += max(0.0, reward._vf_weight)
        return max(0.0, total / weights)

    def _trace(self, task: Any, reply: str = "") -> Any:
        vf = self._vf
        asked = vf.MessageNode(message=vf.UserMessage(content=task.data.prompt_text))
        said = vf.MessageNode(parent=0, message=vf.AssistantMessage(content=reply), sampled=True)
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        return vf.Trace(task=about, nodes=[asked, said], is_completed=True, ok=True, **self._common)


def _finished(reward: Any) -> Any:
    """Return the result of a coroutine that never waits. Raises PluginRefused if it waits."""
    try:
        reward.send(None)
    except StopIteration as done:
        return done.value
    reward.close()
    raise PluginRefused(f"its reward {reward.__name__} waits for something: a sandbox or a model. {_PURE}")
