"""Which machine sends one hostile peer after another. Pure; `now` is an argument.

A new key costs nothing, so who was shut out comes back as somebody else, and is let in until he shows himself again. An address costs
something: where several peers that came from one had to be shut out, nobody is let in from there for a while. Who shares it with such
a neighbour, behind one router, keeps the connections that he has, and we dial him as before.
"""

import logging
from collections import OrderedDict

from p2p.netgroup import machine_of_host
from p2p.rate_limit import RateLimit
from p2p.types import PeerId

PEERS = 3.0  # that may be shut out at once,
EVERY = 600.0  # and one more in so many seconds,
CLOSED = 60.0  # before nobody is let in for so many, and for twice as long each time
_KNOWN = 1024

log = logging.getLogger(__name__)


class HostBans:
    """Who may come in, by where he comes from."""

    def __init__(self) -> None:
        self._rate_limit = RateLimit(rate=1 / EVERY, burst=PEERS, ban=CLOSED)
        self._known: OrderedDict[PeerId, None] = OrderedDict()  # who was charged for

    def count(self, peer: PeerId, host: str, now: float) -> None:
        """A peer was shut out that came from there: an IP address as text, or "" where that is not known, which counts for nothing. Each
        peer counts once: its own ban is for when it comes again. Says so where nobody else is let in now.
        """
        if not host or self.knows(peer):
            return
        machine = machine_of_host(host)
        self._known[peer] = None
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        if not self._rate_limit.pay(machine, now):
            log.warning("several peers that came from %s had to be shut out: nobody new is let in from there for a while", machine)

    def knows(self, peer: PeerId) -> bool:
        """Whether it was counted."""
        return peer in self._known

    def admits(self, host: str, now: float) -> bool:
        return not self._rate_limit.banned(machine_of_host(host), now)
