"""Diagnoses isolation: why a node hears no peer, or what else is wrong with its swarm, and what to do. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2p.types import Reason
from swarmd.daemon.reachability_report import bootstrap_remedy

_NOT_A_CAUSE = (Reason.DUPLICATE, Reason.OWN_ECHO)  # of every swarm


@dataclass(frozen=True, slots=True)
class Trouble:
    cause: str
    remedy: str

    def document(self) -> dict[str, str]:
        return {"cause": self.cause, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class Facts:
    """What `isolation_watch` found out about a node that has heard no peer for a minute."""

    name: str  # the swarm's
    curriculum: str
    connected: int = 0  # members
    helpers: int = 0  # of them, those that say that they train nothing
    companions: int = 0  # other members of our curriculum that somebody sees, at least
    others: Mapping[str, int] = field(default_factory=dict)  # another curriculum -> nodes of it that somebody sees
    bootstrap: Sequence[Mapping[str, Any]] = ()  # `network_survey.who_answers` of each address, with "address"
    refused: Mapping[Reason, int] = field(default_factory=dict)  # frames, since somebody was heard last
    shards: int = 1


def why_alone(facts: Facts) -> Trouble:
    """The most likely cause of hearing no peer."""
    if facts.others and not facts.companions:
        return _another_curriculum(facts)
    if not facts.connected:
        return _nobody_connected(facts)
    if (found := _main_reason(facts)) is not None:
        return found
    if facts.helpers >= facts.connected:
        return Trouble(
            f"no peer is heard: {_nodes(facts.connected, 'bootstrap node')} is connected, which trains nothing, and no other node of "
            f"{facts.curriculum}",
            "wait: others are found as they come",
        )
    if facts.shards > 1:
        return Trouble(
            f"no peer is heard in our part of the swarm, one of {facts.shards}: {_nodes(facts.connected, 'member')} connected",
            "wait: the node looks for the others by itself, which may take some minutes",
        )
    return Trouble(
        f"no peer is heard: {_nodes(facts.connected, 'member')} connected, and none has shared anything for a minute",
        "wait: their rounds may be long, or they are paused; swarmd peers shows who they are",
    )


def twin_trouble(later: bool) -> Trouble:
    """Of a node beside which another lives with the same key."""
    what = (
        "it started earlier, so this one stays out of the swarm until it stops"
        if later
        else "it started later, and stays out of the swarm until this one stops"
    )
    return Trouble(
        f"another node runs with this node's key: {what}",
        "stop one of the two; a second node needs a --state-dir of its own, and a copied one must lose its identity.key",
    )


def dead_bootstrap(entry: Mapping[str, Any]) -> Trouble:
    """Of an address that does not answer."""
    return Trouble(f"bootstrap address {entry['address']} does not answer: {entry['says']}", bootstrap_remedy(entry))


def _another_curriculum(facts: Facts) -> Trouble:
    there = ", ".join(f"{_nodes(count, 'node')} of {name}" for name, count in sorted(facts.others.items()))
    known = [name for name in facts.others if " " not in name]
    remedy = f'wait for nodes of {facts.curriculum}, or train with those that are there: swarm.curriculum = "{known[0]}"' if known else ""
    return Trouble(
        f"no peer is heard: in swarm {facts.name} there is only {there}, and this node is of {facts.curriculum}",
        remedy or f"wait for nodes of {facts.curriculum}, or see that all run the same version of swarmd and have the same tasks",
    )


def _nobody_connected(facts: Facts) -> Trouble:
    if not facts.bootstrap:
        return Trouble(
            "no peer is heard: no bootstrap address is set, and no member was found on the local network",
            "ask the swarm's people for an address, and start with --bootstrap",
        )
    dead = [entry for entry in facts.bootstrap if not entry["answers"]]
    if len(dead) == len(facts.bootstrap):
        trouble = dead_bootstrap(dead[0])
        more = f", and {_nodes(len(dead) - 1, 'other')} neither" if len(dead) > 1 else ""
        return Trouble(f"no peer is heard: {trouble.cause}{more}", trouble.remedy)
    return Trouble(
        f"no peer is heard: the bootstrap address answers, and no member of swarm {facts.name}, {facts.curriculum}, is connected",
        "wait for others, or check that they have the same swarm.name, curriculum and version of swarmd: swarmd doctor network",
    )


def _main_reason(facts: Facts) -> Trouble | None:
    refused = {reason: count for reason, count in facts.refused.items() if count and reason not in _NOT_A_CAUSE}
    if not refused:
        return None
    reason = max(refused, key=lambda reason: (refused[reason], reason.value))
    return Trouble(
        f"no peer is heard: {_nodes(facts.connected, 'member')} connected, and what came was refused: {refused[reason]} {reason.value}",
        reason.remedy or "swarmd status counts what is refused; docs/admission.md says why",
    )


def _nodes(count: int, word: str) -> str:
    return f"{count} {word}" + ("s" if count != 1 else "")
