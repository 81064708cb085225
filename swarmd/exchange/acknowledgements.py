"""Acknowledgements: a node tells authors how many of their rollouts it trained on.

They are shown to people; no decision depends on them.

Question: byte 7 and msgpack [1, number, rollouts]. The asker has trained on that many more rollouts of the
peer that it asks. number: different for each message, so that a repeated message counts once. Answer: byte 1,
or nothing from a peer that does not know the question. The message is not signed: the connection proves the
sender, and no third node has to believe it. Only connected authors are told, so acknowledgements cost no
connection and no gossip, however large the swarm is.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Final, Literal

import msgspec
import trio

from p2p.latest import Latest
from p2p.peers.introduction import ask_each
from p2p.types import Ask, PeerId, PeerRequest
from swarmd.state.status import SharedRollouts

VERSION: Final = 1
# Seconds between two calls of `tell`.
TELL_EVERY_S = 30.0
# Maximum number of authors that one call of `tell` sends a message to.
AT_ONCE = 16
ANSWER_TIMEOUT_S = 5.0
# Maximum number of authors that wait for a message, and of peers whose messages we remember.
MAX_PEERS = 1024
HEARD = b"\x01"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]


class Acknowledgement(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: Literal[1]
    number: _Count
    rollouts: _Count


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Acknowledgement)


def encode(number: int, rollouts: int) -> bytes:
    return PeerRequest.USED.message(_encoder.encode(Acknowledgement(VERSION, number, rollouts)))


class Acknowledger:
    """Counts the rollouts that we trained on, by author, and tells the authors.

    connected: returns the connected peers. clock: seconds since the epoch.
    """

    def __init__(
        self, ask: Ask, connected: Callable[[], Collection[PeerId]], clock: Callable[[], float]
    ) -> None:
        self._ask, self._connected = ask, connected
        self._number = int(clock() * 1000)
        # Author -> rollouts; the most recently used author is at the end
        self._untold: Latest[PeerId, int] = Latest(MAX_PEERS)

    def used(self, authors: Iterable[PeerId]) -> None:
        """Note that one rollout of each author was trained on for the first time."""
        for author in authors:
            self._untold[author] = self._untold.get(author, 0) + 1

    async def run(self) -> None:
        while True:
            await trio.sleep(TELL_EVERY_S)
            await self.tell()

    async def tell(self) -> None:
        """Send their counts to the connected authors with the most used rollouts.

        The counts of authors that were not reached are kept.
        """
        there = self._untold.keys() & set(self._connected())
        most = sorted(there, key=lambda author: (-self._untold[author], author))[:AT_ONCE]
        due = {author: self._untold[author] for author in most}
        await ask_each(lambda author: self._tell(author, due[author]), most, ANSWER_TIMEOUT_S)

    async def _tell(self, author: PeerId, rollouts: int) -> None:
        self._number += 1
        await self._ask(author, encode(self._number, rollouts), len(HEARD))
        if (left := self._untold.pop(author, rollouts) - rollouts) > 0:
            self._untold[author] = left


class AcknowledgementCounter:
    """Counts the rollouts that we shared and that peers say they used; answers their messages.

    A peer counts for at most as many rollouts as we shared. An attacker with many keys can inflate these
    figures, but only on this node's own screen.

    shared: returns how many rollouts were shared since the start.
    """

    def __init__(self, shared: Callable[[], int]) -> None:
        self._shared = shared
        # Peer -> number of its last message, rollouts
        self._by: Latest[PeerId, tuple[int, int]] = Latest(MAX_PEERS)

    def __call__(self, peer: PeerId, message: bytes) -> bytes:
        try:
            said = _decoder.decode(PeerRequest.USED.content(message) or b"")
        except (msgspec.MsgspecError, RecursionError):
            return b""
        number, before = self._by.get(peer, (None, 0))
        if total := min(self._shared(), before + (said.rollouts if number != said.number else 0)):
            self._by[peer] = (said.number, total)
        return HEARD

    def figures(self) -> SharedRollouts:
        """Return the figures for the status."""
        return SharedRollouts(self._shared(), sum(total for _, total in self._by.values()), len(self._by))
