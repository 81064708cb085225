"""py-libp2p's Kademlia for provider records, with bounds on what a peer may ask and have us keep."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import trio
from libp2p.kad_dht import kad_dht, peer_routing, provider_store
from libp2p.kad_dht.common import BUCKET_SIZE
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.peerinfo import PeerInfo
from libp2p.records.validator import NamespacedValidator

from p2p.engines.libp2p.metering import MeteredStream
from p2p.engines.libp2p.peerstore import bounded

# 20 providers and 20 closer peers, with all that `peerstore` keeps of each.
MAX_MESSAGE_BYTES = 192 * 1024
# Streams served at once, in all and of one peer.
MAX_STREAMS, MAX_STREAMS_EACH = 64, 4
# The longest life of one stream. p2pd keeps its own open for the next question, and opens another after.
STREAM_S = 30.0
# What a read costs (`metering`). A question takes three, so a peer may ask 50 a second.
READ_COST = 20.0
# Keys of provider records.
MAX_KEYS = 1024
# Another may take the place of a provider that was silent for so long; members announce each half hour.
SILENT_S = 3600.0

for module in (kad_dht, peer_routing, provider_store):
    module.MAX_DHT_MESSAGE_SIZE = MAX_MESSAGE_BYTES  # the library takes 4 MiB


class Dht(KadDHT):  # type: ignore[misc]  # the library is not typed for us
    """py-libp2p's DHT, for provider records alone.

    The library takes any value under any key, 50,000 of 1 MiB: here none, as nothing of ours uses them. It
    serves 12 streams at once, however long nothing comes on them.

    charge: called with a peer and the cost of what it sent; cuts it off where that is too much.
    """

    def __init__(self, host: Any, charge: Callable[[Any, float], object]) -> None:
        nothing = NamespacedValidator({}, strict_validation=True)
        super().__init__(
            host, DHTMode.SERVER, validator=nothing, validator_changed=True, strict_validation=True
        )
        self.provider_store = BoundedProviders(host=host, peer_routing=self.peer_routing)
        self._inbound_limiter = trio.CapacityLimiter(MAX_STREAMS)
        self._charge = charge
        self._served: Counter[Any] = Counter()  # peer -> streams

    async def handle_stream(self, stream: Any) -> None:
        peer = stream.muxed_conn.peer_id
        if self._served[peer] >= MAX_STREAMS_EACH:
            await stream.reset()
            return
        self._served[peer] += 1
        try:
            with trio.move_on_after(STREAM_S):
                await super().handle_stream(MeteredStream(stream, lambda peer: self._charge(peer, READ_COST)))
                return
            await stream.reset()
        finally:
            self._served[peer] -= 1
            if not self._served[peer]:
                del self._served[peer]


class BoundedProviders(ProviderStore):  # type: ignore[misc]
    """A provider store that drops the keys that nobody has announced for longest.

    Members announce theirs again and again. For the same reason those that stopped make room for others: the
    library keeps the first 20 of a key for two days, so a swarm's newer members were not found.
    """

    def add_provider(self, key: bytes, provider: Any) -> None:
        held = self.providers[key] = self.providers.pop(key, {})  # now the newest
        if len(held) >= BUCKET_SIZE:
            for name in [name for name, record in held.items() if time.time() - record.timestamp > SILENT_S]:
                del held[name]
        super().add_provider(key, PeerInfo(provider.peer_id, bounded(provider.addrs)))
        while len(self.providers) > MAX_KEYS:
            del self.providers[next(iter(self.providers))]
