"""What the rest of swarmd and the judge see: rewards and reasons."""

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from swarmd.errors import ConfigError
from swarmd.protocols import Reward
from swarmd.tasks.answers import LONGEST_COMPLETION
from swarmd.tasks.grading import solution
from swarmd.tasks.scoring import Completion, GradeReason, Judgement, TaskRef, Verifier
from swarmd.tasks.source import tasks_of

ROOT = Path(__file__).parents[2]
REF = TaskRef("binary_matrix", 7)


@pytest.fixture(scope="module")
def right() -> str:
    tasks = tasks_of("tiny-9")
    return solution(tasks, tasks.task(REF))


@pytest.mark.net
def test_reasons(verifier: Verifier, right: str) -> None:
    texts = {
        f"so <answer>{right}</answer>": GradeReason.CORRECT,
        "<answer>0</answer>": GradeReason.WRONG,
        right: GradeReason.NO_ANSWER,
        f"<answer>{right}": GradeReason.NO_ANSWER,
        f"<answer>{right * 40}</answer>": GradeReason.TOO_LONG,
        "x" * LONGEST_COMPLETION + f"<answer>{right}</answer>": GradeReason.TOO_LONG,
        f"<answer>{right}\u202e</answer>": GradeReason.UNSAFE,
        f"<answer>{right}\ud800</answer>": GradeReason.UNSAFE,
        f"\ud800\0<answer>{right}</answer>": GradeReason.CORRECT,
    }
    unknown = TaskRef("no such", 7)
    judged = verifier.judge([(REF, [Completion(text, True) for text in texts]), (unknown, [Completion("", True)] * 2), (REF, [])])
    assert judged == [tuple(map(Judgement, texts.values())), (Judgement(GradeReason.NO_TASK),) * 2, ()]
    assert verifier.judge([]) == []
    assert verifier.judge([(TaskRef("bf", 2**80), [Completion("<answer>1</answer>", True)])]) == [(Judgement(GradeReason.NO_TASK),)]


@pytest.mark.net
def test_a_completion_that_was_cut_after_its_answer_is_scored(verifier: Verifier, right: str) -> None:
    assert verifier.score([(REF, [Completion(f"<answer>{right}</answer> and so", False)])]) == [(1.0,)]


@pytest.mark.net
def test_it_is_a_reward_and_threads_may_share_it(verifier: Verifier, right: str) -> None:
    reward: Reward = verifier
    answers: list[object] = []

    def ask() -> None:
        answers.extend(reward([(REF, [Completion(f"<answer>{right}</answer>", True)])]) for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[(1.0,)]] * 80
    assert verifier.restarts == 0


@pytest.mark.net
def test_an_unused_or_closed_verifier_is_no_process() -> None:
    idle = Verifier("tiny-9")
    assert (idle.pid, idle.seccomp) == (None, None)
    idle.close()
    with pytest.raises(ConfigError):
        Verifier("no such")


@pytest.mark.net
@pytest.mark.parametrize("name", ["sapo-9", "tiny-9"])
def test_a_batch_of_sixty_four_takes_milliseconds(name: str) -> None:
    rng, tasks, seconds = random.Random(1), tasks_of(name), []
    with Verifier(name) as verifier:
        for _ in range(60):
            drawn = tasks.draw(8, rng)
            items = [(t.ref, [Completion(f"<answer>{a}</answer>", True) for a in [solution(tasks, t)] * 4 + ["1"] * 4]) for t in drawn]
            start = time.perf_counter()
            verifier.score(items)
            seconds.append(time.perf_counter() - start)
    typical = sorted(seconds[1:])[len(seconds) // 2] * 1000  # the first waits for ReasoningGYM to load
    print(f"\n{name}: {typical:.1f} ms for 8 questions of 8 completions")
    assert typical < 100  # 5 to 10 on two idle cores; the bound is for busy ones


@pytest.mark.net
@pytest.mark.parametrize("modules, banned", [("scoring", "torch reasoning_gym"), ("source, verifier", "torch")])
def test_what_an_import_loads(modules: str, banned: str) -> None:
    program = f"import sys; from swarmd.tasks import {modules}; print([m for m in {banned.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
