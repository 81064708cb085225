"""Blobs: compressed content with an id, which peers offer, fetch and serve.

A blob is a zstd frame (RFC 8878) around a body, and its id is the first 12 bytes of SHA-256 of the blob as it
travels: it is checked before anything is inflated. 96 bits are enough against a second blob with the id of a
given one, as a blob is of use for some minutes. An author could find two blobs with one id in 2^48 tries, but
that would only make its own offer ambiguous.

Question: byte 1 and a content id of 12 bytes. Answer: the blob; a zero byte where the peer does not have it;
nothing where we are over its rate limit, or it does not know the question.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256

import trio
import zstandard

from p2p.rate_limit import TokenBuckets
from p2p.types import Ask, PeerId, PeerRequest, Reason, Unanswered

ID_BYTES = 12
# The size of a blob as it travels.
MAX_BLOB_BYTES = 256 * 1024
# The size of what is in it.
MAX_CONTENT_BYTES = 1024 * 1024
KEPT_BYTES = 64 * 1024 * 1024
_LEVEL = 3

# Without a checksum, as the id is one. With the content's size, so that a large one is refused before
# anything is inflated.
_packer = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False, write_content_size=True)


class BadBlob(ValueError):
    """The blob is not one whole zstd frame with its content's size, within the limit."""


def content_id(blob: bytes) -> bytes:
    return sha256(blob).digest()[:ID_BYTES]


def pack(content: bytes) -> bytes:
    """Compress content into a blob. Raises ValueError where no receiver would take it."""
    blob = _packer.compress(content)
    if len(content) > MAX_CONTENT_BYTES or len(blob) > MAX_BLOB_BYTES:
        raise ValueError(
            f"{len(content)} bytes, {len(blob)} compressed, are more than {MAX_CONTENT_BYTES} and"
            f" {MAX_BLOB_BYTES}"
        )
    return blob


def unpack(blob: bytes, limit: int = MAX_CONTENT_BYTES) -> bytes:
    """Return the content, of at most `limit` bytes. Raises BadBlob.

    It is refused by the size in the blob's header, and no more than that is inflated.
    """
    try:
        parameters = zstandard.get_frame_parameters(blob)
        claimed = parameters.content_size
        # An unknown size reads as the largest number there is.
        if claimed > limit or parameters.dict_id or not claimed:
            raise BadBlob("empty, or more than the limit, or of unknown size")
        # Into one buffer of the claimed size, which is all the memory it takes and all it can fill.
        content = zstandard.ZstdDecompressor().decompress(blob, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadBlob(str(error)) from None
    if len(content) != claimed:
        raise BadBlob(f"{len(content)} bytes where {claimed} were claimed")
    return content


class BlobStore:
    """Our own and fetched blobs, in memory, for peers that ask.

    At the limit the least recently used one is dropped.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.bytes, self._limit = 0, kept_bytes
        # By id, the least recently used first.
        self.held: OrderedDict[bytes, bytes] = OrderedDict()

    def put(self, blob: bytes) -> bytes:
        """Add a blob and return its id."""
        name = content_id(blob)
        if name not in self.held:
            self.held[name] = blob
            self.bytes += len(blob)
        self.held.move_to_end(name)
        while self.bytes > self._limit:
            self.bytes -= len(self.held.popitem(last=False)[1])
        return name

    def get(self, name: bytes) -> bytes | None:
        blob = self.held.get(name)
        if blob is not None:
            self.held.move_to_end(name)
        return blob


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
# Peers whose use of our upload is counted.
_COUNTED_PEERS = 4096

log = logging.getLogger(__name__)


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
        now, name = self._clock(), PeerRequest.BLOBS.content(message)
        bucket = self._upload.of(peer, now)
        if name is None or len(name) != ID_BYTES or bucket.refill(now) <= 0:
            return b""
        reply = self._store.get(name) or MISSING
        bucket.spend(len(reply))
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
                with trio.move_on_after(HEDGE_MISSING_S if hopeless else HEDGE_S):
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
        """Ask a holder for a blob. No answer in time counts as one without the blob.

        Raises Unanswered where the holder could not be asked.
        """
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
                raise
        return None
