"""Outbound peer selection against eclipse attacks: which peers to dial, and which connections to keep.

Also decides when connections that were made for one question end. Pure; `now`, `rng` are arguments.

An attacker that wants to isolate a node can fill its inbound slots and most of its address book. So inbound
connections count as members, but give no protection. A node therefore dials GROUPS members of the swarm, each
in a different network group if it knows so many groups (Heilman et al., "Eclipse Attacks on Bitcoin's
Peer-to-Peer Network", USENIX Security 2015, and Bitcoin Core's counter-measures).
"""

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from p2p.netgroup import group_of
from p2p.peers.addressbook import AddressBook, Candidate
from p2p.types import PeerId

# Number of connected members that we want, including inbound ones.
TARGET_MEMBERS = 8
# Number of network groups in which we want a member that we dialled.
GROUPS = 10
# Maximum number of connections that we dialled, including those to nodes outside our swarm.
MAX_OUTBOUND = 20
DIALS_AT_ONCE = 4
# Seconds in which a dialled peer must prove to be in our swarm.
STRANGER_S = 30.0
# Seconds without a member after which we dial bootstrap addresses again.
ALONE_S = 10.0
FEEL_EVERY_S = 60.0


@dataclass(slots=True)
class Link:
    """A connection that we dialled."""

    group: str  # network group of the address that answered
    since: float
    feeler: bool = False  # whether we dialled only to check that the peer is there
    met: bool = False  # whether the peer has proved to be in our swarm


class Outbound:
    def __init__(self, book: AddressBook, now: float) -> None:
        self.links: dict[PeerId, Link] = {}
        self.dialling: dict[PeerId, list[str]] = {}
        self._feelers: set[PeerId] = set()
        self._book = book
        self._company = now  # when a member was last connected
        self._felt = now

    def choose(
        self, connected: Collection[PeerId], members: Collection[PeerId], now: float, rng: random.Random
    ) -> list[Candidate]:
        """Choose the peers to dial now. Each stays in `dialling` until a call of `reached` or `missed`."""
        # `min`, because the clock may have been set back.
        self._company = now if members else min(self._company, now)
        free = min(DIALS_AT_ONCE - len(self.dialling), MAX_OUTBOUND - len(self.links) - len(self.dialling))
        dialled = (address for addresses in self.dialling.values() for address in addresses)
        taken = {link.group for link in self.links.values()} | {*filter(None, map(group_of, dialled))}
        chosen: list[Candidate] = []
        lacking = TARGET_MEMBERS - len(members) - len(self.dialling)

        def more(avoid: Collection[str], count: int) -> list[Candidate]:
            busy = {*connected, *self.dialling, *(peer for peer, _ in chosen)}
            return self._book.candidates(now, rng, busy, avoid, count) if count > 0 else []

        if not members and free > 0 and now - self._company >= ALONE_S:
            named = self._book.bootstraps(now, {*connected, *self.dialling})
            chosen = rng.sample(named, min(free, len(named)))
        for peer, addresses in more(taken, min(free - len(chosen), GROUPS - len(taken))):
            if (group := group_of(addresses[0]) or "") not in taken:
                taken.add(group)
                chosen.append((peer, addresses))
        chosen += more((), min(free, lacking) - len(chosen))
        self.dialling.update(chosen)
        return chosen

    def feeler(self, connected: Collection[PeerId], now: float, rng: random.Random) -> Candidate | None:
        """Choose a peer to dial only to check that it is there, at most once in FEEL_EVERY_S."""
        if self.dialling or 0 <= now - self._felt < FEEL_EVERY_S or len(self.links) >= MAX_OUTBOUND:
            return None
        self._felt = now
        if (found := self._book.feeler(now, rng, {*connected})) is not None:
            self.dialling[found[0]] = found[1]
            self._feelers.add(found[0])
        return found

    def reached(self, peer: PeerId, address: str, group: str, now: float) -> None:
        """Note a dial that succeeded at this address of the book, in this network group.

        address: "" if the peer dialled us at the same time, so that the connection proves no address.
        """
        self.dialling.pop(peer, None)
        if address:
            self._book.succeeded(peer, address, now)
            self.links[peer] = Link(group, now, feeler=peer in self._feelers)
        self._feelers.discard(peer)

    def missed(self, peer: PeerId, now: float) -> None:
        """Note a dial that failed."""
        self._book.failed(peer, now, self.dialling.pop(peer, []))
        self._feelers.discard(peer)

    def prune(self, connected: Collection[PeerId], members: Collection[PeerId], now: float) -> list[PeerId]:
        """Note which peers are connected, and which of them are members of our swarm.

        Returns the peers to hang up on: nodes outside our swarm, and feelers that are done.
        """
        for peer in [peer for peer in self.links if peer not in connected]:
            del self.links[peer]
        over: list[PeerId] = []
        for peer, link in self.links.items():
            if peer in members and not link.met:
                link.met = True
                self._book.met(peer, now)
                if link.feeler and len(members) > TARGET_MEMBERS:
                    over.append(peer)
            elif (
                not link.met
                and now - link.since > STRANGER_S
                and not (peer in self._book.known and self._book.known[peer].pinned)
            ):
                self._book.stranger(peer, now)
                over.append(peer)
        return over


# A connection that was made for a question ends after this long without a question. In a large swarm other
# nodes need its slot.
IDLE_S = 2.0
# The same limit for connections that the library's DHT made.
DHT_IDLE_S = 60.0
# Maximum number of connections made for questions.
MAX_VISITS = 32


class RequestConnections:
    """Tracks connections that were made for questions, and decides when each ends."""

    def __init__(self) -> None:
        self._until: dict[PeerId, float] = {}
        # Questions in progress by peer; their connections must not end.
        self.asked: Counter[PeerId] = Counter()

    def begin(self, peer: PeerId, now: float, idle: float = IDLE_S) -> None:
        """Note a connection that was dialled for a question."""
        self._until[peer] = now + idle

    def used(self, peer: PeerId, now: float) -> None:
        """Note that the peer is being asked, or has answered."""
        if peer in self._until:
            self._until[peer] = max(self._until[peer], now + IDLE_S)

    def prune(self, connected: Collection[PeerId], now: float) -> list[PeerId]:
        """Forget disconnected peers, and return the peers to hang up on: idle, or over MAX_VISITS."""
        self._until = {
            peer: at
            for peer, at in sorted(self._until.items(), key=lambda item: item[1])
            if peer in connected
        }
        return [
            peer
            for n, (peer, until) in enumerate(self._until.items())
            if (now > until or n < len(self._until) - MAX_VISITS) and peer not in self.asked
        ]
