"""The GossipSub topic of a swarm. Peers of another name, digest or shard subscribe to another topic, so they never meet."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256

SHARDS = 2**16
ASK = "/swarmd/ask/1"  # the protocol of questions and answers (`p2p.engines.libp2p.request_response`)
_SHARD = re.compile(r"0|[1-9][0-9]{0,4}")
_WORD = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class Topic:
    """`str(topic)` is the GossipSub topic, `/swarmd/1/<name>/<digest>/<shard>`. Raises ValueError on a part that is no word."""

    name: str
    digest: str  # of all that peers must agree on: curriculum, reasoning-gym version, wire version
    shard: int = 0

    def __post_init__(self) -> None:
        for part in (self.name, self.digest):
            if not _WORD.fullmatch(part):
                raise ValueError(f"{part!r} cannot be part of a topic: use a-z, 0-9 and -, at most 64 letters")
        if not 0 <= self.shard < SHARDS:
            raise ValueError(f"shard {self.shard} is outside 0 to {SHARDS - 1}")

    def __str__(self) -> str:
        return f"/swarmd/1/{self.name}/{self.digest}/{self.shard}"

    def of(self, shard: int) -> "Topic":
        """The same swarm's topic of another shard. Raises ValueError."""
        return replace(self, shard=shard)

    def shard_of(self, topics: Sequence[str]) -> int:
        """The first of this swarm's shards among the topics of a message; 0 where there is none."""
        return next((shard for topic in topics if (shard := self.shard_in(topic)) is not None), 0)

    def shard_in(self, topic: str) -> int | None:
        """Which shard of this swarm the topic is; None for another swarm's, and for what is none."""
        prefix = str(self).removesuffix(str(self.shard))
        shard = topic.removeprefix(prefix)
        return int(shard) if topic.startswith(prefix) and _SHARD.fullmatch(shard) and int(shard) < SHARDS else None

    @cached_property
    def swarm_id(self) -> bytes:
        """16 bytes in every frame for its swarm and shard: nobody can replay it in another."""
        return sha256(str(self).encode()).digest()[:16]

    @cached_property
    def provider_key(self) -> bytes:
        """The DHT key of the members' provider records: a SHA-256 multihash, as every libp2p program takes one."""
        return b"\x12\x20" + sha256(b"swarmd:" + str(self).encode()).digest()
