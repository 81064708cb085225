"""Starver: 1,500 frames a second of fresh keys, within all limits, while honest newcomers send their first
frames.

The test plays a real inbox in virtual time. The hostile frames come over as many connections as one machine
may have, or over all connections of a node, from 16 addresses. The newcomers' frames come over separate
connections, or through a neighbour that has forwarded 60 authors. Their connections are of other network
groups than the attacker's, or of the same.
"""

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from p2p.admission.inbox import Inbox
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.types import Envelope, PeerId
from tests.attacks.harness import Attack, show
from tests.attacks.test_deafener import Unsigned, Victim
from tests.doubles import NOW, TOPIC, identity

KEYS = 12_000  # more authors than a node remembers
ESTABLISHED = 60  # authors whose frames the honest neighbour forwards
NEIGHBOUR = identity(1).peer_id
BEFORE = 10.0  # seconds until newcomers send; by then the memory of authors is full


@dataclass
class Starved:
    newcomers: int
    heard: int
    established: int  # frames of the neighbour's authors
    established_heard: int
    admitted: int  # admitted frames of the attacker

    @property
    def missed(self) -> float:
        return 1 - self.heard / self.newcomers

    @property
    def established_missed(self) -> float:
        return 1 - self.established_heard / self.established


def attack(
    folder: Path,
    addresses: int = 1,
    connections: int = 100,
    rate: float = 1500.0,
    newcomers: int = 100,
    together: bool = False,
    ahead: float = 0.0,
    seed: int = 1,
) -> Starved:
    """Play the attack. together: the newcomers are in the network group of the first address.

    ahead: seconds by which the clocks of the fresh keys are ahead.
    """
    rng, result, numbers = random.Random(seed), Starved(newcomers, 0, 0, 0, 0), itertools.count(1)
    keys = [Unsigned(rng.randbytes(32)) for _ in range(KEYS)]
    lines = [PeerId(f"hostile {n}") for n in range(connections)]
    groups = {line: f"{n % addresses}.0" for n, line in enumerate(lines)}
    home = "0.0" if together else "honest"
    inbox = Inbox(
        identity(0).peer_id, TOPIC.swarm_id, group_of=lambda via: groups.get(via, home), verify=Victim.verify
    )

    def hears(who: Identity, via: PeerId, now: float, ahead: float = 0.0) -> bool:
        frame = seal(who, TOPIC.swarm_id, next(numbers), now + ahead, "offer", b"")
        return isinstance(inbox.receive(frame, now, via), Envelope)

    neighbours = [Unsigned(rng.randbytes(32)) for _ in range(ESTABLISHED)]
    for who in neighbours:
        hears(who, NEIGHBOUR, NOW)
    sent = come = 0
    for step in range(1, int((BEFORE + newcomers / 5) * 10) + 1):
        now = NOW + step / 10
        while sent < rate * step / 10:
            result.admitted += hears(keys[sent % KEYS], lines[sent % connections], now, ahead)
            sent += 1
        if now >= NOW + BEFORE and step % 2 == 0 and come < newcomers:
            newcomer = identity(10_000 + come)
            come += 1
            result.heard += hears(newcomer, newcomer.peer_id if come % 2 else NEIGHBOUR, now)
        if step % 5 == 0:
            result.established += 1
            result.established_heard += hears(neighbours[step // 5 % ESTABLISHED], NEIGHBOUR, now)
    show(
        f"starver, {rate:g}/s, {connections} connections,"
        f" {addresses} addresses{', newcomers next to them' if together else ''}",
        result,
    )
    return result


@pytest.mark.parametrize(
    "addresses, connections, together, ahead",
    [
        (1, 100, False, 0.0),
        (16, 159, False, 0.0),
        (1, 100, True, 0.0),
        (2, 100, True, 0.0),
        (16, 100, True, 0.0),
        (2, 100, True, 9.0),
    ],
)
def test_newcomers_are_admitted_despite_many_fresh_keys(
    addresses: int, connections: int, together: bool, ahead: float, tmp_path: Path
) -> None:
    result = attack(tmp_path, addresses, connections, newcomers=20, together=together, ahead=ahead)
    assert result.admitted > 5000 and result.established_missed == 0
    # If the attacker's clocks are ahead, a newcomer's frame may be rejected by chance.
    assert result.missed <= (0.2 if ahead else 0)


ATTACK = Attack(
    attack,
    {"missed": 0.05, "established_missed": 0.0},
    about={
        "together": "newcomers are in the network group of the first address",
        "rate": "frames a second, over all connections together",
        "ahead": "seconds by which the clocks of the fresh keys are ahead",
    },
)
