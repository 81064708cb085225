"""What the rest of swarmd and the judge see: rewards and reasons."""

import threading

import pytest

from swarmd.errors import ConfigError
from swarmd.protocols import Reward
from swarmd.tasks.answers import MAX_COMPLETION_CHARACTERS
from swarmd.tasks.grading import solution
from swarmd.tasks.sandbox.client import Completion, GradeReason, ScoredAnswer, TaskRef, Verifier
from swarmd.tasks.source import tasks_of

REF = TaskRef("binary_matrix", 7)


@pytest.fixture(scope="module")
def right() -> str:
    tasks = tasks_of("tiny-9")
    return solution(tasks, tasks.task(REF))


@pytest.mark.net
def test_each_completion_gets_its_reason(verifier: Verifier, right: str) -> None:
    texts = {
        f"so <answer>{right}</answer>": GradeReason.CORRECT,
        "<answer>0</answer>": GradeReason.WRONG,
        right: GradeReason.NO_ANSWER,
        f"<answer>{right}": GradeReason.NO_ANSWER,
        f"<answer>{right * 40}</answer>": GradeReason.TOO_LONG,
        "x" * MAX_COMPLETION_CHARACTERS + f"<answer>{right}</answer>": GradeReason.TOO_LONG,
        f"<answer>{right}\u202e</answer>": GradeReason.UNSAFE,
        f"<answer>{right}\ud800</answer>": GradeReason.UNSAFE,
        f"\ud800\0<answer>{right}</answer>": GradeReason.CORRECT,
    }
    unknown = TaskRef("no such", 7)
    scores = verifier.judge(
        [(REF, [Completion(text, True) for text in texts]), (unknown, [Completion("", True)] * 2), (REF, [])]
    )
    judged = [tuple(score.reason for score in row) for row in scores]
    assert judged == [tuple(texts.values()), (GradeReason.NO_TASK,) * 2, ()]
    assert verifier.judge([]) == []
    # Cut after its answer
    assert verifier.score([(REF, [Completion(f"<answer>{right}</answer> and so", False)])]) == [(1.0,)]
    assert verifier.judge([(TaskRef("bf", 2**80), [Completion("<answer>1</answer>", True)])]) == [
        (ScoredAnswer.of(GradeReason.NO_TASK),)
    ]


@pytest.mark.net
def test_a_verifier_is_a_reward_that_threads_may_share(verifier: Verifier, right: str) -> None:
    reward: Reward = verifier
    verifier.judge([(REF, [Completion(f"<answer>{right}</answer>", True)])])  # it is up
    restarts, answers = verifier.restarts, list[object]()

    def ask() -> None:
        answers.extend(reward([(REF, [Completion(f"<answer>{right}</answer>", True)])]) for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[(1.0,)]] * 80
    assert verifier.restarts == restarts


@pytest.mark.net
def test_an_unused_or_closed_verifier_is_no_process() -> None:
    idle = Verifier("tiny-9")
    assert (idle.pid, idle.seccomp) == (None, None)
    idle.close()
    with pytest.raises(ConfigError):
        Verifier("no such")
