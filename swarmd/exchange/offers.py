"""What is on offer, what to fetch, from whom. Pure.

A rollout set too large to be gossiped whole is offered: each rollout is a blob of its own (`p2p.blobs.blobs`), and what is gossiped names
them. The layout is written down for other implementations in docs/wire.md.

    offer = msgpack [version = 1, round, [specialty, …], [n, …], [size, …], ids]

specialty is the index in the curriculum's list, which all peers of a swarm share; size is that of the blob in bytes; ids is all of them
in one piece. Everybody hears every offer several times, so each byte of it counts. A blob holds the body of a `rollouts` frame with this
one rollout.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from p2p.blobs.blobs import ID_BYTES, MAX_BLOB, content_id, pack
from p2p.types import Envelope, PeerId, Reason
from swarmd.exchange import wire
from swarmd.types import Rollout, TaskRef

KIND = "offer"  # the envelope's kind
VERSION = 1
MAX_OFFER = 1024  # bytes of one offer
MAX_ITEMS = 64  # in one offer
TAKEN = 8192  # chosen ids that a board remembers
WHOLE = 2 * 1024  # bytes; a set up to this size is gossiped whole: an offer and a fetch would cost as much, and a way there and back

_Index = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOB)]
_N = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_MANY = msgspec.Meta(min_length=1, max_length=MAX_ITEMS)
_Ids = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES * MAX_ITEMS)]


class _Offer(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: int
    round: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    specialties: Annotated[tuple[_Index, ...], _MANY]
    ns: Annotated[tuple[_N, ...], _MANY]
    sizes: Annotated[tuple[_Size, ...], _MANY]
    ids: _Ids


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Offer)


@dataclass(frozen=True, slots=True)
class Offered:
    """One rollout that somebody has for us."""

    author: PeerId
    ref: TaskRef
    id: bytes
    size: int  # bytes of the blob
    via: PeerId | None  # the peer that handed the offer to us
    heard: int = 0  # the board's round in which the offer came; set when it is chosen


def encode(rollouts: Sequence[Rollout], round_number: int, model: str, specialties: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
    """The offers, of at most MAX_OFFER bytes each, and the blobs that they name. A rollout over the limits of a blob is left out.

    Raises ValueError on a specialty that is not in the list.
    """
    blobs: list[bytes] = []
    offers: list[bytes] = []
    waiting: list[tuple[int, int, int, bytes]] = []
    for rollout in rollouts:
        try:
            blob = pack(wire.encode([rollout], round_number, model))
        except ValueError:
            continue
        item = (specialties.index(rollout.ref.specialty), rollout.ref.n, len(blob), content_id(blob))
        blobs.append(blob)
        if waiting and (len(waiting) == MAX_ITEMS or len(_body(round_number, [*waiting, item])) > MAX_OFFER):
            offers.append(_body(round_number, waiting))
            waiting = []
        waiting.append(item)
    if waiting:
        offers.append(_body(round_number, waiting))
    return offers, blobs


def decode(envelope: Envelope, specialties: Sequence[str]) -> tuple[Offered, ...] | Reason:
    """What the envelope's author offers, or why that is no offer. Never raises for what the bytes are."""
    try:
        offer = _decoder.decode(envelope.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return wire.newer(envelope.body, VERSION)
    if offer.version != VERSION:
        return Reason.WRONG_VERSION
    if len(envelope.body) > MAX_OFFER or _encoder.encode(offer) != envelope.body:
        return Reason.UNDECODABLE
    ids = [offer.ids[at : at + ID_BYTES] for at in range(0, len(offer.ids), ID_BYTES)]
    if not len(offer.specialties) == len(offer.ns) == len(offer.sizes) == len(ids) or len(ids[-1]) < ID_BYTES:
        return Reason.UNDECODABLE
    if max(offer.specialties) >= len(specialties):
        return Reason.UNKNOWN_TASK
    author, via = envelope.author, envelope.via
    items = zip(offer.specialties, offer.ns, ids, offer.sizes, strict=True)
    return tuple(Offered(author, TaskRef(specialties[index], n), name, size, via) for index, n, name, size in items)


def _body(round_number: int, items: Sequence[tuple[int, int, int, bytes]]) -> bytes:
    indices, ns, sizes, ids = zip(*items, strict=True)
    return _encoder.encode(_Offer(VERSION, round_number, indices, ns, sizes, b"".join(ids)))


Choice = Callable[[Sequence[Offered], int, random.Random], Sequence[Offered]]
"""At most so many of them, none twice."""


def uniform(offered: Sequence[Offered], count: int, rng: random.Random) -> Sequence[Offered]:
    return rng.sample(offered, min(count, len(offered)))


class Board:
    """What is on offer now. Bounded: per author and in all the oldest go first, and nobody's offers push out more than his own share.

    newcomer: where the board is full and newcomers have more than a quarter of it together, the oldest of theirs go first. Where somebody
    else offers what a newcomer offers, it is his: so nobody hides another's rollouts behind a name that does not serve them.
    A rollout of one author and task is there once, like in the pool, and what was chosen once is not on the board again.

    kept_rounds: `round.max_age`. The age of a rollout is counted in our rounds, from the one in which its offer was heard. It is chosen
    before it is that old, because what is fetched may be trained on in the next round only.
    """

    def __init__(
        self,
        trainable: Callable[[TaskRef], bool],
        *,
        kept_rounds: int,
        per_author: int = MAX_ITEMS,
        in_all: int = 8192,
        newcomer: Callable[[PeerId], bool] = lambda _: False,
    ) -> None:
        self._trainable, self._newcomer = trainable, newcomer
        self._kept_rounds, self._per_author, self._in_all = kept_rounds, per_author, in_all
        self.round = 1  # ours, counted by `next_round`
        self._offered: OrderedDict[bytes, tuple[int, Offered]] = OrderedDict()  # by id, with the round it came in, oldest first
        self._authors: dict[PeerId, OrderedDict[bytes, None]] = {}  # what each has there, oldest first
        self._crowd: OrderedDict[bytes, None] = OrderedDict()  # what newcomers have there
        self._taken: OrderedDict[bytes, None] = OrderedDict()  # chosen ids, oldest first

    def add(self, offered: Sequence[Offered]) -> int:
        """How many of them are for training. Others are not put up."""
        good = [item for item in offered if self._trainable(item.ref)]
        for item in good:
            if item.id in self._taken:
                continue
            if item.id in self._offered:
                if item.id not in self._crowd or self._newcomer(item.author):
                    continue
                self._drop(item.id)
            if len(mine := self._authors.get(item.author, ())) >= self._per_author:
                self._drop(next(iter(mine)))
            elif len(self._offered) >= self._in_all:
                self._drop(next(iter(self._crowd if len(self._crowd) > self._in_all // 4 else self._offered)))
            self._offered[item.id] = (self.round, item)
            self._authors.setdefault(item.author, OrderedDict())[item.id] = None
            if self._newcomer(item.author):
                self._crowd[item.id] = None
        return len(good)

    def choose(self, count: int, rng: random.Random, choice: Choice = uniform) -> Sequence[Offered]:
        """What `choice` says, which is then off the board. One of those with the same author and task: they are the same experience."""
        distinct = {(item.author, item.ref): item for _, item in self._offered.values()}
        chosen = [replace(item, heard=self._offered[item.id][0]) for item in choice(list(distinct.values()), max(0, count), rng)]
        for item in chosen:
            self._drop(item.id)
            self._taken[item.id] = None
        while len(self._taken) > TAKEN:
            self._taken.popitem(last=False)
        return chosen

    def take_down(self, author: PeerId) -> None:
        """All that it offers."""
        for name in list(self._authors.get(author, ())):
            self._drop(name)

    def next_round(self) -> None:
        """A round of ours begins: offers that could only be trained on when they are too old are taken down."""
        self.round += 1
        while self._offered and self.round - next(iter(self._offered.values()))[0] >= self._kept_rounds:
            self._drop(next(iter(self._offered)))

    def too_old(self, item: Offered) -> bool:
        """Whether what was chosen may no longer be trained on."""
        return self.round - item.heard > self._kept_rounds

    def _drop(self, name: bytes) -> None:
        _, item = self._offered.pop(name)
        self._crowd.pop(name, None)
        del self._authors[item.author][name]
        if not self._authors[item.author]:
            del self._authors[item.author]

    def __len__(self) -> int:
        return len(self._offered)

    def __iter__(self) -> Iterator[Offered]:
        return (item for _, item in self._offered.values())
