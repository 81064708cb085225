"""On ladder-9, rounds change a node's levels, checkpoints keep them, and it trains on every level."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p.engines.memory import MemorySwarm
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.exchange import wire
from swarmd.policy.parallel.question_queue import QuestionQueue
from swarmd.tasks.curriculum import LADDER_9, level_of
from swarmd.trainer.checkpoint import Checkpoints
from swarmd.trainer.node import build, resume, run_state
from swarmd.trainer.parts import RoundParts
from swarmd.trainer.round import run_round
from swarmd.types import Completion, Generation, Rollout, Task, TaskRef
from tests.doubles import ListeningMember, memory_member, memory_node
from tests.played import PlayedPolicy

RIGHT, WRONG, MIXED = ["right"] * 4, ["wrong"] * 4, ["right", "wrong"] * 2


class Scripted(PlayedPolicy):
    """A policy that gives the same answers to all questions of a round; its checkpoints are empty."""

    def __init__(self, script: Iterator[list[str]]) -> None:
        super().__init__(lambda _: self.texts)
        self.script, self.texts = script, RIGHT

    def generate(
        self, questions: Sequence[str], completions: int, limits: Sequence[int] = (), **_: object
    ) -> Sequence[Generation]:
        self.texts = next(self.script)
        return super().generate(questions, completions)

    def restore(self, folder: Path) -> None: ...


def right_or_wrong(items: Sequence[tuple[TaskRef, Sequence[Completion]]]) -> Sequence[tuple[float, ...]]:
    return [tuple(float(completion.text == "right") for completion in given) for _, given in items]


def node(*script: list[str], **rounds: Any) -> tuple[RoundParts, Scripted, ListeningMember]:
    """Return a node that asks sums and matrices, its policy, and another member of its swarm."""
    sections = {"round": {"local": 8, "external": 8, "completions": 4, **rounds}, "gate": {"mode": "off"}}
    tasks = {"specialties": ("basic_arithmetic", "binary_matrix.2")}
    config = NodeConfig.model_validate({**sections, "tasks": tasks, "swarm": {"curriculum": "ladder-9"}})
    swarm = MemorySwarm()
    ours = memory_node(swarm, 1, lambda: 1_700_000_000.0, curriculum=LADDER_9, config=config)
    other = memory_member(swarm, 2, lambda: 1_700_000_000.0)
    me, policy = ours.member.identity.peer_id, Scripted(iter(script))
    return build(config, 1, me, ours, policy, right_or_wrong), policy, other


def asked(parts: RoundParts) -> int:
    return parts.tasks.staircase.levels["basic_arithmetic"]


def test_rounds_change_the_level_and_report_it() -> None:
    parts, _, _ = node(RIGHT, RIGHT, MIXED, WRONG, WRONG, WRONG)
    reports = [run_round(t, parts) for t in range(1, 7)]
    assert [report.levels["basic_arithmetic"] for report in reports] == [2, 3, 3, 2, 1, 1]
    # A configured level does not change.
    assert {report.levels["binary_matrix"] for report in reports} == {2}


def test_resampled_questions_have_the_next_level_at_once() -> None:
    parts, _, _ = node(RIGHT, RIGHT, RIGHT, resample=2)
    assert run_round(1, parts).levels["basic_arithmetic"] == 4


def test_late_answers_of_generators_do_not_change_the_level() -> None:
    parts, policy, _ = node(*[WRONG] * 9)
    queue = QuestionQueue(lambda count: parts.tasks.draw(count, parts.task_rng), 12, 100)
    held = queue.hand_out(0)

    class Beside:
        def collect(self) -> list[tuple[Task, Generation]]:
            return queue.collect(4)

    apart = replace(parts, generators=Beside())
    for texts, level in ((RIGHT, 2), (RIGHT, 2), (WRONG, 2)):
        policy.script = iter([texts])
        now, held = held[:4], held[4:]
        queue.answered(0, zip([n for n, _ in now], policy.generate(["?"] * 4, 4), strict=True))
        assert run_round(1, apart).levels["basic_arithmetic"] == level


def test_a_checkpoint_keeps_the_levels(tmp_path: Path) -> None:
    parts, _, _ = node(RIGHT, RIGHT, MIXED)
    for t in (1, 2):
        run_round(t, parts)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(run_state(2, 1, parts), [])
    again, its_policy, _ = node()
    assert resume(checkpoints, again, its_policy, 1)[0] == 2 and asked(again) == 3  # type: ignore[arg-type]
    drawn = [[task.ref for task in one.tasks.draw(20, one.task_rng)] for one in (parts, again)]
    assert drawn[0] == drawn[1] and {level_of(ref.specialty) for ref in drawn[0]} == {2, 3}


@pytest.mark.parametrize("level", [1, 3, 5])
def test_rollouts_of_every_level_are_trained_on(level: int) -> None:
    parts, _, other = node(MIXED)
    both = (Completion("right", True), Completion("wrong", True))
    rollouts = [
        Rollout(TaskRef(f"{subject}.{level}", n), both, PeerId(other.identity.peer_id))
        for subject in ("basic_arithmetic", "arc_1d")
        for n in (7, 8)
        if parts.tasks.trains_on(parts.tasks.task(TaskRef(f"{subject}.{level}", n)))
    ]
    other.publish(wire.KIND, wire.encode(rollouts, 1, "tiny"))
    report = run_round(1, parts)
    found = {f"{subject}.{level}" for subject in ("basic_arithmetic", "arc_1d")}
    assert report.external == len(rollouts) and set(report.external_by_specialty) == found


def test_the_same_seed_gives_the_same_levels_and_random_states() -> None:
    def history() -> list[Any]:
        rng = random.Random(3)
        parts, _, _ = node(*(rng.choice([RIGHT, WRONG, MIXED]) for _ in range(12)))
        return [(run_round(t, parts).levels, parts.task_rng.getstate()) for t in range(1, 13)]

    assert history() == history()
