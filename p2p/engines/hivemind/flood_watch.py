"""Finds those who flood p2pd with what it drops by itself: bad signatures, gossip about nothing, floods of other protocols.

p2pd says nothing of these, so whoever sends them would never be cut off. The kernel knows what came over each connection, and
`p2p.engines.hivemind.unexplained_bytes` how much of it can have been of use.
"""

import logging
from collections.abc import Callable, Collection

import psutil
import trio

from p2p.address import parse_endpoint
from p2p.engines.hivemind.discovery import direct, texts
from p2p.engines.hivemind.p2pd import P2pd, peer_of
from p2p.engines.hivemind.p2pd_sockets import sockets_of
from p2p.engines.hivemind.unexplained_bytes import AROUND, Unexplained
from p2p.types import PeerId

EVERY = 0.5  # seconds

log = logging.getLogger(__name__)


class Watch:
    """cut_off: called with each peer that sends too much."""

    def __init__(self, p2pd: P2pd, cut_off: Callable[[PeerId], None]) -> None:
        self._p2pd, self._cut_off = p2pd, cut_off
        self._connections = Unexplained[int]()  # by the socket's inode
        self._of_use = 0  # bytes, since the last look at it

    def came(self, size: int) -> None:
        """A message, or an answer to us, of so many bytes."""
        self._of_use += size + AROUND

    async def run(self) -> None:
        """Until cancelled. Where the kernel does not tell, nobody is cut off, and the log says so."""
        read, at = 0, trio.current_time()
        try:
            process = psutil.Process(self._p2pd.pid)
            while True:
                await trio.sleep(EVERY)
                before, since = read, at
                read, at = process.io_counters().read_chars, trio.current_time()  # all that it read, from sockets and from files
                suspected = self._connections.passed(at - since, read - before, self._of_use)
                self._of_use = 0
                if suspected:  # else the sockets, which are dearer to look at, are left alone
                    await self._look()
        except (OSError, psutil.Error) as error:
            log.info("what p2pd's connections bring cannot be seen (%s): who floods it with junk will not be found", error)

    async def _look(self) -> None:
        sockets = sockets_of(self._p2pd.pid)
        over = self._connections.over({found.inode: found.received for found in sockets})
        if over:
            await self._cut({(found.host, found.port) for found in sockets if found.inode in over})

    async def _cut(self, ends: Collection[tuple[str, int]]) -> None:
        """ends: the other sides of connections."""
        listed = (await self._p2pd.ask(type=self._p2pd.pb.Request.LIST_PEERS)).peers
        for info in listed:  # one of each connection
            peer = peer_of(info.id)
            there = [parse_endpoint(text) for text in direct(texts(info.addrs))]
            if peer is not None and any(end is not None and (end.host, end.port) in ends for end in there):
                self._cut_off(peer)
