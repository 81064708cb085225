"""Generator processes that run in parallel to rounds, on the tiny model, and the queue between them."""

import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.config.config import NodeConfig
from swarmd.errors import ConfigError, SwarmdError
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.parallel.generator_pool import Generators
from swarmd.policy.parallel.messages import Begin
from swarmd.policy.parallel.question_queue import MAX_PASSED_OVER, QuestionQueue
from swarmd.policy.parallel.worker import ProcessLost, WorkerProcess
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.source import CurriculumTasks
from swarmd.trainer import workers
from swarmd.trainer.workers import check_workers, open_workers, sharing
from swarmd.types import Completion, Generation, Rollout, Scored, Task, TaskRef, Tokens
from tests import ROOT
from tests.doubles import TIMEOUT_S
from tests.swarmd.exchange.test_wire import ME


def config(**sections: Any) -> NodeConfig:
    return NodeConfig.model_validate(
        {"model": {"name": "tiny", "device": "cpu"}, "round": {"local": 2, "completions": 4}, **sections}
    )


def scored(task: Task, answers: Generation, round_number: int) -> Scored:
    """Return the rollout with rewards that always give an advantage; learning does not matter here."""
    rewards = tuple(float(i % 2) for i in range(len(answers.completions)))
    return Scored(
        Rollout(task.ref, answers.completions, ME), task.question, rewards, round_number, answers.tokens
    )


@pytest.mark.slow
@pytest.mark.net
def test_two_generators_switch_to_newer_weights_within_an_answer(tmp_path: Path) -> None:
    settings = config(generate={"max_new_tokens": 64}, workers={"generators": 2})
    policy, tasks, rng = LanguagePolicy.open(settings, 1), CurriculumTasks(TINY_9), random.Random(1)
    with open_workers(settings, policy, 1, tmp_path, lambda count: tasks.draw(count, rng)) as crew:
        rounds, within = 0, False
        deadline = time.monotonic() + TIMEOUT_S
        while not (within and len(crew.generators.working) == 2 and rounds > 4):
            assert time.monotonic() < deadline, crew.report(time.monotonic())
            if not crew.generators.wait(2, 1.0):
                continue
            taken = crew.generators.collect()
            assert len(taken) == 2
            versions = [v for _, answers in taken for v in answers.tokens.versions if v]
            assert all(list(v) == sorted(v) for v in versions), "a generator went back to older weights"
            assert all(max(v) <= policy.version for v in versions)
            within = within or any(len(set(v)) > 1 for v in versions)
            batch = [scored(task, answers, 1) for task, answers in taken]
            crew.note(batch)
            crew.policy.update(batch)
            rounds += 1
        assert policy.version == rounds
        figures = crew.report(time.monotonic())
        assert (
            figures.version == policy.version and 0 <= figures.lag.mean <= figures.lag.max <= policy.version
        )
        assert figures.tokens_per_second is None

        crew.generators.rest(True)
        crew.generators.collect()
        there = len(crew.generators.flow.finished)
        assert not crew.generators.wait(there + 5, 0.5), (
            "more than two answers of each generator used older weights"
        )
        crew.generators.rest(False)
        assert crew.generators.wait(2, TIMEOUT_S)
        pids = crew.generators.pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture
def flow() -> Iterator[QuestionQueue]:
    tasks, rng = CurriculumTasks(TINY_9), random.Random(1)
    yield QuestionQueue(lambda count: tasks.draw(count, rng), 2, 4)


@pytest.mark.slow
@pytest.mark.net
def test_a_generator_that_fails_ends_the_run_with_its_reason(flow: QuestionQueue, tmp_path: Path) -> None:
    begin = Begin(config(model={"name": "/no/such/model"}).model_dump_json(), 1, str(tmp_path), 1)
    with (
        Generators(
            1,
            lambda _: WorkerProcess("swarmd.policy.parallel.generator", begin, {}),
            flow,
            None,
        ) as working,
        pytest.raises(SwarmdError, match="/no/such/model") as failure,
    ):
        working.wait(1, TIMEOUT_S)
    assert failure.value.exit_code == 3


@pytest.mark.net
def test_a_generator_that_dies_ends_the_run(flow: QuestionQueue, tmp_path: Path) -> None:
    begin = Begin("", 1, str(tmp_path), 1)
    no_worker = "swarmd.policy.parallel.messages"  # a module that ends at once
    with (
        Generators(1, lambda _: WorkerProcess(no_worker, begin, {}), flow, None) as working,
        pytest.raises(ProcessLost, match=r"generator 0 ended \(exit 0\)"),
    ):
        working.wait(1, TIMEOUT_S)


@pytest.mark.net
def test_errors_while_drawing_questions_are_raised_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # so that `tests` can be imported

    def draw(count: int) -> Sequence[Task]:
        raise ZeroDivisionError

    def start(_: int) -> WorkerProcess:
        return WorkerProcess("tests.swarmd.policy.parallel.ready", Begin("", 1, str(tmp_path), 1), {})

    with (
        Generators(1, start, QuestionQueue(draw, 2, 4), None) as working,
        pytest.raises(ZeroDivisionError),
    ):
        working.wait(1, TIMEOUT_S)


def test_impossible_numbers_of_workers_are_rejected_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"limit \d+"):
        check_workers(config(workers={"generators": 64, "trainers": 64}))
    check_workers(config(workers={"generators": 2, "trainers": 2}))


def test_a_container_gets_no_more_processes_than_its_cpu_quota_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarmd.policy.models.preflight.cgroup_cores", lambda: [0.5])
    check_workers(config(workers={"generators": 3, "trainers": 1}))
    with pytest.raises(ConfigError, match="5 processes on 1 cores"):
        check_workers(config(workers={"generators": 4, "trainers": 1}))


def test_processes_are_assigned_to_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(workers, "count_devices", lambda: 2)
    settings = config(workers={"generators": 4})
    assert [sharing(settings, place) for place in range(5)] == [3, 2, 3, 2, 3]
    monkeypatch.setattr(workers, "count_devices", lambda: 8)
    assert [sharing(config(workers={"trainers": 2}), place) for place in range(3)] == [1, 1, 1]
    assert sharing(config(), 0) == 1


def queue_of(ahead: int = 4, enough: int = 100) -> QuestionQueue:
    numbers = itertools.count()

    def draw(count: int) -> Sequence[Task]:
        return [
            Task(TaskRef("binary_matrix", n), f"question {n}", {}) for n in itertools.islice(numbers, count)
        ]

    return QuestionQueue(draw, ahead, enough)


def answer(text: str = "1") -> Generation:
    return Generation((Completion(text, True),), Tokens(((1, 2),), ((-0.5, -0.5),), ((3, 4),)))


def test_each_generator_gets_as_many_new_questions_as_it_answers() -> None:
    work = queue_of(ahead=3)
    first, second = work.hand_out(0), work.hand_out(1)
    assert [text for _, text in [*first, *second]] == [
        f"question {n}" for n in range(6)
    ] and work.in_flight == 6
    assert work.hand_out(0) == []
    work.answered(0, [(number, answer()) for number, _ in first[:2]])
    assert (len(work.finished), work.tokens) == (2, 4) and len(work.hand_out(0)) == 2


def test_the_latest_rollouts_are_taken_and_often_skipped_ones_are_dropped() -> None:
    work = queue_of(ahead=100)
    asked = work.hand_out(0)
    work.answered(0, [(number, answer("old")) for number, _ in asked[:2]])
    for n in range(MAX_PASSED_OVER):
        assert len(work.finished) == 2 and work.overtaken == 0
        work.answered(0, [(asked[2 + n][0], answer("new"))])
        ((task, taken),) = work.collect(1)
        assert taken.completions[0].text == "new" and task.question == f"question {2 + n}"
    assert len(work.finished) == 0 and work.overtaken == 2


def test_without_a_limit_all_rollouts_are_taken_oldest_first() -> None:
    work = queue_of(ahead=3)
    asked = work.hand_out(0)
    work.answered(0, [(number, answer()) for number, _ in asked])
    assert [task.question for task, _ in work.collect(None)] == [text for _, text in asked] and work.collect(
        None
    ) == []


def test_no_question_is_asked_that_no_later_round_would_use() -> None:
    work = queue_of(ahead=4, enough=6)
    asked = work.hand_out(0)
    assert (len(asked), len(work.hand_out(1)), work.hand_out(2)) == (4, 2, [])
    work.answered(0, [(number, answer()) for number, _ in asked])
    assert work.hand_out(0) == []
    work.collect(3)
    assert len(work.hand_out(0)) == 3
