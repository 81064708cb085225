"""Limits dials of addresses that peers named, which may belong to a victim. Pure; `now` is an argument."""

from p2p.address import Endpoint
from p2p.netgroup import LOCAL, MIN_PORT, block_of_host, group_of_host
from p2p.rate_limit import TokenBuckets

# Unanswered dials of addresses in one block (/24 of IPv4, /48 of IPv6): rate and burst.
UNANSWERED_PER_S, UNANSWERED_AT_ONCE = 1 / 60, 8.0
# In blocks of local networks this many dials count as one, because many nodes there meet each other at once.
LOCAL_FACTOR = 16.0
_MAX_BLOCKS = 4096


class Dials:
    """Limits unanswered dials for each block of addresses.

    Blocks are counted because an attacker can name one victim with many ports, keys and addresses. A dial
    that the named peer answers is refunded.
    """

    def __init__(self) -> None:
        self._unanswered = TokenBuckets[str](UNANSWERED_PER_S, UNANSWERED_AT_ONCE, _MAX_BLOCKS)

    def begin(self, endpoint: Endpoint | None, now: float) -> bool:
        """Return whether to dial an unproved endpoint, and charge its block. Names are never dialled."""
        block = block_of_host(endpoint.host) if endpoint is not None else None
        if endpoint is None or block is None or endpoint.port < MIN_PORT:
            return False
        return not self._unanswered.of(block, now).wait(now, _cost(endpoint))

    def proved(self, endpoint: Endpoint, now: float) -> None:
        """Refund a dial: the named peer answered."""
        if (block := block_of_host(endpoint.host)) is not None:
            self._unanswered.of(block, now).spend(-_cost(endpoint))


def _cost(endpoint: Endpoint) -> float:
    return 1 / LOCAL_FACTOR if group_of_host(endpoint.host) == LOCAL else 1.0
