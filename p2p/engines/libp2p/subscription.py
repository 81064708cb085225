"""The shards that an engine subscribes to."""

from collections.abc import Collection

import trio

from p2p.topic import SHARDS


class Subscription:
    """wanted: the shards to be in besides shard 0. `changed` is set when it changes, and replaced."""

    def __init__(self) -> None:
        self.wanted: frozenset[int] = frozenset()
        self.changed = trio.Event()

    def change(self, shards: Collection[int]) -> None:
        """Raises ValueError on what is no shard."""
        if outside := [shard for shard in shards if not 0 <= shard < SHARDS]:
            raise ValueError(f"shard {outside[0]} is outside 0 to {SHARDS - 1}")
        wanted = frozenset(shards) - {0}
        if wanted != self.wanted:
            self.wanted = wanted
            self.changed.set()
            self.changed = trio.Event()
