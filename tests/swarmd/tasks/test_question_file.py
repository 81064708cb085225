"""Question files on this machine and on the hub: reading, held-out questions, and the identity of a file.

Hub data sets are read from the hub's cache; the tests create this cache as the hub's client does.
"""

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx2
import huggingface_hub.constants
import pyarrow
import pytest
from pyarrow import parquet

from swarmd.config.curriculum_name import curriculum_name
from swarmd.errors import ConfigError
from swarmd.exchange.swarm_id import swarm_digest
from swarmd.tasks.curriculum import HELD_OUT, HELD_OUT_END, TRAINING_TASKS
from swarmd.tasks.own_tasks import _own, find_curriculum
from swarmd.tasks.question_file import HELD_OUT_SHARE, QuestionFile, number, right_answer, same_answer
from swarmd.tasks.sandbox.client import Completion, TaskRef, Verifier
from swarmd.tasks.sandbox.worker import PluginRefused
from swarmd.tasks.source import open_tasks
from tests import ROOT
from tests.doubles import TIMEOUT_S
from tests.loopback import Handler, listening

DOCS = ROOT / "docs"
DOCUMENT, EXAMPLE = DOCS / "own-tasks.md", DOCS / "examples" / "capitals.jsonl"


def content(*lines: object) -> bytes:
    return "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode()


def asked(file: QuestionFile, specialty: str, low: int, high: int) -> set[str]:
    rng = random.Random(3)
    return {file.generate(specialty, rng.randrange(low, high))[0] for _ in range(4000)}


@pytest.mark.parametrize(
    ("expected", "same", "other"),
    [
        (
            "72",
            ["72", " 72.0 ", "72.", "+72", "7.2e1", "144/2", "$72", "0072"],
            ["72 apples", "7 2", "72,", "-72", "72.0001", "７２", ""],
        ),
        ("1,234", ["1234", "1,234.0", "$1,234$"], ["1.234", "12,34", "1 234"]),
        (
            "3/4",
            ["0.75", "6/8", "\\frac{3}{4}", "$\\dfrac{6}{8}$", ".75", "3 / 4"],
            ["0.7500001", "4/3", "3/4/1", "3/0", "\\frac34"],
        ),
        ("-1 1/2", ["-1.5", "-3/2", "−1.5"], ["1.5", "-0.5"]),
        ("0.1", ["1/10", "1e-1"], ["0.10000000000000001"]),
        ("Paris", ["paris", " PARIS. ", "Paris"], ["Paris, France", "Pari", ""]),
        ("x + 1", ["X  +  1"], ["1 + x", "x+1"]),
        ("é", ["e\u0301", "É"], ["e"]),
        ("yes", ["Yes", "yes."], ["no", "1"]),
    ],
)
def test_equal_answers_in_different_forms_count_as_the_same(
    expected: str, same: list[str], other: list[str]
) -> None:
    assert [answer for answer in same if not same_answer(expected, answer)] == []
    assert [answer for answer in other if same_answer(expected, answer)] == []


def test_the_size_of_numbers_is_limited() -> None:
    assert number("9" * 1000) == int("9" * 1000)
    assert number("1e999") is not None and number("1e1000") is None
    assert all(
        number(text) is None
        for text in ("", "nan", "inf", "1_000", "0x10", "--1", "1/", "/1", "1/0", "٣", "1e", "(1)")
    )


def test_a_tenth_of_the_questions_is_held_out_by_their_text() -> None:
    lines = [{"question": f"What is {n}?", "answer": n, "level": "easy"} for n in range(2000)]
    file, longer = (
        QuestionFile(content(*lines)),
        QuestionFile(content(*lines[::-1], {"question": "new", "answer": "1"})),
    )
    training, held_out = (
        asked(file, "questions", 0, TRAINING_TASKS),
        asked(file, "questions", HELD_OUT, HELD_OUT_END),
    )
    assert not training & held_out and abs(len(held_out) / 2000 - HELD_OUT_SHARE) < 0.02
    # No held-out question becomes a training question when the file grows.
    assert not held_out & asked(longer, "questions", 0, TRAINING_TASKS)
    assert file.score("7", "14/2") == 1.0 and file.score("7", "8") == 0.0


def test_a_small_file_with_specialties_and_gsm8k_answers_is_read() -> None:
    lines = [
        {
            "question": f"q{n}",
            "answer": f"It is {n} * 2 = <<{n}*2={2 * n}>>\n#### {2 * n}",
            "specialty": "math",
        }
        for n in range(2)
    ]
    file = QuestionFile(
        b"\xef\xbb\xbf"
        + content(*lines, "", {"question": "a", "answer": 1}, {"question": "b", "answer": 0.5})
    )
    assert file.specialties == ("math", "questions")
    both = [file.generate("math", 5), file.generate("math", HELD_OUT + 5)]
    assert sorted(both) == [("q0", "0"), ("q1", "2")]  # at least one question for training, and one held out


def test_a_file_with_many_specialties_is_read_quickly() -> None:
    """So the user is told of the limit on specialties, and not of a timeout."""
    many = content(*({"question": f"q{n}", "answer": 1, "specialty": f"s{n // 2}"} for n in range(40_000)))
    begun = time.process_time()
    assert len(QuestionFile(many).specialties) == 20_000
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "line 1: Input data was truncated"),
        (
            [{"problem": "a", "answer": "1"}, {"answer": "1"}],
            "line 2: it has no `question`",
        ),
        ([{"question": "a"}], "line 1: it has no `answer`"),
        (
            [{"question": "q", "answer": "1", "specialty": "My Sums"}],
            "line 1: specialty 'My Sums': expected at most 64 lower-case letters, digits, hyphens",
        ),
        ([{"question": "", "answer": "1"}], r"line 1: Expected `str` of length >= 1 - at `\$.question`"),
        (
            [{"question": "a", "answer": None}],
            r"line 1: it has no `answer`",
        ),
        ([{"question": "a", "answer": " "}], "line 1: the answer has 0 characters"),
        (
            [{"question": "a", "answer": "x" * 1001}],
            r"line 1: the answer has 1,001 characters \(limit: 1 to 1,000\)",
        ),
        ([{"question": "a", "answer": "1", "specialty": "No!"}], "line 1: specialty 'No!'"),
        (['{"question": "a", "answer": NaN}'], "line 1: JSON is malformed"),
        ([[1]], "line 1: Expected `object`, got `array`"),
        (["[" * 100_000], "line 1: "),
        (
            [{"question": "a", "answer": 1}, "", {"question": "a", "answer": 2}],
            "line 3: the question of line 1 again, with another answer",
        ),
        (["x"] * 7, "line 5: .*; and 2 lines more"),
        ([{"question": "a", "answer": 1}], "specialty questions has 1 question and needs 2, .* Add another"),
        ([" "], "it has no lines"),
    ],
)
def test_an_error_names_the_invalid_line(lines: list[object], words: str) -> None:
    with pytest.raises(PluginRefused, match=words):
        QuestionFile(content(*lines))
    with pytest.raises(PluginRefused, match="line 1: "):
        QuestionFile(b'{"question": "\xff", "answer": 1}')


def test_repeated_lines_are_left_out_and_counted() -> None:
    line, other = {"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}
    file = QuestionFile(content(line, other, line, "", line))
    assert file.notes == ("2 of 4 lines left out: 2 repeated",)
    assert QuestionFile(content(line, other)).notes == ()


@pytest.mark.parametrize(
    "copy",
    [
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: text.replace(b"\n", b"\r"),
        lambda text: b"\xef\xbb\xbf" + text + b"\n\n",
        lambda text: text.decode().encode("utf-16"),
        lambda text: b"\n".join(text.split(b"\n")[::-1]),
        lambda text: text.replace(b", ", b",").replace(b"\xc3\xa9", b"\\u00e9"),
        lambda text: text + b"\n" + text,
    ],
    ids=["crlf", "cr", "mark", "utf-16", "order", "spacing", "repeated"],
)
def test_copies_with_the_same_questions_have_the_same_identity(copy: Callable[[bytes], bytes]) -> None:
    lines = [
        {"question": "caf\u00e9", "answer": "1", "source": "x"},
        {"question": "b", "answer": 2, "specialty": "c"},
    ]
    lines += [{"question": "d", "answer": 3}, {"question": "e", "answer": 2, "specialty": "c"}]
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode()
    assert QuestionFile(copy(text)).canonical == QuestionFile(text).canonical
    assert QuestionFile(text.replace(b"3", b"4")).canonical != QuestionFile(text).canonical


@pytest.mark.parametrize(
    ("given", "right"),
    [
        (r"\boxed{42}", "42"),
        (r"$\boxed{42}$.", "42"),
        (r"It is #### \boxed{\sqrt{\frac{1}{2}}}", r"\sqrt{\frac{1}{2}}"),
        (r"\boxed{1} or \boxed{2}", r"\boxed{1} or \boxed{2}"),
        (r"x = \boxed{1}", r"x = \boxed{1}"),
        (3, "3"),
    ],
)
def test_a_box_around_the_right_answer_is_removed(given: object, right: str) -> None:
    assert right_answer(given) == right


@pytest.mark.net
def test_the_documented_lines_can_be_loaded_and_each_is_asked(tmp_path: Path) -> None:
    lines = [
        line.strip()
        for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
        if line.startswith('    {"question"')
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    found = find_curriculum(str(tmp_path / "mine.jsonl"))
    assert len(lines) == 4 and found.specialties == ("capitals", "questions")
    with Verifier(found) as verifier:
        tasks = open_tasks(found, verifier)
        drawn = [*tasks.draw(16, random.Random(1)), *tasks.draw_held_out(16, random.Random(1))]
    assert {task.question for task in drawn} == {json.loads(line)["question"] for line in lines}


@pytest.mark.net
def test_the_documented_example_file_asks_and_scores() -> None:
    found = find_curriculum(str(EXAMPLE))
    assert (found.name, found.specialties) == ("capitals", ("capitals", "quantities"))
    with Verifier(found) as verifier:
        tasks = open_tasks(found, verifier)
        answers = {
            line["question"]: line["answer"] for line in map(json.loads, EXAMPLE.read_text().splitlines())
        }
        drawn = [*tasks.draw(12, random.Random(1)), *tasks.draw_held_out(4, random.Random(1))]
        items = [
            (t.ref, [Completion(f"so <answer>{a}</answer>", True) for a in (answers[t.question], "?")])
            for t in drawn
        ]
        assert verifier.score(items) == [(1.0, 0.0)] * 16
        assert tasks.task(TaskRef("quantities", 2**31)) is None


COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"
ROWS = {
    "question": ["Natalia sold 48 clips. How many?", "Half of one?", "Which numbers solve it?", "Who?"],
    "answer": ["She sold 48 + 24 = 72.\n#### 72", r"\frac{1}{2}", r"\{1, 2\}", "Evelyn"],
}
MORE = {"question": ["No answer?", "", "Half of one?"], "answer": [None, "3", "1/2"]}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a commit in an otherwise empty hub cache; the hub itself cannot be reached."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    _own.cache_clear()
    folder = tmp_path / "datasets--openai--gsm8k" / "snapshots" / COMMIT / "main"
    folder.mkdir(parents=True)
    return folder


def name(file: str) -> str:
    return f"hf:openai/gsm8k@{COMMIT}/main/{file}"


def write(path: Path, columns: Mapping[str, Sequence[object]]) -> None:
    parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.net
def test_a_hub_data_set_asks_its_questions_and_compares_answers_mathematically(hub: Path) -> None:
    whole = {key: [*ROWS[key], *MORE[key]] for key in ROWS}
    write(hub / "train.parquet", whole)
    found = find_curriculum(name("train.parquet"))
    assert (found.name, found.specialties) == ("openai-gsm8k", ("questions",))
    right = {
        "Natalia sold 48 clips. How many?": (
            ["72", "72.0", r"\boxed{72}", "$72$", "8 \\times 9"],
            ["71", "x"],
        ),
        "Half of one?": (["0.5", "1/2", r"\frac{2}{4}"], ["2", "__import__('os').getpid()"]),
        "Which numbers solve it?": (["1, 2", r"\{2,1\}"], ["1", "(1, 2]"]),
        "Who?": (["evelyn"], ["nylevE", "E*v*e*l*y*n"]),
    }
    with Verifier(found) as verifier:
        tasks = open_tasks(found, verifier)
        asked = {
            task.question: ref
            for n in (*range(3), 1_000_000_000)
            if (task := tasks.task(ref := TaskRef("questions", n)))
        }
        assert set(asked) == set(right), "the questions asked are not exactly the usable rows"
        for question, (good, bad) in right.items():
            answers = [Completion(f"<answer>{text}</answer>", True) for text in (*good, *bad)]
            (rewards,) = verifier.score([(asked[question], answers)])
            assert rewards == (1.0,) * len(good) + (0.0,) * len(bad), question
        assert not verifier.faults
    write(hub / "other.parquet", ROWS | {"answer": ["1", "2", "3", "4"]})
    assert swarm_digest(find_curriculum(name("other.parquet"))) != swarm_digest(found)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"question": ["a?"]},
            r"it has no answers \(a column answer or final_answer\)\. Its columns are question\. Name a",
        ),
        ({"text": ["a"], "answer": ["b"]}, r"it has no questions \(a column question or problem"),
        ({"question": ["a?"], "answer": [""]}, "1 of 1 rows left out: 1 without an answer"),
        ({"question": [], "answer": []}, "it has no rows"),
        (
            {"prompt": [[{"role": "user", "content": "a?"}]], "answer": ["1"]},
            "its column prompt holds lists of messages, not text",
        ),
        ({"question": ["a?"], "answer": [["1", "2"]]}, "its column answer holds lists, not text"),
        ({"question": [b"a?"], "answer": ["1"]}, "its column question holds binary, not text"),
        ({"question": [{"en": "a?"}], "answer": ["1"]}, "its column question holds struct<en: string>"),
    ],
)
@pytest.mark.net
def test_a_data_set_without_usable_rows_is_rejected_before_the_node_joins(
    hub: Path, columns: dict[str, list[object]], words: str
) -> None:
    write(hub / "train.parquet", columns)
    with pytest.raises(ConfigError, match=rf"own tasks cannot be used: hf:openai/gsm8k@.*{words}"):
        find_curriculum(name("train.parquet"))


@pytest.mark.net
def test_unusable_rows_are_left_out_and_counted_by_reason(
    hub: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        ("a", "1"),
        ("b", "2"),
        ("a", "1"),
        ("", "3"),
        (None, "3"),
        ("c", None),
        ("d", " "),
        ("e" * 16_385, "1"),
    ]
    rows += [("f", "x" * 1001)]
    write(hub / "train.parquet", dict(zip(("question", "answer"), zip(*rows, strict=True), strict=True)))
    find_curriculum(name("train.parquet"))
    assert caplog.messages == [
        f"{name('train.parquet')}: 7 of 9 rows left out: 1 repeated, 2 without a question, 2 without"
        " an answer, 1 with a question of over 16,384 characters, 1 with an answer of over 1,000 characters"
    ]
    numbers: dict[str, Sequence[object]] = {"problem": ["a", "b", "c"], "answer": [1.5, math.nan, 2.0]}
    write(hub / "numbers.parquet", {"question": [[1], [2], [3]], **numbers})
    find_curriculum(name("numbers.parquet"))
    assert caplog.messages[-1].endswith("1 of 3 rows left out: 1 without an answer")


@pytest.mark.net
def test_an_error_names_a_missing_or_malformed_data_set(hub: Path) -> None:
    (hub / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match="it is no Parquet file"):
        find_curriculum(name("bad.parquet"))
    with pytest.raises(ConfigError, match=r"gsm8k@.*/none\.parquet .*see that the data set has this commit"):
        find_curriculum(name("none.parquet"))
    for wrong in ("hf:openai/gsm8k", f"hf:openai/gsm8k@{COMMIT}", "hf:openai/gsm8k@main/a.parquet"):
        with pytest.raises(ValueError, match="has a commit and a file"):
            curriculum_name(wrong)


class XetHub(Handler):
    """A hub that serves each file over HTTP, and refers hf_xet to an address that does not work."""

    def get(self) -> None:
        if self.path.startswith("/datasets/"):
            xet = {"X_Xet_Hash": 64 * "a", "X_Xet_Refresh_Route": "/no/where"}
            self.answer(b"rows", X_Repo_Commit=COMMIT, ETag=f'"{40 * "a"}"', **xet)
        else:
            self.answer(status=404)


@pytest.mark.net
def test_a_data_set_is_fetched_over_http(tmp_path: Path) -> None:
    """hf_xet is not used, because it hangs forever on some connections. This holds for models as well."""
    code = "import sys; from swarmd.tasks.data_set import fetched; print(fetched(sys.argv[1]).read_text())"
    with listening(XetHub) as address:
        done = subprocess.run(
            [sys.executable, "-c", code, name("test.parquet")],
            env=os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.stdout == "rows\n", done.stderr


def test_an_error_names_a_data_set_whose_download_breaks_off(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object, **__: object) -> None:
        raise httpx2.RemoteProtocolError("peer closed connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cut_off)
    with pytest.raises(
        ConfigError, match=r"/none\.parquet .*\(peer closed connection\)\. Check .* see that the data set"
    ):
        find_curriculum(name("none.parquet"))


@pytest.mark.net
def test_a_local_copy_of_a_hub_data_set_belongs_to_another_swarm(hub: Path, tmp_path: Path) -> None:
    """Answers to the copy are compared as text, not mathematically, so rewards would differ."""
    lines = '{"question": "Half of one?", "answer": "1/2"}\n{"question": "A third?", "answer": "1/3"}\n'
    copy = tmp_path / "train.jsonl"
    for path in (hub / "train.jsonl", copy):
        path.write_text(lines)
    digests = {swarm_digest(find_curriculum(source)) for source in (name("train.jsonl"), str(copy))}
    assert len(digests) == 2
