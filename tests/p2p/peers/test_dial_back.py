"""Dial-back and the partial Noise handshake.

The tests check which addresses are dialled, how often, and which proofs are accepted.
"""

import ipaddress
import random
from collections.abc import Callable
from hashlib import sha256

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from p2p.peers.dial_back import (
    DIALS_AT_ONCE,
    KEPT_S,
    MAX_ASKED,
    PORTS,
    DialBack,
    DialBackReply,
    Outcome,
    answered,
    ask_members,
    can_be_dialled,
    question,
    seen_at,
    who_dials_back,
)
from p2p.peers.noise_probe import Handshake, NoPeer, knock
from p2p.types import Peer, PeerId
from tests.doubles import TIMEOUT_S, memory_member
from tests.p2p.real import real_engine

ASKER = Identity(bytes(32)).peer_id
OTHER = Identity(b"\1" * 32).peer_id
HOME = "/ip4/11.0.0.2/tcp/40123"


class World:
    """A member that is asked to dial back, its connected peers, and a record of its dials."""

    def __init__(
        self, addresses: dict[PeerId, str], behind: Callable[[str, int], PeerId | Exception]
    ) -> None:
        self.now = 1000.0
        self.dialled: list[tuple[str, int]] = []
        self.peers = [Peer(peer, address, "inbound", 0.0) for peer, address in addresses.items()]
        self._behind = behind
        self.dial_back = DialBack(lambda: self.peers, lambda: self.now, knock=self._knock)

    async def _knock(self, host: str, port: int) -> PeerId:
        self.dialled.append((host, port))
        found = self._behind(host, port)
        if isinstance(found, Exception):
            raise found
        return found

    async def asks(self, port: int, peer: PeerId = ASKER) -> DialBackReply | None:
        """Ask for a dial-back; return its final outcome."""
        while (
            said := answered(self.dial_back(peer, question(port)))
        ) is not None and said.outcome is Outcome.TRYING:
            await trio.testing.wait_all_tasks_blocked()
        return said


async def outcome(world: World, port: int = 4001, peer: PeerId = ASKER) -> Outcome:
    async with trio.open_nursery() as nursery:
        world.dial_back.nursery = nursery
        said = await world.asks(port, peer)
        nursery.cancel_scope.cancel()
    assert said is not None
    return said.outcome


@pytest.mark.parametrize("there", [ASKER, OTHER, NoPeer("no answer"), NoPeer("a web server")])
async def test_only_an_answer_with_the_requesters_key_counts_as_reached(
    there: PeerId | Exception,
) -> None:
    world = World({ASKER: HOME}, lambda host, port: there)
    assert await outcome(world) is (Outcome.REACHED if there == ASKER else Outcome.NOT_REACHED)
    assert world.dialled == [("11.0.0.2", 4001)]  # the address of the connection, with the requested port


@pytest.mark.parametrize(
    "address, port",
    [
        ("/ip4/11.0.0.1/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp/p2p-circuit", 4001),
        ("/dns/somewhere.example/tcp/4001", 4001),
        ("", 4001),
        (HOME, 0),
        (HOME, 22),
        (HOME, 1023),
    ],
)
async def test_dial_backs_cannot_probe_a_third_party(address: str, port: int) -> None:
    world = World({ASKER: address}, lambda host, port: ASKER)
    assert await outcome(world, port) is Outcome.REFUSED
    assert await outcome(world, 4001, OTHER) is Outcome.REFUSED  # OTHER is not connected
    assert world.dialled == []


async def test_dials_of_one_peer_and_of_all_peers_are_limited(nursery: trio.Nursery) -> None:
    peers = [Identity(bytes([n]) * 32).peer_id for n in range(2, 22)]
    world = World(
        {ASKER: HOME} | {peer: f"/ip4/11.1.0.{n}/tcp/1" for n, peer in enumerate(peers)},
        lambda host, port: NoPeer("no"),
    )
    world.dial_back.nursery = nursery
    said = [await world.asks(port) for port in range(5000, 5010)]
    assert [answer.outcome for answer in said if answer] == [Outcome.NOT_REACHED] * PORTS + [
        Outcome.REFUSED
    ] * (10 - PORTS)
    await world.asks(5000)
    assert len(world.dialled) == PORTS  # known results are repeated without a dial
    for peer in peers:
        await world.asks(4001, peer)
    assert len(world.dialled) == DIALS_AT_ONCE
    world.now += KEPT_S + 1
    assert (await world.asks(5009)) == DialBackReply(Outcome.NOT_REACHED, seen_at(world.peers[0]))


def test_nothing_is_dialled_while_the_node_does_not_run() -> None:
    world = World({ASKER: HOME}, lambda host, port: ASKER)
    assert world.dial_back(ASKER, question(4001)) == bytes([Outcome.REFUSED, 11, 0, 0, 2])
    assert str(seen_at(Peer(ASKER, "/ip6/::ffff:11.0.0.2/tcp/1", "inbound", 0.0))) == "11.0.0.2"
    for message in (b"", b"\3", b"\3\1", b"\3\1\2\3", b"\1\x0f\xa1"):  # not valid questions
        assert world.dial_back(ASKER, message) == b""
    for message in (b"", b"\x04", b"\xff\1\2\3\4", b"\2\1\2\3", b"\2" + bytes(18)):  # not valid answers
        assert answered(message) is None


@pytest.mark.parametrize(
    "said, reachable",
    [
        ([(Outcome.NOT_REACHED, "11.0.0.2"), (Outcome.REACHED, "11.0.0.2")], True),
        # The second member is on the node's network.
        ([(Outcome.NOT_REACHED, "11.0.0.2"), (Outcome.REACHED, "192.168.2.10")], False),
        ([(Outcome.REFUSED, "11.0.0.2"), (Outcome.REACHED, None)], None),
        # Members without IPv6 cannot dial the first address.
        ([(Outcome.REACHED, "2611::2"), (Outcome.NOT_REACHED, "11.0.0.2")], False),
        ([(Outcome.REACHED, "2611::2")], False),
        ([(Outcome.NOT_REACHED, "2611::2"), (Outcome.REACHED, "11.0.0.2")], True),
    ],
)
def test_only_members_outside_the_nodes_network_can_tell_if_it_is_reachable(
    said: list[tuple[Outcome, str | None]], reachable: bool | None
) -> None:
    replies = [DialBackReply(outcome, ipaddress.ip_address(seen) if seen else None) for outcome, seen in said]
    assert can_be_dialled(replies) is reachable


def test_ipv4_and_ipv6_members_are_asked_to_dial_back_distant_members_first() -> None:
    """Dialled members come next. The address of a member behind a relay does not count."""
    met = {
        "near": ("/ip4/192.168.2.10/tcp/4001", "outbound"),
        "far": ("/ip4/11.0.0.2/tcp/40123", "inbound"),
        "further": ("/ip4/12.0.0.2/tcp/40123", "inbound"),
        "we dialled": ("/ip4/13.0.0.2/tcp/4001", "outbound"),
        "by IPv6": ("/ip6/2611::2/tcp/40123", "inbound"),
        "relayed": (f"/ip4/14.0.0.2/tcp/4001/p2p/{OTHER}/p2p-circuit", "inbound"),
    }
    peers = [Peer(PeerId(name), *where, 0.0) for name, where in met.items()]
    asked = who_dials_back(peers, {"ip4": 4001, "ip6": 4006})
    assert list(asked.items()) == [("we dialled", 4001), ("by IPv6", 4006), ("far", 4001), ("further", 4001)]
    assert len(asked) == MAX_ASKED
    assert list(who_dials_back(peers[:2], {"ip4": 4001})) == ["far", "near"]
    assert who_dials_back(peers, {"ip6": 4006}) == {"by IPv6": 4006}


async def test_members_dial_each_other_back() -> None:
    swarm = MemorySwarm()
    members = [memory_member(swarm, n, lambda: 0.0) for n in (1, 2)]
    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(member.run)
        await trio.testing.wait_all_tasks_blocked()
        verdicts = await ask_members(
            members[0].engine.request, {members[1].identity.peer_id: 4001, OTHER: 4001}
        )
        nursery.cancel_scope.cancel()
    # In memory there are no addresses, so one member refuses; the other is not connected.
    assert verdicts == {members[1].identity.peer_id: DialBackReply(Outcome.REFUSED, None)}


async def knocked_at(*said: bytes) -> PeerId:
    """Probe a server that sends this and hangs up; return the outcome."""

    async def serve(stream: trio.SocketStream) -> None:
        for part in said:
            await stream.send_all(part)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        found: PeerId | NoPeer
        try:
            found = await knock("127.0.0.1", port, patience=TIMEOUT_S)
        except NoPeer as error:
            found = error
        nursery.cancel_scope.cancel()
    if isinstance(found, NoPeer):
        raise found
    return found


CHOSEN = b"\x13/multistream/1.0.0\n\x07/noise\n"


@pytest.mark.net
@pytest.mark.parametrize(
    "said, why",
    [
        ([], "hung up"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100)], "does not speak"),
        ([b"\x13/multistream/1.0.0\n\x03na\n" + bytes(100)], "does not speak"),  # Noise is not supported
        ([CHOSEN], "hung up"),
        ([CHOSEN, b"\x00\x00"], "too short"),
        ([CHOSEN, b"\xff\xff" + bytes(65535)], "too long"),
        ([CHOSEN, b"\x00\x60" + bytes(96)], "proves no peer id"),  # a key of small order
        ([CHOSEN, b"\x00\x70" + random.Random(0).randbytes(112)], "proves no peer id"),
    ],
)
async def test_a_listener_without_a_proof_is_not_the_peer(said: list[bytes], why: str) -> None:
    with pytest.raises(NoPeer, match=why):
        await knocked_at(*said)


@pytest.mark.net
async def test_an_address_without_a_listener_is_reported() -> None:
    with pytest.raises(NoPeer) as error:
        await knock("127.0.0.1", 1)
    assert "nothing listens" in str(error.value)


@pytest.mark.net
async def test_a_silent_listener_is_reported(nursery: trio.Nursery) -> None:
    listeners = await nursery.start(trio.serve_tcp, lambda stream: trio.sleep_forever(), 0)
    with pytest.raises(NoPeer):
        await knock("127.0.0.1", listeners[0].socket.getsockname()[1], patience=0.2)


class Responder:
    """The responder of Noise XX, up to its one message."""

    def __init__(self, first: bytes) -> None:
        self.static, ephemeral = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._hash = sha256(b"Noise_XX_25519_ChaChaPoly_SHA256").digest()
        self._chain, self._key = b"Noise_XX_25519_ChaChaPoly_SHA256", b""
        for data in (first, b"", ephemeral.public_key().public_bytes_raw()):
            self._hash = sha256(self._hash + data).digest()
        caller = X25519PublicKey.from_public_bytes(first)
        self._mix(ephemeral.exchange(caller))
        self._said = ephemeral.public_key().public_bytes_raw() + self._sealed(self.public)
        self._mix(self.static.exchange(caller))

    @property
    def public(self) -> bytes:
        return self.static.public_key().public_bytes_raw()

    def says(self, payload: bytes) -> bytes:
        return self._said + self._sealed(payload)

    def _mix(self, shared: bytes) -> None:
        made = HKDF(hashes.SHA256(), 64, self._chain, b"").derive(shared)
        self._chain, self._key = made[:32], made[32:]

    def _sealed(self, plain: bytes) -> bytes:
        secret = ChaCha20Poly1305(self._key).encrypt(bytes(12), plain, self._hash)
        self._hash = sha256(self._hash + secret).digest()
        return secret


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


ME = Identity(b"\5" * 32)
KEY = field(1, bytes.fromhex("08011220") + ME.public_key)


def sign(message: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(ME.seed).sign(message)


def test_a_signature_over_the_connections_key_is_accepted() -> None:
    handshake = Handshake()
    responder = Responder(handshake.first)
    signature = sign(b"noise-libp2p-static-key:" + responder.public)
    assert handshake.whose(responder.says(KEY + field(2, signature) + field(4, b"extensions"))) == ME.peer_id


@pytest.mark.parametrize(
    "payload",
    [
        lambda public: KEY,
        lambda public: (
            KEY + field(2, sign(b"noise-libp2p-static-key:" + bytes(32)))
        ),  # another connection's key
        lambda public: KEY + field(2, sign(public)),
        lambda public: (
            field(1, bytes.fromhex("08001220") + ME.public_key)
            + field(2, sign(b"noise-libp2p-static-key:" + public))
        ),
        lambda public: KEY[:-1],
        lambda public: b"\x08\x01" + KEY,
        lambda public: b"\x0a\xff\xff\xff\xff\x01",
        lambda public: b"",
    ],
    ids=[
        "no signature",
        "another's",
        "of something else",
        "another kind of key",
        "cut off",
        "a number",
        "endless",
        "nothing",
    ],
)
def test_a_signature_over_another_key_is_rejected(payload: Callable[[bytes], bytes]) -> None:
    handshake = Handshake()
    responder = Responder(handshake.first)
    with pytest.raises(NoPeer):
        handshake.whose(responder.says(payload(responder.public)))


@pytest.mark.net
@pytest.mark.parametrize("name", ["libp2p", pytest.param("hivemind", marks=pytest.mark.p2pd)])
async def test_both_engines_are_recognised(name: str, nursery: trio.Nursery) -> None:
    """A probed engine keeps running."""
    [address] = await nursery.start(real_engine(name, ME.seed[0]).run)
    for _ in range(3):
        assert await knock("127.0.0.1", int(address.split("/")[4]), patience=TIMEOUT_S) == ME.peer_id
