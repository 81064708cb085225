"""Finding a judge: whose word counts, where it may send us, and the way through real engines."""

import itertools
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio

from p2p.engines import engine
from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from p2p.member import QueuedMember
from p2p.topic import Topic
from p2p.types import Handlers, P2pEngine, Peer, PeerId, PeerRequest
from swarmd.daemon.judging import discovery
from swarmd.daemon.judging.discovery import (
    MAX_URLS,
    Found,
    JudgeAdvertiser,
    JudgeSearch,
    advertised,
    choose,
    judges_topic,
    pack,
    unpack,
    usable,
)
from swarmd.errors import ConfigError
from swarmd.testing import TIMEOUT_S, memory_member, until

TOPIC = Topic("main", "0123456789abcdef")
A, B, C = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2, 3))
JUDGE, OTHER = "https://judge.example", "https://other.example:8443"


def test_advertised_urls_are_understood_up_to_the_limit() -> None:
    assert unpack(pack([JUDGE, OTHER])) == [JUDGE, OTHER] and unpack(b"") == []
    for urls in (["https://a.example"] * (MAX_URLS + 1), ["https://" + "a" * 200], [""]):
        with pytest.raises(ValueError, match="at most"):
            pack(urls)


NO_ANSWERS = [
    pack([JUDGE])[:-1],
    pack([JUDGE]) + b"\x05",
    pack([JUDGE]) * (MAX_URLS + 1),
    b"\x03\xff\xff\xff",
    b"\x00",
    b"\x0cftp://a.examp",
    b"\xc9" + b"https://" + b"a" * 193,
    b"\x20https://me:secret@judge.example/",
]


@pytest.mark.parametrize("message", NO_ANSWERS)
def test_malformed_answers_name_no_judge(message: bytes) -> None:
    assert unpack(message) == []


EVERYWHERE = f"{JUDGE} https://judge.example. https://11.0.0.1:8400"
NEAR = "http://127.0.0.1:8400 http://[::1]:8400"
NOWHERE = """http://judge.example http://11.0.0.1 https://192.168.1.1 https://10.0.0.1 https://[fe80::1]
    https://localhost https://nas.local https://metadata.google.internal https://0.0.0.0
    https://224.0.0.1 https://198.18.0.1
    https://metadata.google.internal. https://localhost. https://router
    https://0x7f000001 https://0x7f.0.0.0x1 https://127.0.0.0x1 https://nas.home.arpa"""


@pytest.mark.parametrize(
    "urls, far, near", [(EVERYWHERE, True, True), (NEAR, False, True), (NOWHERE, False, False)]
)
def test_urls_from_peers_lead_only_to_public_hosts(urls: str, far: bool, near: bool) -> None:
    for url in urls.split():
        assert (usable(url, same_machine=False), usable(url, same_machine=True)) == (far, near), url


class Names(trio.abc.HostnameResolver):
    def __init__(self, **names: list[str]) -> None:
        self._names = names

    async def getaddrinfo(
        self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in self._names:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self._names[name]]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


async def test_a_name_leads_to_public_addresses_or_nowhere() -> None:
    mixed = ["11.0.0.1", "127.0.0.1"]
    before = trio.socket.set_custom_hostname_resolver(
        Names(
            good=["11.0.0.1", "2a00::1"],
            mixed=mixed,
            inside=["10.1.2.3"],
            metadata=["169.254.169.254"],
            six=["::ffff:127.0.0.1"],
        )
    )
    try:
        assert await discovery.public_addresses("good", 443) == ["11.0.0.1", "2a00::1"]
        for name in ("mixed", "inside", "metadata", "six", "nobody"):
            with pytest.raises(OSError, match=r"no public address|unknown"):
                await discovery.public_addresses(name, 443)
    finally:
        trio.socket.set_custom_hostname_resolver(before)


@pytest.mark.parametrize(
    "told, trusted, chosen",
    [
        ([], [], None),
        ([(A, JUDGE)], [], Found(JUDGE, (A,))),
        ([(A, OTHER), (B, JUDGE), (C, JUDGE)], [], Found(JUDGE, (B, C))),
        ([(A, OTHER), (B, JUDGE), (C, JUDGE)], [A], Found(OTHER, (A,))),  # the operator named A
        ([(A, OTHER), (B, JUDGE)], [], Found(JUDGE, (B,))),
        ([(A, OTHER), (A, OTHER), (B, JUDGE)], [], Found(JUDGE, (B,))),  # saying it twice does not help
    ],
)
def test_the_judge_of_most_bootstrap_peers_is_chosen(
    told: list[tuple[PeerId, str]], trusted: list[PeerId], chosen: Found | None
) -> None:
    assert choose(told, trusted) == chosen


@pytest.mark.parametrize(
    "urls",
    [
        ["http://judge.example"],
        ["judge.example"],
        ["https://192.168.1.1"],
        [JUDGE] * 5,
        ["https://" + "a" * 250],
    ],
)
def test_urls_that_cannot_be_advertised(urls: list[str]) -> None:
    with pytest.raises(ConfigError, match="--judge"):
        advertised(urls)


def test_no_swarm_shares_the_judges_topic() -> None:
    assert (
        judges_topic(TOPIC)
        == judges_topic(Topic("another", TOPIC.digest))
        != judges_topic(Topic("main", "0" * 16))
    )
    assert judges_topic(TOPIC).digest != TOPIC.digest and len(judges_topic(TOPIC).digest) != 16


# Through engines. The members are on this machine, so a judge on loopback counts.

HERE = "http://127.0.0.1:8400"


def build_memory() -> Callable[[Identity, Sequence[str]], Callable[[Handlers], P2pEngine]]:
    swarm = MemorySwarm()
    return lambda identity, bootstrap: lambda handlers: swarm.join(identity.peer_id, handlers)


def build_real(identity: Identity, bootstrap: Sequence[str]) -> Callable[[Handlers], P2pEngine]:
    options: dict[str, Any] = {
        "listen": ["/ip4/127.0.0.1/tcp/0"],
        "bootstrap": bootstrap,
        "addressbook": None,
    }
    return lambda handlers: engine("libp2p")(
        identity, TOPIC, handlers, clock=time.time, rng=random.Random(1), **options
    )


@pytest.mark.parametrize("net", ["memory", pytest.param("libp2p", marks=pytest.mark.net)])
async def test_a_node_finds_the_judge_that_a_third_one_tells_of(
    net: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "FIRST_S", 0.5)
    url = JUDGE if net == "memory" else HERE  # in memory there are no addresses, so nobody is on this machine
    build = build_memory() if net == "memory" else build_real
    identities = [Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3)]
    bootstrap: list[str] = []
    members = []
    async with trio.open_nursery() as nursery:
        for identity in identities:
            member = QueuedMember(
                identity, TOPIC, build(identity, bootstrap), sequence=itertools.count(), clock=time.time
            )
            addresses = await nursery.start(member.run) if net != "memory" else nursery.start_soon(member.run)
            bootstrap = bootstrap or list(addresses or [])
            members.append(member)
        advertiser, search = JudgeAdvertiser(members[1], [url]), JudgeSearch(members[2], ())
        assert (
            search.document()["url"] == "auto"
            and "no peer of this swarm advertises" in search.document()["cause"]
        )
        members[1].answers[PeerRequest.JUDGES] = advertiser.answer
        nursery.start_soon(advertiser.run)
        with trio.fail_after(TIMEOUT_S):
            assert await search.run() == Found(url, (B,))
        assert [peer["id"] for peer in search.document()["advertised_by"]] == [B]
        nursery.cancel_scope.cancel()


async def test_a_judge_on_this_machine_is_not_taken_from_afar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FIRST_S", 0.01)
    swarm = MemorySwarm()
    members = [memory_member(swarm, n, time.time, topic=TOPIC) for n in (1, 2)]
    afar = Peer(members[0].identity.peer_id, "/ip4/11.0.0.1/tcp/4001", "outbound", 0.0)
    monkeypatch.setattr(members[1].engine, "peers", lambda: [afar])
    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(member.run)
        advertiser = JudgeAdvertiser(members[0], [HERE])
        asked: list[bytes] = []
        members[0].answers[PeerRequest.JUDGES] = lambda peer, message: (
            asked.append(message) or advertiser.answer(peer, message)
        )  # type: ignore[func-returns-value]
        nursery.start_soon(advertiser.run)
        search = JudgeSearch(members[1], ())
        nursery.start_soon(search.run)
        await until(lambda: len(asked) >= 2 or search.found is not None)
        assert search.found is None
        nursery.cancel_scope.cancel()
