"""Being in the shards that we are to be in, on py-libp2p."""

import trio

from p2p.engines.common.lasting import Shards
from p2p.engines.libp2p.stack import Stack, drain
from p2p.topic import Topic


async def keep_subscribed(stack: Stack, topic: Topic, shards: Shards) -> None:
    """Enter and leave topics as `shards` says, until cancelled. The messages of each come through the validator."""
    async with trio.open_nursery() as nursery:
        inside: frozenset[int] = frozenset()
        while True:
            wanted, changed = shards.wanted, shards.changed
            for shard in inside - wanted:
                await stack.pubsub.leave(topic.of(shard))
            for shard in wanted - inside:
                nursery.start_soon(drain, await stack.pubsub.enter(topic.of(shard)))
            inside = wanted
            await changed.wait()
