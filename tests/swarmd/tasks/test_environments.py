"""Tasks of several turns: an environment's replies are made again from the model's texts alone."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmd.config.config import NodeConfig
from swarmd.errors import ConfigError
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.tasks import tools
from swarmd.tasks.answers import GradeReason
from swarmd.tasks.own_tasks import OwnTasks, find_curriculum
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import tasks_of
from swarmd.types import Completion, TaskRef

COUNTER = """
import random
specialties = ["count.1", "count.2"]
limits = {"turns": 3}
examples = [("Count to 1", "1")]
def reset(specialty, seed):
    level = int(specialty[-1])
    return f"Count to {level}, from {seed}", {"at": 0, "to": level}
def step(state, text):
    state["at"] += 1
    if text != str(state["at"]):
        return "", 0, True
    return f"then {state['at'] + 1}", 1 / state["to"], state["at"] == state["to"]
def solution(state):
    return [str(i + 1) for i in range(state["to"])]
"""


def environment(folder: Path, source: str = COUNTER) -> str:
    (folder / "counter.py").write_text(source)
    return str(folder / "counter.py")


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnTasks]:
    found = find_curriculum(environment(tmp_path_factory.mktemp("counter")))
    with Verifier(found) as verifier:
        yield OwnTasks(found, verifier)


def texts(*each: str) -> Completion:
    return Completion(each[-1], True, each[:-1])


@pytest.mark.parametrize(
    ("said", "reward", "replies"),
    [
        (("1", "2"), 1.0, ("then 2",)),
        (("1",), 0.5, ("then 2",)),
        (("1", "3"), 0.5, ("then 2",)),
        (("2", "2"), 0.0, ()),
        (("",), 0.0, ()),
        # Nobody asked a model for the third text; and four texts are more than the limit.
        (("1", "2", "3"), 0.0, ("then 2",)),
        (("1", "2", "3", "4"), 0.0, ()),
        (("1", "\u202e"), 0.0, ()),
        (("1" * 9000, "2" * 9000), 0.0, ()),
    ],
)
def test_an_episode_is_scored_by_playing_it_again(
    counted: OwnTasks, said: tuple[str, ...], reward: float, replies: tuple[str, ...]
) -> None:
    item = TaskRef("count.2", 5), [texts(*said)]
    ((score,),) = counted._maker.judge([item])
    assert (score.reward, score.observations) == (reward, replies)
    assert counted.play([item]) == [(replies,)]


def test_all_texts_together_have_a_limit(counted: OwnTasks) -> None:
    ((score,),) = counted._maker.judge([(TaskRef("count.2", 5), [texts("1", "2" * 16_384)])])
    assert score.reason is GradeReason.TOO_LONG


def test_the_observer_replies_until_the_episode_ends(counted: OwnTasks) -> None:
    observe = counted.observer([TaskRef("count.1", 1), TaskRef("count.2", 2)])
    assert observe is not None
    assert observe([(0, ("1",)), (1, ("1",)), (1, ("1", "2")), (1, ("no",))]) == [None, "then 2", None, None]


def test_an_environment_brings_levels_examples_and_a_solution(counted: OwnTasks) -> None:
    assert counted.curriculum.turns == 3 and counted.curriculum.examples == (("Count to 1", "1"),)
    assert counted.staircase.levels == {"count": 1}
    assert counted.solution(TaskRef("count.2", 1)) == ("1", "2")
    assert all(task.question.startswith("Count to 1, from") for task in counted.draw(3, random.Random(1)))


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (COUNTER.replace("def reset", "def begin"), "it has no reset"),
        (COUNTER.replace('"turns": 3', '"turns": 1'), r"limits: Expected `int` >= 2"),
        (COUNTER.replace('"turns": 3', '"turns": 65'), r"limits: Expected `int` <= 64"),
        (COUNTER.replace('[("Count to 1", "1")]', "[1]"), r"examples: Expected `array`"),
        (COUNTER.replace("1 / state", "2 / state"), r"step gave .*, not a number from 0 to 1"),
        (COUNTER.replace('return "", 0, True', "return None"), "step gave None, not an observation"),
        (
            COUNTER.replace("import random", "plays = []").replace(
                'return f"then', 'plays.append(1)\n    return f"{len(plays)} then'
            ),
            r"count.2, seed 1: the same texts give .* and then .*, so other nodes could not check",
        ),
        (
            COUNTER.replace("import random", "import os\n\nsalt = os.urandom(8).hex()").replace(
                'return f"then', 'return f"{salt} then'
            ),
            r"count.2, seed 1: the same texts give .* and then .*, so other nodes could not check",
        ),
        (
            COUNTER.replace('return "", 0, True', 'return "x" * 10_000, 0, False'),
            r"step gave an observation of 10,000 characters \(limit: 1 to 8,192\)",
        ),
        (COUNTER.replace('return "", 0, True', "open('/etc/passwd')"), "refused in the verifier"),
    ],
)
def test_a_faulty_environment_is_refused_with_the_cause(tmp_path: Path, source: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        find_curriculum(environment(tmp_path, source))


def test_endless_turns_and_slow_steps_cost_one_limit(tmp_path: Path) -> None:
    slow = COUNTER.replace('return "", 0, True', 'while text == "loop": pass\n        return "on", 0, False')
    found = find_curriculum(environment(tmp_path, slow.replace('"turns": 3', '"turns": 3, "seconds": 0.2')))
    with Verifier(found) as verifier:
        ((endless, looped, fine),) = verifier.judge(
            [(TaskRef("count.1", 1), [texts("a", "b", "c"), texts("loop"), texts("1")])]
        )
    # The third text is the last, whatever the environment wants.
    assert (endless.reward, endless.observations) == (0.0, ("on", "on"))
    assert (looped.reason, fine.reward) == (GradeReason.TIMEOUT, 1.0)


HOSTILE = COUNTER.replace("import random", "import os, random, socket, time").replace(
    '    state["at"] += 1\n',
    """    state["at"] += 1
    match text:
        case "sleep":
            time.sleep(60)
        case "fork":
            os.fork()
        case "file":
            open("/etc/passwd").read()
        case "socket":
            socket.create_connection(("127.0.0.1", 1))
        case "megabyte":
            return "x" * 2**20, 0, False
        case "memory":
            bytearray(2**40)
        case "exit":
            os._exit(0)
""",
)


@pytest.mark.parametrize("text", ["sleep", "fork", "file", "socket", "megabyte", "memory", "exit"])
def test_a_step_that_reaches_outside_or_takes_too_much_earns_nothing(tmp_path: Path, text: str) -> None:
    found = find_curriculum(
        environment(tmp_path, HOSTILE.replace('"turns": 3', '"turns": 3, "seconds": 0.2'))
    )
    with Verifier(found) as verifier:
        (bad, good) = verifier.judge(
            [(TaskRef("count.2", 1), [texts("1", text)]), (TaskRef("count.2", 1), [texts("1", "2")])]
        )
        assert bad[0].reward == 0.0 and good[0] == (GradeReason.CORRECT, 1.0, ("then 2",))
        assert verifier.restarts == 0 and len(verifier.faults) == 1


def test_several_texts_earn_nothing_where_tasks_have_one_turn() -> None:
    ref = TaskRef("basic_arithmetic", 7)
    right = f"<answer>{tasks_of('tiny-9').task(ref).entry['answer']}</answer>"
    with Verifier("tiny-9") as verifier:
        ((one, two),) = verifier.judge([(ref, [texts(right), texts("a hidden text", right)])])
    assert (one.reward, two) == (1.0, (GradeReason.TOO_LONG, 0.0, ()))


@pytest.mark.parametrize("given", [{"workers": {"generators": 2}}, {"generate": {"engine": "vllm"}}])
def test_only_the_trainers_own_engine_answers_environments(given: dict[str, Any]) -> None:
    config = NodeConfig.model_validate({"swarm": {"curriculum": "tools-6"}, **given})
    with pytest.raises(ConfigError, match="tools-6 has tasks of several turns, which only the trainer's own"):
        curriculum_of(config)


def test_an_own_reward_cannot_replace_an_environments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(facts, answer, score):\n    return score\n")
    with pytest.raises(ConfigError, match="scored by their `step`"):
        find_curriculum(environment(tmp_path), str(tmp_path / "mine.py"))


@pytest.mark.parametrize("specialty", tools.specialties)
def test_tools_6_can_be_solved_within_its_turns(specialty: str) -> None:
    for seed in range(50):
        question, episode = tools.reset(specialty, seed)
        assert tools.reset(specialty, seed)[0] == question
        steps = [tools.step(episode, text) for text in tools.solution(episode)]
        assert [done for _, _, done in steps] == [*[False] * (len(steps) - 1), True], (specialty, seed)
        assert sum(reward for _, reward, _ in steps) == 1 and len(steps) <= tools.limits["turns"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "<tool>1+1",
        "<tool>1+1</tool> so 2",
        "<tool></tool>",
        "<answer>no</answer>",
        "<tool>a<b</tool>",
    ],
)
@pytest.mark.parametrize("specialty", [name for name in tools.specialties if name.endswith(".2")])
def test_a_malformed_call_ends_an_episode_without_reward(specialty: str, text: str) -> None:
    _, episode = tools.reset(specialty, 3)
    assert tools.step(episode, text) == ("", 0.0, True)


@pytest.mark.parametrize(
    "call", ["", "9" * 64, "rm -rf", "__import__('os')", "1+", "²", "AA", "ZZ", "left left", "-1"]
)
@pytest.mark.parametrize("specialty", tools.specialties)
def test_a_senseless_call_gets_a_short_reply(specialty: str, call: str) -> None:
    _, episode = tools.reset(specialty, 3)
    reply, done = episode.call(call)
    assert not done and 0 < len(reply) < 100


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("7+8*2", "23"),
        ("10-3-2", "5"),
        ("2*3*4", "24"),
        (" 12 * 12 ", "144"),
        ("999999999*999999999*9", "8999999982000000009"),
    ],
)
def test_the_calculator_computes_products_first(said: str, value: str) -> None:
    assert tools.computed(said) == value
