"""Offers of rollouts: the wire format, and the board of offers that we know. Pure.

A rollout set too large to gossip is offered instead: each rollout is a separate blob (`p2p.blobs.blobs`), and
the offer lists the blobs' ids. `swarmd.exchange.pacing` decides how often offers are sent. docs/wire.md has
the layout for other implementations.

    offer = msgpack [version = 1, round, [specialty, …], [n, …], [size, …], ids, address]

specialty is an index into the curriculum's list, which all peers of a swarm share. size is the blob's size in
bytes. ids are concatenated. address is the author's reachable address (`p2p.address.packed`), left out if the
author does not know it. Every member receives every offer several times, so bytes matter. A blob holds one
rollout of one author:

    blob = msgpack [author's public key, the body of a `rollouts` frame with this one rollout], packed

so a copy of another author's offer leads to a blob that names the real author. The copier gains nothing and
the real author loses nothing: each author's offers are kept separately.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

import msgspec

from p2p.address import PACKED_BYTES, packed, unpacked
from p2p.admission.fair_queue import fair_share
from p2p.blobs.blobs import ID_BYTES, MAX_BLOB_BYTES, BadBlob, content_id, pack, unpack
from p2p.identity import KEY_BYTES, peer_id_of, public_key_of
from p2p.latest import Latest
from p2p.netgroup import on_internet
from p2p.types import Envelope, PeerId, Reason
from swarmd.exchange import wire
from swarmd.experience.pool import heard_in, too_old
from swarmd.types import Rollout, TaskRef

# The envelope's kind.
KIND = "offer"
VERSION: Final = 1
# Maximum bytes of one offer.
OFFER_BYTES = 1024
# Maximum bytes of an offer without its address; the address has a msgpack header of two bytes.
ITEMS_BYTES = OFFER_BYTES - max(PACKED_BYTES) - 2
# Maximum number of items in one offer.
MAX_ITEMS = 64
# A set up to this size is gossiped whole, because an offer and a fetch would cost as many bytes, and one more
# round trip.
WHOLE_BYTES = 2 * 1024
# Maximum number of offers on the board, and of chosen offers that are remembered.
MAX_OFFERED = MAX_TAKEN = 8192

_Index = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOB_BYTES)]
_N = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_MANY = msgspec.Meta(min_length=1, max_length=MAX_ITEMS)
_Item = tuple[int, int, int, bytes]  # index of the specialty, n, bytes of the blob, its id


class _Offer(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: Literal[1]
    round: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    specialties: Annotated[tuple[_Index, ...], _MANY]
    ns: Annotated[tuple[_N, ...], _MANY]
    sizes: Annotated[tuple[_Size, ...], _MANY]
    ids: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES * MAX_ITEMS)]
    at: Annotated[bytes, msgspec.Meta(max_length=max(PACKED_BYTES))] = b""


class _Blob(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    author: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    body: bytes


_encoder = msgspec.msgpack.Encoder()
_blob_decoder = msgspec.msgpack.Decoder(_Blob)
_decoder = msgspec.msgpack.Decoder(_Offer)


@dataclass(frozen=True, slots=True)
class Offered:
    """One rollout on offer."""

    author: PeerId
    ref: TaskRef
    id: bytes
    size: int  # size of the blob in bytes
    via: PeerId  # the peer that forwarded the offer to us; the author if unknown
    group: str = ""  # the author's network group, from the envelope
    round: int = 0  # our round in which the offer arrived; set by the board
    at: str = ""  # the multiaddress at which the author says that it can be reached

    @property
    def key(self) -> "Key":
        return self.author, self.id


Key = tuple[PeerId, bytes]  # an offer's author and its blob's id


@dataclass(frozen=True, slots=True)
class Blob:
    """A decoded blob, or another answer to a question for a blob."""

    id: bytes
    size: int  # bytes
    author: PeerId | None = None  # the author that it names; None if it cannot be decoded
    found: wire.RolloutSet | Reason | None = None  # its rollout, or why it has none; None: our own
    data: bytes = b""  # left out of recordings


def packed_rollout(rollout: Rollout, round_number: int, model: str) -> Blob | None:
    """Return the blob of our own rollout; None if it is over the limits of a blob."""
    content = _Blob(public_key_of(rollout.author), wire.encode([rollout], round_number, model))
    try:
        data = pack(_encoder.encode(content))
    except ValueError:
        return None
    return Blob(content_id(data), len(data), rollout.author, data=data)


def encode(
    blobs: Sequence[tuple[TaskRef, Blob]], round_number: int, specialties: Sequence[str]
) -> Sequence[bytes]:
    """Encode offers of blobs, each of at most OFFER_BYTES.

    Raises ValueError if `specialties` lacks a specialty.
    """
    return _bodies(
        round_number, [(specialties.index(ref.specialty), ref.n, blob.size, blob.id) for ref, blob in blobs]
    )


def join(bodies: Sequence[bytes]) -> list[bytes]:
    """Merge our own offers into as few as possible, with their items in the same order.

    All merged offers get the round of the first one.
    """
    parsed = [_decoder.decode(body) for body in bodies]
    return _bodies(
        parsed[0].round,
        [
            (index, n, size, offer.ids[at * ID_BYTES : (at + 1) * ID_BYTES])
            for offer in parsed
            for at, (index, n, size) in enumerate(zip(offer.specialties, offer.ns, offer.sizes, strict=True))
        ],
    )


def addressed(body: bytes, address: str) -> bytes:
    """Return our own offer with our reachable multiaddress added, if the address has a packed form."""
    return _encode(msgspec.structs.replace(_decoder.decode(body), at=packed(address)))


def _encode(offer: _Offer) -> bytes:
    fields = msgspec.structs.astuple(offer)
    return _encoder.encode(fields if offer.at else fields[:-1])


def decode(envelope: Envelope, specialties: Sequence[str]) -> tuple[Offered, ...] | Reason:
    """Return the offers in an envelope, or the reason for rejecting it.

    It raises for no bytes.
    """
    try:
        offer = _decoder.decode(envelope.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return wire.newer(envelope.body, VERSION)
    if (
        len(envelope.body) > OFFER_BYTES
        or _encode(offer) != envelope.body
        or len(offer.at) not in {0, *PACKED_BYTES}
    ):
        return Reason.UNDECODABLE
    ids = [offer.ids[at : at + ID_BYTES] for at in range(0, len(offer.ids), ID_BYTES)]
    if not len(offer.specialties) == len(offer.ns) == len(offer.sizes) == len(ids) or len(ids[-1]) < ID_BYTES:
        return Reason.UNDECODABLE
    if max(offer.specialties) >= len(specialties):
        return Reason.UNKNOWN_TASK
    author, via, group = envelope.author, envelope.via or envelope.author, envelope.group
    where = at if offer.at and on_internet(at := unpacked(offer.at)) else ""
    return tuple(
        Offered(author, TaskRef(specialties[index], n), name, size, via, group, at=where)
        for index, n, name, size in zip(offer.specialties, offer.ns, ids, offer.sizes, strict=True)
    )


def _bodies(round_number: int, items: Sequence[_Item]) -> list[bytes]:
    """Encode the items in order, as offers that leave room for an address."""
    found: list[bytes] = []
    waiting: list[_Item] = []
    for item in items:
        if waiting and (
            len(waiting) == MAX_ITEMS or len(_body(round_number, [*waiting, item])) > ITEMS_BYTES
        ):
            found.append(_body(round_number, waiting))
            waiting = []
        waiting.append(item)
    return [*found, _body(round_number, waiting)] if waiting else found


def decode_blob(data: bytes, wanted: Container[bytes] | None = None) -> Blob:
    """Decode a holder's answer. Never raises.

    wanted: the ids that were asked for; an answer with another id is not inflated. None: any id.
    """
    blob = Blob(content_id(data), len(data), None, Reason.UNDECODABLE, data)
    with suppress(BadBlob, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if wanted is None or blob.id in wanted:
            parsed = _blob_decoder.decode(content := unpack(data))
            if _encoder.encode(parsed) == content:
                author = peer_id_of(parsed.author)
                return replace(blob, author=author, found=wire.decode(parsed.body, author))
    return blob


def rollout_of(blob: Blob, item: Offered) -> wire.RolloutSet | Reason:
    """Return a blob's rollout, as a set of one, or the reason why it does not match its offer.

    blob: has the offered id, so the author of the offer is responsible for its content.
    """
    found = blob.found if blob.author in (None, item.author) else Reason.NOT_ITS_OWN
    if not isinstance(found, wire.RolloutSet):
        return found or Reason.UNDECODABLE
    # Without this check, an offer with a false specialty would attract nodes that lack that specialty.
    return found if [rollout.ref for rollout in found.rollouts] == [item.ref] else Reason.MISLABELLED


def _body(round_number: int, items: Sequence[_Item]) -> bytes:
    indices, ns, sizes, ids = zip(*items, strict=True)
    return _encode(_Offer(VERSION, round_number, indices, ns, sizes, b"".join(ids)))


# (offers, count, rng) -> at most `count` distinct offers.
Choice = Callable[[Sequence[Offered], int, random.Random], Sequence[Offered]]


class Board:
    """Holds the offers that we know.

    It is bounded per author and in total. When it is full, the authors with most offers lose their oldest
    (`p2p.admission.fair_queue`). An offer's key is its author and its id, so a copied offer is a separate
    entry and does not displace the real author's. Of one author and task only the newest offer can be chosen;
    a chosen offer is not accepted again.

    kept_rounds: `round.max_age`. Age is counted in the trainer's rounds, from the round in which the offer
    arrived.
    """

    def __init__(
        self,
        trainable: Callable[[TaskRef], bool],
        *,
        kept_rounds: int,
        per_author: int = MAX_ITEMS,
        in_all: int = MAX_OFFERED,
    ) -> None:
        self.trainable = trainable
        self._kept_rounds, self._per_author, self._in_all = kept_rounds, per_author, in_all
        self.round = 0  # the trainer's round; 0: not known yet
        self.offered: OrderedDict[Key, Offered] = OrderedDict()  # oldest first
        self._authors: dict[PeerId, OrderedDict[Key, None]] = {}  # keys of each author's offers, oldest first
        self._taken: Latest[Key, None] = Latest(MAX_TAKEN)  # chosen offers, oldest first

    def add(self, offered: Sequence[Offered]) -> int:
        """Add the offers of tasks that we train on; return their number."""
        good = [item for item in offered if self.trainable(item.ref)]
        for item in good:
            if item.key in self._taken or item.key in self.offered:
                continue
            if len(mine := self._authors.get(item.author, ())) >= self._per_author:
                self._drop(next(iter(mine)))
            self.offered[item.key] = replace(item, round=self.round)
            self._authors.setdefault(item.author, OrderedDict())[item.key] = None
            if len(self.offered) > self._in_all:
                # Free a quarter of the places at once, because each pass reads the whole board.
                held = [(key, its.group, its.author) for key, its in self.offered.items()]
                kept = fair_share(held, self._in_all * 3 // 4)
                for key in self.offered.keys() - kept:
                    self._drop(key)
        return len(good)

    def choose(self, count: int, rng: random.Random, choice: Choice) -> Sequence[Offered]:
        """Choose offers and take them off the board.

        Of offers with the same author and task only one is considered.
        """
        distinct = {(item.author, item.ref): item for item in self.offered.values()}
        chosen = choice(list(distinct.values()), max(0, count), rng)
        for item in chosen:
            self.take(item)
        return chosen

    def take(self, item: Offered) -> None:
        """Take an offer off the board, as chosen."""
        self._drop(item.key)
        self._taken[item.key] = None

    def same(self, item: Offered) -> Sequence[Offered]:
        """Return other authors' offers of the same blob, the oldest first."""
        return [i for i in self.offered.values() if i.id == item.id and i.author != item.author]

    def take_down(self, author: PeerId) -> None:
        """Remove all offers of this author."""
        for key in list(self._authors.get(author, ())):
            self._drop(key)

    def begin(self, round_number: int) -> None:
        """Begin this round of the trainer.

        Removes offers whose rollouts would be too old in the next round, in which they would be trained on.
        If this is the first known round, or the trainer restarted from an earlier one, the offers on the
        board count as heard in this round.
        """
        if self.round == 0 or round_number < self.round:
            self.offered = OrderedDict(
                (key, replace(i, round=heard_in(i.round, round_number))) for key, i in self.offered.items()
            )
        self.round = round_number
        while self.offered and too_old(
            next(iter(self.offered.values())).round, self.round + 1, self._kept_rounds
        ):
            self._drop(next(iter(self.offered)))

    def too_old(self, item: Offered) -> bool:
        """Return whether a chosen rollout is too old to train on."""
        return too_old(item.round, self.round, self._kept_rounds)

    def _drop(self, key: Key) -> None:
        author = self.offered.pop(key).author
        del self._authors[author][key]
        if not self._authors[author]:
            del self._authors[author]
