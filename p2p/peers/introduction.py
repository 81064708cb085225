"""Introductions: what a peer says of itself, and whether it takes our frames.

A node asks now and then, to find out why it is alone.

Question: byte 8 and the swarm's name. Answer: msgpack [1, time, digest, trains, runs, doing, refuses]: its
clock in ms, the digest of its swarm, the name of what it trains, what it runs ("swarmd 0.1.0, …"),
"training", "paused" or "helping", and whether it ignores our frames because of what we did; empty where the
question has another name. A later version may add fields. Nothing proves an answer: it is shown to the
operator, and nothing is decided by it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from p2p.peers.census import ask_each
from p2p.topic import Topic
from p2p.types import Ask, PeerId, PeerRequest

VERSION = 1
MAX_ANSWER_BYTES = 512
# The time for one peer's answer.
PEER_TIMEOUT_S = 5.0
# How much of a name is shown.
SHOWN_CHARACTERS = 64
TRAINING, PAUSED, HELPING = "training", "paused", "helping"

_Text = Annotated[str, msgspec.Meta(max_length=2 * SHOWN_CHARACTERS)]


class Introduction(msgspec.Struct, array_like=True, frozen=True):
    version: int
    time: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]  # ms
    digest: _Text
    trains: _Text
    runs: _Text
    doing: _Text
    refuses: bool


@dataclass(frozen=True, slots=True)
class Introduced:
    """A peer's answer."""

    digest: str
    trains: str
    runs: str
    doing: str
    refuses: bool
    ahead: float  # seconds that its clock is ahead of ours, give or take the time that the answer took


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Introduction)


class Introducer:
    """Answers the question. refused: returns whether we ignore a peer's frames."""

    def __init__(
        self,
        topic: Topic,
        trains: str,
        runs: str,
        doing: Callable[[], str],
        refused: Callable[[PeerId], bool],
        clock: Callable[[], float],
    ) -> None:
        self._topic, self._trains, self._runs = topic, trains[:SHOWN_CHARACTERS], runs[:SHOWN_CHARACTERS]
        self._doing, self._refused, self._clock = doing, refused, clock

    def __call__(self, peer: PeerId, message: bytes) -> bytes:
        if message != question(self._topic.name):
            return b""
        now = int(self._clock() * 1000)
        said = Introduction(
            VERSION, now, self._topic.digest, self._trains, self._runs, self._doing(), self._refused(peer)
        )
        return _encoder.encode(said)


def question(name: str) -> bytes:
    return PeerRequest.INTRODUCTION.message(name.encode())


def answered(message: bytes, now: float) -> Introduced | None:
    """Parse an answer; None where it is none, or one of another version."""
    try:
        said = _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if said.version != VERSION:
        return None
    return Introduced(said.digest, said.trains, said.runs, said.doing, said.refuses, said.time / 1000 - now)


async def ask(
    request: Ask, peers: Collection[PeerId], name: str, clock: Callable[[], float]
) -> Mapping[PeerId, Introduced | None]:
    """Ask these peers at the same time; None for those that do not know the question.

    Whoever does not answer is left out.
    """
    came: dict[PeerId, Introduced | None] = {}

    async def timed(peer: PeerId, message: bytes, limit: int) -> bytes:
        answer = await request(peer, message, limit)
        came[peer] = answered(answer, clock())
        return answer

    await ask_each(timed, peers, question(name), MAX_ANSWER_BYTES, PEER_TIMEOUT_S)
    return came
