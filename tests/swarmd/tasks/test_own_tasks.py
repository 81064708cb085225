"""Own tasks: the interface of a plug-in, the effect of faulty plug-ins, and the digest."""

import functools
import logging
import operator
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from p2p.engines.memory import MemorySwarm
from p2p.types import PeerId
from swarmd.config.config import NodeConfig, SwarmConfig, TasksConfig
from swarmd.config.curriculum_name import GROUP
from swarmd.errors import ConfigError
from swarmd.exchange.swarm_id import curriculum_of, swarm_digest
from swarmd.experience.pool import Pool
from swarmd.tasks.answers import GradeReason, ScoredAnswer
from swarmd.tasks.curriculum import EXAMPLES, HELD_OUT, TINY_9
from swarmd.tasks.own_tasks import PLUGIN_PROCESS, NoQuestion, OwnTasks, find_curriculum
from swarmd.tasks.plugin import load, reward
from swarmd.tasks.sandbox.client import Completion, TaskRef, Verifier, VerifierFailed, describe
from swarmd.tasks.sandbox.pipe import PluginDescription
from swarmd.tasks.sandbox.worker import PluginRefused, TaskFault
from swarmd.tasks.source import open_tasks
from swarmd.trainer.parts import ReceivingParts
from swarmd.trainer.round import score_others
from swarmd.types import Rollout
from tests import ROOT
from tests.doubles import TIMEOUT_S, memory_node
from tests.swarmd.tasks.unruly import FATAL, MADE, WRONG
from tests.swarmd.tasks.watched import descendants

pytestmark = pytest.mark.net
EXAMPLE = ROOT / "docs" / "examples" / "sums.py"
UNRULY = Path(__file__).with_name("unruly.py")
GOOD = (
    "specialties = ['a']\ndef generate(specialty, seed):\n    return f'question {seed}', seed\ndef"
    " score(facts, answer):\n    return 1\n"
)


def described(source: str, seconds: float = TIMEOUT_S) -> PluginDescription:
    return describe(
        (PLUGIN_PROCESS, source, ""), f"own tasks cannot be used: {source}", "name other tasks", seconds
    )


def plugin(folder: Path, text: str = GOOD) -> str:
    (folder / "tasks.py").write_text(text)
    return str(folder / "tasks.py")


def said(*answers: str) -> list[Completion]:
    return [Completion(f"<answer>{answer}</answer>", True) for answer in answers]


@pytest.fixture(scope="module")
def unruly() -> Iterator[Verifier]:
    with Verifier(find_curriculum(str(UNRULY))) as verifier:
        yield verifier


def test_the_documented_example_asks_and_scores() -> None:
    found = curriculum_of(NodeConfig(swarm=SwarmConfig(curriculum=str(EXAMPLE))))
    assert (found.name, found.specialties) == ("sums", ("add", "subtract"))
    assert swarm_digest(found) != swarm_digest(TINY_9)
    with Verifier(found) as verifier:
        tasks = open_tasks(found, verifier, ["add"])
        drawn = tasks.draw(8, random.Random(1))
        assert drawn == tasks.draw(8, random.Random(1)) == [tasks.task(task.ref) for task in drawn]
        assert {task.ref.specialty for task in drawn} == {"add"} and len(
            {task.question for task in drawn}
        ) > 1
        assert all(task.ref.n >= HELD_OUT for task in tasks.draw_held_out(4, random.Random(1)))
        assert tasks.task(TaskRef("add", -1)) is None and tasks.task(TaskRef("multiply", 1)) is None
        assert tasks.task(TaskRef("add", 7)).question == "Calculate 9 + 7."
        answers = [*said("16", " 16 ", "17", "９"), Completion("16", True)]
        judged = verifier.judge([(TaskRef("add", 7), answers), (TaskRef("x", 7), said("16"))])
        reasons = [[score.reason for score in row] for row in judged]
        right, wrong = GradeReason.CORRECT, GradeReason.WRONG
        assert reasons == [[right, right, wrong, wrong, GradeReason.NO_ANSWER], [GradeReason.NO_TASK]]
        assert (verifier.restarts, verifier.faults) == (0, [])
    with pytest.raises(
        ConfigError, match=r"tasks.specialties: multiply is not in sums. Choose from add, subtract"
    ):
        open_tasks(found, verifier, ["multiply"])


def test_a_plugins_scores_are_rewards(tmp_path: Path) -> None:
    thirds = plugin(tmp_path, GOOD.replace("return 1", "return len(answer) / 3"))
    with Verifier(find_curriculum(thirds)) as verifier:
        (scores,) = verifier.judge([(TaskRef("a", 1), said("", "1", "12", "123", "1234"))])
    assert list(scores) == [
        *map(ScoredAnswer.of, (0.0, 1 / 3, 2 / 3, 1.0)),
        (GradeReason.FAULT, 0.0, ()),
    ]
    assert [score.reward for score in scores] == [0, 0.3333, 0.6667, 1, 0]
    assert [fault[:48] for fault in verifier.faults] == ["a score gave float #.#, not a number from # to #"]


@pytest.mark.parametrize("given", [True, 1, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)])
def test_a_reward_may_be_a_numpy_number(given: object) -> None:
    assert reward(SimpleNamespace(score=lambda: given), "score") == 1.0
    for wrong in ("1", b"1", None, 1j, np.array([1.0, 1.0]), np.float32("nan")):
        with pytest.raises(TaskFault, match=r"score gave .*, not a number from 0 to 1"):
            reward(SimpleNamespace(score=lambda wrong=wrong: wrong), "score")


def test_sums_of_rewards_are_rounded_to_one_and_zero() -> None:
    for parts, made in (((0.4, 0.2, 0.3, 0.1), 1.0), ([1 / 9] * 9, 1.0), ((0.3, *[-0.1] * 3), 0.0)):
        total = functools.reduce(operator.add, parts)
        assert (
            not 0 <= total <= 1 and reward(SimpleNamespace(score=lambda total=total: total), "score") == made
        )


@pytest.mark.parametrize("whole", [True, False])
def test_text_after_an_answer_is_kept_only_if_it_is_scored(tmp_path: Path, whole: bool) -> None:
    """If whole texts are scored, the whole text is trained on, because its answer alone earns nothing."""
    limits = f"limits = {{'whole': {whole}}}\n"
    score = "def score(facts, answer):\n    return answer in ('<answer>1</answer> yes', '1')\n"
    found = find_curriculum(plugin(tmp_path, GOOD.partition("def score")[0] + score + limits))
    text = "<answer>1</answer> yes"
    sent = Rollout(TaskRef("a", 1), (Completion(text, True), Completion("no", True)), PeerId("other"))
    with Verifier(found) as verifier:
        me = PeerId("me")
        parts = ReceivingParts(
            me=me,
            tasks=open_tasks(found, verifier),
            reward=verifier,
            swarm=memory_node(MemorySwarm(), 1, lambda: 1.7e9, curriculum=found),
            pool=Pool(2),
            batch_rng=random.Random(0),
        )
        (scored,) = score_others(1, parts, [sent])
    first, second = scored.rollout.completions
    assert (first, second) == (Completion(text[: None if whole else 18], whole), Completion("no", True))
    assert scored.rewards == (1.0, 0.0)


OWN_REWARD = "def reward(facts, answer, score):\n    return (score + (answer == str({facts}))) / 2\n"


@pytest.mark.parametrize(
    ("more", "examples"),
    [
        ("", EXAMPLES),
        ("limits = {'whole': True}\n", ()),
        ("examples = [('What is 1?', '<answer>1</answer>')]\n", (("What is 1?", "<answer>1</answer>"),)),
    ],
)
def test_examples_of_own_tasks_show_the_form_of_their_answers(
    tmp_path: Path, more: str, examples: tuple[tuple[str, str], ...]
) -> None:
    assert find_curriculum(plugin(tmp_path, GOOD + more)).examples == examples


@pytest.mark.parametrize(
    ("curriculum", "ref", "facts"),
    [
        ("tiny-9", TaskRef("basic_arithmetic", 7), "len(facts['question'])"),
        (str(EXAMPLE), TaskRef("add", 7), "facts + 1"),
    ],
)
def test_an_own_reward_changes_neither_the_questions_nor_the_swarm(
    tmp_path: Path, curriculum: str, ref: TaskRef, facts: str
) -> None:
    """The reward function receives the facts, the answer and the curriculum's own score."""
    file = tmp_path / "mine.py"
    file.write_text(OWN_REWARD.replace("{facts}", facts))
    theirs, ours = find_curriculum(curriculum), find_curriculum(curriculum, str(file))
    assert (ours.questions, ours.digest) == (theirs.questions, theirs.digest)
    assert swarm_digest(ours) == swarm_digest(theirs) and ours.scoring != theirs.scoring == theirs.digest
    with Verifier(ours) as verifier, Verifier(theirs) as usual:
        asked, again = (open_tasks(of, v).task(ref) for of, v in ((ours, verifier), (theirs, usual)))
        assert asked == again is not None
        answers = said("16", "17", "6", "no")
        assert verifier.score([(ref, answers)])[0][0] == 0.5 and usual.score([(ref, answers)])[0][0] == 1
        assert sorted(verifier.score([(ref, answers)])[0]) == [0, 0, 0.5, 0.5]
        file.write_text("changed")
        verifier.close()
        with pytest.raises(VerifierFailed, match="has changed since this node started"):
            verifier.score([(ref, answers)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def reward(f, a, s): return -1", "reward gave int -1, not a number from 0 to 1"),
        ("def reward(f, a, s): return s / 0", r"reward: ZeroDivisionError: float division by zero \(mine.py"),
        ("def score(f, a): return 1", r"it has no function reward\(facts, answer, score\)"),
    ],
)
def test_an_unusable_own_reward_is_reported_before_the_node_joins(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"tasks\.reward cannot be used: .*mine\.py: .*{words}"):
        curriculum_of(
            NodeConfig(swarm=SwarmConfig(curriculum=str(EXAMPLE)), tasks=TasksConfig(reward=str(file)))
        )


# These actions end the worker.
ENDING = ("hangs", "dies", "eats")


@pytest.mark.parametrize("how", [*FATAL, *WRONG])
def test_a_failed_score_counts_as_wrong_and_is_logged_and_scoring_continues(
    unruly: Verifier, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    unruly.make(TaskRef("fine", 1))
    (worker,) = descendants(unruly.pid)
    with caplog.at_level(logging.WARNING):
        row, fine = unruly.score(
            [(TaskRef(how, 1), said("good", "?", "bad", "good")), (TaskRef("fine", 1), said("good", "bad"))]
        )
    # A rollout that kills two workers gets no score for its remaining answers.
    assert row == (1.0, 0.0, 0.0, 0.0 if how == "dies" else 1.0)
    assert fine == (1.0, 0.0)
    assert f"the tasks unruly: {how} n = 1: score" in caplog.text and "\x1b" not in caplog.text
    assert ("refused in the verifier" in caplog.text) is (how in ("touches", "dials", "imports"))
    assert not UNRULY.with_suffix(".touched").exists()
    (after,) = descendants(unruly.pid)
    assert unruly.restarts == 0 and (after == worker) is (how not in ENDING)


def test_a_plugins_time_limit_counts_cpu_time(tmp_path: Path) -> None:
    """An answer may wait without CPU use for up to five times the limit."""
    text = (
        GOOD.partition("def score")[0]
        + "import time\nlimits = {'seconds': 0.25}\ndef score(facts, answer):\n"
        "    for _ in range(90_000_000 * (answer == 'burns')): pass\n"
        "    time.sleep(0 if answer == 'burns' else float(answer)); return 1.0\n"
    )
    with Verifier(find_curriculum(plugin(tmp_path, text))) as verifier:
        assert verifier.score([(TaskRef("a", 1), said("0", "0.4", "60", "0"))]) == [(1.0, 1.0, 0.0, 1.0)]
        assert verifier.score([(TaskRef("a", 2), said("burns", "0"))]) == [(0.0, 1.0)]
        assert len(verifier.faults) == 1 and verifier.restarts == 0


def word(*fields: object) -> bytes:
    body = msgspec.msgpack.encode(["marked", *fields])
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "written",
    [
        word("no reason", 1.0),
        word("correct", 6.5),
        word("correct", 1.0)[:9],
        b"\0\0\0\1\xff",
        b"\xff" * 4,
        msgspec.msgpack.encode(["made", "a question"]),
    ],
    ids=["no reason", "more than the whole reward", "cut", "no message", "too long", "another word"],
)
def test_a_plugin_that_writes_to_the_pipe_loses_only_its_own_answer(tmp_path: Path, written: bytes) -> None:
    forging = (
        f"    if answer == 'forge':\n        for to in range(3, 16):\n            with suppress(OSError):"
        f" os.write(to, {written!r})\n        os._exit(1)\n"
    )
    text = "import os\nfrom contextlib import suppress\n" + GOOD.replace(
        "    return 1", forging + "    return 1"
    )
    with Verifier(find_curriculum(plugin(tmp_path, text))) as verifier:
        rows = verifier.judge([(TaskRef("a", 1), said("x", "forge")), (TaskRef("a", 2), said("x"))])
        right = GradeReason.CORRECT
        assert [[score.reason for score in row] for row in rows] == [[right, GradeReason.CRASHED], [right]]
        assert verifier.restarts == 0


@pytest.mark.parametrize("how", [*FATAL, *MADE])
def test_a_question_that_fails_is_skipped(
    unruly: Verifier, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    unruly.make(TaskRef("fine", 10))
    (worker,) = descendants(unruly.pid)
    with caplog.at_level(logging.WARNING):
        made = unruly.make(TaskRef(how, 10))
    assert made.question is None and made.fault.startswith("generate")
    assert f"the tasks unruly: {how} n = 10: generate" in caplog.text
    ((score,),) = unruly.judge([(TaskRef(how, 10), said("good"))])
    ends = {"hangs": GradeReason.TIMEOUT, "dies": GradeReason.CRASHED}
    assert score == ScoredAnswer.of(ends.get(how, GradeReason.FAULT))
    assert (descendants(unruly.pid) == [worker]) is (how not in ENDING)
    assert unruly.make(TaskRef("fine", 10)).question.startswith("fine 10 of ") and unruly.restarts == 0


def test_each_kind_of_plugin_fault_is_logged_once_with_its_line(
    unruly: Verifier, caplog: pytest.LogCaptureFixture
) -> None:
    unruly.faults.clear()
    assert (
        unruly.make(TaskRef("raises", 10)).fault
        == "generate: ValueError: no such luck \\x1b[31m (unruly.py, line 52)"
    )
    with caplog.at_level(logging.WARNING):
        unruly.score([(TaskRef("raises", 2), said(f"{n}")) for n in range(1, 26)])
    (once,) = (record.getMessage() for record in caplog.records if " score: " in record.getMessage())
    assert once.endswith("(unruly.py, line 52)") and "raises score: ValueError" in unruly.faults


def test_plugin_code_does_not_run_in_the_nodes_process(unruly: Verifier) -> None:
    _, _, _, pid, number = unruly.make(TaskRef("fine", 1)).question.split()
    assert int(pid) not in (os.getpid(), os.getppid())
    assert float(number) == random.Random(1).random()  # `random` is seeded for plug-ins that do not
    long = "x" * 51
    assert [score.reason for score in unruly.judge([(TaskRef("fine", 1), said(long, "\u202e"))])[0]] == [
        GradeReason.TOO_LONG,
        GradeReason.UNSAFE,
    ]


def test_drawing_from_a_plugin_without_questions_gives_an_error_with_the_cause(unruly: Verifier) -> None:
    found = find_curriculum(str(UNRULY))
    with pytest.raises(
        NoQuestion,
        match=r"made no question in 16 tries; the last: generate: ValueError: no such luck .*Fix it",
    ):
        OwnTasks(found, unruly, ["raises"]).draw(1, random.Random(0))
    assert OwnTasks(found, unruly, ["fine", "raises"]).draw(4, random.Random(0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import no_such_module_anywhere",
            r"ModuleNotFoundError: No module named 'no_such_module_anywhere' \(tasks.py, line 1\)",
        ),
        ("def generate(:", "SyntaxError: invalid syntax"),
        ("raise SystemExit", r"SystemExit \(tasks.py, line 1\)"),
        ("\0", "SyntaxError|ValueError"),
        ("", "it has no specialties, no generate, no score"),
        (GOOD + "score = 1", "score is no function"),
        (GOOD + "specialties = 'a'", "specialties is str 'a', not a list of names"),
        (GOOD + "specialties = []", "not a list of names"),
        (GOOD + "specialties = ['A b']", "str 'A b' is no specialty's name"),
        (GOOD + "specialties = ['a', 'a']", "none twice"),
        (GOOD + "name = 'Mine'", "its name is 'Mine'"),
        (GOOD + "version = 2", "its version is 2, no text"),
        (GOOD + "limits = {'second': 1}", "limits: Object contains unknown field `second`"),
        (GOOD + "limits = {'seconds': 60}", r"limits: Expected `float` <= 10.0 - at `\$.seconds`"),
    ],
)
def test_a_malformed_plugin_is_rejected_with_the_cause(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PluginRefused, match=words):
        load(plugin(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\nos._exit(7)", r"it ended \(exit code 7"),
        ("import time\ntime.sleep(60)", "it did not answer in time"),
        ("x = bytearray(2**33)", "MemoryError"),
        (
            GOOD.replace("return 1", "return -1"),
            r"a, seed 1: score gave int -1, not a number from 0 to 1: give \(r - least\)",
        ),
        (GOOD.replace("return 1", "return float('nan')"), "score gave float nan, not a number from 0 to 1"),
        (GOOD.replace("return 1", "open(__file__)"), "a, seed 1: score: .* refused in the verifier: open"),
        (GOOD + "name = 'tiny-9'", "as of tasks of swarmd"),
        (GOOD + "generate = lambda s, n: 1 / 0", "no question for a, seed 1: generate: ZeroDivisionError"),
        (
            GOOD + "generate = lambda s, n: 'text'",
            r"generate\('a', 1\) gave str 'text', not a question and its facts",
        ),
        (
            GOOD + "import time\ngenerate = lambda s, n: (str(time.time_ns()), 0)",
            "gives another question each time",
        ),
        (
            "import time\nbegun = time.time_ns()\n" + GOOD + "generate = lambda s, n: (str(begun), 0)",
            "each time",
        ),
    ],
)
def test_an_error_about_a_plugin_that_cannot_be_used_names_its_file(
    tmp_path: Path, text: str, words: str
) -> None:
    path = plugin(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"tasks\.py: .*{words}"):
        described(path, seconds=3) if "sleep" in text else find_curriculum(path)


def test_a_file_that_cannot_run_twice_is_loaded_once(tmp_path: Path) -> None:
    registers = "import sys\nassert not hasattr(sys, 'tasks_here')\nsys.tasks_here = True\n"
    assert described(plugin(tmp_path, registers + GOOD)).specialties == ("a",)


def test_the_example_asks_the_questions_of_tools_6_without_their_tools() -> None:
    found = find_curriculum(str(ROOT / "docs" / "examples" / "without_tool.py"))
    with Verifier(found) as verifier:
        for specialty in found.specialties:
            question = verifier.make(TaskRef(specialty, 7)).question
            assert question and "tool" not in question and "call" not in question


def test_an_error_about_an_unusable_reward_has_its_own_remedy(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 1")
    with pytest.raises(ConfigError, match=r"mine\.py: it has no function .* or leave tasks\.reward out"):
        find_curriculum("tiny-9", str(tmp_path / "mine.py"))


def test_missing_files_and_unknown_names_are_reported(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"none\.py: No such file or directory\. Fix that, or name other tasks \(docs",
    ):
        find_curriculum(str(tmp_path / "none.py"))
    with pytest.raises(ConfigError, match=r"no curriculum is called 'tiny9': .*did you mean tiny-9\? There"):
        find_curriculum("tiny9")
    with pytest.raises(ConfigError, match=r"auto stands for the curriculum of a node's model\. Name one: "):
        find_curriculum("auto")
    with pytest.raises(
        ConfigError, match=r"^tasks\.reward: .*none\.py: No such file or directory\. Correct the path"
    ):
        find_curriculum("tiny-9", str(tmp_path / "none.py"))


def test_a_plugin_finds_files_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("apple")
    text = "from pathlib import Path\nspecialties = [Path(__file__).with_name('words.txt').read_text()]\n"
    assert load(plugin(tmp_path, GOOD + text)).description.specialties == ("apple",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tasks.py", "words.txt"], (
        "loading the plug-in has written a file"
    )


def test_the_digest_depends_on_the_content_of_the_file_and_not_on_its_name(tmp_path: Path) -> None:
    digests = [swarm_digest(find_curriculum(plugin(tmp_path)))]
    for name, text in (("again.py", GOOD), ("other.py", GOOD.replace("return 1", "return 0"))):
        (tmp_path / name).write_text(text)
        digests.append(swarm_digest(find_curriculum(str(tmp_path / name))))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("start, line_end", [(b"", b"\r\n"), (b"", b"\r"), (b"\xef\xbb\xbf", b"\n")])
def test_a_copy_with_other_line_endings_has_the_same_digest(
    tmp_path: Path, start: bytes, line_end: bytes
) -> None:
    (tmp_path / "copy.py").write_bytes(start + GOOD.encode().replace(b"\n", line_end))
    copy, own = (load(str(path)).description for path in (tmp_path / "copy.py", Path(plugin(tmp_path))))
    assert copy.digest == own.digest


def test_a_plugin_may_provide_a_right_answer(tmp_path: Path) -> None:
    told = plugin(tmp_path, GOOD + "def solution(facts):\n    return facts + 1\n")
    found = find_curriculum(told)
    with Verifier(found) as maker:
        assert OwnTasks(found, maker).solution(TaskRef("a", 7)) == ("8",)
    (tmp_path / "silent.py").write_text(GOOD)
    silent = find_curriculum(str(tmp_path / "silent.py"))
    with Verifier(silent) as maker:
        assert OwnTasks(silent, maker).solution(TaskRef("a", 7)) is None


def test_a_plugin_file_that_changes_while_the_node_runs_is_not_used(tmp_path: Path) -> None:
    found = find_curriculum(plugin(tmp_path))
    plugin(tmp_path, GOOD.replace("return 1", "return 0"))
    with (
        Verifier(found) as verifier,
        pytest.raises(
            VerifierFailed, match=r"has changed since this node started; .*fix the tasks or the reward"
        ),
    ):
        verifier.score([(TaskRef("a", 1), said("x"))])


def install(folder: Path, version: str, target: str = "own_package.tasks") -> None:
    info = folder / "own_package-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: own-package\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nown-sums = {target}\n")
    (folder / "own_package").mkdir(exist_ok=True)
    (folder / "own_package" / "__init__.py").write_text("")
    (folder / "own_package" / "tasks.py").write_text(GOOD)


def test_an_installed_package_offers_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = set()
    changes: list[Callable[[], object]] = [
        lambda: install(tmp_path, "1"),
        lambda: install(tmp_path, "2"),
        lambda: (tmp_path / "own_package" / "data.txt").write_text("data"),
    ]
    for change in changes:
        change()
        found = described("own-sums")
        assert (found.name, found.specialties) == ("own-sums", ("a",))
        digests.add(found.digest)
    assert len(digests) == 3
    assert (
        find_curriculum("own-sums").name
        == NodeConfig(swarm=SwarmConfig(curriculum="own-sums")).swarm.curriculum
        == "own-sums"
    )
    install(tmp_path, "2", "own_package.nothing:here")
    with pytest.raises(
        ConfigError, match=r"own-sums: ModuleNotFoundError: No module named 'own_package\.nothing'"
    ):
        described("own-sums")
