"""Data sets of the hub: read from its cache, which is laid out here as the hub's client leaves it."""

from pathlib import Path

import huggingface_hub.constants
import pyarrow
import pytest
from pyarrow import parquet

from swarmd.config.curriculum_name import curriculum_name
from swarmd.errors import ConfigError
from swarmd.exchange.swarm_id import swarm_digest
from swarmd.tasks.own import _own, find_curriculum
from swarmd.tasks.sandbox.client import Completion, Verifier
from swarmd.tasks.source import open_tasks
from swarmd.types import TaskRef

pytestmark = pytest.mark.net
COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"
ROWS = {
    "question": ["Natalia sold 48 clips. How many?", "Half of one?", "Which numbers solve it?", "Who?"],
    "answer": ["She sold 48 + 24 = 72.\n#### 72", r"\frac{1}{2}", r"\{1, 2\}", "Evelyn"],
}
MORE = {"question": ["No answer?", "", "Half of one?"], "answer": [None, "3", "1/2"]}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a commit in an empty cache of the hub, which is out of reach."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    _own.cache_clear()
    folder = tmp_path / "datasets--openai--gsm8k" / "snapshots" / COMMIT / "main"
    folder.mkdir(parents=True)
    return folder


def name(file: str) -> str:
    return f"hf:openai/gsm8k@{COMMIT}/main/{file}"


def write(path: Path, columns: dict[str, list[str]]) -> None:
    parquet.write_table(pyarrow.table(columns), path)


def test_a_data_set_of_the_hub_asks_its_questions_and_compares_as_mathematics(hub: Path) -> None:
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
        assert set(asked) == set(right), "one of them is held out, and rows of no use are left out"
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
            r"it has no answers \(a column answer or final_answer\), but question\. Name a",
        ),
        ({"text": ["a"], "answer": ["b"]}, r"it has no questions \(a column question or problem"),
        ({"question": ["a?"], "answer": [""]}, "it has no lines"),
    ],
)
def test_a_data_set_without_answers_is_refused_before_anything_is_joined(
    hub: Path, columns: dict[str, list[str]], words: str
) -> None:
    write(hub / "train.parquet", columns)
    with pytest.raises(ConfigError, match=rf"own tasks cannot be used: hf:openai/gsm8k@.*{words}"):
        find_curriculum(name("train.parquet"))


def test_what_is_no_data_set_or_not_there_is_named(hub: Path) -> None:
    (hub / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match="it is no Parquet file"):
        find_curriculum(name("bad.parquet"))
    with pytest.raises(ConfigError, match=r"gsm8k@.*/none\.parquet: .*See that the data set has this commit"):
        find_curriculum(name("none.parquet"))
    for wrong in ("hf:openai/gsm8k", f"hf:openai/gsm8k@{COMMIT}", "hf:openai/gsm8k@main/a.parquet"):
        with pytest.raises(ValueError, match="has a commit and a file"):
            curriculum_name(wrong)


def test_a_copy_outside_of_the_cache_is_of_another_swarm(hub: Path, tmp_path: Path) -> None:
    """Its answers are compared letter by letter: the same answer would be right here and wrong there."""
    lines = '{"question": "Half of one?", "answer": "1/2"}\n{"question": "A third?", "answer": "1/3"}\n'
    copy = tmp_path / "train.jsonl"
    for path in (hub / "train.jsonl", copy):
        path.write_text(lines)
    digests = {swarm_digest(find_curriculum(source)) for source in (name("train.jsonl"), str(copy))}
    assert len(digests) == 2
