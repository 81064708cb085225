"""Introductions: what a peer says of itself, whether it takes our frames, and whom it sees.

A node asks now and then, to find out why it is alone.

Question: byte 8 and the swarm's name. Answer: msgpack [1, time, digest, trains, runs, doing, refuses,
[[digest, members], …]]: its clock in ms, the digest of its swarm, the name of what it trains, what it runs
("swarmd 0.1.0, …"), "training", "paused" or "helping", whether it ignores our frames because of what we did,
and the swarms of this name that it is in, with how many members of each it is connected to; empty where the
question has another name. A later version may add fields. Nothing proves an answer: it is shown to the
operator, and nothing is decided by it.
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
# Swarms in an answer.
MAX_SWARMS = 16
# Peers that are asked.
MAX_ASKED = 6
# The time for one peer's answer.
PEER_TIMEOUT_S = 5.0
# How much of a name is shown.
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
    """A peer's answer, when it came."""

    ahead: float  # seconds that its clock is ahead of ours, give or take the time that the answer took


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Introduction)


class Introducer:
    """Answers the question.

    topics: our swarm's, then those of others whose members we help to meet. present: returns how many members
    of a topic we are connected to. refused: returns whether we ignore a peer's frames.
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
    """Parse an answer; None where it is none, or one of another version."""
    try:
        said = _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return Introduced(**msgspec.structs.asdict(said), ahead=said.time / 1000 - now)


async def ask(
    request: Ask, peers: Collection[PeerId], name: str, clock: Callable[[], float]
) -> Mapping[PeerId, Introduced | None]:
    """Ask these peers at the same time; None for those that do not know the question.

    Whoever does not answer is left out.
    """

    async def ask_peer(peer: PeerId) -> Introduced | None:
        return answered(await request(peer, question(name), MAX_ANSWER_BYTES), clock())

    return await ask_each(ask_peer, peers, PEER_TIMEOUT_S)


async def ask_each(
    ask: Callable[[PeerId], Awaitable[R]], peers: Iterable[PeerId], patience: float
) -> Mapping[PeerId, R]:
    """Ask each of these peers, all at the same time, and return what they said.

    Whoever does not answer within `patience` seconds is left out.

    ask: asks one; may raise Unanswered.
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
