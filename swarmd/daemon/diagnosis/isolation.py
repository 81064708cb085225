"""Diagnoses isolation: why a node hears no peer, or what else is wrong with its swarm, and what to do. Pure.

`certain` finds what needs no waiting; `why_alone` adds what only silence tells, and silence may be the long
rounds of others.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2p.peers.introduction import HELPING, PAUSED, SHOWN_CHARACTERS, Introduced
from p2p.types import PeerId, Reason
from swarmd.daemon.diagnosis.reachability_report import bootstrap_remedy
from swarmd.terminal import printable

# How far a clock may be behind. Frames older than `replays.WINDOW_S` are refused.
BEHIND_S = 240.0
# How far a clock may be ahead. Frames from more than `replays.AHEAD_S` in the future are refused, and an
# answer takes its time.
AHEAD_S = 20.0
_NOT_A_CAUSE = {Reason.DUPLICATE, Reason.OWN_ECHO, Reason.OLD}  # of every swarm
# One such frame shows that its author runs something else
_SURE_OF = (Reason.OTHER_MODALITY, Reason.WRONG_VERSION)


@dataclass(frozen=True, slots=True)
class Trouble:
    cause: str
    remedy: str

    def document(self) -> dict[str, str]:
        return {"cause": self.cause, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that `isolation_watch` gathers for a diagnosis."""

    name: str  # the swarm's
    curriculum: str
    digest: str = ""  # of our swarm
    runs: str = ""  # version of swarmd, and of what makes the tasks
    heard: bool = False  # somebody is heard
    offline: bool = False  # this machine has no route to any bootstrap address, nor to the internet
    connected: int = 0  # members
    helpers: int = 0  # of them, those that say that they train nothing
    unknown: int = 0  # of them, those that said nothing when asked: they may train
    companions: int = 0  # other members of our curriculum that somebody sees, at least
    others: Mapping[str, int] = field(default_factory=dict)  # nodes that peers see, by other curriculum
    answered: Collection[PeerId] = ()  # of the peers asked, those that answered at all
    introduced: Sequence[Introduced] = ()  # what peers say of themselves
    bootstrap: Sequence[Mapping[str, Any]] = ()  # `who_answers` of each address, with "address"
    hung_up: Sequence[str] = ()  # bootstrap addresses that answer, and end each connection of ours
    refused: Mapping[Reason, int] = field(default_factory=dict)  # frames, since somebody was heard last
    settled: bool = True  # there was time to connect, and to be seen by others


def certain(facts: Facts) -> Trouble | None:
    """Return a cause that later facts cannot change, or None.

    While peers are heard, only wrong clocks and refusals by others count.
    """
    if (found := _clock(facts) or _refused(facts)) is not None or facts.heard:
        return found
    if not facts.settled:
        return _offline(facts) or _nobody_answers(facts)
    if facts.others and not facts.companions and not facts.unknown:
        return _another_curriculum(facts)
    if not facts.connected:
        return _nobody_connected(facts)
    if facts.companions or facts.unknown:
        return _main_reason(facts, _SURE_OF) or _all_paused(facts)
    if facts.helpers >= facts.connected:
        return Trouble(
            f"no peer is heard: {_nodes(facts.connected, 'bootstrap node')} connected, which train nothing,"
            f" and no other node of {facts.curriculum}",
            "wait: others are found as they come",
        )
    return None


def why_alone(facts: Facts) -> Trouble:
    """Return the most likely cause of hearing no peer for long."""
    if (found := certain(facts) or _main_reason(facts)) is not None:
        return found
    return Trouble(
        f"no peer is heard: {_nodes(facts.connected, 'member')} connected, and none has shared anything for a"
        " quarter of an hour",
        "wait: their rounds may be long, or nothing that they write is worth sharing; swarmd peers shows who"
        " they are",
    )


def twin_trouble(later: bool) -> Trouble:
    """Describe the trouble of two running nodes with the same key."""
    what = (
        "it started earlier, so this one stays out of the swarm until it stops"
        if later
        else "it started later, and stays out of the swarm until this one stops"
    )
    return Trouble(
        f"another node runs with this node's key: {what}",
        "stop one of the two; a second node needs a --state-dir of its own, and a copied one must lose its"
        " identity.key",
    )


def dead_bootstrap(entry: Mapping[str, Any]) -> Trouble:
    """Describe a bootstrap address that does not answer."""
    return Trouble(
        f"bootstrap address {where(entry)} does not answer: {entry['says']}", bootstrap_remedy(entry)
    )


def where(entry: Mapping[str, Any]) -> str:
    """Shorten a bootstrap address for a sentence: leave out the peer id, which is longer than the rest."""
    return str(entry["address"]).partition("/p2p/")[0] or str(entry["address"])


def _offline(facts: Facts) -> Trouble | None:
    if not facts.offline or facts.connected:
        return None
    return Trouble(
        "no peer is heard: this machine is offline",
        "connect it to a network; until then the node trains alone, and it finds the others by itself",
    )


def _clock(facts: Facts) -> Trouble | None:
    """Blame our clock if those of all peers asked differ from it in the same direction."""
    ahead = [said.ahead for said in facts.introduced]
    behind = all(seconds > BEHIND_S for seconds in ahead)
    if not ahead or not (behind or all(seconds < -AHEAD_S for seconds in ahead)):
        return None
    least = min(map(abs, ahead))
    off = f"{least:.0f} seconds" if least < 100 else f"{least / 60:.0f} minutes"
    off += " behind" if behind else " ahead"
    if len(ahead) > 1:
        return Trouble(
            f"this machine's clock is {off}, say all {len(ahead)} peers asked: frames are refused for it",
            "set the clock, best by NTP; the node needs no restart",
        )
    if facts.heard:
        # One peer's word does not count against frames of others that arrived in time.
        return None
    return Trouble(
        f"this machine's clock is {off} of that of the only peer that could be asked: frames are refused"
        " for it",
        "let NTP set this clock; if it was right, the other's has to be set",
    )


def _refused(facts: Facts) -> Trouble | None:
    """Return the trouble of being refused as misbehaving, or None.

    One peer's word is enough only while nobody is heard.
    """
    ours = [
        one for one in facts.introduced if one.digest == facts.digest and one.doing != HELPING
    ] or facts.introduced
    if ours and all(one.refuses for one in ours) and (len(ours) > 1 or not facts.heard):
        who = f"all {len(ours)} peers asked" if len(ours) > 1 else "the only peer that could be asked"
        return Trouble(
            f"what this node sends is refused by {who}: for them it is one that misbehaves",
            "wait: half of what they hold against it is forgotten in half an hour. If it comes again, update"
            " swarmd; docs/admission.md says what counts",
        )
    if facts.hung_up and not facts.connected and not facts.heard:
        return Trouble(
            f"bootstrap address {facts.hung_up[0]} answers, and ends each connection of this node: it has"
            " banned this node, or has no room",
            "wait: a ban ends by itself, most within 16 minutes; or ask for another bootstrap address",
        )
    return None


def _another_curriculum(facts: Facts) -> Trouble:
    there = ", ".join(f"{_nodes(count, 'node')} of {name}" for name, count in sorted(facts.others.items()))
    known = [name for name in facts.others if " " not in name]
    remedy = (
        f"wait for nodes of {facts.curriculum}, or train with those that are there: swarm.curriculum ="
        f' "{known[0]}"'
        if known
        else ""
    )
    ours = facts.curriculum if known or not facts.runs else f"{facts.curriculum} with {facts.runs}"
    return Trouble(
        f"no peer is heard: in swarm {facts.name} there is only {there}, and this node is of {ours}",
        remedy
        or f"wait for nodes of {facts.curriculum}, or see that all run the same version of swarmd"
        " and have the same tasks",
    )


def another(said: Introduced) -> str:
    """Name a swarm whose digest this version of swarmd does not know."""
    return f"{printable(said.trains)[:SHOWN_CHARACTERS]} with {printable(said.runs)[:SHOWN_CHARACTERS]}"


def _nobody_answers(facts: Facts) -> Trouble | None:
    """Return the trouble that no bootstrap address answers, if that is so."""
    dead = [entry for entry in facts.bootstrap if not entry["answers"]]
    if facts.connected or not dead or len(dead) < len(facts.bootstrap):
        return None
    trouble = dead_bootstrap(dead[0])
    more = f", and {_nodes(len(dead) - 1, 'other')} neither" if len(dead) > 1 else ""
    return Trouble(f"no peer is heard: {trouble.cause}{more}", trouble.remedy)


def _nobody_connected(facts: Facts) -> Trouble:
    if (offline := _offline(facts)) is not None:
        return offline
    if not facts.bootstrap:
        return Trouble(
            "no peer is heard: no bootstrap address is set, and no member was found on the local network",
            "ask a friend who is in it for `swarmd invite`, and join with what it prints; or wait for others"
            " to join you",
        )
    return _nobody_answers(facts) or Trouble(
        f"no peer is heard: the bootstrap address answers, and no member of swarm {facts.name},"
        f" {facts.curriculum}, is connected",
        "wait for others, or check that they have the same swarm.name, curriculum and version of swarmd:"
        " swarmd doctor network",
    )


def _all_paused(facts: Facts) -> Trouble | None:
    doing = [said.doing for said in facts.introduced if said.doing != HELPING]
    if facts.unknown or not doing or any(what != PAUSED for what in doing):
        return None
    return Trouble(
        f"no peer is heard: {_nodes(len(doing), 'node')} connected, and paused",
        "wait: they share again when they are resumed",
    )


def _main_reason(facts: Facts, of: Collection[Reason] = frozenset(Reason) - _NOT_A_CAUSE) -> Trouble | None:
    refused = {reason: count for reason, count in facts.refused.items() if count and reason in of}
    if not refused:
        return None
    reason = max(refused, key=lambda reason: (refused[reason], reason.value))
    return Trouble(
        f"no peer is heard: {_nodes(facts.connected, 'member')} connected, and what came was refused:"
        f" {refused[reason]} {reason.value}",
        reason.remedy or "swarmd status counts what is refused; docs/admission.md says why",
    )


def _nodes(count: int, word: str) -> str:
    return f"{count} {word}" + ("s" if count != 1 else "")
