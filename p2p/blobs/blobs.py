"""Blobs: compressed content with an id, which peers offer and fetch, their store and its server. Pure.

A blob is a zstd frame (RFC 8878) around a body, and its id is the first 12 bytes of SHA-256 of the blob as it
travels: it is checked before anything is inflated. 96 bits are enough against a second blob with the id of a
given one, as a blob is of use for some minutes. An author could find two blobs with one id in 2^48 tries, but
that would only make its own offer ambiguous.

Question: byte 1 and a content id of 12 bytes. Answer: the blob; a zero byte if the peer does not have it;
nothing if it does not know the question.
"""

from collections import OrderedDict
from hashlib import sha256
from typing import Final

from backports import zstd

from p2p.types import PeerId, PeerRequest

ID_BYTES = 12
# The size of a blob as it travels.
MAX_BLOB_BYTES = 256 * 1024
# The size of what is in it.
MAX_CONTENT_BYTES = 1024 * 1024
KEPT_BYTES = 64 * 1024 * 1024
# The answer of a peer that does not have the blob.
MISSING = b"\0"
# Without a checksum, as the id is one. With the content's size, so that a large one is refused before
# anything is inflated.
_PACKED: Final[dict[int, int]] = {
    zstd.CompressionParameter.compression_level: 3,
    zstd.CompressionParameter.checksum_flag: 0,
    zstd.CompressionParameter.content_size_flag: 1,
}


class BadBlob(ValueError):
    """The blob is not one whole zstd frame with its content's size, within the limit."""


def content_id(blob: bytes) -> bytes:
    return sha256(blob).digest()[:ID_BYTES]


def pack(content: bytes) -> bytes:
    """Compress content into a blob. Raises ValueError where no receiver would take it."""
    blob = zstd.compress(content, options=_PACKED)
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
        claimed = zstd.get_frame_info(blob).decompressed_size
        if not claimed or claimed > limit:
            raise BadBlob("empty, or more than the limit, or of unknown size")
        # A byte more than was claimed: only with room left does it read on to the frame's end.
        frame = zstd.ZstdDecompressor()
        content = frame.decompress(blob, max_length=claimed + 1)
    except zstd.ZstdError as error:
        raise BadBlob(str(error)) from None
    # At a frame's end zstd itself has compared the size with the claim.
    if not frame.eof or frame.unused_data:
        raise BadBlob("cut off, or more than one frame")
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


class BlobServer:
    """Answers questions from a store; the engine limits how much a peer may have."""

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
