"""2,000 hostile answers over all specialties: no side effects, no reward, and the round goes on."""

import random
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from swarmd.tasks.curriculum import CURRICULA, HELD_OUT_END
from swarmd.tasks.scoring import Completion, GradeReason, Verifier
from swarmd.tasks.source import TaskRef, tasks_of
from tests.tasks.hostile import answers
from tests.tasks.watched import descendants, watched

COUNT = 2000
HOLD = 0.5  # seconds one answer may hold the round
TRIES = 5  # one of them on a machine that does not do something else just then


@pytest.mark.net
def test_two_thousand_hostile_answers_do_nothing(tmp_path: Path) -> None:
    rng = random.Random(7)
    kinds = [(name, specialty) for name in ("sapo-9", "tiny-9") for specialty in CURRICULA[name].specialties]
    reasons: Counter[GradeReason] = Counter()
    held: list[float] = []
    rewards = 0.0
    with watched(tmp_path / "watched") as target, Verifier("sapo-9") as sapo, Verifier("tiny-9") as tiny:
        verifiers = {"sapo-9": sapo, "tiny-9": tiny}
        for verifier in verifiers.values():  # both are up, and what is timed is the marking
            verifier.judge([(TaskRef("bf", 1), [Completion("<answer>x</answer>", True)])])
        for name, specialty in kinds:
            tasks = tasks_of(name)
            task = next(t for n in iter(lambda: rng.randrange(HELD_OUT_END), -1) if (t := tasks.task(TaskRef(specialty, n))))
            for text in islice(answers(tasks, task, target.path, target.port, rng), -(-COUNT // len(kinds))):
                completion = Completion(text, rng.random() < 0.5)
                for _ in range(TRIES):
                    start = time.perf_counter()
                    (judgement,) = verifiers[name].judge([(task.ref, [completion])])[0]
                    seconds = time.perf_counter() - start
                    if seconds < HOLD:
                        break
                held.append(seconds)
                reasons[judgement] += 1
                rewards += judgement.reward
                assert judgement.reward == 0, (task.ref, text[:200])
        assert all(len(descendants(v.pid)) == 1 for v in verifiers.values())  # its one worker
        assert [v.restarts for v in verifiers.values()] == [0, 0]
        assert target.touched() == []
    assert len(held) >= COUNT
    assert rewards == 0
    assert max(held) < HOLD
    why = ", ".join(f"{reason.value} {count}" for reason, count in reasons.most_common())
    print(f"\n{len(held)} answers, 0 side effects, {rewards:.0f} scored, longest hold {max(held) * 1000:.0f} ms; {why}")
