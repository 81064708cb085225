"""Fetches blobs from peers, and serves them.

Question: byte 1 and a content id of 12 bytes. Answer: the blob; a zero byte if the peer does not have it;
nothing if it does not know the question.
"""

import logging
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum

import trio

from p2p.blobs.blobs import ID_BYTES, BlobStore, content_id
from p2p.types import Ask, PeerId, PeerRequest, Reason, Unanswered

# The answer of a peer that does not have the blob.
MISSING = b"\0"
# Peers that are asked for one blob, at most; some may be gone.
MAX_HOLDERS = 32
# Questions under way. Those to peers that are gone take long, and must not delay the others.
QUESTIONS_AT_ONCE = 64
# When the next holder is asked too.
HEDGE_S = 0.5
# The same where the likeliest holder does not have the blob: then few others do.
HEDGE_MISSING_S = 0.05
# The time for one holder to answer.
HOLDER_TIMEOUT_S = 10.0
# When a holder that could not be asked is asked once more: it may be the only one.
ASK_AGAIN_S = 1.0

log = logging.getLogger(__name__)


class BlobServer:
    """Answers questions from a store. Pure; the engine limits how much a peer may have."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self.sent = 0  # bytes

    def __call__(self, peer: PeerId, message: bytes) -> bytes:  # noqa: ARG002
        """Answer a question; empty for another question."""
        name = PeerRequest.BLOBS.content(message)
        if name is None or len(name) != ID_BYTES:
            return b""
        reply = self._store.get(name) or MISSING
        self.sent += len(reply)
        return reply


@dataclass(frozen=True, slots=True)
class Want:
    """A blob we chose, as it was offered."""

    id: bytes
    size: int  # bytes as it travels
    holders: Sequence[PeerId]  # who may have it, the likeliest first
    at: str = ""  # where the first of them says that it can be reached


class HolderReply(Enum):
    """A holder's reply to our question for one blob."""

    NOTHING = "nothing yet"  # the question was sent
    YES = "here it is"
    NO = "I have it not"
    FAILED = "could not be asked, or hung up"


HolderReplies = MutableMapping[PeerId, HolderReply]  # by holder, those that were asked


class Fetcher:
    """Fetches blobs into a store. blame: called with peers that answer with something else."""

    def __init__(self, ask: Ask, store: BlobStore, blame: Callable[[PeerId, Reason], None]) -> None:
        self._ask, self._store, self._blame = ask, store, blame
        self._at_once = trio.Semaphore(QUESTIONS_AT_ONCE)
        self.received = 0  # bytes of answers

    async def fetch(self, want: Want, replies: HolderReplies | None = None) -> bytes | None:
        """Fetch a blob from the first holder that has it; None where none does. Cancel it at your deadline.

        A slow holder is still waited for when the next is asked: the first answer wins, and the other
        requests are cancelled. A holder that could not be asked is asked once more. replies: filled with the
        reply of each holder so far.
        """
        found = self._store.get(want.id)
        if found is not None:
            return found
        told = {} if replies is None else replies
        async with trio.open_nursery() as nursery:

            async def ask(holder: PeerId, settled: trio.Event) -> None:
                nonlocal found
                try:
                    blob = await self._ask_one(holder, want, told)
                    if told[holder] is HolderReply.FAILED:
                        # Nobody waits for the second question.
                        settled.set()
                        await trio.sleep(ASK_AGAIN_S)
                        blob = await self._ask_one(holder, want, told)
                    if blob is not None and found is None:
                        found = blob
                        self._store.put(blob)
                        nursery.cancel_scope.cancel()
                    elif holder == holders[0] and told.get(holder) is HolderReply.NO:
                        # One deadline for all other holders together.
                        nursery.cancel_scope.deadline = trio.current_time() + ASK_AGAIN_S
                finally:
                    settled.set()

            holders = list(dict.fromkeys(want.holders))[:MAX_HOLDERS]
            for holder in holders:
                settled = trio.Event()
                nursery.start_soon(ask, holder, settled)
                hopeless = told.get(holders[0]) is HolderReply.NO
                with trio.move_on_after(HEDGE_MISSING_S if hopeless else HEDGE_S):
                    await settled.wait()
        return found

    async def _ask_one(self, holder: PeerId, want: Want, replies: HolderReplies) -> bytes | None:
        """Ask a holder for a blob. No answer in time counts as one without the blob."""
        async with self._at_once:
            replies[holder] = HolderReply.NOTHING
            try:
                with trio.move_on_after(HOLDER_TIMEOUT_S):
                    reply = await self._ask(holder, PeerRequest.BLOBS.message(want.id), want.size)
                    self.received += len(reply)
                    if content_id(reply) == want.id:
                        replies[holder] = HolderReply.YES
                        return reply
                    if reply == MISSING:
                        replies[holder] = HolderReply.NO
                    elif reply:
                        self._blame(holder, Reason.NOT_ASKED_FOR)
            except Unanswered as error:
                log.debug("a blob was not fetched from %s: %s", holder, error)
                replies[holder] = HolderReply.FAILED
        return None
