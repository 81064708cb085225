"""A real trainer is paused many times, at any point of its rounds, and loses no round."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.engines.traffic import Traffic
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.guest.conditions import MachineFacts
from swarmd.daemon.guest.guest import Guest
from swarmd.daemon.supervision.trainer_process import TrainerChild
from swarmd.exchange.swarm_id import curriculum_of
from tests.doubles import TIMEOUT_S, Clock
from tests.swarmd.daemon.guest.test_guest import Swarm

PAUSES = 60


class PausedTrainer:
    """A trainer process with a guest whose facts the test sets."""

    def __init__(self, folder: Path, config: NodeConfig) -> None:
        folder.mkdir()
        start = link.StartTrainer(
            config.model_dump_json(), str(folder), "12D3KooWtest", 7, curriculum_of(config).digest
        )
        self.child = TrainerChild(start, folder / "trainer.log", self._on_message, lambda _: None)
        self.guest = Guest(
            config,
            folder,
            Traffic(),
            Swarm(),
            self.child.tell,
            print,
            Clock(),
            measure=lambda *_: MachineFacts(),
        )
        self._said, self._states = trio.open_memory_channel[str](math.inf)
        self.folder = folder

    def _on_message(self, message: link.ToDaemon) -> None:
        if isinstance(message, link.TrainerState):
            self._said.send_nowait(message.state)

    async def until(self, state: str) -> None:
        while await self._states.receive() != state:
            pass

    def lines(self) -> list[Mapping[str, Any]]:
        """Return the lines of metrics.jsonl, without the fields that depend on the clock."""
        kept = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [
            {key: value for key, value in line.items() if key not in ("time", "seconds")} for line in kept
        ]


@pytest.mark.slow
@pytest.mark.net
async def test_pauses_lose_no_round(tmp_path: Path) -> None:
    config = NodeConfig.model_validate(
        {"swarm": {"engine": "none"}, "limits": {"priority": "normal"}, "model": {"device": "cpu"}}
    )
    paused = PausedTrainer(tmp_path / "paused", config)
    with trio.fail_after(2 * TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(paused.child.run)
            await paused.until("training")
            for _ in range(PAUSES):
                paused.guest.decide(MachineFacts(on_battery=True))
                await paused.until("paused")
                paused.guest.decide(MachineFacts(on_battery=False))
                await paused.until("training")
            paused.guest.decide(MachineFacts(on_battery=True))
            await paused.until("paused")
            paused.child.stop()  # stopped while paused, so the round is finished and saved
        rounds = len(paused.lines())
        assert [line["round"] for line in paused.lines()] == list(
            range(1, rounds + 1)
        ) and paused.child.restarts == 0
        whole = config.model_copy(update={"round": config.round.model_copy(update={"rounds": rounds})})
        unpaused = PausedTrainer(tmp_path / "unpaused", whole)
        await unpaused.child.run()
    assert unpaused.lines() == paused.lines()  # every round continued at the point of its pause
    assert rounds >= 3
