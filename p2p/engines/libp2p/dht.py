"""py-libp2p's Kademlia DHT for provider records, and its peer store, with limits on entries from peers.

Any node can send us records about any other, in messages of several MB.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import trio
from libp2p.identity import update
from libp2p.kad_dht import kad_dht, peer_routing, provider_store
from libp2p.kad_dht.common import BUCKET_SIZE
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStore
from libp2p.records.validator import NamespacedValidator
from multiaddr.exceptions import Error as MultiaddrError

from p2p.admission.inbound_slots import who_leaves
from p2p.engines.libp2p.network import circuit, remote_host
from p2p.engines.libp2p.streams import MeteredStream
from p2p.netgroup import share_group_of_host
from p2p.rate_limit import counted

# Maximum number of addresses of one peer; our nodes announce fewer than ten.
MAX_ADDRESSES = 16
# Maximum number of protocols of one peer; our nodes have about twenty.
MAX_PROTOCOLS = 64
# Maximum bytes of one address (104 at most through a relay), and letters of a protocol's name.
MAX_LENGTH = 128
# Maximum bytes of a peer id; ids of Ed25519 and RSA keys have fewer than 42.
MAX_ID_BYTES = 64
# Maximum bytes of a signed peer record.
MAX_RECORD_BYTES = 2048


class BoundedPeerStore(PeerStore):  # type: ignore[misc]  # the library is not typed for us
    """A peer store with limits. The library keeps all addresses, and compares a new one with each."""

    # Whether a peer's entry must stay in a full store, because the peer is connected or is this node.
    keeps: Callable[[Any], Any] = staticmethod(lambda _: False)

    def add_addrs(self, peer_id: Any, addrs: Sequence[Any], ttl: int = 0) -> None:
        """Add addresses; over MAX_ADDRESSES the oldest are dropped."""
        super().add_addrs(peer_id, bounded(addrs), ttl)
        del self.peer_data_map[peer_id].addrs[:-MAX_ADDRESSES]

    def add_protocols(self, peer_id: Any, protocols: Sequence[str]) -> None:
        """Add at most MAX_PROTOCOLS, because one message of a peer can name half a million protocols."""
        super().add_protocols(
            peer_id, [name for name in protocols[:MAX_PROTOCOLS] if len(name) <= MAX_LENGTH]
        )

    def _enforce_peer_limit(self) -> None:
        """Drop the oldest entries that `keeps` does not protect.

        The library also drops connected peers, whose protocols are never sent again. So after a thousand
        peers were named to us, we no longer knew that connected peers are relays. It also sorts the whole
        store for each address.
        """
        others = (peer for peer in self.peer_data_map if not self.keeps(peer))
        for peer in [*itertools.islice(others, max(0, len(self.peer_data_map) - self.max_peers))]:
            self.peer_record_map.pop(peer, None)
            del self.peer_data_map[peer]

    def consume_peer_record(self, envelope: Any, ttl: int) -> bool:
        """Keep a peer's newest record, and return True for an older one.

        js-libp2p signs a new record for each node that asks. For an older record the library would ignore the
        peer that was named with it.
        """
        if len(envelope.raw_payload) > MAX_RECORD_BYTES:
            return False
        record = envelope.record()
        held = self.peer_record_map.get(record.peer_id)
        older = held is not None and bool(held.seq > record.seq)
        return older or bool(super().consume_peer_record(envelope, ttl))


def bounded(addresses: Sequence[Any]) -> list[Any]:
    """Return the valid addresses, at most MAX_ADDRESSES.

    The library accepts any bytes as an address, and raises an error when it converts them to text.
    """
    return [
        address
        for address in addresses[:MAX_ADDRESSES]
        if len(address.to_bytes()) <= MAX_LENGTH and _readable(address)
    ]


# Patches the library, which caches the last thousand addresses from identify messages, each up to 1 MiB.
_parsed = update._safe_parse_multiaddr_cached
update._safe_parse_multiaddr_cached = lambda raw: _parsed(raw) if len(raw) <= MAX_LENGTH else None


def _readable(address: Any) -> bool:
    try:
        return bool(str(address))
    except (MultiaddrError, ValueError, LookupError):
        return False


# 20 providers and 20 closer peers, each with the most addresses that the peer store keeps.
MAX_MESSAGE_BYTES = 192 * 1024
# Maximum number of streams served at the same time, in all and for one peer.
MAX_STREAMS, MAX_STREAMS_EACH = 64, 4
# Longest life of one stream. p2pd keeps its stream open for the next question, and then opens another one.
STREAM_S = 30.0
# Cost of a read (`metering`). A question takes three reads, so a peer may ask 50 a second.
READ_COST = 20.0
# Maximum number of keys of provider records. A key with BUCKET_SIZE providers, each with MAX_ADDRESSES of
# MAX_LENGTH, takes 80 KB.
MAX_KEYS = 256


class BoundedId(ID):  # type: ignore[misc]  # the library is not typed for us
    """A peer id from a message. Raises ValueError if it is longer than MAX_ID_BYTES.

    The library writes ids to the log, and base58 takes a minute for an id that fills a message.
    """

    def __init__(self, peer_id_bytes: bytes) -> None:
        if len(peer_id_bytes) > MAX_ID_BYTES:
            raise ValueError(f"peer id too long: {len(peer_id_bytes):,} bytes (limit {MAX_ID_BYTES})")
        super().__init__(peer_id_bytes)


for module in (kad_dht, peer_routing, provider_store):
    module.ID = BoundedId
    module.MAX_DHT_MESSAGE_SIZE = MAX_MESSAGE_BYTES  # the library allows 4 MiB


class Dht(KadDHT):  # type: ignore[misc]  # the library is not typed for us
    """py-libp2p's DHT, limited to provider records.

    The library stores any value under any key, 50,000 of up to 1 MiB. We use no values, so all are refused
    here. The library also serves only 12 streams at once, and has no timeout for idle ones.

    charge: called with a peer and a cost; disconnects the peer if it exceeds its limit.
    """

    def __init__(self, host: Any, charge: Callable[[Any, float], object]) -> None:
        super().__init__(
            host,
            DHTMode.SERVER,
            validator=NamespacedValidator({}, strict_validation=True),
            validator_changed=True,
            strict_validation=True,
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
        with counted(self._served, peer):
            with trio.move_on_after(STREAM_S):
                await super().handle_stream(MeteredStream(stream, lambda peer: self._charge(peer, READ_COST)))
                return
            await stream.reset()


class BoundedProviders(ProviderStore):  # type: ignore[misc]
    """A provider store in which no network group can push out the other groups.

    The library keeps the first 20 providers of a key, which renew their records again and again. So all nodes
    of a large swarm would find only these 20, whose inbound slots are taken. Here a new provider replaces the
    oldest.
    """

    def add_provider(self, key: bytes, provider: Any) -> None:
        # Move the key to the end, as the newest.
        held = self.providers[key] = self.providers.pop(key, {})
        name, group = str(provider.peer_id), self._group_of(provider.peer_id)
        if len(held) >= BUCKET_SIZE and name not in held:
            # Shares are by network group: an attacker with twenty keys on one network has one place among
            # members of twenty groups.
            del held[who_leaves({one: record.group for one, record in held.items()}, group)]
        super().add_provider(key, PeerInfo(provider.peer_id, bounded(provider.addrs)))
        held[name].group = group
        if len(self.providers) > MAX_KEYS:
            # A key belongs to the group of its first provider. The group with the most keys loses its oldest.
            first = {key: next(iter(held.values())).group for key, held in self.providers.items()}
            largest = Counter(first.values()).most_common(1)[0][0]
            del self.providers[next(key for key in first if first[key] == largest)]

    def _group_of(self, peer: Any) -> str:
        """Return the network group of a peer's connection; through a relay, the relay's address."""
        for connection in self.host.get_network().get_connections(peer):
            through = circuit(connection)
            return through.address if through else share_group_of_host(remote_host(connection)) or ""
        return ""
