"""Relay starver: circuits of one machine, or of many machines in one network group, use up the rate of a
relay, while an honest node sends bytes through it and waits for the echo.

The relay and the hosts are real, on loopback, where each address is a separate network group. The burst is
used up before the measurement starts.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError

from p2p.engines.libp2p.relay import GUEST_BYTES_PER_S
from tests.attacks.harness import Attack, show
from tests.p2p.engines.libp2p.test_relay import OK, Net, net

BURST = 1 << 20  # bytes that one circuit may carry, and bytes of the burst
TIMEOUT_S = 40.0


@dataclass
class Beside:
    calm: float  # seconds until the honest bytes were echoed, without the attack
    beside: float  # the same during the attack; TIMEOUT_S if some were missing
    came: int  # honest bytes that were echoed during the attack
    hostile: int  # bytes that the attacker sent in that time

    @property
    def slower(self) -> float:
        return self.beside / self.calm


async def there_and_back(stream: Any, size: int) -> int:
    """Send `size` bytes through a circuit; return how many were echoed."""
    came = 0
    with trio.move_on_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, bytes(size))
            while came < size:
                came += len(await stream.read(1 << 16))
    return came


class Crowd:
    """The attacker's circuits."""

    def __init__(self, piece: int, pause: float) -> None:
        self.sent, self._piece, self._pause = 0, piece, pause

    async def flood(self, stream: Any) -> None:
        """Send pieces, one after the other, until the relay closes the circuit."""
        try:
            while True:
                await stream.write(bytes(self._piece))
                self.sent += self._piece
                await trio.sleep(self._pause)
        except BaseLibp2pError:
            return

    async def drain(self, stream: Any) -> None:
        try:
            while await stream.read(1 << 16):
                pass
        except BaseLibp2pError:
            return


async def circuit(those: Net, asker: Any, target: Any) -> Any:
    status, stream = await those.connect(asker, target)
    assert status is OK
    return stream


async def play(circuits: int, piece: int, pace: float, rate: float, size: int, victim: bool) -> Beside:
    async with net(rate=rate, size=BURST) as those:
        home, asker = await those.peer("127.0.1.1"), await those.peer("127.0.2.1")
        theirs = await those.peer("127.0.3.1")
        targets = [await those.peer("127.0.4.1", echoes=False) for _ in range(1 + circuits // 4)]
        for host in (home, *targets):
            assert await those.reserve(host) is OK
        honest = await circuit(those, asker, home)
        # Use up the burst, which is more than one circuit may carry.
        for seconds in (TIMEOUT_S, 1.0):
            with trio.move_on_after(seconds):
                await Crowd(1 << 16, 0.0).flood(used := await circuit(those, theirs, targets[0]))
        await used.reset()
        begun = trio.current_time()
        assert await there_and_back(honest, size) == size
        calm = trio.current_time() - begun
        crowd = Crowd(piece, circuits * piece / (pace * rate) if pace else 0.0)
        async with trio.open_nursery() as nursery:
            for n in range(circuits):
                stream = await circuit(those, theirs, home if victim else targets[1 + n // 4])
                nursery.start_soon(crowd.flood, stream)
                nursery.start_soon(crowd.drain, stream)
            await trio.sleep(1.0)
            begun = trio.current_time()
            came = await there_and_back(honest, size)
            result = Beside(calm, trio.current_time() - begun, came, crowd.sent)
            nursery.cancel_scope.cancel()
    return result


def attack(
    folder: Path,
    circuits: int = 8,
    piece: int = 1024,
    pace: float = 1.0,
    rate: float = GUEST_BYTES_PER_S,
    size: int = 200_000,
    victim: bool = False,
) -> Beside:
    result = trio.run(play, circuits, piece, pace, rate, size, victim)
    how = f"{piece} bytes at {pace:g} times the rate" if pace else f"{piece} bytes, unpaced"
    to = " to the honest node" if victim else ""
    show(f"relay starver, {circuits} circuits{to}, {how}, relay {rate:g} bytes/s", result)
    return result


@pytest.mark.net
@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
@pytest.mark.parametrize(
    "circuits, piece, pace, victim",
    [(8, 1024, 1.0, False), (8, 1 << 16, 0.0, False), (4, 1 << 16, 0.0, True)],
)
def test_an_honest_circuit_gets_its_share_of_a_relays_rate(
    circuits: int, piece: int, pace: float, victim: bool, tmp_path: Path
) -> None:
    result = attack(tmp_path, circuits, piece, pace, rate=GUEST_BYTES_PER_S, size=100_000, victim=victim)
    assert result.came == 100_000 and result.hostile > 50_000
    assert result.slower <= 2.5  # 2.0 is half of the rate; the rest allows for the machine's load


ATTACK = Attack(
    attack,
    {"slower": 2.0},
    about={
        "piece": "bytes of each write",
        "pace": "bytes a second of all circuits, in parts of the relay's rate; 0: as fast as it goes",
        "rate": "of the relay, in bytes a second",
        "size": "honest bytes, there and back",
        "victim": "the circuits lead to the honest node",
    },
)
