"""Eclipse: an attacker who owns nine of ten addresses tries to be every peer that a node dials.

`pytest -s` prints the figures.

The code is the product's: `p2p.peers.addressbook`, `p2p.peers.outbound`, the book's file. Only the sockets
are simulated: a hostile address always answers, an honest address answers if its owner is online, an invented
address never answers. The rules favour the attacker. All its peers are always up. They name only each other
and, if the attacker lies, invented peers in invented network groups. Nine tenths of the addresses that honest
peers name are hostile, too. INBOUND hostile peers and HONEST_INBOUND honest peers dial the node in each
session. The bootstrap peer is honest, and is offline after the first session. The attacker arrives after CALM
sessions, or is present from the first minute.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from p2p.address import Endpoint
from p2p.identity import peer_id_of
from p2p.netgroup import group_of
from p2p.peers.addressbook import AddressBook
from p2p.peers.addressbook_file import AddressBookFile
from p2p.peers.outbound import Outbound
from p2p.types import PeerId
from tests.attacks.harness import Attack, show

ME = peer_id_of(b"\xff" * 32)
HONEST, HOSTILE = 100, 900
ONLINE = 0.7  # probability that an honest peer is online during a session
INBOUND, HONEST_INBOUND = 30, 2  # hostile and honest peers that dial the node in a session
TOLD = 20  # peers named in one answer, as in the DHT
RESTARTS = 200
CALM = 10  # sessions before the attacker comes
SESSION = 30  # minutes


@dataclass
class World:
    rng: random.Random
    groups: int  # network groups in which the attacker has addresses
    lies: bool
    addresses: dict[PeerId, str] = field(default_factory=dict)
    honest: list[PeerId] = field(default_factory=list)
    hostile: list[PeerId] = field(default_factory=list)
    invented: int = 0
    calm: bool = False  # whether the attacker has not arrived yet

    def __post_init__(self) -> None:
        prefixes = [f"{a}.{b}" for a in range(11, 100) for b in range(256)]
        self.rng.shuffle(prefixes)
        his = prefixes[: self.groups]
        for n in range(HONEST + HOSTILE):
            prefix = self.rng.choice(prefixes[self.groups :]) if n < HONEST else his[n % self.groups]
            peer = peer_id_of(n.to_bytes(32, "big"))
            self.addresses[peer] = (
                f"/ip4/{prefix}.{self.rng.randrange(256)}.{self.rng.randrange(1, 255)}/tcp/4001"
            )
            (self.honest if n < HONEST else self.hostile).append(peer)

    def answer(self, teller: PeerId) -> list[tuple[PeerId, list[str]]]:
        """Return the peers, with addresses, that `teller` names when it is asked."""
        if teller in self.honest:
            return [
                (peer, [self.addresses[peer]])
                for peer in self.rng.sample(self.honest if self.calm else list(self.addresses), TOLD)
            ]
        told = [(peer, [self.addresses[peer]]) for peer in self.rng.sample(self.hostile, TOLD)]
        if self.lies:  # hostile peers with addresses in invented groups, and invented peers
            told = [(peer, [self.nowhere(), *addresses]) for peer, addresses in told[: TOLD // 2]]
            for _ in range(TOLD // 2):
                self.invented += 1
                told.append((peer_id_of((10**6 + self.invented).to_bytes(32, "big")), [self.nowhere()]))
        return told

    def nowhere(self) -> str:
        return f"/ip4/{self.rng.randrange(100, 200)}.{self.rng.randrange(256)}.0.1/tcp/4001"


@dataclass
class Result:
    eclipsed: int = 0  # restarts after which no dialled peer was honest
    honest: int = 0
    outbound: int = 0
    groups: int = 0


class Victim:
    def __init__(self, world: World, path: Path) -> None:
        self.world, self.path, self.now = world, path, 1_700_000_000.0
        self.result = Result()

    def session(self, first: bool = False) -> None:
        """Play one run of the node's process, from its start to its end.

        It knows what the previous session saved in the file.
        """
        world = self.world
        book = AddressBook(ME, world.rng.randbytes(16))
        bootstrap = world.honest[0]
        if first:
            _, _, host, _, port = world.addresses[bootstrap].split("/")
            book.pin(bootstrap, Endpoint("ip4", host, int(port)))
        file = AddressBookFile(book, self.path, lambda: self.now)
        up = {peer for peer in world.honest[1:] if world.rng.random() < ONLINE} | {
            *([bootstrap] if first else [])
        }
        inbound = {*world.rng.sample(sorted(up), HONEST_INBOUND)}
        if not world.calm:
            up.update(world.hostile)
            inbound.update(world.rng.sample(world.hostile, INBOUND))
        outbound = Outbound(book, self.now)
        for second in range(60 * SESSION):
            connected = {*inbound, *outbound.links}
            if second < 30 or second % 60 == 0:
                for peer in outbound.prune(connected, connected, self.now):
                    outbound.links.pop(peer, None)
                for peer, addresses in outbound.choose(connected, connected, self.now, world.rng):
                    self.dial(outbound, peer, addresses, up)
                feeler = outbound.feeler(connected, self.now, world.rng)
                if feeler is not None:
                    self.dial(outbound, *feeler, up)
            if second == 30:
                self.count(outbound)
            if second % 600 == 60:
                self.learn(book, connected)
            self.now += 1
        file.save()
        self.now += 3600

    def dial(self, outbound: Outbound, peer: PeerId, addresses: list[str], up: set[PeerId]) -> None:
        where = self.world.addresses.get(peer)
        if peer in up and where in addresses:
            outbound.reached(peer, where, group_of(where) or "", self.now)
        else:
            outbound.missed(peer, self.now)

    def learn(self, book: AddressBook, connected: set[PeerId]) -> None:
        for teller in sorted(connected):
            source = group_of(self.world.addresses[teller])
            book.add(teller, [self.world.addresses[teller]], self.now, source=source)
            for peer, addresses in self.world.answer(teller):
                book.add(peer, addresses, self.now, teller=teller, source=source)

    def count(self, outbound: Outbound) -> None:
        honest = sum(peer in self.world.honest for peer in outbound.links)
        self.result.eclipsed += honest == 0
        self.result.honest += honest
        self.result.outbound += len(outbound.links)
        self.result.groups += len({link.group for link in outbound.links.values()})


def attack(
    folder: Path,
    groups: int = 64,
    lies: bool = False,
    calm: int = CALM,
    restarts: int = RESTARTS,
    seed: int = 1,
) -> dict[str, float]:
    """Play the attack; return the share of restarts that were eclipsed, and means over the restarts."""
    victim = Victim(World(random.Random(seed), groups, lies), folder / "peers.json")
    for n in range(max(calm, 1)):
        victim.world.calm = n < calm
        victim.session(first=n == 0)
    victim.world.calm, victim.result = False, Result()
    for _ in range(restarts):
        victim.session()
    r = victim.result
    found = {
        "eclipsed": r.eclipsed / restarts,
        "honest_peers": r.honest / restarts,
        "dialled_peers": r.outbound / restarts,
        "groups": r.groups / restarts,
    }
    show(
        f"eclipse, {HOSTILE} of {HOSTILE + HONEST} addresses hostile, in {groups} groups, lies {lies},"
        f" {calm} calm sessions",
        found,
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("groups, lies", [(16, False), (64, True)])
def test_a_node_keeps_honest_peers_though_nine_of_ten_addresses_are_hostile(
    groups: int, lies: bool, tmp_path: Path
) -> None:
    restarts = RESTARTS // 20  # `python -m tests.attacks eclipse` plays all 200, and other attackers
    found = attack(tmp_path, groups, lies, restarts=restarts)
    assert found["eclipsed"] == 0 and found["groups"] >= 4


ATTACK = Attack(
    attack,
    {"eclipsed": 0.01},
    about={
        "groups": "network groups in which the attacker has addresses",
        "lies": "hostile peers name peers that do not exist",
        "calm": "sessions before the attacker arrives; 0: present from the first minute",
    },
)
