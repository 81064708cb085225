"""Announcer: one machine announces many keys for a swarm in the DHT, so that a newcomer finds no other peers;
it also announces many other swarms.

The test plays the provider store of one DHT node in virtual time. Members of different network groups
announce themselves every two minutes; the attacker announces all its keys every ten seconds.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from p2p.engines.libp2p.dht import BoundedProviders
from p2p.engines.libp2p.stack import make_host
from p2p.identity import Identity
from tests.attacks.harness import Attack, Shares, show

KEY = b"\x12\x20" + bytes(32)
ATTACKER = "attacker"
EVERY_S, ATTACKS_EVERY_S, LOOK_EVERY_S = 120.0, 10.0, 30.0


@dataclass
class Announced(Shares):
    """The attacker's shares of a swarm's provider list."""

    lost: int = 0  # lookups that found no providers


def attack(
    folder: Path,
    keys: int = 40,
    members: int = 40,
    swarms: int = 2000,
    minutes: float = 30.0,
    seed: int = 0,
) -> Announced:
    found = trio.run(_play, keys, members, swarms, 60 * minutes, random.Random(seed))
    show(f"announcer, {keys} keys of one machine next to {members} members", found)
    return found


async def _play(keys: int, members: int, swarms: int, seconds: float, rng: random.Random) -> Announced:
    store, groups, found = (
        BoundedProviders(host=make_host(Identity(bytes(32)))),
        dict[Any, str](),
        Announced(),
    )
    store._group_of = groups.__getitem__

    def announce(name: str, group: str, key: bytes = KEY) -> None:
        peer = ID(name.encode())
        groups[peer] = group
        store.add_provider(key, PeerInfo(peer, [Multiaddr("/ip4/11.0.0.1/tcp/4001")]))

    others = iter(range(swarms))
    for at, who in sorted(_turns(members, seconds, rng)):
        if who >= 0:
            announce(f"member {who}", f"group {who}")
        elif who == -1:
            for number in range(keys):
                announce(f"key {number}", ATTACKER)
                if (other := next(others, None)) is not None:
                    announce(f"key {number}", ATTACKER, other.to_bytes(4, "big"))
        elif at > EVERY_S:
            listed = [groups[info.peer_id] for info in store.get_providers(KEY)]
            found.lost += not listed
            found.shares.append(listed.count(ATTACKER) / max(1, len(listed)))
    return found


def _turns(members: int, seconds: float, rng: random.Random) -> Iterator[tuple[float, int]]:
    """Yield (time, who): a member or the attacker (-1) announces itself, or a newcomer looks up (-2)."""
    for who, every in [
        *((member, EVERY_S) for member in range(members)),
        (-1, ATTACKS_EVERY_S),
        (-2, LOOK_EVERY_S),
    ]:
        at = rng.uniform(0, every)
        while at < seconds:
            yield at, who
            at += every * rng.uniform(0.75, 1.25)


def test_one_machine_does_not_displace_members_from_the_provider_list(tmp_path: Path) -> None:
    found = attack(tmp_path)
    assert found.most <= ATTACK.bounds["most"] and found.lost == 0
    few = attack(tmp_path, members=3)  # none of the three is displaced
    assert few.most == 17 / 20 and few.lost == 0


ATTACK = Attack(attack, {"most": 0.05, "lost": 0})
