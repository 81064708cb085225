"""2,000 hostile answers over all specialties: no side effects, no reward, and the round goes on."""

import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from swarmd.tasks.curriculum import CURRICULA, HELD_OUT_END
from swarmd.tasks.sandbox.client import Completion, GradeReason, Verifier
from swarmd.tasks.source import TaskRef, tasks_of
from tests.swarmd.tasks.hostile import answers
from tests.swarmd.tasks.watched import cpu_seconds, descendants, watched

COUNT = 2000
# Seconds of CPU time for which an answer may hold the round, in the mean; what takes 0.2 is ended
# (test_verifier.py)
HOLD = 0.001


@pytest.mark.net
def test_two_thousand_hostile_answers_do_nothing(tmp_path: Path) -> None:
    rng = random.Random(7)
    kinds = [(name, specialty) for name in ("sapo-9", "tiny-9") for specialty in CURRICULA[name].specialties]
    reasons: Counter[GradeReason] = Counter()
    rewards = 0.0
    with watched(tmp_path / "watched") as target, Verifier("sapo-9") as sapo, Verifier("tiny-9") as tiny:
        verifiers = {"sapo-9": sapo, "tiny-9": tiny}
        for verifier in verifiers.values():  # both are up, and what is measured is the marking
            verifier.judge([(TaskRef("bf", 1), [Completion("<answer>x</answer>", True)])])
        restarts, begun = (
            [v.restarts for v in verifiers.values()],
            sum(cpu_seconds(v.pid) for v in verifiers.values()),
        )
        for name, specialty in kinds:
            tasks = tasks_of(name)
            task = next(
                t
                for n in iter(lambda: rng.randrange(HELD_OUT_END), -1)
                if (t := tasks.task(TaskRef(specialty, n)))
            )
            for text in islice(answers(tasks, task, target.path, target.port, rng), -(-COUNT // len(kinds))):
                completion = Completion(text, rng.random() < 0.5)
                (judgement,) = verifiers[name].judge([(task.ref, [completion])])[0]
                reasons[judgement.reason] += 1
                rewards += judgement.reward
                assert judgement.reward == 0, (task.ref, text[:200])
        assert all(len(descendants(v.pid)) == 1 for v in verifiers.values())  # its one worker
        assert [v.restarts for v in verifiers.values()] == restarts
        assert target.touched() == []
        held = (sum(cpu_seconds(v.pid) for v in verifiers.values()) - begun) / reasons.total()
    assert reasons.total() >= COUNT
    assert rewards == 0
    assert held < HOLD
    why = ", ".join(f"{reason.value} {count}" for reason, count in reasons.most_common())
    print(
        f"\n{reasons.total()} answers, 0 side effects, {rewards:.0f} scored, {held * 1000:.2f} ms of CPU time"
        f" each; {why}"
    )
