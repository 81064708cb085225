"""Limits on slow readers by network. Pure. The rate limit of requests is in `p2p.rate_limit`."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)


class SlowReaders(Generic[R]):
    """Connections with a response that is not yet read. Limited per network and in all, so memory is bounded."""

    def __init__(self, of_a_network: int, of_all: int) -> None:
        self._of_a_network, self._of_all = of_a_network, of_all
        self._networks: OrderedDict[R, str] = OrderedDict()  # the one that has waited longest first

    def __len__(self) -> int:
        return len(self._networks)

    def begin(self, reader: R, network: str) -> R | None:
        """`reader` is slow from now on. Returns the reader to cut off, if any: the longest waiting of its network, or of all."""
        if reader in self._networks:
            return None
        self._networks[reader] = network
        near = [other for other, theirs in self._networks.items() if theirs == network]
        if len(near) > self._of_a_network:
            return self._drop(near[0])
        return self._drop(next(iter(self._networks))) if len(self._networks) > self._of_all else None

    def end(self, reader: R) -> None:
        self._networks.pop(reader, None)

    def _drop(self, reader: R) -> R:
        del self._networks[reader]
        return reader
