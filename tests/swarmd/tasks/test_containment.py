"""A contained worker cannot use the rights that it has given up.

The kernel's filter and the audit hook are tested separately, and both with ReasoningGYM's own unsafe scorers.
"""

import errno
import platform
import random
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from swarmd.tasks.curriculum import CURRICULA, HELD_OUT_END
from swarmd.tasks.sandbox import seccomp
from swarmd.tasks.sandbox.client import Completion, GradeReason, Verifier
from swarmd.tasks.source import TaskRef, tasks_of
from testbed.hostile_answers import CODE, SLOW, answers
from tests import ROOT
from tests.swarmd.tasks.watched import cpu_seconds, descendants, watched

FILTERED = sys.platform == "linux" and platform.machine() in seccomp.MACHINES
ONLY_FILTERED = pytest.mark.skipif(not FILTERED, reason="no seccomp filter for this system")
ALLOW, REFUSE = seccomp.ALLOW, seccomp.ERRNO | errno.EPERM


def probe(how: str, path: Path) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.swarmd.tasks.probe", how, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.net
@ONLY_FILTERED
def test_the_kernel_refuses_calls_that_bypass_python(tmp_path: Path) -> None:
    outcomes = probe("kernel", tmp_path / "made")
    assert outcomes.pop("contained") == "True" and outcomes.pop("memory") == "refused"
    assert len(outcomes) == 12
    assert set(outcomes.values()) == {f"refused {errno.EPERM}"}, outcomes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.net
def test_the_audit_hook_refuses_the_same_actions_without_a_kernel_filter(tmp_path: Path) -> None:
    outcomes = probe("hook", tmp_path / "made")
    assert outcomes.pop("contained") == "False" and len(outcomes) == 12
    assert set(outcomes.values()) == {"refused"}, outcomes
    assert list(tmp_path.iterdir()) == []


def verdict(program: list[seccomp.Instruction], architecture: int, number: int, third: int) -> int:
    """Return the kernel's verdict; interprets the four operations of classic BPF in use (linux/filter.h)."""
    data = {seccomp.NUMBER: number, seccomp.ARCHITECTURE: architecture, seccomp.THIRD_ARGUMENT: third}
    at, accumulator = 0, 0
    while True:
        step = program[at]
        at += 1
        if step.code == seccomp.LOAD:
            accumulator = data[step.operand]
        elif step.code == seccomp.EQUAL:
            at += step.if_true if accumulator == step.operand else step.if_false
        elif step.code == seccomp.ANY_BIT:
            at += step.if_true if accumulator & step.operand else step.if_false
        else:
            assert step.code == seccomp.RETURN
            return step.operand


@pytest.mark.parametrize("name", sorted(seccomp.MACHINES))
def test_the_filter_allows_only_the_listed_system_calls(name: str) -> None:
    machine = seccomp.MACHINES[name]
    program = list(seccomp.program(machine))
    for number in range(1024):
        for protection in (0, 1, 3, 4, 5, 7):
            memory = number in machine.memory.values() and not protection & seccomp.PROT_EXEC
            expected = ALLOW if memory or number in machine.calls.values() else REFUSE
            assert verdict(program, machine.architecture, number, protection) == expected
    # The x32 ABI has the same calls with other numbers.
    assert verdict(program, machine.architecture, 0x40000000, 0) == REFUSE
    others = {m.architecture for m in seccomp.MACHINES.values()} - {machine.architecture} | {0x40000003}
    assert all(
        verdict(program, other, number, 0) == seccomp.KILL_PROCESS
        for other in others
        for number in range(512)
    )


@pytest.mark.net
@pytest.mark.parametrize("left_out", ["nothing", pytest.param("no-hook", marks=ONLY_FILTERED), "no-seccomp"])
def test_scorers_that_execute_answers_are_contained(left_out: str, tmp_path: Path) -> None:
    """binary_matrix's own scorer evaluates the answer; propositional_logic's own takes exponential time.

    In this test they may run, and the containment limits their effect.
    """
    tasks, rng = tasks_of("sapo-9"), random.Random(3)
    command = (sys.executable, "-m", "tests.swarmd.tasks.unguarded", left_out)
    with watched(tmp_path / "watched") as target, Verifier("sapo-9", command) as verifier:
        assert (
            verifier.judge([(TaskRef("bf", 1), [Completion("<answer>x</answer>", True)])])[0][0].reason
            is GradeReason.WRONG
        )
        assert verifier._child.seccomp is (FILTERED and left_out != "no-seccomp")
        restarts, begun = verifier.restarts, cpu_seconds(verifier.pid)
        ended = []
        for payload in [*CODE, *SLOW[:7]]:
            specialty = "propositional_logic" if "∨" in payload or "→" in payload else "binary_matrix"
            if payload in CODE:
                payload = payload.format(path=target.path, port=target.port)
            text = f"<answer>{payload}</answer>"
            (judgement,) = verifier.judge(
                [(TaskRef(specialty, rng.randrange(1000)), [Completion(text, True)])]
            )[0]
            ended.append(judgement.reason)
            assert judgement.reward == 0, payload
            assert target.touched() == [], payload
        # An answer takes at most two workers of 0.2 s each, and their forks. Without limits, one answer takes
        # minutes.
        assert cpu_seconds(verifier.pid) - begun < len(ended)
        assert sum(reason is GradeReason.TIMEOUT for reason in ended) >= (2 if left_out != "no-hook" else 3)
        assert verifier.restarts == restarts and len(descendants(verifier.pid)) == 1
        right = tasks.task(TaskRef("binary_matrix", 1))
        assert verifier.score(
            [(right.ref, [Completion(f"<answer>{right.entry['answer']}</answer>", True)])]
        ) == [(1.0,)]


COUNT = 2000
# Limit of the mean CPU seconds that an answer costs the round. A task that takes 0.2 s is ended
# (test_verifier.py).
HOLD = 0.001


@pytest.mark.net
def test_two_thousand_hostile_answers_have_no_effect(tmp_path: Path) -> None:
    rng = random.Random(7)
    kinds = [(name, specialty) for name in ("sapo-9", "tiny-9") for specialty in CURRICULA[name].specialties]
    reasons: Counter[GradeReason] = Counter()
    with watched(tmp_path / "watched") as target, Verifier("sapo-9") as sapo, Verifier("tiny-9") as tiny:
        verifiers = {"sapo-9": sapo, "tiny-9": tiny}
        for verifier in verifiers.values():  # start both, so that only marking is measured
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
                assert judgement.reward == 0, (task.ref, text[:200])
        assert all(len(descendants(v.pid)) == 1 for v in verifiers.values())  # one worker each
        assert [v.restarts for v in verifiers.values()] == restarts
        assert target.touched() == []
        held = (sum(cpu_seconds(v.pid) for v in verifiers.values()) - begun) / reasons.total()
    assert reasons.total() >= COUNT
    assert held < HOLD
