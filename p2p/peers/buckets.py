"""The address book's two tables of buckets: a flood of addresses fills only a part of them. Pure.

The design follows Bitcoin Core's address manager (addrman.h). It is smaller, and stricter because peer ids
cost less than IP addresses.

- `new` holds peers that we never reached. All peers that are named from one network group share NEW_REACH
  buckets, and the named peer's group decides which of these.
- `tried` holds peers that we dialled and that were of our swarm. Each group has one bucket.

No group has more than SHARE places in a bucket. Private networks are one group; it has LOCAL_REACH buckets
and no such share. A secret in the hash prevents an attacker from choosing groups and peer ids that fall into
one bucket. A full bucket takes a new peer only if it can evict one (`AddressBook`).
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated

import msgspec

from p2p.netgroup import LOCAL, group_of
from p2p.types import PeerId

NEW_BUCKETS, TRIED_BUCKETS, SIZE = 256, 128, 16
NEW_REACH, LOCAL_REACH, SHARE = 2, 4, 4
# The wait after a failed dial; it doubles with each further failure.
FIRST_WAIT_S = 1.0
# The longest waits: for a peer that was connected less than _FRESH_S before the failure, and for other peers.
FRESH_WAIT_S = 8.0
STALE_WAIT_S = 300.0
_FRESH_S = 600.0
_DAY_S = 86_400.0
# A peer that was neither named nor connected for this long counts as gone.
HORIZON_S = 30 * _DAY_S
# Failures that are closer together count as one miss.
MISS_EVERY_S = 3600.0
_MISSES_NEW, _MISSES_SEEN, _SEEN_S = 3, 10, 7 * _DAY_S


_Time = Annotated[float, msgspec.Meta(gt=-1e12, lt=1e12)]  # seconds since the epoch; 0 for never
_Count = Annotated[int, msgspec.Meta(ge=0, lt=10**12)]


class Known(msgspec.Struct):
    """One known peer, in the address book and in its file."""

    addresses: list[str] = []  # best first; the address that worked last is the best
    # Addresses from the operator. A peer with such an address is never removed.
    pinned: list[str] = []
    proved: str = ""  # the address at which we last reached it
    source: str = ""  # network group of the peer that named it first
    itself: bool = False  # the peer named itself, over a connection from the network group of its address
    heard: _Time = 0.0
    last_success: _Time = 0.0  # last connected, in either direction
    last_failure: _Time = 0.0
    failures: _Count = 0  # consecutive failures
    misses: _Count = 0  # failures while we could reach other peers, so that the peer was at fault
    missed: _Time = 0.0  # time of the last miss
    tried: bool = False  # we dialled it, and it was of our swarm

    @property
    def group(self) -> str:
        return group_of(self.addresses[0]) or ""

    def due(self, now: float) -> float:
        """Return the time of the next dial: 0 (now) if the clock was set back since the last failure."""
        if self.failures == 0 or self.last_failure > now:
            return 0.0
        fresh = self.pinned or self.last_failure - self.last_success < _FRESH_S
        return self.last_failure + min(
            FIRST_WAIT_S * 2.0 ** min(self.failures - 1, 16), FRESH_WAIT_S if fresh else STALE_WAIT_S
        )

    def terrible(self, now: float) -> bool:
        """Return whether the peer is not worth keeping: it is gone, or has too many misses."""
        never = self.last_success == 0 and self.misses >= _MISSES_NEW
        seen = self.last_success > 0 and self.misses >= _MISSES_SEEN
        gone = now - max(self.heard, self.last_success) > HORIZON_S
        return not self.pinned and (gone or never or (seen and now - self.last_success > _SEEN_S))


class Tables:
    """The buckets: at most NEW_BUCKETS x SIZE peers in `new`, TRIED_BUCKETS x SIZE in `tried`."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        # (table, bucket number) -> the peers in the bucket, with their groups.
        self._buckets: dict[tuple[str, int], dict[PeerId, str]] = {}
        self._place: dict[PeerId, tuple[str, int]] = {}

    def new(self, peer: PeerId, known: Known) -> Sequence[PeerId]:
        """Put the peer into `new`. Return () on success.

        If there is no room, the peer stays where it was, and the result lists peers of which one must be
        removed first.
        """
        row = (
            self._hash("peer", peer) % LOCAL_REACH
            if known.group == LOCAL
            else self._hash("row", known.source, known.group) % NEW_REACH
        )
        return self._put(("new", self._hash("new", known.source, row) % NEW_BUCKETS), peer, known.group)

    def tried(self, peer: PeerId, known: Known) -> Sequence[PeerId]:
        """Move the peer into `tried`. The result is the same as for `new`."""
        row = self._hash("peer", peer) % LOCAL_REACH if known.group == LOCAL else 0
        return self._put(("tried", self._hash("tried", known.group, row) % TRIED_BUCKETS), peer, known.group)

    def remove(self, peer: PeerId) -> None:
        if peer in self._place:
            del self._buckets[self._place.pop(peer)][peer]

    def _put(self, place: tuple[str, int], peer: PeerId, group: str) -> Sequence[PeerId]:
        bucket = self._buckets.setdefault(place, {})
        if peer not in bucket:
            alike = [one for one, its in bucket.items() if its == group != LOCAL]
            if len(alike) >= SHARE or len(bucket) >= SIZE:
                return alike if len(alike) >= SHARE else list(bucket)
            self.remove(peer)
            bucket[peer] = group
            self._place[peer] = place
        return ()

    def _hash(self, *parts: object) -> int:
        return int.from_bytes(
            blake2b("\0".join(map(str, parts)).encode(), key=self.key, digest_size=8).digest(), "big"
        )
