"""The contained process that evaluates weights, with the real tiny model."""

import asyncio
import os
import random
import signal
import subprocess
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from judge.verified.evaluator import COMMAND, START_S, EvaluationFailed, Evaluator
from judge.verified.messages import AnswerRequest, ModelTensors
from judge.verified.weights_check import WeightsCheck
from swarmd.policy.models.tiny import WEIGHTS
from swarmd.tasks.source import tasks_of
from testbed.uploaded_weights import file_of, parts_of, whole

pytestmark = [pytest.mark.net, pytest.mark.slow]
QUESTIONS = tuple(task.question for task in tasks_of("tiny-9").draw_held_out(12, random.Random(1)))


@dataclass
class Given:
    model: ModelTensors
    folder: Path
    said: str

    def answers(
        self, weights: bytes, lora_rank: int | None = None, count: int = 1, digest: str = ""
    ) -> list[list[str]]:
        file = self.folder / "weights"
        file.write_bytes(weights)
        digest = digest or sha256(weights).hexdigest()
        request = AnswerRequest("tiny", lora_rank, digest, QUESTIONS, count, seed=1, cpu=300, memory=2**29)
        rows = asyncio.run(Evaluator(600.0).answers(file, request))
        return [[answer.text for answer in row] for row in rows]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    read, write = os.pipe()  # its output at the end is a pipe, not a file
    command = ("sh", "-c", f'exec "$@" 2>/proc/{os.getpid()}/fd/{write}', "sh", *COMMAND)
    model = asyncio.run(Evaluator(600.0, command).describe(["tiny"]))["tiny"]
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as said:
        return Given(model, tmp_path_factory.mktemp("weights"), said.read())


def test_the_contained_worker_can_end_without_an_error(given: Given) -> None:
    """The sandbox forbids the operations of torch's normal exit."""
    assert given.said == ""


def test_the_worker_answers_with_the_given_weights(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the judge's working folder does not shadow a module."""
    monkeypatch.chdir(given.folder)
    Path("json.py").write_text("raise ImportError")
    tiny = (WEIGHTS["tiny"] / "model.safetensors").read_bytes()
    WeightsCheck(len(tiny), sha256(tiny).hexdigest(), given.model.shapes(None)).feed(tiny)
    answers = given.answers(tiny, count=3)
    assert all(len(row) == 3 and "<answer>" in row[0] for row in answers)
    shapes = given.model.shapes(2)
    header, data = parts_of(file_of(shapes))
    nothing = whole(
        {f"base_model.model.{name.replace('.default', '')}": entry for name, entry in header.items()},
        bytes(len(data)),
    )
    WeightsCheck(len(nothing), sha256(nothing).hexdigest(), shapes).feed(nothing)
    # An adapter of zeros changes nothing.
    assert [row[0] for row in given.answers(nothing, 2)] == [row[0] for row in answers]


def test_weights_that_differ_from_their_digest_are_not_evaluated(given: Given) -> None:
    tiny = (WEIGHTS["tiny"] / "model.safetensors").read_bytes()
    with pytest.raises(EvaluationFailed, match="damaged"):
        given.answers(tiny, digest=64 * "0")


def test_the_worker_ends_if_its_judge_was_killed_during_the_start() -> None:
    """The worker notices this, because its parent process then has another id."""
    worker = subprocess.run((*COMMAND, "1", "0"), stdin=subprocess.DEVNULL, timeout=START_S, check=False)
    assert worker.returncode == -signal.SIGKILL
