"""The curriculum and the digest of a swarm.

The digest is part of the topic, so swarms with different digests never meet. It covers everything that
determines the questions. It does not cover scoring, which each node decides for itself.
"""

import hashlib

from swarmd.config.config import NodeConfig
from swarmd.config.curriculum_name import BUILT_IN
from swarmd.config.invitation import Invitation
from swarmd.errors import ConfigError
from swarmd.exchange import wire
from swarmd.state.logs import installed_version
from swarmd.tasks.curriculum import CURRICULA, LADDER_9, TINY_9, Curriculum
from swarmd.tasks.own_tasks import find_curriculum


def curriculum_of(config: NodeConfig) -> Curriculum:
    """Return the curriculum: `auto` means TINY_9 for the tiny models and LADDER_9 for all other models.

    The operator's own tasks and reward are loaded, once (`tasks.own_tasks`). Raises ConfigError.
    """
    if (name := config.swarm.curriculum) == "auto":
        name = (TINY_9 if config.model.name.startswith("tiny") else LADDER_9).name
    found = find_curriculum(name, config.tasks.reward)
    if found.turns > 1 and (config.workers.processes > 1 or config.generate.engine != "own"):
        raise ConfigError(
            f"{found.name} has tasks of several turns, which only the trainer's own engine can answer. Leave"
            ' the section [workers] out, and set generate.engine to "own".'
        )
    return found


def swarm_digest(of: Curriculum) -> str:
    """Return 16 hex digits over the curriculum's questions and the wire version."""
    return hashlib.sha256(f"{of.questions} wire {wire.VERSION}".encode()).hexdigest()[:16]


def curriculum_named(digest: str) -> str | None:
    """Return the name of the built-in curriculum with this swarm digest; None if there is none.

    If two share the digest, the first in `CURRICULA` is returned.
    """
    return next((of.name for of in CURRICULA.values() if swarm_digest(of) == digest), None)


def require_same_swarm(invitation: Invitation, curriculum: Curriculum) -> None:
    """Raise ConfigError if a node with this curriculum would never meet the inviting swarm."""
    here, digest = curriculum.name, swarm_digest(curriculum)
    if invitation.digest in ("", digest):
        return
    versions = f"swarmd {installed_version()} with reasoning-gym {installed_version('reasoning-gym')}"
    if invitation.curriculum == here and here in BUILT_IN:
        raise ConfigError(
            f"the invitation is from another version: its questions of {here} differ from those of"
            f" {versions}, which this machine has. Update both nodes to the same version."
        )
    if invitation.curriculum == here:
        raise ConfigError(
            f"the invitation is for other tasks called {here}: its swarm has the digest {invitation.digest},"
            f" and your file makes {digest}. Get their file, and give it with --curriculum."
        )
    if invitation.curriculum in BUILT_IN:
        raise ConfigError(
            f"the invitation is for {invitation.curriculum}, and --curriculum says {here}: they never meet."
            " Leave one of the two out."
        )
    raise ConfigError(
        f"the invitation is for the tasks {invitation.curriculum}, which {versions} does not have: own tasks,"
        " or those of a newer version. Get the file from the person who invited you and name it with"
        " --curriculum, or update."
    )
