"""Dialler: peers with fresh keys answer every DHT question of a node with providers at addresses of third
parties, under many keys and ports, so that the node dials the third parties.

A real node and real hostile peers run on loopback. Dials of the third parties, whose addresses are public,
are counted but not carried out.
"""

import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.utils import encode_varint_prefixed
from libp2p.utils.varint import read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from p2p.admission.dials import UNANSWERED_AT_ONCE, UNANSWERED_PER_S
from p2p.engines import discovery
from p2p.netgroup import MIN_PORT, block_of_host
from tests.attacks.harness import Attack, show
from tests.p2p.hostile import hostile_peer
from tests.p2p.real import real_engine

# The n-th address of the third party: IPv4, the same address mapped to IPv6 or behind NAT64, and IPv6.
VICTIM = (
    "/ip4/11.5.5.{n}",
    "/ip6/::ffff:11.5.5.{n}",
    "/ip6/64:ff9b::b05:5{n:02x}",
    "/ip6/2600:5:5:{n}::1",
)
PORTS = (22, 80, 443, 1023, 4001, 8080, 50_000)
NAMED = 20  # providers in one answer


@dataclass
class Dialled:
    dials: int  # dials of third parties
    low_ports: int  # dials of ports of system services
    block: int  # dials of the address block that was dialled most
    seconds: float

    @property
    def beyond(self) -> float:
        """Return the dials of one block beyond the allowed number, plus all dials of low ports."""
        return self.low_ports + max(0.0, self.block - UNANSWERED_AT_ONCE - UNANSWERED_PER_S * self.seconds)


class ThirdParties:
    """Names third parties as providers, and counts the dials of them."""

    def __init__(self, seed: int) -> None:
        self._rng, self.dialled = random.Random(seed), Counter[tuple[str, int]]()
        self._open = trio.open_tcp_stream

    async def dial(self, host: str, port: int, **options: Any) -> Any:
        """Replace `trio.open_tcp_stream`."""
        if host.startswith("127."):
            return await self._open(host, port, **options)
        self.dialled[host, port] += 1
        raise OSError("a third party")

    def _peer(self) -> Message.Peer:
        name = ID.from_pubkey(create_new_key_pair(self._rng.randbytes(32)).public_key)
        at = [
            Multiaddr(f"{where.format(n=self._rng.randrange(1, 255))}/tcp/{self._rng.choice(PORTS)}")
            for where in self._rng.sample(VICTIM, 2)
        ]
        return Message.Peer(id=name.to_bytes(), addrs=[address.to_bytes() for address in at])

    async def answer(self, stream: Any) -> None:
        question = Message.FromString(await read_varint_prefixed_bytes_limited(stream, 1 << 20))
        said = Message(
            type=question.type,
            key=question.key,
            providerPeers=[self._peer() for _ in range(NAMED)],
            closerPeers=[self._peer() for _ in range(NAMED)],
        )
        await stream.write(encode_varint_prefixed(said.SerializeToString()))
        await stream.close()


async def no_dials(peer: Any) -> Any:
    raise SwarmException(f"{peer} is not dialled")


async def play(keys: int, seconds: float, seed: int) -> Dialled:
    parties = ThirdParties(seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(trio, "open_tcp_stream", parties.dial)
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            (address,) = await nursery.start(real_engine("libp2p", 1).run)
            for n in range(keys):
                hostile, _ = await stack.enter_async_context(hostile_peer(address, 66 + n))
                hostile.host.set_stream_handler(PROTOCOL_ID, parties.answer)
                # The hostile peers get the same answers from each other, but must not dial.
                hostile.host.get_network().dial_peer = no_dials
            begun = time.monotonic()
            await trio.sleep(seconds)
            blocks = Counter[str]()
            for (host, _), count in parties.dialled.items():
                blocks[block_of_host(host) or ""] += count
            nursery.cancel_scope.cancel()
    return Dialled(
        parties.dialled.total(),
        sum(count for (_, port), count in parties.dialled.items() if port < MIN_PORT),
        max(blocks.values(), default=0),
        time.monotonic() - begun,
    )


def attack(
    folder: Path, keys: int = 8, seconds: float = 150.0, hurry: bool = False, seed: int = 1
) -> Dialled:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if hurry:
            monkeypatch.setattr(discovery, "DHT_FIRST_S", 0.1)
            monkeypatch.setattr(discovery, "DHT_EVERY_S", 0.5)
        result = trio.run(play, keys, seconds, seed)
    show(f"dialler, {keys} keys", result)
    return result


@pytest.mark.net
def test_third_parties_are_dialled_only_as_often_as_allowed(tmp_path: Path) -> None:
    result = attack(tmp_path, keys=3, seconds=5.0, hurry=True)
    assert result.dials > 0 and result.beyond == 0


ATTACK = Attack(
    attack,
    {"beyond": 0.0},
    about={"hurry": "the node asks the DHT twice a second instead of every two minutes"},
)
