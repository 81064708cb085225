"""Introductions: asks a peer about itself, whether it refuses our frames, and how many members it sees.

A node asks some peers now and then, so that its operator can see why it is alone.

Question: byte 8 and the swarm's name. Answer: msgpack [1, time, digest, trains, runs, doing, refuses,
[[digest, members], …]], or empty if the question names another swarm.

- time: the peer's clock in ms.
- digest: the digest of its swarm.
- trains: the name of the curriculum that it trains on.
- runs: its version, "swarmd 0.1.0, …".
- doing: "training", "paused" or "helping".
- refuses: whether it ignores our frames because of our offences.
- the last field: the swarms of this name that it is in, each with the number of members it is connected to.

A later version may add fields. An answer can be a lie, so it is only shown to the operator.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec
import trio

from p2p.topic import Topic
from p2p.types import Ask, PeerId, PeerRequest, Unanswered

VERSION: Final = 1
MAX_ANSWER_BYTES = 2560
# Maximum number of swarms in an answer.
MAX_SWARMS = 16
# Maximum number of peers that we ask.
MAX_ASKED = 6
# Timeout of one peer's answer.
PEER_TIMEOUT_S = 5.0
# Longer names are truncated.
SHOWN_CHARACTERS = 64
TRAINING, PAUSED, HELPING = "training", "paused", "helping"

_Text = Annotated[str, msgspec.Meta(max_length=2 * SHOWN_CHARACTERS)]
R = TypeVar("R")


log = logging.getLogger(__name__)


class SwarmCount(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """How many members of one swarm a peer is connected to."""

    digest: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,63}\Z")]
    members: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class Introduction(msgspec.Struct, array_like=True, frozen=True):
    version: Literal[1]
    time: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]  # ms
    digest: _Text
    trains: _Text
    runs: _Text
    doing: _Text
    refuses: bool
    swarms: Annotated[tuple[SwarmCount, ...], msgspec.Meta(max_length=MAX_SWARMS)]


class Introduced(Introduction, frozen=True):
    """A peer's answer, and the difference of its clock."""

    ahead: float  # seconds that its clock is ahead of our clock; the error is the answer's travel time


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Introduction)


class Introducer:
    """Answers introduction questions.

    Args:
        topics: our swarm's topic, then the topics of other swarms whose members we help to meet.
        present: returns how many members of a topic we are connected to.
        trains: the name of our curriculum.
        runs: our version.
        doing: returns TRAINING, PAUSED or HELPING.
        refused: returns whether we ignore a peer's frames.
        clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        topics: Sequence[Topic],
        present: Callable[[Topic], int],
        trains: str,
        runs: str,
        doing: Callable[[], str],
        refused: Callable[[PeerId], bool],
        clock: Callable[[], float],
    ) -> None:
        self._topics, self._present = topics[:MAX_SWARMS], present
        self._trains, self._runs = trains[:SHOWN_CHARACTERS], runs[:SHOWN_CHARACTERS]
        self._doing, self._refused, self._clock = doing, refused, clock

    def __call__(self, peer: PeerId, message: bytes) -> bytes:
        if message != question(self._topics[0].name):
            return b""
        return _encoder.encode(
            Introduction(
                VERSION,
                int(self._clock() * 1000),
                self._topics[0].digest,
                self._trains,
                self._runs,
                self._doing(),
                self._refused(peer),
                tuple(SwarmCount(topic.digest, self._present(topic)) for topic in self._topics),
            )
        )


def question(name: str) -> bytes:
    return PeerRequest.INTRODUCTION.message(name.encode())


def answered(message: bytes, now: float) -> Introduced | None:
    """Parse an answer; None if it is malformed or of another version."""
    try:
        said = _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return Introduced(**msgspec.structs.asdict(said), ahead=said.time / 1000 - now)


async def ask(
    request: Ask, peers: Collection[PeerId], name: str, clock: Callable[[], float]
) -> Mapping[PeerId, Introduced | None]:
    """Ask these peers, all at the same time.

    Returns the answers by peer. The value is None if the answer cannot be parsed, as from a peer that does
    not know the question. Peers that do not answer are left out.
    """

    async def ask_peer(peer: PeerId) -> Introduced | None:
        return answered(await request(peer, question(name), MAX_ANSWER_BYTES), clock())

    return await ask_each(ask_peer, peers, PEER_TIMEOUT_S)


async def ask_each(
    ask: Callable[[PeerId], Awaitable[R]], peers: Iterable[PeerId], patience: float
) -> Mapping[PeerId, R]:
    """Ask each of these peers, all at the same time, and return their answers.

    Peers that do not answer within `patience` seconds are left out.

    ask: asks one peer; may raise Unanswered.
    """
    said: dict[PeerId, R] = {}

    async def ask_peer(peer: PeerId) -> None:
        with trio.move_on_after(patience):
            try:
                said[peer] = await ask(peer)
            except Unanswered as error:
                log.debug("%s does not answer: %s", peer, error)

    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(ask_peer, peer)
    return said
