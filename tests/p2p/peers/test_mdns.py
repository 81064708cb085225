"""Discovery on the local network.

The tests parse announcements, and let two members find each other by real multicast.
"""

import ipaddress
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.identity import Identity
from p2p.peers import mdns
from p2p.peers.mdns import MAX_ADDRESSES, Mdns, own_networks, read_text, swarm_tag, text_of
from p2p.topic import Topic
from p2p.types import PeerId
from tests.doubles import until

ME, THEM = (Identity(bytes([n]) * 32).peer_id for n in (1, 2))
TOPIC = Topic("main", "0123456789abcdef")
TAG = swarm_tag(TOPIC)
HOUSE = [ipaddress.ip_network("192.168.2.0/24"), ipaddress.ip_network("fd00::/64")]
HERE = f"/ip4/192.168.2.10/tcp/4001/p2p/{THEM}"


def strings(*texts: bytes) -> bytes:
    return b"".join(bytes([len(text)]) + text for text in texts)


def test_an_announcement_has_libp2ps_format_without_the_swarms_name() -> None:
    data = text_of([TAG], [HERE])
    assert data == strings(f"swarmd={TAG}".encode(), f"dnsaddr={HERE}".encode())
    assert b"main" not in data and len(TAG) == 16
    six = f"/ip6/fd00::2/tcp/4001/p2p/{THEM}"
    assert read_text(text_of([TAG], [HERE, six]), [TAG], HOUSE) == (
        THEM,
        ["/ip4/192.168.2.10/tcp/4001", "/ip6/fd00::2/tcp/4001"],
    )


@pytest.mark.parametrize(
    "data",
    [
        text_of([swarm_tag(Topic("main", "another"))], [HERE]),
        strings(f"dnsaddr={HERE}".encode()),  # an announcement of another libp2p program
        text_of([TAG], [HERE, f"/ip4/192.168.2.11/tcp/4001/p2p/{ME}"]),  # addresses of two peers
    ],
)
def test_an_announcement_of_another_swarm_or_of_two_peers_is_refused(data: bytes) -> None:
    assert read_text(data, [TAG], HOUSE) is None


@pytest.mark.parametrize(
    "address",
    [
        f"/ip4/11.0.0.1/tcp/4001/p2p/{THEM}",
        f"/ip4/192.168.3.10/tcp/4001/p2p/{THEM}",
        f"/ip4/127.0.0.1/tcp/4001/p2p/{THEM}",
        f"/ip6/fe80::1/tcp/4001/p2p/{THEM}",
        f"/dns/router.lan/tcp/4001/p2p/{THEM}",
        f"/ip4/192.168.2.10/udp/4001/quic-v1/p2p/{THEM}",
        f"/ip4/192.168.2.10/tcp/0/p2p/{THEM}",
        "/ip4/192.168.2.10/tcp/4001",
        "/ip4/192.168.2.10/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    ],
)
def test_only_addresses_on_this_machines_networks_count(address: str) -> None:
    assert read_text(text_of([TAG], [address]), [TAG], HOUSE) is None
    assert read_text(text_of([TAG], [address, HERE]), [TAG], HOUSE) == (THEM, ["/ip4/192.168.2.10/tcp/4001"])


def test_few_addresses_of_an_announcement_are_read() -> None:
    many = [f"/ip4/192.168.2.10/tcp/{port}/p2p/{THEM}" for port in range(1, 200)]
    assert len(read_text(text_of([TAG], many), [TAG], HOUSE)[1]) == MAX_ADDRESSES  # type: ignore[index]
    flood = strings(f"swarmd={TAG}".encode(), *(f"dnsaddr={address}".encode() for address in many))
    assert len(read_text(flood, [TAG], HOUSE)[1]) < 4 * MAX_ADDRESSES  # type: ignore[index]


@given(st.binary(max_size=400), st.booleans())
@settings(max_examples=300, derandomize=True, deadline=None)
def test_any_bytes_parse_as_an_announcement_or_as_none(data: bytes, ours: bool) -> None:
    found = read_text(
        (strings(f"swarmd={TAG}".encode(), b"dnsaddr=" + HERE.encode()[:40]) if ours else b"") + data,
        [TAG],
        HOUSE,
    )
    assert found is None


def test_loopback_and_link_local_networks_do_not_count() -> None:
    for address, network in own_networks().items():
        assert ipaddress.ip_address(address) in network and not network.is_loopback


# Real multicast on this machine's network.


def addresses_of(peer: PeerId, port: int) -> list[str]:
    return [
        f"/ip4/{host}/tcp/{port}/p2p/{peer}"
        for host, network in own_networks().items()
        if network.version == 4
    ]


class Ear:
    def __init__(self, me: PeerId, port: int, topic: Topic = TOPIC) -> None:
        self.heard: dict[PeerId, Sequence[str]] = {}
        self.mdns = Mdns([topic], me, lambda: addresses_of(me, port), self._note)

    def _note(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self.heard[peer] = addresses


@pytest.mark.net
async def test_two_nodes_find_each_other_by_mdns_and_notice_when_one_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not addresses_of(ME, 1):
        pytest.skip("this machine has no network but loopback")
    one, two, stranger = (
        Ear(ME, 4001),
        Ear(THEM, 4002),
        Ear(Identity(b"\3" * 32).peer_id, 4003, Topic("other", "0")),
    )
    async with trio.open_nursery() as nursery:
        for ear in (one, two, stranger):
            nursery.start_soon(ear.mdns.run)
        with trio.move_on_after(15) as waited:
            await until(lambda: one.heard and two.heard)
        nursery.cancel_scope.cancel()
    if waited.cancelled_caught:
        pytest.skip(f"multicast does not work here: {caplog.text or 'nothing was heard'}")
    assert set(one.heard) == {THEM} and set(two.heard) == {ME} and not stranger.heard
    assert all(address.endswith("/tcp/4002") for address in one.heard[THEM])


async def test_a_node_on_loopback_announces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing may be opened")

    monkeypatch.setattr(Mdns, "_open", refuse)
    nothing = Mdns(
        [TOPIC], ME, lambda: [f"/ip4/127.0.0.1/tcp/1/p2p/{ME}", "/memory/x"], lambda peer, addresses: None
    )
    with trio.move_on_after(0.2) as waiting:
        await nothing.run()
    assert waiting.cancelled_caught


async def test_a_multicast_failure_is_logged_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: Any,
    nursery: trio.Nursery,
) -> None:
    tries = [trio.Event(), trio.Event(), trio.Event()]

    def fail(*_: object) -> None:
        trio.from_thread.run_sync(next(each for each in tries if not each.is_set()).set)
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(mdns, "own_networks", lambda: {"192.168.2.10": HOUSE[0]})
    monkeypatch.setattr(Mdns, "_open", fail)
    with caplog.at_level(logging.WARNING):
        nursery.start_soon(
            Mdns([TOPIC], ME, lambda: [HERE.replace(THEM, ME)], lambda peer, addresses: None).run
        )
        await tries[-1].wait()
    [said] = caplog.messages
    assert "Address already in use" in said and 'swarm.mdns = "off"' in said
