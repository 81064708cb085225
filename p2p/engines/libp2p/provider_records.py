"""Provider records in py-libp2p's DHT, for `p2p.engines.libp2p.discovery`."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import trio
from libp2p.kad_dht.provider_store import ProviderStore

from p2p.engines.libp2p.discovery import AddressRecord
from p2p.engines.libp2p.network import direct
from p2p.engines.libp2p.peerstore import bounded
from p2p.engines.libp2p.stack import Stack
from p2p.topic import Topic
from p2p.types import PeerId, Unanswered

TIMEOUT = 20.0  # seconds
T = TypeVar("T")


class Libp2pProviderRecords:
    """Implements `ProviderRecords`. group_of: the network group that a peer's connection comes from. note: as in `Libp2pConnections`."""

    def __init__(self, stack: Stack, group_of: Callable[[Any], str], note: Callable[[PeerId, Sequence[str]], None]) -> None:
        self._stack, self._group_of, self._note = stack, group_of, note

    async def provide(self, topic: Topic) -> None:
        await _in_time(self._stack.dht.provider_store.provide(topic.provider_key))

    async def providers(self, topic: Topic) -> list[AddressRecord]:
        return await _in_time(self._providers(topic.provider_key))

    async def _providers(self, key: bytes) -> list[AddressRecord]:
        dht, host = self._stack.dht, self._stack.host
        for peer, connections in host.get_network().get_connections_map().items():
            if direct(connections):
                await dht.add_peer(peer)
        # A store of its own to look with: the DHT's answers from itself as soon as it holds one record, and that may be ours.
        lookup = _Lookup(host=host, peer_routing=dht.peer_routing)
        await lookup.find_providers(key)
        told = [*lookup.told, *((host.get_id(), info) for info in dht.provider_store.get_providers(key))]
        records = [
            AddressRecord(PeerId(str(info.peer_id)), [str(a) for a in bounded(info.addrs)], PeerId(str(teller)), self._group_of(teller))
            for teller, info in told
        ]
        for record in records:
            self._note(record.peer, record.addresses)
        return records


async def _in_time(call: Awaitable[T]) -> T:
    """Raises Unanswered."""
    with trio.move_on_after(TIMEOUT):
        try:
            return await call
        except Exception as error:  # any of the library's many
            raise Unanswered(f"the DHT failed: {error!r}") from None
    raise Unanswered(f"the DHT did not answer in {TIMEOUT:.0f} s")


class _Lookup(ProviderStore):  # type: ignore[misc]  # the library is not typed for us
    """Remembers who told what."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: list[tuple[Any, Any]] = []  # peer id, PeerInfo

    async def _get_providers_from_peer_with_closers(self, peer_id: Any, key: bytes) -> tuple[list[Any], list[Any]]:
        providers, closer = await super()._get_providers_from_peer_with_closers(peer_id, key)
        self.told += [(peer_id, info) for info in providers]
        return providers, closer
