"""Peer discovery over simulated connections: which peers it dials, keeps and disconnects."""

import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import trio

from p2p.engines.discovery import MISSING_S, AddressRecord, Dialled, Discovery
from p2p.identity import Identity
from p2p.peers.addressbook import CONNECTED_EVERY_S, AddressBook
from p2p.peers.outbound import DHT_IDLE_S, STRANGER_S, TARGET_MEMBERS
from p2p.topic import Topic
from p2p.types import Peer, PeerId, Unanswered

TOPIC = Topic("main", "0123456789abcdef")
PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 20)]


class Library:
    """Implement `Connections`: every peer in `there` can be dialled."""

    def __init__(self) -> None:
        self.there: set[PeerId] = set()
        self.open: dict[PeerId, Peer] = {}
        self.members: set[PeerId] = set()
        self.records: list[AddressRecord] = []
        self.dials: list[tuple[PeerId, Sequence[str]]] = []
        self.hung_up: list[PeerId] = []
        self.provided: list[Topic] = []

    def connect(self, peer: PeerId, direction: str) -> None:
        self.open[peer] = Peer(peer, "", direction, trio.current_time())

    async def refresh(self, dialled: Collection[PeerId]) -> float:
        await trio.lowlevel.checkpoint()
        return 1.0

    def connected(self) -> dict[PeerId, Peer]:
        return self.open

    def is_connected(self, peer: PeerId) -> bool:
        return peer in self.open

    def subscribed(self) -> set[PeerId]:
        return self.members & self.open.keys()

    in_mesh = subscribed

    def present(self, topic: Topic) -> int:
        return len(self.subscribed())

    async def identified(self) -> list[AddressRecord]:
        return []

    async def dial(self, peer: PeerId, addresses: Sequence[str]) -> Dialled | None:
        self.dials.append((peer, addresses))
        if peer not in self.there:
            return None
        self.connect(peer, "outbound")
        return Dialled(addresses[0], "a group") if addresses else Dialled()

    async def hang_up(self, peer: PeerId) -> None:
        self.hung_up.append(peer)
        self.open.pop(peer, None)

    async def provide(self, topic: Topic) -> None:
        self.provided.append(topic)

    async def providers(self, topic: Topic) -> list[AddressRecord]:
        if not self.open:
            raise Unanswered
        return self.records


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def book() -> AddressBook:
    return AddressBook(PEERS[0], bytes(16))


@pytest.fixture
async def discovery(library: Library, book: AddressBook, nursery: trio.Nursery) -> Discovery:
    found = Discovery(
        library, [TOPIC], book, lambda peer: peer == PEERS[13], trio.current_time, random.Random(1)
    )
    nursery.start_soon(found.run)
    return found


async def test_a_member_that_is_missing_from_the_topic_is_reconnected(
    autojump_clock: Any, discovery: Discovery, library: Library
) -> None:
    library.members = {PEERS[1], PEERS[2]}
    for peer in library.members:
        library.connect(peer, "inbound")
    await trio.sleep(2)
    assert [peer.id for peer in discovery.peers()] == sorted(
        library.members
    ) and discovery.connected == library.members
    library.members = {PEERS[2]}
    await trio.sleep(MISSING_S - 1)
    assert not library.hung_up
    await trio.sleep(3)
    assert library.hung_up == [PEERS[1]] and discovery.connected == {PEERS[2]}


async def test_a_stranger_is_disconnected_and_not_dialled_again(
    autojump_clock: Any, discovery: Discovery, library: Library, book: AddressBook
) -> None:
    library.there = {PEERS[1]}
    book.add(PEERS[1], ["/ip4/11.0.0.1/tcp/1"], trio.current_time())
    await trio.sleep(STRANGER_S / 2)
    assert library.dials == [(PEERS[1], ["/ip4/11.0.0.1/tcp/1"])] and not library.hung_up
    await trio.sleep(2 * STRANGER_S)
    assert library.hung_up == [PEERS[1]] and len(library.dials) == 1


async def test_a_peer_that_stays_connected_for_months_is_not_forgotten(
    autojump_clock: Any, discovery: Discovery, library: Library, book: AddressBook
) -> None:
    library.members = {PEERS[1]}
    book.add(PEERS[1], ["/ip4/11.0.0.1/tcp/1"], trio.current_time())
    library.connect(PEERS[1], "inbound")
    await trio.sleep(2)
    began, book.changed = book.known[PEERS[1]].last_success, False
    await trio.sleep(CONNECTED_EVERY_S + 2)
    assert book.known[PEERS[1]].last_success >= began + CONNECTED_EVERY_S and book.changed


async def test_idle_dialled_connections_end_and_inbound_connections_stay(
    autojump_clock: Any, discovery: Discovery, library: Library
) -> None:
    library.members = set(PEERS[1 : TARGET_MEMBERS + 2])
    for peer in library.members:
        library.connect(peer, "inbound")
    library.connect(PEERS[12], "outbound")
    library.connect(PEERS[14], "inbound")
    await trio.sleep(DHT_IDLE_S / 2)
    assert await discovery.reach(PEERS[12])
    await trio.sleep(DHT_IDLE_S / 2 - 4)
    assert not library.hung_up
    await trio.sleep(8)
    assert library.hung_up == [PEERS[12]]


async def test_a_small_swarm_keeps_members_and_disconnects_strangers_of_the_dht(
    autojump_clock: Any, discovery: Discovery, library: Library
) -> None:
    library.members = {PEERS[12]}
    library.connect(PEERS[12], "outbound")
    library.connect(PEERS[14], "outbound")
    library.connect(PEERS[15], "inbound")
    await trio.sleep(2 * DHT_IDLE_S - 5)
    assert not library.hung_up
    await trio.sleep(10)
    assert library.hung_up == [PEERS[14]]


async def test_a_peer_that_returned_is_not_treated_as_an_idle_connection(
    autojump_clock: Any, discovery: Discovery, library: Library
) -> None:
    library.connect(PEERS[12], "outbound")
    await trio.sleep(5)
    del library.open[PEERS[12]]
    await trio.sleep(DHT_IDLE_S)
    library.members = set(PEERS[1 : TARGET_MEMBERS + 2])
    for peer in [PEERS[12], *library.members]:
        library.connect(peer, "inbound")
    await trio.sleep(5)
    assert not library.hung_up


async def test_a_provider_without_addresses_is_dialled_through_its_relay(
    autojump_clock: Any, discovery: Discovery, library: Library, book: AddressBook
) -> None:
    library.there = {PEERS[2], PEERS[3]}
    library.connect(PEERS[1], "inbound")
    near = ["/ip4/11.0.0.3/tcp/1"]
    library.records = [
        AddressRecord(PEERS[0], ["/ip4/11.0.0.9/tcp/1"]),
        AddressRecord(PEERS[2], [], relayed=True),
    ]
    library.records += [AddressRecord(PEERS[3], near, teller=PEERS[1], source="11.0")] * 2
    await trio.sleep(10)
    assert (PEERS[2], ()) in library.dials and PEERS[2] in discovery.connected and TOPIC in library.provided
    assert PEERS[3] in book.known and PEERS[0] not in book.known


async def test_a_peer_is_dialled_once_for_all_questions_and_never_while_banned(
    autojump_clock: Any, discovery: Discovery, library: Library, book: AddressBook
) -> None:
    library.there, reached = {PEERS[1], PEERS[13]}, list[bool]()

    async def reach(peer: PeerId) -> None:
        reached.append(await discovery.reach(peer))

    async with trio.open_nursery() as several:
        for peer in (PEERS[1], PEERS[1], PEERS[1], PEERS[13], PEERS[14]):
            several.start_soon(reach, peer)
    assert sorted(reached) == [False] * 2 + [True] * 3
    assert sorted(peer for peer, _ in library.dials) == sorted([PEERS[1], PEERS[14]])
    library.connect(PEERS[13], "inbound")
    assert not await discovery.reach(PEERS[13])


@pytest.mark.parametrize(("members", "turns"), [(TARGET_MEMBERS, (25, 40)), (TARGET_MEMBERS + 1, (7, 18))])
async def test_a_node_with_enough_members_rarely_asks_the_dht(
    autojump_clock: Any, discovery: Discovery, library: Library, members: int, turns: tuple[int, int]
) -> None:
    """Otherwise a whole swarm would ask the same 20 nodes every two minutes, and fill their 500 places."""
    library.members = set(PEERS[1 : members + 1])
    for peer in library.members:
        library.connect(peer, "inbound")
    await trio.sleep(3600)
    assert turns[0] <= len(library.provided) <= turns[1]
