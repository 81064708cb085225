"""Tasksets of verifiers v1 and tasks of lm-evaluation-harness work with the real packages.

Each package is tested separately.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmd.config.curriculum_name import curriculum_name
from swarmd.errors import ConfigError
from swarmd.tasks.curriculum import HELD_OUT
from swarmd.tasks.foreign.episode import TURNS
from swarmd.tasks.foreign.harness_task import HarnessScores
from swarmd.tasks.foreign.taskset import keep_game
from swarmd.tasks.own_tasks import OwnTasks, find_curriculum
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import open_tasks
from swarmd.types import Completion, TaskRef
from testbed.environments import PACKAGES, default_environment, holds

pytestmark = pytest.mark.slow

SUMS = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        import decimal  # not loaded before
        return float(f"= {self.data.answer}" in trace.last_reply)

    @vf.reward(weight=0.25)
    async def short(self, task: SumData, trace: vf.Trace) -> float:
        assert trace.num_turns == 1 and trace.task.data == task
        return float(0 < len(trace.last_reply) < 20)
    # MORE

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for a in range(9):
            for b in range(9):
                data = SumData(prompt=f"{a} + {b}", system_prompt="Add.", answer=str(a + b))
                yield SumTask(data, self.config.task)

__all__ = ["Sums"]
"""
# Additions to a taskset that other nodes could not score, by the message that they cause.
REFUSED = {
    "a sandbox": "NEEDS_CONTAINER = True",
    "a sandbox, and": "async def setup(self, trace, runtime): pass",
    "tools on another machine": "toolsets = classmethod(lambda cls, config: [1])",
    "a judge model": "",
    "runtime for its reward graded": """
    @vf.reward
    async def graded(self, trace, runtime) -> float:
        return 1.0
""",
    "waits for something": """
    @vf.reward
    async def slow(self, trace) -> float:
        import asyncio
        await asyncio.sleep(0)
        return 1.0
""",
    "refused in the verifier": """
    @vf.reward
    async def reads(self, trace) -> float:
        return float(bool(open("/etc/hostname").read()))
""",
}
# A guessing game against the environment, with a task of each kind of opening.
GAME = """
import verifiers.v1 as vf

class PlayerConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class GuessData(vf.TaskData):
    hidden: int

class GuessTask(vf.Task[GuessData]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "I give up"

    @vf.reward(weight=1.0)
    async def quick(self, trace: vf.Trace) -> float:
        assert [message.content for message in trace.assistant_messages][-1] == trace.last_reply
        return 1 / trace.num_turns

class Game(vf.Env[PlayerConfig]):
    async def run(self, task, agents):
        first = None if task.data.prompt else [vf.UserMessage(content="Guess from 0 to 9.")]
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn(first)
            while not segment.terminated and segment.last_reply != str(task.data.hidden):
                # MORE
                larger = segment.last_reply < str(task.data.hidden)
                segment = await interaction.turn("larger" if larger else "smaller")
        interaction.trace.record_reward("found", float(not segment.terminated), 3.0)

class Games(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for hidden in range(10):
            prompt = "Find the digit." if hidden % 2 else None
            yield GuessTask(GuessData(prompt=prompt, system_prompt="Play.", hidden=hidden), self.config.task)

__all__ = ["Game", "Games"]
"""
REFUSED_GAMES = {
    "more than one player": ("player: vf", "other: vf.AgentConfig = vf.AgentConfig()\n    player: vf"),
    "its own service or verdict": (
        "    async def run(",
        "    async def finalize(self, task, episode): pass\n    async def run(",
    ),
    "waits for something other than a text": ("# MORE", "import asyncio; await asyncio.sleep(0)"),
    "2 turns at once": ("[vf.User", "[vf.UserMessage(content='Now'), vf.User"),
    "or pictures": ('content="Guess from 0 to 9."', "content=[vf.TextContentPart(text='Guess.')]"),
    "another question each time": ('"Guess from 0 to 9."', "f'Guess {__import__(\"time\").time_ns()}'"),
    "ends before the first text": ("        async with", "        return\n        async with"),
    "it has 1 tasks and needs 2": ("range(10)", "range(1)"),
}
TOOLS = """
import verifiers.v1 as vf

PRICES = {"tea": 3, "cake": 5}

class Till(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "till"

    async def setup_task(self, task) -> None:
        self.spent = 0

    @vf.tool
    async def price(self, item: str) -> int:
        \"\"\"Return a price.\"\"\"
        return PRICES[item]

    @vf.tool(name="buy")
    def bought(self, item: str, count: int = 1) -> str:
        self.spent += PRICES[item] * count
        return f"spent {self.spent}"

    @vf.tool
    def odd(self) -> object:
        return object()

    @vf.tool
    def peek(self) -> str:
        return open("/etc/hostname").read()

class ShopTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Till(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def told(self, trace: vf.Trace) -> float:
        calls = [call.name for message in trace.assistant_messages for call in message.tool_calls or ()]
        return float(trace.last_reply == "6" and calls.count("till_buy") == len(trace.tool_messages))

class Shop(vf.Taskset[ShopTask, vf.TasksetConfig]):
    def load(self):
        for n in range(20):
            yield ShopTask(vf.TaskData(prompt=f"Buy two teas, customer {n}."), self.config.task)

__all__ = ["Shop"]
"""
JUDGED = """
class Judged(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig(id="x")

class JudgedConfig(vf.TasksetConfig):
    task: Judged = Judged()
"""
Install = Callable[..., str]


def packages(name: str) -> str:
    environment = default_environment(name)
    if not holds(environment, name):
        pytest.skip(f"{PACKAGES[name][-1][-1]} is not here: `python -m testbed.environments {name}`")
    (found,) = environment.glob("lib/python3*/site-packages")
    return str(found)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a taskset as a package, next to verifiers."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), packages("verifiers")])

    def write(name: str, code: str = SUMS) -> str:
        module = name.replace("-", "_")
        for path, text in (
            (tmp_path / module / "__init__.py", code),
            (
                tmp_path / f"{module}-1.0.dist-info" / "METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
            ),
        ):
            path.parent.mkdir()
            path.write_text(text)
        return f"verifiers:{name}@1.0"

    return write


def test_a_taskset_asks_and_scores_whole_texts_in_the_contained_process(install: Install) -> None:
    found = find_curriculum(install("tiny-sums"))
    assert (found.name, found.specialties) == ("tiny-sums", ("questions",))
    with Verifier(found) as verifier:
        task = open_tasks(found, verifier).task(TaskRef("questions", 7))
        assert task is not None and task.question.startswith("Add.\n\n")
        right = sum(map(int, task.question.split()[1::2]))
        texts = [f"it is = {right}", f"so {'x' * 2000} = {right}", "no", "", f"= {right}" + "x" * 17_000]
        rewards = verifier.score([(task.ref, [Completion(text, True) for text in texts])])
    assert rewards == [(1.0, 0.8, 0.2, 0.0, 0.0)]


def test_name_version_and_code_of_a_taskset_identify_the_swarm(install: Install) -> None:
    names = install("one"), install("two"), install("three", SUMS.replace("= {self", "is {self"))
    assert len({find_curriculum(name).questions for name in names}) == 3
    with pytest.raises(ConfigError, match=r"one 1\.0 is installed: install 2\.0, from"):
        find_curriculum("verifiers:one@2.0")
    with pytest.raises(ConfigError, match="or four is not installed: run"):
        find_curriculum("verifiers:four@1.0")


@pytest.mark.parametrize("why", REFUSED)
def test_a_taskset_that_other_nodes_cannot_score_is_rejected_before_loading(
    install: Install, why: str
) -> None:
    code = SUMS.replace("# MORE", REFUSED[why])
    if why == "a judge model":
        code = code.replace(
            "class Sums(vf.Taskset[SumTask, vf.TasksetConfig])",
            f"{JUDGED}\nclass Sums(vf.Taskset[SumTask, JudgedConfig])",
        )
    if "waits" not in why and "refused" not in why:
        code = code.replace("for a in range(9)", "raise RuntimeError('loaded')\n        for a in ()")
    with pytest.raises(ConfigError, match=why):
        find_curriculum(install(f"needy-{list(REFUSED).index(why)}", code))


def _texts(*said: str) -> Completion:
    return Completion(said[-1], True, said[:-1])


def test_an_environment_of_one_player_is_played_in_the_contained_process(install: Install) -> None:
    found = find_curriculum(install("guess-game", GAME))
    with Verifier(found) as verifier:
        tasks = OwnTasks(found, verifier)
        # Tasks 1 to 9 are trained on, task 0 is held out.
        asked = [tasks.task(TaskRef("questions", seed)) for seed in (2, 3, HELD_OUT)]
        assert [task.question for task in asked if task] == [
            "Play.\n\nFind the digit.",
            "Play.\n\nGuess from 0 to 9.",
            "Play.\n\nGuess from 0 to 9.",
        ]
        item = (
            TaskRef("questions", 2),
            [_texts("3"), _texts("1", "5", "3"), _texts("1", "I give up"), _texts("9")],
        )
        endless = TaskRef("questions", 2), [_texts(*["9"] * TURNS), _texts(*["9"] * (TURNS - 1), "3")]
        held_out = TaskRef("questions", HELD_OUT), [_texts("0")]
        scores, last, (zero,) = verifier.judge([item, endless, held_out])
    assert zero.reward == 1
    assert [score.observations for score in scores] == [(), ("larger", "smaller"), ("larger",), ("smaller",)]
    # The third was ended by the task's own rule. The fourth is not over, so it has no reward yet.
    assert [score.reward for score in scores] == pytest.approx([1, (3 + 1 / 3) / 4, 1 / 8, 0], abs=1e-4)
    assert [score.reward for score in last] == pytest.approx([1 / TURNS / 4, (3 + 1 / TURNS) / 4], abs=1e-4)


@pytest.mark.parametrize("why", REFUSED_GAMES)
def test_an_environment_that_other_nodes_cannot_play_is_refused(install: Install, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        find_curriculum(install(f"odd-{list(REFUSED_GAMES).index(why)}", GAME.replace(*REFUSED_GAMES[why])))


def test_tools_of_a_taskset_are_called_in_the_contained_process(install: Install) -> None:
    found = find_curriculum(install("shop", TOOLS))
    assert found.examples == (
        (
            'Call {"name":"till_buy","arguments":{"item":"text"}}',
            '<tool_call>{"name":"till_buy","arguments":{"item":"text"}}</tool_call>',
        ),
    )
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    two = call % ("till_buy", '{"item": "tea", "count": 2}')
    one = call % ("till_buy", '{"item": "tea"}')
    with Verifier(found) as verifier:
        task = OwnTasks(found, verifier).task(TaskRef("questions", 0))
        assert task is not None and task.question.startswith(
            "Buy two teas, customer 1.\n\nA tool is called by"
        )
        assert "\ntill_price(item: str) -> int: Return a price." in task.question
        wrong = [
            call % ("till_price", '{"item": "tea"}'),
            call % ("till_price", '{"item": "wine"}'),
            call % ("till_price", '{"thing": "tea"}'),
            call % ("till_price", "[]"),
            call % ("price", "{}"),
            call % ("till_peek", "{}"),
            call % ("till_odd", "{}"),
            "<tool_call>till_price(tea)</tool_call>",
        ]
        said = [
            _texts(two, "6"),
            _texts(one + one, "6"),
            _texts(one, one, "6"),
            _texts("6"),
            _texts(*wrong, "6"),
        ]
        ((right, both, each, none, bad),) = verifier.judge([(task.ref, said)])
    assert [score.reward for score in (right, both, each, none, bad)] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert (right.observations, both.observations) == (("spent 6",), ("spent 3\nspent 6",))
    assert each.observations == ("spent 3", "spent 6")
    starts = (
        "3",
        "till_price failed: KeyError",
        "wrong arguments: till_price(item: str) -> int",
        "this is no call. A tool is called by <tool_call>",
        "there is no tool price; there are till_",
        "till_peek failed: PermissionError",
        "till_odd failed: TypeError",
        "this is no call",
    )
    assert [shown[: len(start)] for shown, start in zip(bad.observations, starts, strict=True)] == [*starts]


def test_a_game_of_textarena_is_made_once_since_it_reads_word_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    registered = {"Word-v0": SimpleNamespace(entry_point="textarena.envs:Word")}
    games = SimpleNamespace(ENV_REGISTRY=registered, make=lambda name: made.append(name) or SimpleNamespace())
    monkeypatch.setitem(sys.modules, "textarena.envs.registration", games)
    keep_game(SimpleNamespace(game="Word-v0"))
    keep_game(SimpleNamespace(game="other"))
    keep_game(SimpleNamespace())
    make = registered["Word-v0"].entry_point
    assert callable(make) and make(length=5) is make(length=5) and made == ["Word-v0-raw"]


@pytest.mark.parametrize(
    "change",
    [
        ("vf.ToolsetConfig())]", "vf.ToolsetConfig(url='http://localhost:1/mcp'))]"),
        ("async def setup_task(self, task)", "async def setup(self)"),
    ],
)
def test_tools_that_run_elsewhere_are_refused(install: Install, change: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="tools on another machine, or tools that are set up first"):
        find_curriculum(install(f"far-{len(change[0])}", TOOLS.replace(*change)))


def test_a_tasksets_name_needs_a_version() -> None:
    assert curriculum_name("verifiers:reverse-text@0.1.0") == "verifiers:reverse-text@0.1.0"
    for wrong in ("verifiers:reverse-text", "verifiers:@1.0", "verifiers:a/b@1.0"):
        with pytest.raises(ValueError, match="verifiers:NAME@VERSION"):
            curriculum_name(wrong)


HARNESS = r"""
task: gsm8k_here
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/gsm8k.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\nAnswer:"
doc_to_target: "{{answer.split('#### ')[-1]}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
generation_kwargs: {until: ["Question:"]}
filter_list:
  - {name: strict, filter: [{function: regex, regex_pattern: "#### ([0-9]+)"}, {function: take_first}]}
  - name: last
    filter: [{function: regex, group_select: -1, regex_pattern: "([0-9]+)"}, {function: take_first}]
"""


def test_a_harness_task_asks_with_its_template_and_scores_with_its_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, packages("lm-eval")])
    rows = [f'{{"question": "What is {n}?", "answer": "It is\\n#### {n}"}}' for n in range(100, 140)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(rows))
    file = tmp_path / "gsm8k.yaml"
    file.write_text(HARNESS.replace("FOLDER", str(tmp_path)))
    with Verifier(found := find_curriculum(str(file))) as verifier:
        task = open_tasks(found, verifier).task(TaskRef("questions", 7))
        assert task is not None and task.question.startswith("Question: What is 1")
        right = task.question.split()[3].rstrip("?")
        texts = [
            f"#### {right}, not 3",
            f"first 9, so {right}",
            "9",
            "",
            f"it is {right} Question: What is 9?",
        ]
        rewards = verifier.score([(task.ref, [Completion(text, True) for text in texts])])
    assert rewards == [(1.0, 1.0, 0.0, 0.0, 1.0)]
    # With examples before the question, and with the harness's default metric.
    shots = tmp_path / "shots.yaml"
    shots.write_text(
        "".join(line for line in file.read_text().splitlines(True) if "metric_list" not in line)
        + "num_fewshot: 2\n"
    )
    with Verifier(found := find_curriculum(str(shots))) as verifier:
        task = open_tasks(found, verifier).task(TaskRef("questions", 7))
        assert task is not None and task.question.count("Question: ") == 3
        right = task.question.split()[-2].rstrip("?")
        assert verifier.score([(task.ref, [Completion(right, True), Completion("9", True)])]) == [(1.0, 0.0)]
    other = tmp_path / "other.yaml"
    other.write_text(file.read_text().replace("generate_until", "loglikelihood"))
    with pytest.raises(ConfigError, match="Name one task with generate_until"):
        find_curriculum(str(other))


@pytest.mark.parametrize("until", ["Question:", ["Question:"], None])
def test_a_harness_task_may_give_one_text_or_a_list_as_the_end_of_an_answer(until: object) -> None:
    """The harness accepts both (`handle_stop_sequences`). The substitute task scores a text's length."""
    asked = SimpleNamespace()
    task = SimpleNamespace(
        eval_docs=[{}],
        doc_to_target=str,
        construct_requests=lambda **_: asked,
        config=SimpleNamespace(generation_kwargs={"until": until}),
        _metric_fn_list={"length": len},
        apply_filters=lambda: asked.filtered_resps.update(all=asked.resps[0]),
        process_results=lambda _doc, texts: {"length": len(texts[0])},
    )
    assert HarnessScores(task, [""])("0", "no end Question:") == (7 if until else 16)
