"""The curriculum and the digest of a swarm.

The digest is part of the topic, so swarms with different digests never meet. It covers what makes the
questions. How answers are scored is each node's own affair.
"""

import hashlib

from swarmd.config.config import NodeConfig
from swarmd.exchange import wire
from swarmd.tasks.curriculum import CURRICULA, SAPO_9, TINY_9, Curriculum
from swarmd.tasks.own import find_curriculum


def curriculum_of(config: NodeConfig) -> Curriculum:
    """Return the curriculum: for `auto` the easy one with the tiny models, the paper's with the rest.

    Own tasks are loaded, once (`own`). Raises ConfigError.
    """
    if config.swarm.curriculum != "auto":
        return find_curriculum(config.swarm.curriculum)
    return TINY_9 if config.model.name.startswith("tiny") else SAPO_9


def swarm_digest(of: Curriculum) -> str:
    """Return 16 hex digits over the curriculum's questions, ReasoningGYM's version and the wire version."""
    return hashlib.sha256(f"{of.questions} wire {wire.VERSION}".encode()).hexdigest()[:16]


def curriculum_named(digest: str) -> str | None:
    """Return the name of the curriculum with this swarm digest, the faithful one of two.

    None if this version of swarmd has none.
    """
    return next((of.name for of in CURRICULA.values() if swarm_digest(of) == digest), None)
