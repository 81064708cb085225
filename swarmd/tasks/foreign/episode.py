"""Episodes of verifiers v1's environments, played without an event loop, a model server or tool servers.

An environment's `run` is a coroutine. Here it waits for nothing but a model's next text, so the contained
process plays it, and every receiver plays it again. A tool is a method of the taskset: a text calls it as
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the form that Qwen's and SmolLM's templates use.
"""

import inspect
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec

from swarmd.tasks.curriculum import HELD_OUT
from swarmd.tasks.question_file import SPECIALTY
from swarmd.tasks.sandbox.pipe import MAX_OWN_QUESTION_CHARACTERS
from swarmd.tasks.sandbox.worker import PluginRefused

PURE = "Name one whose rewards are functions of the task and the texts"
# Maximum number of the model's texts in an episode.
TURNS = 16
# Every tenth task is held out.
_HELD_OUT_STEP = 10
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_HOW = 'A tool is called by <tool_call>{"name": "…", "arguments": {…}}</tool_call> at the end. Tools:'


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class Recorder:
    """Makes traces, and records the rewards of a task's own functions in them."""

    def __init__(self, vf: Any) -> None:
        self._vf = vf
        self._common = {"agent": vf.AgentInfo(config=vf.AgentConfig())}

    def trace(self, task: Any) -> Any:
        about = self._vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        made = self._vf.Trace(task=about, is_completed=True, ok=True, **self._common)
        # Kept from the first trace: reading it runs git, which a contained process cannot do.
        self._common["verifiers"] = made.verifiers
        return made

    def add(self, trace: Any, message: Any) -> None:
        sampled = isinstance(message, self._vf.AssistantMessage)
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(self._vf.MessageNode(parent=parent, message=message, sampled=sampled))

    def record(self, task: Any, trace: Any) -> None:
        given = {"task": task.data, "trace": trace}
        for reward in task.hooks("reward"):
            wanted = inspect.signature(reward).parameters.keys() & given.keys()
            found = finished(reward(**{name: given[name] for name in wanted}))
            scores = found.values() if isinstance(found, Mapping) else [found]
            trace.record_reward(reward.__name__, sum(map(float, scores)), reward._vf_weight)


def total(trace: Any) -> float:
    """Return the weighted sum of a trace's rewards over the sum of weights, at least 0."""
    rewards = list(filter(None, trace.rewards.values()))
    weights = sum(max(0.0, each.weight) for each in rewards)
    return max(0.0, float(sum(each.score * each.weight for each in rewards)) / (weights or 1.0))


def text_of(vf: Any, message: Any) -> str:
    """Return a prompt, a message or a list of messages as text.

    Raises PluginRefused for anything but text, and for several turns: a question is one.
    """
    messages = [message] if isinstance(message, str) else list(message or ())
    turns = [each for each in messages if not isinstance(each, vf.SystemMessage)]
    found = [
        each if isinstance(each, str) else each["content"] if isinstance(each, dict) else each.content
        for each in messages
    ]
    if len(turns) != 1 or not all(isinstance(each, str) for each in found):
        raise PluginRefused(f"it shows {len(turns)} turns at once, or pictures, and a question is one text")
    return "\n\n".join(found)


def finished(call: Any) -> Any:
    """Return the result of a coroutine that never waits. Raises PluginRefused if it waits."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    call.close()
    raise PluginRefused(f"its {call.__name__} waits for something: a sandbox or a model. {PURE}")


class Environment:
    """A taskset's environment with one player, as a plug-in with the interface of plugin.LoadedPlugin."""

    specialties = (SPECIALTY,)
    limits = {"longest_question": MAX_OWN_QUESTION_CHARACTERS, "turns": TURNS}  # noqa: RUF012

    def __init__(
        self, vf: Any, env: Any, toolsets: Callable[[Any], Sequence[Any]], tasks: Sequence[Any]
    ) -> None:
        """Take an environment's tasks, and hold every tenth out.

        Args:
            vf: the module verifiers.v1.
            env: an environment of one player.
            toolsets: returns new toolsets for a taskset.
            tasks: the taskset's tasks.

        Raises:
            PluginRefused: if there are fewer than two tasks, or an episode cannot be played.
        """
        if len(tasks) < 2:
            raise PluginRefused(f"it has {len(tasks)} tasks and needs 2, since one of them is held out")
        self.vf, self.env, self.recorder = vf, env, Recorder(vf)
        (self.player,) = self.players(env)
        self.toolsets = partial(toolsets, env.taskset)
        # The first tool's call, since a small model rarely writes one from a description alone.
        self.examples = [_example(*tool) for tool in _tools(self.toolsets())][:1]
        self._held_out = tasks[::_HELD_OUT_STEP]
        self._training = [task for place, task in enumerate(tasks) if place % _HELD_OUT_STEP]
        for text in ("", "0"):
            # Trigger lazy imports now: the contained worker cannot import anything.
            _, episode = self.reset(SPECIALTY, 0)
            while not self.step(episode, text)[2]:
                pass

    @staticmethod
    def players(env: Any) -> Sequence[str]:
        from verifiers.v1.configs.agent import agent_config_fields

        return [*agent_config_fields(env.config)]

    def reset(self, specialty: str, seed: int) -> tuple[str, "TasksetEpisode"]:  # noqa: ARG002
        tasks = self._held_out if seed >= HELD_OUT else self._training
        episode = TasksetEpisode(self, tasks[seed % len(tasks)])
        return episode.question, episode

    def step(self, episode: "TasksetEpisode", text: str) -> tuple[str, float, bool]:
        shown = episode.said(text)
        return (shown, 0.0, False) if shown is not None else ("", episode.reward, True)


class _Text:
    """Waits for the model's reply to a shown text."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __await__(self) -> Generator[str, str, str]:
        return (yield self._shown)


class TasksetEpisode:
    """One episode, played up to the model's next text."""

    def __init__(self, environment: Environment, task: Any) -> None:
        self._of, self._vf, self._recorder = environment, environment.vf, environment.recorder
        # Set as soon as the environment asks the player something.
        self.trace: Any = None
        player = SimpleNamespace(interaction=self._interaction, run=self._run)
        self._play = environment.env.run(task, SimpleNamespace(**{environment.player: player}))
        question = self.said(None)
        if question is None:
            raise PluginRefused("an episode ends before the first text")
        self.question = question

    @property
    def reward(self) -> float:
        return total(self.trace)

    def said(self, text: str | None) -> str | None:
        """Go on with the model's text (None: begin); return the next text that it sees, None at the end."""
        try:
            shown = self._play.send(text)
        except StopIteration:
            return None
        if not isinstance(shown, str):
            self._play.close()
            raise PluginRefused(f"its environment waits for something other than a text. {PURE}")
        return shown

    async def _run(self, task: Any) -> Any:
        async with self._interaction(task) as interaction:
            await interaction.turn()
        return self.trace

    def _interaction(self, task: Any) -> "TasksetEpisode":
        """Begin the exchange with the player, as `verifiers.v1.Agent.interaction` does."""
        self._task, self.trace = task, self._recorder.trace(task)
        toolsets = self._of.toolsets()
        for toolset in toolsets:
            finished(toolset.setup_task(task.data))
        self._tools = dict(_tools(toolsets))
        lines = [f"{name}{inspect.signature(f)}: {inspect.getdoc(f)}" for name, f in self._tools.items()]
        # Shown once, before and after the first message.
        self._around = task.data.system_prompt, "\n".join([_HOW, *lines] if lines else [])
        return self

    async def __aenter__(self) -> "TasksetEpisode":
        return self

    async def __aexit__(self, fault: type[BaseException] | None, *_: object) -> None:
        if fault is None:
            self._recorder.record(self._task, self.trace)

    async def turn(self, message: Any = None) -> Any:
        """Show a message (None: the task's prompt) and return the model's `verifiers.v1.Segment`.

        A segment has texts until one calls no tool.
        """
        shown = text_of(self._vf, self._task.data.prompt if message is None else message)
        if self._over():
            return self._vf.Segment(messages=[], terminated=True)
        self._recorder.add(self.trace, self._vf.UserMessage(content=shown))
        (before, after), self._around = self._around, ("", "")
        shown = "\n\n".join(filter(None, (before, shown, after)))
        first = len(self.trace.nodes)
        while True:
            text = await _Text(shown)
            calls = [
                self._vf.ToolCall(id=str(number), name="", arguments=call)
                for number, call in enumerate(_CALL.findall(text) if self._tools else ())
            ]
            results = [self._result(call) for call in calls]
            self._recorder.add(self.trace, self._vf.AssistantMessage(content=text, tool_calls=calls or None))
            for call, result in zip(calls, results, strict=True):
                self._recorder.add(self.trace, self._vf.ToolMessage(tool_call_id=call.id, content=result))
            if not calls or self._over():
                return self._vf.Segment(messages=[node.message for node in self.trace.nodes[first:]])
            shown = "\n".join(results)

    def _result(self, call: Any) -> str:
        """Run a tool call, and write its name and arguments into it. Every fault is a result.

        Texts of Python's and libraries' errors differ between versions, and results must not: so a result has
        only an error's type.
        """
        try:
            asked = msgspec.json.decode(call.arguments, type=_Call)
        except msgspec.DecodeError:
            return f"this is no call. {_HOW} {', '.join(self._tools)}"
        call.name, call.arguments = asked.name, msgspec.json.encode(asked.arguments).decode()
        if asked.name not in self._tools:
            return f"there is no tool {asked.name}; there are {', '.join(self._tools)}"
        tool = self._tools[asked.name]
        try:
            inspect.signature(tool).bind(**asked.arguments)
        except TypeError:
            return f"wrong arguments: {asked.name}{inspect.signature(tool)}"
        try:
            found = tool(**asked.arguments)
            found = finished(found) if inspect.iscoroutine(found) else found
            return found if isinstance(found, str) else msgspec.json.encode(found).decode()
        except (PluginRefused, MemoryError):
            raise
        except Exception as error:
            return f"{asked.name} failed: {type(error).__name__}"

    def _over(self) -> bool:
        trace = self.trace
        return trace.num_turns >= TURNS or any(finished(stop(trace)) for stop in self._task.hooks("stop"))


def _tools(toolsets: Sequence[Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    from verifiers.v1.utils.decorators import discover_decorated

    for toolset in toolsets:
        for tool in discover_decorated(toolset, "tool"):
            name = getattr(tool, "tool_name", None) or tool.__name__
            yield "_".join(filter(None, (toolset.server_name, name))), tool


def _example(name: str, tool: Callable[..., Any]) -> tuple[str, str]:
    """Return a turn that shows how a tool is called: a user's text, and the model's."""
    values = {int: 1, float: 1.5, bool: True}
    given = {
        parameter.name: values.get(parameter.annotation, "text")
        for parameter in inspect.signature(tool).parameters.values()
        if parameter.default is parameter.empty
    }
    call = msgspec.json.encode({"name": name, "arguments": given}).decode()
    return f"Call {call}", f"<tool_call>{call}</tool_call>"
