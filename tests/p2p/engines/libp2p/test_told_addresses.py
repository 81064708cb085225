"""Fetching blobs from authors that no connected peer knows, by the addresses in their offers.

The members are real, on loopback, without the DHT, which names few of the authors in a swarm of thousands.
"""

from contextlib import suppress

import pytest
import trio

from p2p.blobs.blobs import pack
from p2p.engines import discovery
from p2p.engines.libp2p import circuits
from p2p.identity import Identity
from p2p.member import Member
from p2p.peers import addressbook
from p2p.types import PeerRequest, Unanswered
from swarmd.exchange.fetching import ASK_AGAIN_S
from tests.doubles import until
from tests.p2p.engines.libp2p.test_libp2p import started
from tests.p2p.real import SECONDS

pytestmark = pytest.mark.net
BLOB = pack(b"a rollout")


@pytest.fixture(autouse=True)
def an_internet_without_a_dht(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loopback count as the internet, and turn the DHT off."""
    monkeypatch.setattr(discovery, "DHT_FIRST_S", 1e9)
    monkeypatch.setattr(addressbook, "only_here", lambda _: False)
    monkeypatch.setattr(circuits, "is_public", lambda _: True)
    monkeypatch.setattr(circuits, "on_internet", lambda _: True)
    monkeypatch.setattr(circuits, "ASK_FIRST_S", 0.1)
    monkeypatch.setattr(circuits, "TICK_S", 0.1)


async def fetch(reader: Member, author: Member, at: str) -> bytes | None:
    author.blobs.put(BLOB)
    with trio.fail_after(SECONDS):
        question = PeerRequest.BLOBS.message(next(iter(author.blobs.held)))
        for _ in range(2):
            with suppress(Unanswered):
                return await reader.request(author.identity.peer_id, question, len(BLOB), at)
            await trio.sleep(ASK_AGAIN_S)
        return None


@pytest.mark.parametrize("home", [False, True], ids=["that can be dialled", "behind a relay"])
async def test_an_unknown_author_is_reached_by_the_address_in_its_offer(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, home: bool
) -> None:
    monkeypatch.setattr(circuits, "can_be_dialled", lambda _: not home)
    _, _, there = await started(nursery, 1)
    author, engine, address = await started(nursery, 2, there)
    await until(engine.reached_at)
    assert engine.reached_at() == (f"{there}/p2p-circuit" if home else address.split("/p2p/")[0])
    _, _, elsewhere = await started(nursery, 3)
    reader, reads, _ = await started(nursery, 4, elsewhere)
    await until(reader.peers)
    assert await fetch(reader, author, "") is None
    assert author.identity.peer_id not in reads._book.known
    assert await fetch(reader, author, engine.reached_at()) == BLOB
    through = [peer.address for peer in reader.peers() if peer.id == author.identity.peer_id]
    assert all(("/p2p-circuit" in address) == home for address in through)
    nursery.cancel_scope.cancel()


async def test_unknown_authors_are_recorded_at_a_limited_rate(nursery: trio.Nursery) -> None:
    """Otherwise an attacker with many keys could fill the address book and choose the dialled addresses."""
    _, engine, _ = await started(nursery, 1)
    for n in range(2, 250):
        engine.told_of(Identity(bytes([n]) * 32).peer_id, f"/ip4/11.{n}.0.1/tcp/4001")
    assert len(engine._book.known) <= addressbook.TOLD_AT_ONCE + 1
    nursery.cancel_scope.cancel()
