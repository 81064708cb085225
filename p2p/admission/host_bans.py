"""Bans hosts that keep producing banned peers. Pure; `now` is an argument.

A new key costs nothing, so a banned peer can return with another id; but a new address has a price. If
several peers from one address were banned, we accept no new connections from that address for a while. An
honest peer behind the same router keeps its connections, and we still dial it.
"""

import logging

from p2p.latest import Latest
from p2p.netgroup import machine_of_host
from p2p.rate_limit import RateLimit, TokenBuckets
from p2p.types import PeerId

# A host may have BANNED_AT_ONCE banned peers, and one more every ONE_MORE_S. Beyond that it is banned.
BANNED_AT_ONCE = 3.0
ONE_MORE_S = 600.0
_KNOWN = 1024
_BANNED = "banned peers"

log = logging.getLogger(__name__)


class HostBans:
    """Decides which hosts may connect to us."""

    def __init__(self) -> None:
        self._rate_limit = RateLimit({_BANNED: TokenBuckets(1 / ONE_MORE_S, BANNED_AT_ONCE)})
        self._known: Latest[PeerId, None] = Latest(_KNOWN)  # banned peers that are counted already

    def count(self, peer: PeerId, host: str, now: float) -> None:
        """Count a banned peer of this host, and ban the host if there were too many, with a warning.

        Each peer counts once.

        host: an IP address as text. If it is "" (unknown), nothing is counted.
        """
        if not host or self.knows(peer):
            return
        machine = machine_of_host(host)
        self._known[peer] = None
        if not self._rate_limit.pay(machine, now, _BANNED):
            log.warning(
                "several peers from %s were banned: new connections from there are refused for a while",
                machine,
            )

    def knows(self, peer: PeerId) -> bool:
        """Return whether this peer was counted."""
        return peer in self._known

    def admits(self, host: str, now: float) -> bool:
        return not self._rate_limit.banned(machine_of_host(host), now)
