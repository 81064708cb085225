"""Keys of one address fill a judge's disk: they are evaluated as fast as the judge allows, a few times each.

An honest node of another network is evaluated at the same time. Then the attacker's keys are silent for three
windows. The clock is virtual; questions, scores and the database are real. `pytest -s` prints the figures.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from judge.config import JudgeSettings
from judge.errors import Refused
from judge.evaluation.service import JudgeService, open_service
from judge.types import Attributes, Signed
from p2p.identity import Identity
from p2p.types import PeerId
from swarmd.tasks.curriculum import TINY_9
from swarmd.types import Completion
from tests.attacks.harness import Attack, show
from tests.doubles import Clock

DAY_S, GIB, MIB = 86_400.0, 2**30, 2**20
WINDOW_S = DAY_S
A_SECOND = 56  # evaluations a second that the attacker tries
OF_A_KEY = 9  # evaluations of each key; with one more, the key would be on the board
TEXT = "I add the numbers. " * 40 + "<answer>1</answer>"
ATTACKER, HONEST = "198.51.100.7", "203.0.113.9"


class Office:
    """A judge on virtual clocks, and the peers that it evaluates."""

    def __init__(self, service: JudgeService, clocks: tuple[Clock, Clock]) -> None:
        self._service, self._clocks, self._sequence = service, clocks, int(clocks[1].now * 1e9)

    def pass_time(self, seconds: float) -> None:
        for clock in self._clocks:
            clock.now += seconds

    def _signed(self, peer: PeerId) -> Signed:
        self._sequence += 1
        return Signed(peer, self._sequence)

    async def evaluate(self, peer: PeerId, host: str, text: str = TEXT) -> bool:
        """Evaluate the peer; return whether the judge asked and graded it."""
        about = Attributes(1, "tiny", "a node", "swarm", 4, 4, "uniform")
        try:
            (handed,) = await self._service.ask(self._signed(peer), host, about, TINY_9.digest)
        except Refused:
            return False
        await self._service.answer(self._signed(peer), handed["evaluation"], [Completion(text, True)])
        return True


def key(number: int) -> PeerId:
    return Identity(number.to_bytes(32, "big")).peer_id


async def play(folder: Path, tries: int) -> dict[str, Any]:
    clocks, honest = (Clock(1_000.0), Clock(1.8e9)), key(0)
    file = folder / "judge.sqlite3"
    settings = JudgeSettings(file, "tiny-9", window=WINDOW_S)
    async with open_service(settings, random.Random(5), *clocks) as service:
        office, sizes = Office(service, clocks), [0, 0, 0]

        def size() -> int:
            """Return the bytes in use, that is, the file's pages that are not free."""
            with service._writer._store.begin() as db:
                pages, free, each = (
                    db.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                    for name in ("page_count", "freelist_count", "page_size")
                )
            return int((pages - free) * each)

        begun, served, graded, refused_honest = size(), 0, 0, 0
        for number in range(tries):
            office.pass_time(1 / A_SECOND)
            graded += await office.evaluate(key(1 + number // OF_A_KEY), ATTACKER)
            if number % (2 * A_SECOND) == 0:
                done = await office.evaluate(honest, HONEST)
                served, refused_honest = served + done, refused_honest + (not done)
            if number == tries // 2:
                sizes[0] = size()
        sizes[1] = size()
        for _ in range(3):
            office.pass_time(WINDOW_S)
            served += await office.evaluate(honest, HONEST)
        if hasattr(service, "prune"):
            await service.prune()
        sizes[2] = size()
        with service._writer._store.begin() as db:
            rows = "SELECT count(*) FROM evaluations"
            left = db.exec_driver_sql(f"{rows} WHERE peer != '{honest}'").scalar_one()
            kept = db.exec_driver_sql(f"{rows} WHERE peer = '{honest}'").scalar_one()
    seconds = tries / A_SECOND
    found = {
        "tried": tries,
        "graded": graded,
        "written_MiB": (sizes[1] - begun) / MIB,
        "later_GiB_a_day": (sizes[1] - sizes[0]) / (seconds / 2) * DAY_S / GIB,
        "left_MiB": (sizes[2] - begun) / MIB,
        "left_rows": left,
        "honest_refused": refused_honest,
        "honest_lost": served - kept,
    }
    show(f"judge-disk, {tries:,} evaluations tried by one address", found)
    return found


@pytest.mark.slow
def test_one_address_writes_little_and_its_rows_are_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_day = {False: (2.0**19, 2.0**22), True: (2.0**19, 2.0**22)}
    monkeypatch.setattr("judge.config.WRITTEN_A_DAY", a_day)
    found = attack(tmp_path, tries=600)
    assert 0 < found["graded"] < 200
    assert (found["left_rows"], found["honest_refused"], found["honest_lost"]) == (0, 0, 0)


def attack(folder: Path, tries: int = 12_000) -> dict[str, Any]:
    return asyncio.run(play(folder, tries))


ATTACK = Attack(
    attack,
    {"written_MiB": 24, "later_GiB_a_day": 0.2, "left_rows": 0, "honest_refused": 0, "honest_lost": 0},
    about={"tries": f"{A_SECOND} a second; 4,000 use up the daily bytes of newcomers of one machine"},
)
