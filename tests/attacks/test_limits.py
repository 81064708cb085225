"""Checks the table of limits in docs/admission.md.

The limits are read from the code and added up, and tests fill each resource with all peers at the same time.
"""

import re
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import trio
import trio.testing
from libp2p.kad_dht.common import BUCKET_SIZE
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from multiaddr import Multiaddr

from p2p.admission import dials, fair_queue, inbound_slots, replays
from p2p.admission.fair_queue import FairQueue
from p2p.admission.inbox import MAX_AUTHORS
from p2p.admission.replays import Holder, Replays, Trace
from p2p.blobs import blobs
from p2p.blobs.blobs import BlobStore
from p2p.engines import request_response
from p2p.engines.libp2p import dht, network, pubsub, rpcs
from p2p.engines.libp2p.network import Muxer
from p2p.engines.libp2p.relay import RelayLimits
from p2p.engines.libp2p.rpcs import ForwardQueue, ingress
from p2p.engines.libp2p.stack import make_host
from p2p.engines.libp2p.streams import READ_BYTES
from p2p.engines.request_response import Responder
from p2p.engines.traffic import Line, RateGate, Traffic
from p2p.identity import Identity
from p2p.rate_limit import MAX_PIECE
from p2p.types import PeerId
from swarmd.exchange import fetching
from swarmd.exchange.events import Ask, Output
from swarmd.exchange.fetching import Fetch, Fetcher
from swarmd.exchange.offers import MAX_ITEMS, WHOLE_BYTES, Board, Offered
from swarmd.types import TaskRef
from tests import ROOT
from tests.doubles import NOW
from tests.p2p.engines.test_request_response import pair

MIB = 1024 * 1024
DOCUMENT = ROOT / "docs" / "admission.md"
CONNECTIONS = 160  # most connections of a node (`p2p.engines.libp2p.stack`)
OFFER = 512  # bytes of an offer on the board with its keys, rounded up
OWN_FRAME = WHOLE_BYTES + 512  # bytes of one of the node's own frames, with its envelope
BEGUN = rpcs.MAX_RPC_BYTES + READ_BYTES  # bytes of an incomplete RPC
NAME = 100  # bytes of a message's id in a list
ADDRESS = 256  # bytes of an address in a provider record, with its share of the record
AUTHOR = 200 + replays.FRAMES * 16  # bytes of a remembered author


@dataclass(frozen=True)
class Limit:
    resource: str
    one: str  # limit for one peer, in words
    all: str  # limit for all peers together, in words
    mib: float  # memory in use at the limit


LIMITS = (
    Limit(
        "authors remembered",
        "an equal part of group and connection, if it is full",
        f"{MAX_AUTHORS:,}",
        (MAX_AUTHORS * AUTHOR + 8 * replays.SLOTS) / MIB,
    ),
    Limit(
        "received frames that wait for a neighbour",
        "an equal part of group, connection and author, if it is full",
        f"{rpcs.MAX_FRAMES} or {rpcs.MAX_BYTES // 1024} KiB each",
        CONNECTIONS * rpcs.MAX_BYTES / MIB,
    ),
    Limit(
        "our own frames that wait for a neighbour",
        "nobody else's",
        f"{rpcs.MAX_OWN_FRAMES} each",
        CONNECTIONS * rpcs.MAX_OWN_FRAMES * OWN_FRAME / MIB,
    ),
    Limit(
        "messages that wait to be checked",
        "an equal part of group and connection, if it is full",
        f"{rpcs.MAX_WAITING_BYTES // MIB} MiB",
        rpcs.MAX_WAITING_BYTES / MIB,
    ),
    Limit(
        "RPCs begun and not finished",
        "a connection one",
        f"{BEGUN // 1024} KiB each",
        CONNECTIONS * BEGUN / MIB,
    ),
    Limit(
        "admitted frames that wait to be used",
        "an equal part of group and author, if it is full",
        f"{fair_queue.MAX_FRAMES:,} or {fair_queue.MAX_BYTES // MIB} MiB",
        fair_queue.MAX_BYTES / MIB,
    ),
    Limit(
        "places on the board",
        f"an author {MAX_ITEMS}; a group an equal part, if it is full",
        "8,192",
        8192 * OFFER / MIB,
    ),
    Limit(
        "questions answered at once",
        f"a connection {request_response.SERVED_EACH}",
        f"{request_response.SERVED_AT_ONCE}",
        request_response.SERVED_AT_ONCE * blobs.MAX_BLOB_BYTES / MIB,
    ),
    Limit(
        "answers to our questions for blobs",
        f"a holder {request_response.AT_ONCE}, of {blobs.MAX_BLOB_BYTES // 1024} KiB each",
        f"{fetching.QUESTIONS_AT_ONCE}",
        fetching.QUESTIONS_AT_ONCE * blobs.MAX_BLOB_BYTES / MIB,
    ),
    Limit(
        "IWANTs that wait for our upload",
        f"a connection {pubsub.MAX_ASKING}, of {pubsub.MAX_WANTED} frames",
        f"{CONNECTIONS * pubsub.MAX_ASKING}",
        CONNECTIONS * pubsub.MAX_ASKING * pubsub.MAX_WANTED * NAME / MIB,
    ),
    Limit(
        "bytes that nobody has read yet",
        f"a connection {network.WINDOW_BYTES // 1024} KiB; beyond that the largest is ended",
        f"{network.MAX_UNREAD_BYTES // MIB} MiB more",
        (CONNECTIONS * network.WINDOW_BYTES + network.MAX_UNREAD_BYTES) / MIB,
    ),
    Limit(
        "bytes that a relay carries",
        "an equal part of group, machine and peer",
        f"{RelayLimits().circuits} circuits",
        RelayLimits().circuits * 2 * request_response.CHUNK_BYTES / MIB,
    ),
    Limit(
        "reservations at a relay",
        f"a machine {RelayLimits().reservations_of_machine}; a group an equal part, if it is full",
        f"{RelayLimits().reservations}",
        0,
    ),
    Limit(
        "dials of third parties",
        f"a /24, or /48 of IPv6, {dials.UNANSWERED_AT_ONCE:g} in vain, and one a minute",
        f"{dials._MAX_BLOCKS:,} blocks",
        dials._MAX_BLOCKS * 256 / MIB,
    ),
    Limit(
        "provider records of the DHT",
        f"a group an equal part of a key's {BUCKET_SIZE}, and of the keys, if they are full",
        f"{dht.MAX_KEYS} keys",
        dht.MAX_KEYS * BUCKET_SIZE * dht.MAX_ADDRESSES * ADDRESS / MIB,
    ),
    Limit("our blobs", "nobody else's", f"{blobs.KEPT_BYTES // MIB} MiB", blobs.KEPT_BYTES / MIB),
)


def table() -> list[str]:
    total = sum(limit.mib for limit in LIMITS)
    rows = [f"| {limit.resource} | {limit.one} | {limit.all} | {limit.mib:.0f} MiB |" for limit in LIMITS]
    return [*rows, f"| *all of it full* | | | {total:.0f} MiB |"]


def test_the_admission_document_shows_the_table_of_limits() -> None:
    found = re.search(r"## What each may take\n[^|]*((?:\|[^\n]*\n)+)", DOCUMENT.read_text())
    assert found is not None
    assert found.group(1).splitlines()[2:] == table(), "\n".join(table())


def test_memory_of_all_limits_together_fits_a_small_machine() -> None:
    assert sum(limit.mib for limit in LIMITS) <= 512


def test_limit_holds_with_all_authors_at_once() -> None:
    replay, limit = Replays(1000), 1000
    holders = [Holder(f"{n % 8}.0", PeerId(f"c{n}")) for n in range(CONNECTIONS)]
    for n in range(20 * limit):
        trace = Trace(n.to_bytes(32, "big"), 1, int(NOW * 1000))
        replay.remember(trace, holders[n % CONNECTIONS], NOW)
    assert len(replay._authors) <= limit
    assert {len(held) for held in replay._held.values()} == {limit // CONNECTIONS, limit // CONNECTIONS + 1}


def test_limit_holds_with_all_frames_to_one_neighbour_at_once() -> None:
    queue = ForwardQueue(b"me")
    for n in range(5000):
        ingress.set((f"{n % 8}.0", f"c{n % CONNECTIONS}"))
        queue.push(rpc_pb2.RPC(publish=[rpc_pb2.Message(from_id=b"%d" % n, data=bytes(4000))]))
        queue.push(rpc_pb2.RPC(publish=[rpc_pb2.Message(from_id=b"me", data=bytes(WHOLE_BYTES))]))
    held = []
    while (rpc := queue.pop()) is not None:
        held.append(rpc)
    own, held = held[: rpcs.MAX_OWN_FRAMES], held[rpcs.MAX_OWN_FRAMES :]
    assert all(rpc.publish[0].from_id == b"me" and rpc.ByteSize() <= OWN_FRAME for rpc in own)
    assert len(held) <= rpcs.MAX_FRAMES and sum(rpc.ByteSize() for rpc in held) <= rpcs.MAX_BYTES


def test_limit_holds_with_all_waiting_rollouts_at_once() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("honest", PeerId("honest"), "9.0", 1)
    for n in range(4000):
        queue.put(f"a{n}", PeerId(f"a{n}"), f"{n % 8}.0", 20_000)
    waiting = queue.drain()
    assert 20_000 * len(waiting) <= fair_queue.MAX_BYTES and len(waiting) <= fair_queue.MAX_FRAMES
    assert waiting[0] == "honest"


def test_limit_holds_with_all_places_on_the_board_at_once() -> None:
    board = Board(lambda ref: True, kept_rounds=4)
    board.add([Offered(PeerId("x honest"), TaskRef("sums", 1), b"honest", 100, PeerId("x honest"), "9.0")])
    for n in range(400):
        who, group = PeerId(f"a{n}"), f"{n % 8}.0"
        board.add(
            [
                Offered(who, TaskRef("sums", k), b"%d %d" % (n, k), 100, who, group)
                for k in range(2 * MAX_ITEMS)
            ]
        )
    assert 6144 <= len(board.offered) <= 8192
    assert "x honest" in {item.author for item in board.offered.values()}


async def test_limit_holds_with_all_questions_at_once() -> None:
    """Each connection begins twice as many questions as it may have, and finishes none.

    Once all connections have asked, the first connection keeps one question, every other connection has at
    most one, and all network groups have equally many.
    """
    responder = Responder(lambda peer, question: question, lambda peer: True, Traffic().upload)
    left: Counter[int] = Counter()  # questions being served, by connection
    streams: list[Any] = []

    async def ask(peer: int) -> None:
        theirs, ours = pair()
        streams.append(theirs)
        await theirs.send_all(bytes(2))
        left[peer] += 1
        line = Line(f"{peer % 8}.0", f"{peer % 8}.0.0.{peer}", peer)
        await responder.serve(PeerId(f"c{peer}"), ours, line)
        left[peer] -= 1

    async with trio.open_nursery() as nursery:
        for connections in (range(1), range(1, CONNECTIONS)):
            for n in connections:
                for _ in range(2 * request_response.SERVED_EACH):
                    nursery.start_soon(ask, n)
            await trio.testing.wait_all_tasks_blocked()
            if n == 0:
                assert left == {0: request_response.SERVED_EACH}
        assert left.total() == request_response.SERVED_AT_ONCE and left[0] == max(left.values()) == 1
        groups = Counter(n % 8 for n in left.elements())
        assert set(groups.values()) == {request_response.SERVED_AT_ONCE // 8}
        nursery.cancel_scope.cancel()


def test_limit_holds_with_all_fetches_at_once() -> None:
    outputs = list[Output]()
    fetcher = Fetcher(outputs.append)
    for n in range(4 * fetching.QUESTIONS_AT_ONCE):
        holders = [PeerId(f"holder {n} {part}") for part in range(2 * fetching.MAX_HOLDERS)]
        item = Offered(holders[0], TaskRef("sums", n), b"%12d" % n, blobs.MAX_BLOB_BYTES, holders[0])
        fetcher.begin(Fetch(item, item.size, holders, 0.0))
    for now in range(5):
        fetcher.advance(float(now))
    for number in list(fetcher.open):
        fetcher.answered(number, None, 5.0)
    for now in range(5, 8):  # each fetch asks its second holder, too
        fetcher.advance(float(now))
        assert len(fetcher.open) == fetching.QUESTIONS_AT_ONCE
    limits = [output.limit for output in outputs if isinstance(output, Ask)]
    assert max(limits) <= blobs.MAX_BLOB_BYTES


async def test_limit_holds_with_all_provider_records_at_once() -> None:
    """Two keys have the most and longest addresses; twice as many keys arrive as are kept."""
    store = dht.BoundedProviders(host=make_host(Identity(bytes(32))))

    def fill(key: int) -> None:
        for provider in range(BUCKET_SIZE + 1):
            names = (f"/dns4/{key:02}{provider:058}.{n:060}/tcp/4001" for n in range(dht.MAX_ADDRESSES + 1))
            found = PeerInfo(ID(provider.to_bytes(34, "big")), [*map(Multiaddr, names)])
            store.add_provider(key.to_bytes(34, "big"), found)

    # Fill the library's caches first.
    fill(0)
    tracemalloc.start()
    for key in range(1, 3):
        fill(key)
    taken = tracemalloc.get_traced_memory()[0] / 2
    tracemalloc.stop()
    assert len(store.providers[bytes(34)]) == BUCKET_SIZE
    assert taken <= BUCKET_SIZE * dht.MAX_ADDRESSES * ADDRESS
    for key in range(2 * dht.MAX_KEYS):
        store.add_provider(key.to_bytes(34, "big"), PeerInfo(ID(bytes(34)), [Multiaddr("/tcp/1")]))
    assert len(store.providers) == dht.MAX_KEYS


def test_limit_holds_with_all_blobs_at_once() -> None:
    store = BlobStore()
    for n in range(2 * blobs.KEPT_BYTES // blobs.MAX_BLOB_BYTES):
        store.put(n.to_bytes(blobs.MAX_BLOB_BYTES, "big"))
    assert store.bytes <= blobs.KEPT_BYTES and store.get(blobs.content_id(n.to_bytes(blobs.MAX_BLOB_BYTES)))


async def test_limit_holds_with_all_uploads_on_one_line_at_once(autojump_clock: Any) -> None:
    """Answers, circuits, forwarding and the node's own frames, on 160 connections of eight network groups."""
    up, traffic, moved, delays = 200_000.0, Traffic(), Counter[str](), list[float]()
    traffic.limit(up, None, month=20e9)
    lines = [
        Line(f"{n % 8}.0", f"{n % 8}.0.0.{n}", n, stranger=n % 160 < inbound_slots.MOST)
        for n in range(CONNECTIONS)
    ]
    circuits = RateGate(RelayLimits().rate, float(RelayLimits().size))

    async def use(what: str, line: Line) -> None:
        while True:
            if what == "answers":
                await traffic.upload(blobs.MAX_BLOB_BYTES, line)
            elif what == "circuits":
                await circuits.wait(MAX_PIECE, line.path)
            await traffic.send(MAX_PIECE, line)
            moved[what] += MAX_PIECE

    async with trio.open_nursery() as nursery:
        for line in lines:
            for what in ("answers", "circuits", "forwarding"):
                nursery.start_soon(use, what, line)
        while trio.current_time() < 60:
            begun = trio.current_time()
            await traffic.send(OWN_FRAME, lines[-1], own=True)
            delays.append(trio.current_time() - begun)
            await trio.sleep(1)
        assert 59 * up - len(delays) * OWN_FRAME <= moved.total() <= (trio.current_time() + 2) * up
        assert max(delays) <= 2 * MAX_PIECE / up
        nursery.cancel_scope.cancel()


async def test_limit_holds_with_all_unread_bytes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only connections of the machine with the most unread bytes are ended."""
    monkeypatch.setattr(network, "UNREAD_EVERY_S", 0.0)
    traffic, ended = Traffic(), list[int]()

    class Unread(Muxer):
        def __init__(self, number: int, size: int) -> None:
            machine = "1.0.0.1" if number else "8.0.0.1"
            self.line, self.size, self.traffic = Line(machine[:3], machine, number), size, traffic
            traffic.muxers.add(self)

        @property
        def unread(self) -> int:
            return self.size

        async def _give_up(self, why: str) -> NoReturn:
            ended.append(self.line.connection)
            raise MuxedConnUnavailable(why)

    held = [Unread(0, 4 * MIB), *(Unread(n, MIB) for n in range(1, 100))]
    for muxer in held:
        await muxer._end_the_largest()
    assert len(set(ended)) == len(ended) and 0 not in ended
    left = sum(muxer.unread - network.WINDOW_BYTES for muxer in traffic.muxers)
    assert left <= network.MAX_UNREAD_BYTES < left + 2 * MIB
