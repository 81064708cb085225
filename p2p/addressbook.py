"""Which peers we know and which of them to dial next. Pure but for `load` and `save`; `now` and the randomness are arguments."""

import heapq
import json
import logging
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from p2p import durable
from p2p.address import Endpoint, parse_endpoint
from p2p.identity import public_key_of
from p2p.types import PeerId

MAX_PEERS = 1024
MAX_ADDRESSES = 8  # of one peer
_MAX_FILE = 4 * 1024 * 1024
FIRST_WAIT = 1.0  # seconds after a failed dial; then twice as long, and so on
FRESH_WAIT = 8.0  # the longest wait for a peer that we heard of, or were connected to, in the last ten minutes
STALE_WAIT = 300.0  # and for the rest
_FRESH = 600.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Known:
    """What we know of one peer. Times in seconds since the epoch, 0: never."""

    addresses: list[str] = field(default_factory=list)  # best first: the one that worked last
    pinned: bool = False  # the operator named it: never forgotten
    heard: float = 0.0
    last_success: float = 0.0
    last_failure: float = 0.0
    failures: int = 0  # in a row

    def due(self) -> float:
        """When to dial again."""
        if self.failures == 0:
            return 0.0
        fresh = self.pinned or self.last_failure - max(self.last_success, self.heard) < _FRESH
        return self.last_failure + min(FIRST_WAIT * 2.0 ** min(self.failures - 1, 16), FRESH_WAIT if fresh else STALE_WAIT)


class AddressBook:
    """At most MAX_PEERS peers. What we connected to ourselves is kept over what others told us."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.changed = False  # since the last `save`
        self._known: dict[PeerId, Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, peer: PeerId) -> Known:
        return self._known[peer]

    def pin(self, peer: PeerId, endpoint: Endpoint) -> None:
        """A bootstrap address: from the operator, so it outlives everything."""
        if peer != self.me:
            known = self._known.setdefault(peer, Known())
            known.pinned = True
            self._add(known, str(endpoint))

    def heard(self, peer: PeerId, addresses: Iterable[str], now: float) -> None:
        """Somebody says this peer is at these addresses. Those that nobody could dial are left out."""
        endpoints = [endpoint for address in addresses if (endpoint := parse_endpoint(address))][:MAX_ADDRESSES]
        if peer == self.me or not endpoints:
            return
        if peer not in self._known:
            self._make_room()
            self.changed = True
        known = self._known.setdefault(peer, Known())
        known.heard = now
        for endpoint in endpoints:
            self._add(known, str(endpoint))

    def succeeded(self, peer: PeerId, address: str | None, now: float) -> None:
        """We are connected. `address`: the one we dialled, or None where the peer dialled us."""
        known = self._known.get(peer)
        if known is None:
            return
        known.last_success, known.failures, self.changed = now, 0, True
        if address in known.addresses:
            known.addresses.remove(address)
            known.addresses.insert(0, address)

    def failed(self, peer: PeerId, now: float) -> None:
        """None of the peer's addresses answered."""
        if peer in self._known:
            known = self._known[peer]
            known.last_failure, known.failures = now, known.failures + 1

    def lost(self, peer: PeerId, now: float) -> None:
        """The connection ended: the peer is dialled again soon, for it may be restarting."""
        if peer in self._known:
            known = self._known[peer]
            known.last_success, known.failures, self.changed = now, 0, True

    def candidates(self, now: float, rng: random.Random, without: Collection[PeerId] = ()) -> list[tuple[PeerId, list[str]]]:
        """Peers that are due, in random order, each with its addresses, best first."""
        due = [(peer, list(known.addresses)) for peer, known in sorted(self._known.items()) if known.due() <= now and peer not in without]
        rng.shuffle(due)
        return due

    def save(self, path: Path) -> None:
        """Raises OSError; then the file is as it was."""
        peers = [
            {"id": peer, "addresses": known.addresses, "last_success": known.last_success, "failures": known.failures}
            for peer, known in sorted(self._known.items())
        ]
        durable.replace(path, json.dumps({"schema": 1, "peers": peers}, indent=1).encode() + b"\n")
        self.changed = False

    def load(self, path: Path) -> None:
        """Add what the file knows. A damaged file is set aside with a warning: peers can be found again. Raises OSError."""
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_FILE + 1)
        except FileNotFoundError:
            return
        try:
            self._add_all(content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.warning("the address book %s was damaged (%s) and is now %s; peers are found anew", path, error, durable.set_aside(path))

    def _add_all(self, content: bytes) -> None:
        if len(content) > _MAX_FILE:
            raise ValueError("too long")
        document = json.loads(content)
        if document["schema"] != 1:
            raise ValueError("of another version")
        read: dict[PeerId, Known] = {}
        for entry in document["peers"][:MAX_PEERS]:
            public_key_of(entry["id"])
            endpoints = [endpoint for address in entry["addresses"][:MAX_ADDRESSES] if (endpoint := parse_endpoint(address))]
            if endpoints and entry["id"] != self.me:
                last_success = float(entry["last_success"])
                read[PeerId(entry["id"])] = Known([str(endpoint) for endpoint in endpoints], last_success=last_success)
        for peer, known in read.items():
            if peer in self._known:
                for address in known.addresses:
                    self._add(self._known[peer], address)
            else:
                self._known[peer] = known

    def _add(self, known: Known, address: str) -> None:
        if address not in known.addresses:
            known.addresses = [*known.addresses[: MAX_ADDRESSES - 1], address]
            self.changed = True

    def _make_room(self) -> None:
        """At the limit, the least proven of the peers go, several at once, as looking for them is dear."""
        if len(self._known) >= MAX_PEERS:
            loose = [(known.last_success, known.heard, peer) for peer, known in self._known.items() if not known.pinned]
            for _, _, peer in heapq.nsmallest(MAX_PEERS // 16, loose):
                del self._known[peer]
