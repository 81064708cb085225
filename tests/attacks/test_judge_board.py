"""Attacks on the judge's board.

A crowd of keys answers one question each, and a node leaves the hard questions out.

Questions and scores are real; the peers are simulated. `pytest -s` prints the figures.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from judge.config import JudgeSettings
from judge.evaluation.service import JudgeService, open_service
from judge.figures.leaderboard import BoardView
from judge.types import Attributes, Signed
from p2p.types import PeerId
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import tasks_of
from swarmd.types import Completion
from tests.attacks.harness import Attack, show

DEADLINE = 60.0
HONEST, ANSWERS = 3, 20


class Hall:
    """A judge, its clock, and the right answer to each of its questions."""

    def __init__(self, service: JudgeService, clock: list[float]) -> None:
        self.service, self.clock, self._sequence = service, clock, int(1.8e18)
        self._tasks = tasks_of("tiny-9")

    def _signed(self, peer: str) -> Signed:
        self._sequence += 1
        return Signed(PeerId(peer), self._sequence)

    async def ask(self, peer: str) -> tuple[str, str]:
        """Ask the judge for a question; return the question's id and its right answer."""
        self.clock[0] += 1.0  # one question a second
        host, about = f"198.51.{sum(peer.encode()) % 7}.1", Attributes(1, "tiny")
        (handed,) = await self.service.ask(self._signed(peer), host, about, TINY_9.digest)
        task = next(q.task for q in self.service._sessions._open.values() if q.id == handed["evaluation"])
        return handed["evaluation"], f"<answer>{solution(self._tasks, task)}</answer>"

    async def answer(self, peer: str, id: str, text: str) -> None:
        await self.service.answer(self._signed(peer), id, [Completion(text, True)])

    async def let_lapse(self) -> None:
        self.clock[0] += DEADLINE + 1.0
        await self.service.expire()

    async def row(self, peer: str) -> dict[str, Any]:
        """Return the peer's rank over all pages, and its score."""
        self.clock[0] += 10.0  # after this time the judge recomputes a page
        after: int | None = 0
        while after is not None:
            board = await self.service.boards.get(BoardView(after))
            for standing in board.standings:
                if standing.record.peer == peer:
                    return {
                        "rank": standing.rank,
                        "score": standing.record.score.share,
                        "n": standing.record.score.answers,
                    }
            after = board.more_after
        return {}


async def crowd(hall: Hall, keys: int) -> dict[str, float]:
    """Let honest peers answer questions; then let `keys` new keys answer one question each, correctly."""
    for number in range(HONEST):
        for turn in range(ANSWERS):
            id, right = await hall.ask(f"honest {number}")
            await hall.answer(f"honest {number}", id, right if turn % 2 else "x")
    for number in range(keys):
        id, right = await hall.ask(f"key {number}")
        await hall.answer(f"key {number}", id, right)
    rows = [await hall.row(f"honest {number}") for number in range(HONEST)]
    return {
        "honest_gone": sum(not row for row in rows),
        "worst_rank": max(row.get("rank", 10**9) for row in rows),
    }


async def dropping(hall: Hall, questions: int) -> dict[str, float]:
    """Play two nodes that know the answer to three questions of four.

    One answers all questions; the other does not answer every fourth question, which it does not know.
    """
    for turn in range(questions):
        id, right = await hall.ask("honest")
        await hall.answer("honest", id, right if turn % 4 else "x")
        id, right = await hall.ask("dropper")
        if turn % 4:
            await hall.answer("dropper", id, right)
        else:
            await hall.let_lapse()
    honest, dropper = await hall.row("honest"), await hall.row("dropper")
    return {
        "honest": honest["score"],
        "dropper": dropper["score"],
        "gain": dropper["score"] - honest["score"],
    }


async def play(folder: Path, keys: int, questions: int) -> dict[str, float]:
    clock = [1_000.0]
    settings = JudgeSettings(folder / "judge.sqlite3", "tiny-9", deadline=DEADLINE)
    async with open_service(settings, random.Random(5), lambda: clock[0], lambda: 1.8e9) as service:
        hall = Hall(service, clock)
        found = await crowd(hall, keys) | await dropping(hall, questions)
    show(
        f"judge-board, {keys} keys that answer once, {HONEST} honest nodes, every fourth question dropped",
        found,
    )
    return found


@pytest.mark.slow
def test_answering_once_or_dropping_hard_questions_gains_no_rank(tmp_path: Path) -> None:
    found = attack(tmp_path, keys=60, questions=16)
    assert (found["honest_gone"], found["worst_rank"]) == (0, HONEST)
    assert found["gain"] == 0


def attack(folder: Path, keys: int = 1_100, questions: int = 98) -> dict[str, float]:
    return asyncio.run(play(folder, keys, questions))


ATTACK = Attack(attack, {"honest_gone": 0, "worst_rank": 3, "gain": 0})
