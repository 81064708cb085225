"""Blobs: compressed content with an id, which peers offer and fetch; and their store. Pure.

A blob is a zstd frame (RFC 8878) around a body. Its id is the first 12 bytes of SHA-256 of the compressed
blob, so a receiver checks the id before it inflates anything. 96 bits are enough against a second blob with a
given id, as a blob is used for a few minutes only. An author could find two blobs with one id in 2^48 tries,
but that would only make its own offer ambiguous.

Question: byte 1 and a content id of 12 bytes. Answer: the blob; a zero byte if the peer does not have it;
nothing if the peer does not know the question.
"""

from collections import OrderedDict
from hashlib import sha256
from typing import Final

from backports import zstd

from p2p.types import PeerId, PeerRequest

ID_BYTES = 12
# Maximum bytes of a blob (compressed).
MAX_BLOB_BYTES = 256 * 1024
# Maximum bytes of a blob's content (inflated).
MAX_CONTENT_BYTES = 1024 * 1024
KEPT_BYTES = 64 * 1024 * 1024
# The answer of a peer that does not have the blob.
MISSING = b"\0"
# No checksum, because the id already serves as one. The header has the content's size, so that a too large
# blob is rejected before anything is inflated.
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
    """Compress content into a blob. Raises ValueError if the blob is over the receivers' limits."""
    blob = zstd.compress(content, options=_PACKED)
    if len(content) > MAX_CONTENT_BYTES or len(blob) > MAX_BLOB_BYTES:
        raise ValueError(
            f"{len(content)} bytes, {len(blob)} compressed, are more than {MAX_CONTENT_BYTES} and"
            f" {MAX_BLOB_BYTES}"
        )
    return blob


def unpack(blob: bytes, limit: int = MAX_CONTENT_BYTES) -> bytes:
    """Return the content, of at most `limit` bytes. Raises BadBlob.

    A blob is rejected if its header states a larger size, and no more bytes than the header states are
    inflated.
    """
    try:
        if not (claimed := zstd.get_frame_info(blob).decompressed_size) or claimed > limit:
            raise BadBlob("empty, or more than the limit, or of unknown size")
        # Allow one byte more than claimed: zstd reads to the frame's end only if it has room left.
        frame = zstd.ZstdDecompressor()
        content = frame.decompress(blob, max_length=claimed + 1)
    except zstd.ZstdError as error:
        raise BadBlob(str(error)) from None
    # When zstd reaches the frame's end, it has already checked the size against the header.
    if not frame.eof or frame.unused_data:
        raise BadBlob("cut off, or more than one frame")
    return content


class BlobStore:
    """Our own and fetched blobs, in memory, for peers that ask for them.

    At the limit the least recently used blob is dropped. The engine limits the bytes that each peer gets.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.bytes, self._limit = 0, kept_bytes
        self.sent = 0  # bytes of all answers
        # By id, the least recently used first.
        self.held: OrderedDict[bytes, bytes] = OrderedDict()

    def put(self, blob: bytes) -> bytes:
        """Add a blob and return its id."""
        if (name := content_id(blob)) not in self.held:
            self.held[name] = blob
            self.bytes += len(blob)
        self.held.move_to_end(name)
        while self.bytes > self._limit:
            self.bytes -= len(self.held.popitem(last=False)[1])
        return name

    def get(self, name: bytes) -> bytes | None:
        if (blob := self.held.get(name)) is not None:
            self.held.move_to_end(name)
        return blob

    def answer(self, peer: PeerId, message: bytes) -> bytes:  # noqa: ARG002
        """Return the blob, MISSING, or an empty answer if the message is not a question for a blob."""
        if (name := PeerRequest.BLOBS.content(message)) is None or len(name) != ID_BYTES:
            return b""
        reply = self.get(name) or MISSING
        self.sent += len(reply)
        return reply
