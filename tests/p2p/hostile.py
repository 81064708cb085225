"""A hostile peer that uses the library directly."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import multiaddr
from libp2p.peer.peerinfo import info_from_p2p_addr

from p2p.address import parse_listen
from p2p.engines.libp2p.stack import Stack, open_stack
from p2p.identity import Identity
from p2p.types import Verdict
from tests.p2p.real import TOPIC


@asynccontextmanager
async def hostile_peer(address: str, n: int = 66, *, meet: bool = True) -> AsyncIterator[tuple[Stack, Any]]:
    """Connect the library to a victim; yield its stack and the victim's id.

    n: number of the key. meet: wait until both speak pubsub.
    """
    listen = [parse_listen("/ip4/127.0.0.1/tcp/0")]
    identity = Identity(bytes([n]) * 32)
    async with open_stack(
        identity, [TOPIC], lambda frame, via, topics: Verdict.ACCEPT, listen, time.time
    ) as stack:
        target = info_from_p2p_addr(multiaddr.Multiaddr(address))
        await stack.host.connect(target)
        if meet:
            await stack.pubsub.wait_for_peer(target.peer_id, 20)
        yield stack, target.peer_id
