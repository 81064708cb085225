"""py-libp2p's peer store with bounds on what is kept of one peer.

Anybody may tell us of anyone, in messages of megabytes.
"""

from collections.abc import Sequence
from typing import Any

from libp2p.peer.peerstore import PeerStore
from multiaddr.exceptions import Error as MultiaddrError

# Addresses of one peer; ours announce fewer than ten.
MAX_ADDRESSES = 16
# Protocols of one peer; ours speak some twenty.
MAX_PROTOCOLS = 64
# Bytes of one address (one through a relay has 104 at most), and letters of a protocol's name.
MAX_LENGTH = 128
# A peer's signed addresses.
MAX_RECORD_BYTES = 2048


class BoundedPeerStore(PeerStore):  # type: ignore[misc]  # the library is not typed for us
    """A store with bounds. The library keeps all addresses, and compares each with all others."""

    _own: Any = None  # whose keys we have

    def add_addrs(self, peer_id: Any, addrs: Sequence[Any], ttl: int = 0) -> None:
        """Add addresses; of too many the newest stay."""
        super().add_addrs(peer_id, bounded(addrs), ttl)
        if peer_id in self.peer_data_map:  # in a full store one without addresses is gone at once
            del self.peer_data_map[peer_id].addrs[:-MAX_ADDRESSES]

    def add_protocols(self, peer_id: Any, protocols: Sequence[str]) -> None:
        """Add at most MAX_PROTOCOLS. A peer may name half a million in one message, over one connection."""
        super().add_protocols(
            peer_id, [name for name in protocols[:MAX_PROTOCOLS] if len(name) <= MAX_LENGTH]
        )

    def add_key_pair(self, peer_id: Any, key_pair: Any) -> None:
        super().add_key_pair(peer_id, key_pair)
        self._own = peer_id

    def _enforce_peer_limit(self) -> None:
        """Enforce the limit without our own entry, which holds our key.

        The library first drops entries without addresses, and ours would be the first. It is left out of the
        count as well. Put back into a full store it would be one too many: each added address would sort all
        peers and drop another one.
        """
        own = self.peer_data_map.pop(self._own, None)
        super()._enforce_peer_limit()
        if own is not None:
            self.peer_data_map[self._own] = own

    def consume_peer_record(self, envelope: Any, ttl: int) -> bool:
        return len(envelope.raw_payload) <= MAX_RECORD_BYTES and super().consume_peer_record(envelope, ttl)


def bounded(addresses: Sequence[Any]) -> list[Any]:
    """Leave out what is no address.

    The library takes any bytes, and raises where they are made text.
    """
    return [
        address
        for address in addresses[:MAX_ADDRESSES]
        if len(address.to_bytes()) <= MAX_LENGTH and _readable(address)
    ]


def _readable(address: Any) -> bool:
    try:
        return bool(str(address))
    except (MultiaddrError, ValueError, LookupError):
        return False
