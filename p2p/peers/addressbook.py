"""The address book: known peers, and the choice of the next to dial. Pure; `now`, `rng` are arguments."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

from p2p.address import Endpoint, parse_endpoint
from p2p.identity import public_key_of
from p2p.netgroup import LOCAL, NAME, group_of, only_here
from p2p.peers.buckets import MISS_EVERY_S, NEW_BUCKETS, SIZE, TRIED_BUCKETS, Known, Tables
from p2p.rate_limit import TokenBuckets
from p2p.types import PeerId

# Maximum number of known peers, not counting those that the operator named.
MAX_PEERS = (NEW_BUCKETS + TRIED_BUCKETS) * SIZE
# Maximum number of addresses of one peer.
MAX_ADDRESSES = 8
MAX_FILE_BYTES = 8 * 1024 * 1024
# Probability that a draw takes a peer that we reached before, if there is one.
TRIED_FIRST = 0.95
# New peers that one peer may name: rate and burst.
TOLD_PER_S, TOLD_AT_ONCE = 0.1, 40.0
# Seconds after which another peer's report renews an entry.
HEARSAY_EVERY_S = 3600.0
# Seconds after which a lasting connection renews an entry.
CONNECTED_EVERY_S = 3600.0
NEARBY = PeerId("nearby")  # the teller of all peers that are announced on our local network
AUTHORS = PeerId("authors")  # the teller of all peers that give their address in a frame

Candidate = tuple[PeerId, list[str]]


class _File(msgspec.Struct, tag_field="schema", tag=1):
    key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32,128}\Z")]
    peers: dict[str, Known]


_decoder = msgspec.json.Decoder(_File)


class AddressBook:
    """Holds at most MAX_PEERS peers, in buckets by network group (`p2p.peers.buckets`).

    key: 16 or more secret random bytes. `restore` replaces it by the file's key.
    """

    def __init__(self, me: PeerId, key: bytes) -> None:
        self.me = me
        self.changed = False  # whether the book differs from the last `dump`
        self.known: dict[PeerId, Known] = {}  # only this class changes it
        self._tables = Tables(key)
        self._tellers = TokenBuckets[PeerId](TOLD_PER_S, TOLD_AT_ONCE)
        self._last_success = 0.0  # time of the last successful dial of any peer

    def vouches(self, peer: PeerId, address: str) -> bool:
        """Return whether the peer answered at an address, or the operator named it."""
        known = self.known.get(peer, Known())
        return address in (known.proved, *known.pinned) or NAME in map(group_of, known.pinned)

    def pin(self, peer: PeerId, endpoint: Endpoint) -> None:
        """Add the operator's bootstrap address, which is never removed."""
        if peer != self.me:
            known = self.known.setdefault(peer, Known())
            self._tables.remove(peer)
            known.pinned = [*dict.fromkeys([*known.pinned, str(endpoint)])]
            self._set(known, [*known.addresses, str(endpoint)])

    def add(
        self,
        peer: PeerId,
        addresses: Iterable[str],
        now: float,
        *,
        teller: PeerId | None = None,
        source: str | None = None,
    ) -> None:
        """Add addresses of a peer.

        Addresses that nobody can dial are left out. So are DNS names, so that peers cannot make us look up
        names. Ids that are not Ed25519 peer ids are ignored: DHT nodes may send any, and `restore` would take
        a file with such an id for damaged.

        Args:
            peer: the peer to add.
            addresses: its multiaddresses.
            now: seconds since the epoch.
            teller: the peer that sent the addresses. None if it is the peer itself, over a connection that
                proves its id.
            source: the network group of the teller's connection. None for the group of the first address.
        """
        itself = teller is None or teller == peer
        known = self.known.get(peer)
        if peer == self.me or (
            known is None and not itself and self._tellers.of(teller or peer, now).wait(now)
        ):
            return
        if not (said := _dialable(addresses, source)) or (known is None and not _is_member_id(peer)):
            return
        near = itself and group_of(said[0]) == source
        if known is None:
            known = Known(said, source=source or group_of(said[0]) or "", heard=now, itself=near)
            if self._placed(peer, known, self._tables.new, now):
                self.known[peer] = known
        elif itself:
            known.heard, known.itself = now, known.itself or near
            self._set(known, [*filter(None, [known.proved]), *known.pinned, *said])
        else:
            if now - known.heard > HEARSAY_EVERY_S:
                known.heard = now
            if known.failures or not known.last_success:
                self._set(known, [*known.addresses, *said])

    def succeeded(self, peer: PeerId, address: str | None, now: float) -> None:
        """Note that we are connected to a peer.

        address: the address that we dialled. None if the peer dialled us, which proves no address.
        """
        if address is not None:
            self._last_success = now
        if (known := self.known.get(peer)) is None:
            return
        known.last_success, known.failures, known.misses, self.changed = now, 0, 0, True
        if address in known.addresses:
            known.proved = address or ""
            self._set(known, [known.proved, *known.addresses])

    def still_connected(self, peers: Iterable[PeerId], now: float) -> None:
        """Note that these peers are connected, at most once an hour.

        Otherwise a peer that has been connected for a month would count as gone and not be dialled after a
        restart.
        """
        for known in filter(None, map(self.known.get, peers)):
            if now - known.last_success > CONNECTED_EVERY_S:
                known.last_success, self.changed = now, True

    def met(self, peer: PeerId, now: float) -> None:
        """Move a peer to `tried`: we dialled it, and it belongs to our swarm."""
        known = self.known.get(peer)
        if known is not None and (known.pinned or self._placed(peer, known, self._tables.tried, now)):
            known.tried = True

    def failed(self, peer: PeerId, now: float, dialled: Sequence[str] = ()) -> None:
        """Note that the peer answered at none of these addresses, and move them behind the rest."""
        if (known := self.known.get(peer)) is None:
            return
        self._set(known, sorted(known.addresses, key=lambda address: address in dialled))
        # Count a miss only if another dial succeeded since the last failure. Otherwise our own network may be
        # down.
        if self._last_success > known.last_failure and now - known.missed > MISS_EVERY_S:
            known.misses, known.missed = known.misses + 1, now
        known.last_failure, known.failures = now, known.failures + 1
        if known.terrible(now):
            self._forget(peer)

    def lost(self, peer: PeerId, now: float) -> None:
        """Note that the connection ended. The peer may be restarting, so it is dialled again soon."""
        if (known := self.known.get(peer)) is not None:
            known.last_success, known.failures, self.changed = now, 0, True

    def stranger(self, peer: PeerId, now: float) -> None:
        """Remove a peer that answered but is not of our swarm, unless the operator named it."""
        if (known := self.known.get(peer)) is not None:
            known.last_failure, known.failures = now, max(known.failures, 10)
            self._forget(peer)

    def candidates(
        self,
        now: float,
        rng: random.Random,
        without: Collection[PeerId] = (),
        avoid: Collection[str] = (),
        count: int | None = None,
    ) -> list[Candidate]:
        """Draw up to `count` peers to dial, best first, from those whose waiting time is over.

        Groups take turns, in random order, and each turn draws one of the group's peers. So ten thousand
        addresses of one group are drawn no more often than one address. A peer takes part with its first
        group that is not in `avoid`, and only its addresses of that group are returned.

        Peers that we reached before are preferred (TRIED_FIRST). The other peers are drawn from three lists,
        because an attacker can name peers in all groups: half of the draws from peers that connected to us
        from the group they claim, a quarter in turns of the tellers' groups, a quarter in turns of the peers'
        groups.

        Args:
            now: seconds since the epoch.
            rng: draws.
            without: peers to leave out.
            avoid: network groups to leave out.
            count: at most how many; None for all.
        """
        tried, new, told, came = (defaultdict[str, list[PeerId]](list) for _ in range(4))
        groups: dict[PeerId, str] = {}
        for peer, known in self.known.items():
            may_be = (group_of(address) for address in known.addresses)
            group = next((group for group in may_be if group not in avoid), None)
            if group is None or peer in without or known.due(now) > now or known.terrible(now):
                continue
            groups[peer] = group
            if known.tried or known.pinned:
                tried[group].append(peer)
            else:
                new[group].append(peer)
                told[known.source].append(peer)
                if known.itself:
                    came[group].append(peer)
        found: dict[PeerId, None] = {}
        reached, heard, tellers, visitors = (_turns(lists, rng) for lists in (tried, new, told, came))
        wanted = len(self.known) if count is None else count
        others = ((visitors, came), (visitors, came), (tellers, told), (heard, new))
        while len(found) < wanted and (tried or new):
            turns = reached
            if not tried or (new and rng.random() >= TRIED_FIRST):
                turns = rng.choice([turns for turns, left in others if left])
            found[next(turns)] = None
        return [
            (peer, [address for address in self.known[peer].addresses if group_of(address) == groups[peer]])
            for peer in found
        ]

    def bootstraps(self, now: float, without: Collection[PeerId] = ()) -> list[Candidate]:
        """Return the bootstrap peers whose waiting time is over."""
        return [
            (peer, list(k.addresses))
            for peer, k in self.known.items()
            if k.pinned and peer not in without and k.due(now) <= now
        ]

    def feeler(self, now: float, rng: random.Random, without: Collection[PeerId] = ()) -> Candidate | None:
        """Choose a peer that we never reached, for a dial that only checks whether it is there."""
        proved = {peer for peer, known in self.known.items() if known.tried or known.pinned}
        return next(iter(self.candidates(now, rng, without=proved.union(without), count=1)), None)

    def dump(self) -> bytes:
        """Return the content of the book's file. Changes during the write are for the next file."""
        self.changed = False
        peers = {str(peer): known for peer, known in self.known.items()}
        return (
            msgspec.json.format(msgspec.json.encode(_File(self._tables.key.hex(), peers)), indent=1) + b"\n"
        )

    def restore(self, content: bytes, latest: float) -> None:
        """Add the peers of a file to a book that has no peers but pinned ones.

        Args:
            content: the result of `dump`.
            latest: later times in the file are replaced by this one. Seconds since the epoch.

        Raises:
            ValueError: the content is malformed; the book is unchanged. Nested arrays raise RecursionError.
        """
        if len(content) > MAX_FILE_BYTES:
            raise ValueError("too long")
        file = _decoder.decode(content)
        entries = [_checked(*entry, latest) for entry in itertools.islice(file.peers.items(), 2 * MAX_PEERS)]
        self._tables = Tables(bytes.fromhex(file.key))
        for peer, known in entries:
            put = self._tables.tried if known.tried else self._tables.new
            if (mine := self.known.get(peer)) is not None:
                mine.tried, mine.heard = mine.tried or known.tried, max(mine.heard, known.heard)
                self._set(mine, [*mine.addresses, *known.addresses])
            elif peer != self.me and known.addresses and not put(peer, known):
                self.known[peer] = known

    def _placed(
        self, peer: PeerId, known: Known, put: Callable[[PeerId, Known], Sequence[PeerId]], now: float
    ) -> bool:
        """Put a peer into a table. Return False if the bucket is full and no peer in it can be evicted.

        A terrible peer can be evicted (`Known.terrible`). So can a peer of the newcomer's group that has a
        miss: a group has so few places that peers that are gone would keep out all later ones.
        """
        if full := put(peer, known):
            gone = next(
                (
                    one
                    for one in full
                    if (its := self.known[one]).terrible(now) or (its.misses and its.group == known.group)
                ),
                None,
            )
            if gone is None:
                return False
            self._forget(gone)
            put(peer, known)
        self.changed = True
        return True

    def _forget(self, peer: PeerId) -> None:
        """Remove a peer from its table, and from the book unless it is a bootstrap peer."""
        self._tables.remove(peer)
        if not self.known[peer].pinned:
            del self.known[peer]
        self.changed = True

    def _set(self, known: Known, addresses: Iterable[str]) -> None:
        if (wanted := list(dict.fromkeys(addresses))[:MAX_ADDRESSES]) != known.addresses:
            known.addresses, self.changed = wanted, True


def _checked(name: str, known: Known, latest: float) -> tuple[PeerId, Known]:
    """Check an entry of the file, and reset the fields that are valid for one run only.

    Raises ValueError if the peer id is malformed.
    """
    public_key_of(name)
    known.addresses = [str(one) for one in map(parse_endpoint, known.addresses[:MAX_ADDRESSES]) if one]
    known.pinned, known.failures, known.last_failure = [], 0, 0.0
    # If the clock was far ahead when the file was written, these would count as fresh for years.
    known.heard, known.missed = min(known.heard or latest, latest), min(known.missed, latest)
    known.last_success = min(known.last_success, latest)
    known.source = known.source[:64] or (known.group if known.addresses else "")
    known.proved = known.addresses[0] if known.addresses[:1] == [known.proved] else ""
    return PeerId(name), known


def _is_member_id(peer: PeerId) -> bool:
    try:
        return bool(public_key_of(peer))
    except ValueError:
        return False


def _dialable(addresses: Iterable[str], source: str | None) -> list[str]:
    """Return at most MAX_ADDRESSES addresses that we may be able to dial, the most likely first."""
    said = {  # address -> network group
        str(endpoint): group
        for endpoint in map(parse_endpoint, itertools.islice(addresses, 4 * MAX_ADDRESSES))
        if endpoint is not None and endpoint.kind in ("ip4", "ip6") and (group := group_of(str(endpoint)))
    }
    if source is None:
        return list(said)[:MAX_ADDRESSES]
    if source != LOCAL:
        said = {address: group for address, group in said.items() if group != LOCAL or not only_here(address)}
    # The teller's group comes first, because we can reach it. Private networks come last, because a distant
    # peer is hardly ever in our private network.
    return sorted(said, key=lambda address: (said[address] != source, said[address] == LOCAL))[:MAX_ADDRESSES]


def _turns(lists: dict[str, list[PeerId]], rng: random.Random) -> Iterator[PeerId]:
    """Yield one item of each list in turn. The order of lists and items is random."""
    while lists:
        for name in rng.sample([*lists], len(lists)):
            drawn = lists[name].pop(rng.randrange(len(lists[name])))
            if not lists[name]:
                del lists[name]
            yield drawn
