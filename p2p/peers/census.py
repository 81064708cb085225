"""Census: asks peers which swarms of our name they see, with how many members, and whether they train.

An isolated node asks.

Question: byte 5 and the swarm's name. Answer: msgpack [1, trains, [[digest, members], …]]; empty where the
question has another name. Nothing proves an answer: it is shown to the operator, and nothing is decided by
it.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated

import msgspec
import trio

from p2p.topic import Topic
from p2p.types import Ask, PeerId, PeerRequest, Unanswered

VERSION = 1
# Swarms in an answer.
MAX_SWARMS = 16
MAX_ANSWER_BYTES = 2048
# Peers that are asked.
MAX_ASKED = 6
# The time for one peer's answer.
PEER_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class SwarmCount(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """How many members of one swarm a peer is connected to."""

    digest: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,63}\Z")]
    members: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class CensusReply(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: int
    trains: bool
    swarms: Annotated[list[SwarmCount], msgspec.Meta(max_length=MAX_SWARMS)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CensusReply)


class Census:
    """Answers the question. present: returns how many members of a topic we are connected to."""

    def __init__(self, topics: Sequence[Topic], present: Callable[[Topic], int], *, trains: bool) -> None:
        self._topics, self._present, self._trains = topics, present, trains

    def __call__(self, _peer: PeerId, message: bytes) -> bytes:
        if message != question(self._topics[0].name):
            return b""
        swarms = [SwarmCount(topic.digest, self._present(topic)) for topic in self._topics[:MAX_SWARMS]]
        return _encoder.encode(CensusReply(VERSION, self._trains, swarms))


def question(name: str) -> bytes:
    return PeerRequest.CENSUS.message(name.encode())


def answered(message: bytes) -> CensusReply | None:
    """Parse an answer; None where it is none, or one of a later version."""
    try:
        found = _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.version == VERSION else None


async def ask(request: Ask, peers: Collection[PeerId], name: str) -> Mapping[PeerId, CensusReply]:
    """Ask up to MAX_ASKED peers at the same time and return their answers.

    Peers that do not know the question, or do not answer, are left out.
    """
    said = await ask_each(
        request, list(dict.fromkeys(peers))[:MAX_ASKED], question(name), MAX_ANSWER_BYTES, PEER_TIMEOUT_S
    )
    return {peer: reply for peer, message in said.items() if (reply := answered(message)) is not None}


async def ask_each(
    request: Ask, peers: Collection[PeerId], question: bytes, limit: int, patience: float
) -> Mapping[PeerId, bytes]:
    """Ask each of these peers once, all at the same time, and return their answers.

    Whoever does not answer within `patience` seconds is left out.
    """
    said: dict[PeerId, bytes] = {}

    async def one(peer: PeerId) -> None:
        with trio.move_on_after(patience):
            try:
                said[peer] = await request(peer, question, limit)
            except Unanswered as error:
                log.debug("%s does not answer: %s", peer, error)

    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(one, peer)
    return said
