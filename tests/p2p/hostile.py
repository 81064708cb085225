"""A peer with the library in its hands and no manners."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import multiaddr
from libp2p.peer.peerinfo import info_from_p2p_addr

from p2p.address import parse_listen
from p2p.engines.libp2p.stack import Stack, open_stack
from p2p.identity import Identity
from p2p.topic import Topic
from p2p.types import Verdict


async def hostile_stack(
    topic: Topic, addresses: Sequence[str], attack: Callable[[Stack, Any], Awaitable[None]], n: int = 66, *, meet: bool = True
) -> None:
    """attack: called with the library and the victim's id, once they are connected. n: whose key. meet: wait until both speak pubsub."""
    listen = [parse_listen("/ip4/127.0.0.1/tcp/0")]
    identity = Identity.from_seed(bytes([n]) * 32)
    async with open_stack(identity, [topic], lambda frame, via, topics: Verdict.ACCEPT, listen, time.time) as stack:
        target = info_from_p2p_addr(multiaddr.Multiaddr(addresses[0]))
        await stack.host.connect(target)
        if meet:
            await stack.pubsub.wait_for_peer(target.peer_id, 20)
        await attack(stack, target.peer_id)
