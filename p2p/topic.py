"""The GossipSub topic of a swarm.

The topic contains the swarm's name and digest, so nodes of swarms with another name or digest never meet.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

ASK = "/swarmd/ask/1"  # the protocol of questions and answers (`p2p.engines.request_response`)
_WORD = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class Topic:
    """A swarm's name and digest. `str(topic)` is its GossipSub topic, `/swarmd/1/<name>/<digest>`.

    Raises:
        ValueError: the name or the digest has other characters than a-z, 0-9 and -, or is too long.
    """

    name: str
    # Covers everything that peers must agree on: the curriculum's questions and the wire version.
    digest: str

    def __post_init__(self) -> None:
        for part in (self.name, self.digest):
            if not _WORD.fullmatch(part):
                raise ValueError(
                    f"{part!r} cannot be part of a topic: use a-z, 0-9 and -, at most 64 letters"
                )

    def __str__(self) -> str:
        return f"/swarmd/1/{self.name}/{self.digest}"

    @cached_property
    def swarm_id(self) -> bytes:
        """The 16 bytes in every frame that name its swarm, so that it cannot be replayed in another swarm."""
        return sha256(str(self).encode()).digest()[:16]

    @cached_property
    def provider_key(self) -> bytes:
        """The DHT key of the members' provider records: a SHA-256 multihash, as libp2p requires."""
        return b"\x12\x20" + sha256(b"swarmd:" + str(self).encode()).digest()
