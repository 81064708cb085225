"""Fetches blobs from peers, and serves them.

Question: byte 1, then content ids of 12 bytes, one to MAX_ASKED. Answer: for each id, in order, the length as
four bytes, big-endian, and the blob; length zero where the peer does not have it. A peer that does not know
the question answers nothing.
"""

import logging
import struct
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum

import trio

from p2p.blobs.blobs import ID_BYTES, MAX_BLOB_BYTES, MAX_HOLDERS, BlobStore, content_id
from p2p.rate_limit import TokenBuckets
from p2p.types import Ask, PeerId, PeerRequest, Reason, Unanswered

# Blobs in one question.
MAX_ASKED = 64
# A blob that does not fit into the answer has length zero.
MAX_ANSWER_BYTES = 1024 * 1024
# The most that one answer to several ids holds: more would take too long over a slow line.
BATCH_BYTES = 128 * 1024
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
_LENGTH = struct.Struct(">I")
# Peers whose use of our upload is counted.
_COUNTED_PEERS = 4096

log = logging.getLogger(__name__)


def question(ids: Sequence[bytes]) -> bytes:
    """Encode a question. Raises ValueError where nobody would answer it."""
    if not 0 < len(ids) <= MAX_ASKED or any(len(name) != ID_BYTES for name in ids):
        raise ValueError(f"one to {MAX_ASKED} ids of {ID_BYTES} bytes")
    return PeerRequest.BLOBS.message(b"".join(ids))


def asked(message: bytes) -> Sequence[bytes]:
    """Return the ids in a question; empty where it is none."""
    ids = PeerRequest.BLOBS.content(message) or b""
    if len(ids) % ID_BYTES or len(ids) > MAX_ASKED * ID_BYTES:
        return ()
    return [ids[i : i + ID_BYTES] for i in range(0, len(ids), ID_BYTES)]


def answer(blobs: Sequence[bytes | None]) -> bytes:
    parts, size = [], 0
    for blob in blobs:
        fits = blob is not None and size + _LENGTH.size + len(blob) <= MAX_ANSWER_BYTES
        part = blob if fits and blob is not None else b""
        parts += [_LENGTH.pack(len(part)), part]
        size += _LENGTH.size + len(part)
    return b"".join(parts)


def answered(message: bytes, count: int) -> Sequence[bytes | None] | None:
    """Parse an answer to so many ids; None where it is malformed."""
    blobs: list[bytes | None] = []
    at = 0
    for _ in range(count):
        if len(message) < at + _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(message, at)
        at += _LENGTH.size
        if length > MAX_BLOB_BYTES or len(message) < at + length:
            return None
        blobs.append(message[at : at + length] or None)
        at += length
    return blobs if at == len(message) else None


class BlobServer:
    """Answers questions from a store, each peer within a rate limit. Pure."""

    def __init__(
        self,
        store: BlobStore,
        clock: Callable[[], float],
        *,
        rate: float = 512 * 1024.0,
        burst: float = 8 * 1024 * 1024.0,
    ) -> None:
        self._store, self._clock = store, clock
        self._upload = TokenBuckets[PeerId](rate, burst, _COUNTED_PEERS)  # bytes
        self.sent = 0  # bytes

    def __call__(self, peer: PeerId, message: bytes) -> bytes:
        """Answer a question; empty for another question, and for a peer over its limit."""
        now = self._clock()
        bucket = self._upload.of(peer, now)
        if not (ids := asked(message)) or bucket.refill(now) <= 0:
            return b""
        reply = answer([self._store.get(name) for name in ids])
        bucket.take(len(reply))
        self.sent += len(reply)
        return reply


@dataclass(frozen=True, slots=True)
class Want:
    """A blob we chose, as it was offered."""

    id: bytes
    size: int  # bytes as it travels
    holders: Sequence[PeerId]  # who may have it, the likeliest first


class HolderReply(Enum):
    """A holder's reply to our question for one blob."""

    NOTHING = "nothing yet"  # the question was sent
    YES = "here it is"
    NO = "I have it not"
    FAILED = "could not be asked, or hung up"


HolderReplies = MutableMapping[PeerId, HolderReply]  # by holder, those that were asked


class _Question:
    """One question to one holder for all blobs that are wanted of it at one moment."""

    def __init__(self) -> None:
        self.wants: dict[bytes, int] = {}  # content id -> bytes
        self.size = 0  # bytes of the answer, as offered
        self.over = trio.Event()
        self.blobs: dict[bytes, bytes | None] | None = None  # None: given up before the answer came
        self.failed: Unanswered | None = None  # set in place of an answer
        self.replies: list[HolderReplies] = []  # one for each fetch that waits for the answer
        # Whether the holder does not have the blobs that are missing in its answer: it answered in time, and
        # there was room.
        self.refused = False

    @property
    def limit(self) -> int:
        """The most bytes that we take as an answer.

        One of several blobs may be larger than its author says; that must not cost us the others.
        """
        return self.size if len(self.wants) == 1 else MAX_ANSWER_BYTES

    def takes(self, want: Want) -> bool:
        size = 0 if want.id in self.wants else _LENGTH.size + want.size
        if self.wants and (len(self.wants) >= MAX_ASKED or self.size + size > BATCH_BYTES):
            return False
        self.wants[want.id] = want.size
        self.size += size
        return True


class Fetcher:
    """Fetches blobs into a store. blame: called with peers that answer with something else."""

    def __init__(
        self, ask: Ask, store: BlobStore, blame: Callable[[PeerId, Reason], None], *, hedge: float = HEDGE_S
    ) -> None:
        self._ask, self._store, self._blame, self._hedge = ask, store, blame, hedge
        self._at_once = trio.Semaphore(QUESTIONS_AT_ONCE)
        self._unsent: dict[PeerId, _Question] = {}
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
                    blob = await self._ask_up_to_twice(holder, want, settled, told)
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
                with trio.move_on_after(min(HEDGE_MISSING_S, self._hedge) if hopeless else self._hedge):
                    await settled.wait()
        return found

    async def _ask_up_to_twice(
        self, holder: PeerId, want: Want, settled: trio.Event, replies: HolderReplies
    ) -> bytes | None:
        """Ask a holder, and once more where it could not be asked.

        settled: set where the first request failed, so that nobody waits for the second.
        """
        try:
            return await self._ask_one(holder, want, replies)
        except Unanswered:
            settled.set()
        await trio.sleep(ASK_AGAIN_S)
        try:
            return await self._ask_one(holder, want, replies)
        except Unanswered:
            return None

    async def _ask_one(self, holder: PeerId, want: Want, replies: HolderReplies) -> bytes | None:
        """Ask a holder for a blob, in one question with all others wanted of it at this moment.

        The first fetch sends the question, the others wait. Raises Unanswered where the holder could not be
        asked.
        """
        while True:
            shared = self._unsent.get(holder)
            if shared is not None and shared.takes(want):
                shared.replies.append(replies)
                await shared.over.wait()
            else:
                shared = self._unsent[holder] = _Question()
                shared.takes(want)
                shared.replies.append(replies)
                try:
                    async with self._at_once:
                        # Fetches that begin at the same moment join this question here.
                        self._close(holder, shared)
                        for each in shared.replies:
                            each[holder] = HolderReply.NOTHING
                        shared.blobs = await self._asked(holder, shared)
                except Unanswered as error:
                    log.debug("%d blobs were not fetched from %s: %s", len(shared.wants), holder, error)
                    shared.failed = error
                finally:
                    self._close(holder, shared)
                    shared.over.set()
            if shared.failed is not None:
                replies[holder] = HolderReply.FAILED
                raise Unanswered(str(shared.failed))
            if shared.blobs is not None:
                blob = shared.blobs[want.id]
                if blob is not None or shared.refused:
                    replies[holder] = HolderReply.NO if blob is None else HolderReply.YES
                return blob

    def _close(self, holder: PeerId, shared: _Question) -> None:
        if self._unsent.get(holder) is shared:
            del self._unsent[holder]

    async def _asked(self, holder: PeerId, wanted: _Question) -> dict[bytes, bytes | None]:
        """Ask, and return the blobs that came. No answer in time counts as one without blobs.

        Raises Unanswered where the holder could not be asked.
        """
        ids, nothing = list(wanted.wants), dict[bytes, bytes | None].fromkeys(wanted.wants)
        with trio.move_on_after(HOLDER_TIMEOUT_S):
            reply = await self._ask(holder, question(ids), wanted.limit)
            self.received += len(reply)
            # An empty reply means that we are over its rate limit.
            wanted.refused = bool(reply) and len(reply) <= MAX_ANSWER_BYTES - MAX_BLOB_BYTES
            if not reply:
                return nothing
            blobs = answered(reply, len(ids))
            if blobs is None or any(
                blob is not None and content_id(blob) != name for name, blob in zip(ids, blobs, strict=True)
            ):
                self._blame(holder, Reason.NOT_ASKED_FOR)
                return nothing
            return {
                name: blob if blob is not None and len(blob) <= wanted.wants[name] else None
                for name, blob in zip(ids, blobs, strict=True)
            }
        log.debug(
            "%d blobs were not fetched from %s: no answer in %.0f s", len(ids), holder, HOLDER_TIMEOUT_S
        )
        return nothing
