"""Why a node is alone, refused or unreachable: each cause, how it is found, and its remedy. Pure.

The first row of CAUSES that fits is shown. `certain` returns causes that need no waiting. `why_alone` also
concludes from silence, which may only mean that other nodes' rounds are long. `reachability_report` uses the
rows of UNREACHABLE. `.venv/bin/python scripts/tables causes` prints the table in docs/p2p.md.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from p2p.address import own_ports
from p2p.peers.introduction import HELPING, PAUSED, SHOWN_CHARACTERS, Introduced
from p2p.types import PeerId, Reason
from swarmd.daemon.local_api.status_words import many
from swarmd.state.status import Trouble
from swarmd.terminal import printable

# Seconds that our clock may be behind. Peers refuse frames older than `replays.WINDOW_S`.
BEHIND_S = 240.0
# Seconds that our clock may be ahead. Peers refuse frames more than `replays.AHEAD_S` in the future; this
# limit is lower, because a peer's answer takes time to arrive.
AHEAD_S = 20.0
_NOT_A_CAUSE = {Reason.DUPLICATE, Reason.OWN_ECHO, Reason.OLD}  # refusals that occur in every swarm


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that `isolation_watch` gathers for a diagnosis."""

    name: str  # the swarm's name
    curriculum: str
    digest: str = ""  # digest of our swarm
    runs: str = ""  # our versions of swarmd and of the task library
    heard: bool = False  # whether any peer is heard
    # Whether this machine has no route to any bootstrap address or to the internet.
    offline: bool = False
    connected: int = 0  # connected members
    helpers: int = 0  # connected members that say that they train nothing
    # Connected members that did not answer; they may train.
    unknown: int = 0
    companions: int = 0  # lower bound of the other nodes of our curriculum that any peer sees
    others: Mapping[str, int] = field(default_factory=dict)  # nodes of other curricula seen by peers, by name
    introduced: Sequence[Introduced] = ()  # peers' answers about themselves
    bootstrap: Sequence[Mapping[str, Any]] = ()  # `who_answers` of each address, and its "address"
    # Refused frames since a peer was last heard.
    refused: Mapping[Reason, int] = field(default_factory=dict)
    settled: bool = True  # whether the node had time to connect and to be seen by peers


class Stage(IntEnum):
    """The stage from which a cause is shown; it stays shown at later stages."""

    HEARD = 0  # shown even while peers are heard
    AT_ONCE = 1  # shown at once when no peer is heard
    SETTLED = 2  # shown once the node had time to connect and to be seen
    PATIENT = 3  # shown when no peer was heard for longer than rounds take


# Values for the {names} in a row's texts; None if the row does not fit.
Blanks = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Cause:
    """A row of the table. The {names} in `says` and `remedy` are filled in."""

    says: str
    found: str  # how it is found
    remedy: str
    stage: Stage | None = None  # None: found elsewhere, and shown at once
    fits: Callable[[Facts], Blanks] = lambda _: None

    def trouble(self, **blanks: object) -> Trouble:
        return Trouble(self.says.format(**blanks), self.remedy.format(**blanks))


# Beginning of the cause that reports do not call bad: somebody has to found a swarm.
FIRST_HERE = "you are the first here"
TWIN = Cause(
    "another node runs with this node's key: {order}",
    "members show each node the other one's signed card",
    "stop one of the two: a second node needs another --state-dir; of a copy delete identity.key",
)
NO_ADDRESS = Cause(
    "no peer is heard: {why}",
    "no interface has an address of swarm.listen",
    'connect that network (the node tries again every 5 s), or set swarm.listen = ["/ip4/0.0.0.0/tcp/0"]',
)
DEAD = Cause(
    "bootstrap address {address} does not answer: {says}",
    "another key answers, the connection is refused, or nothing answers within 5 s",
    "ask its operator for the present address: the node is down, full, moved or has a new key, or a firewall"
    " stops outgoing TCP connections to that port",
)


def port_taken(listen: Sequence[str], ports: Collection[int], peer: PeerId) -> Trouble | None:
    """Describe that another program uses the node's own port; None if the node has it or needs none.

    Args:
        ports: the ports at which it listens; first the one that other nodes should dial first.
    """
    own = own_ports(peer)[0]
    if not ports or own in ports or not all(text.endswith("/tcp/0") for text in listen):
        return None
    return PORT_TAKEN.trouble(port=next(iter(ports)), own=own)


def twin_trouble(later: bool) -> Trouble:
    """Describe the trouble of two running nodes with the same key."""
    return TWIN.trouble(
        order=(
            "it started earlier, so this one stays out of the swarm until it stops"
            if later
            else "it started later, and stays out of the swarm until this one stops"
        )
    )


def dead_bootstrap(entry: Mapping[str, Any]) -> Trouble:
    """Describe a bootstrap address that does not answer."""
    # Leave out the peer id, which is longer than the rest.
    return DEAD.trouble(address=entry["address"].partition("/p2p/")[0], says=entry["says"])


def another(said: Introduced) -> str:
    """Name a swarm whose digest this version of swarmd does not know."""
    trains, runs = printable(said.trains)[:SHOWN_CHARACTERS], printable(said.runs)[:SHOWN_CHARACTERS]
    return f"{trains} ({printable(said.digest)[:SHOWN_CHARACTERS]}) with {runs}"


def _off(facts: Facts) -> str | None:
    """Return how far our clock is off, if all asked peers' clocks differ from it in the same direction."""
    ahead = [said.ahead for said in facts.introduced]
    behind = all(seconds > BEHIND_S for seconds in ahead)
    if not _enough(facts, len(ahead)) or not (behind or all(seconds < -AHEAD_S for seconds in ahead)):
        return None
    least = min(map(abs, ahead))
    off = f"{least:.0f} seconds" if least < 100 else f"{least / 60:.0f} minutes"
    return f"{off} {'behind' if behind else 'ahead of'}"


def _refusing(facts: Facts) -> int:
    """Return how many peers refuse our frames, if all asked peers of our swarm refuse them; else 0."""
    ours = [
        one for one in facts.introduced if one.digest == facts.digest and one.doing != HELPING
    ] or facts.introduced
    return len(ours) if _enough(facts, len(ours)) and all(one.refuses for one in ours) else 0


def _enough(facts: Facts, asked: int) -> bool:
    """Return whether `asked` answers suffice. A single answer suffices only while no peer is heard."""
    return asked > 1 or (asked == 1 and not facts.heard)


def _by(asked: int) -> dict[str, str]:
    return {"who": f"all {asked} peers asked" if asked > 1 else "the only peer that could be asked"}


def _nobody_answers(facts: Facts) -> Blanks:
    if facts.connected or not facts.bootstrap or any(entry["answers"] for entry in facts.bootstrap):
        return None
    first, more = dead_bootstrap(facts.bootstrap[0]), len(facts.bootstrap) - 1
    dead = f"{first.cause} (and {more} more)" if more else first.cause
    return {"dead": dead, "advice": first.remedy}


def _only_others(facts: Facts) -> bool:
    return bool(facts.others) and not facts.companions and not facts.unknown


def _others(facts: Facts) -> dict[str, Any]:
    there = ", ".join(f"{many(count, 'node')} of {name}" for name, count in sorted(facts.others.items()))
    ours = f"{facts.curriculum} ({facts.digest}) with {facts.runs}" if facts.runs else facts.curriculum
    return {"name": facts.name, "there": there, "curriculum": facts.curriculum, "ours": ours}


def _all_paused(facts: Facts) -> Blanks:
    doing = [said.doing for said in facts.introduced if said.doing != HELPING]
    if not facts.companions or facts.unknown or not doing or any(what != PAUSED for what in doing):
        return None
    return {"nodes": many(len(doing), "node")}


def _main_reason(facts: Facts, of: Collection[Reason]) -> Blanks:
    refused = {reason: count for reason, count in facts.refused.items() if count and reason in of}
    if not refused:
        return None
    reason = max(refused, key=lambda reason: (refused[reason], reason.value))
    return {
        "members": many(facts.connected, "member"),
        "count": refused[reason],
        "reason": reason.value,
        "advice": reason.remedy
        or "see `swarmd status` for the refused frames, and docs/admission.md for the reasons",
    }


CAUSES = (
    TWIN,
    NO_ADDRESS,
    DEAD,
    Cause(
        "this machine's clock is {off} {who}, so frames are refused",
        "all asked peers tell their time",
        "let NTP set this clock; the node needs no restart. If this clock is right, the peers' are wrong",
        Stage.HEARD,
        lambda f: _by(len(f.introduced)) | {"off": off} if (off := _off(f)) else None,
    ),
    Cause(
        "frames of this node are refused by {who}, because it counts as misbehaving",
        "all peers asked say so",
        "wait: its score halves every 30 minutes. If peers refuse it again, update swarmd; docs/admission.md"
        " lists the offences",
        Stage.HEARD,
        lambda f: _by(asked) if (asked := _refusing(f)) else None,
    ),
    Cause(
        "no peer is heard: this machine is offline",
        "no route to a bootstrap address or to the internet",
        "connect it to a network: until then the node trains alone; it finds other nodes by itself",
        Stage.AT_ONCE,
        lambda f: {} if f.offline and not f.connected else None,
    ),
    Cause(
        "no peer is heard: {dead}",
        "no bootstrap address answers",
        "{advice}",
        Stage.AT_ONCE,
        _nobody_answers,
    ),
    Cause(
        "no peer is heard: swarm {name} has only {there}, and this node trains on {curriculum}",
        "bootstrap nodes and members name their curricula",
        'wait for nodes of {curriculum}, or join the present ones: swarm.curriculum = "{known}"',
        Stage.SETTLED,
        lambda f: (
            _others(f) | {"known": known[0]}
            if _only_others(f) and (known := [name for name in f.others if " " not in name])
            else None
        ),
    ),
    Cause(
        "no peer is heard: swarm {name} has only {there}, and this node trains on {ours}",
        "the same, but this version knows none of these curricula",
        "wait for nodes of {curriculum}, or give all nodes the same version of swarmd and the same task file,"
        " until the digests in brackets are equal",
        Stage.SETTLED,
        lambda f: _others(f) if _only_others(f) else None,
    ),
    Cause(
        FIRST_HERE + ": no bootstrap address is set, and no member is on the local network",
        "no connection",
        "invite other people with the line that `swarmd invite` prints, or join with such a line",
        Stage.SETTLED,
        lambda f: {} if not f.connected and not f.bootstrap else None,
    ),
    Cause(
        "no peer is heard: the bootstrap address answers, and no member of swarm {name}, {curriculum}, is"
        " connected",
        "no connection",
        "wait for other nodes, or check that they have the same swarm.name, curriculum and version of swarmd:"
        " `swarmd doctor network`",
        Stage.SETTLED,
        lambda f: {"name": f.name, "curriculum": f.curriculum} if not f.connected else None,
    ),
    Cause(
        "no peer is heard: {members} connected, but their frames were refused ({count} {reason})",
        "a frame of another version, or of an unknown kind",
        "{advice}",
        Stage.SETTLED,
        # A single such frame shows that its author runs something else.
        lambda f: (
            _main_reason(f, {Reason.UNKNOWN_KIND, Reason.WRONG_VERSION})
            if f.companions or f.unknown
            else None
        ),
    ),
    Cause(
        "no peer is heard: {nodes} connected, and paused",
        "all training members say so",
        "wait until they are resumed, or ask their operators",
        Stage.SETTLED,
        _all_paused,
    ),
    Cause(
        "no peer is heard: only {helpers} connected, and no node that trains on {curriculum}",
        "all members say that they train nothing",
        "wait: this node finds other nodes as they join",
        Stage.SETTLED,
        lambda f: (
            {"helpers": many(f.connected, "bootstrap node"), "curriculum": f.curriculum}
            if f.helpers >= f.connected and not f.companions
            else None
        ),
    ),
    Cause(
        "no peer is heard: {members} connected, but their frames were refused ({count} {reason})",
        "the most frequent reason",
        "{advice}",
        Stage.PATIENT,
        lambda f: _main_reason(f, frozenset(Reason) - _NOT_A_CAUSE),
    ),
    Cause(
        "no peer is heard: {members} connected, and none has shared a rollout for 15 minutes",
        "none of the above",
        "wait: their rounds may be long, or their rollouts without advantage; `swarmd peers` lists them",
        Stage.PATIENT,
        lambda f: {"members": many(f.connected, "member")},
    ),
)

# The port that remedies recommend.
PORT = 4001
_NO_WAY_IN = "no: {by} could not open a connection to it at TCP port {port}"
LOOPBACK = Cause(
    "on TCP port {port} of the loopback address, which only this machine can dial",
    "the addresses that it listens on",
    f'to be reachable set swarm.listen = ["/ip4/0.0.0.0/tcp/{PORT}", "/ip6/::/tcp/{PORT}"]',
)
PORT_TAKEN = Cause(
    "on TCP port {port}, because another program uses this node's port {own}",
    "swarm.listen ends in /tcp/0",
    "stop that program and restart this node, because its earlier invitations name port {own}; or set"
    " swarm.listen to another port, and invite again",
)
BEHIND_ROUTER = Cause(
    _NO_WAY_IN,
    "members dial back; no IPv4 address of this machine is public",
    "nothing has to be done; to be reachable, forward TCP port {port} of your router to {local}, which has no"
    " effect if the router's own address is in 100.64.0.0/10 (the provider's NAT)",
)
BEHIND_FIREWALL = Cause(
    _NO_WAY_IN,
    "members dial back; an address of this machine is public",
    "nothing has to be done; to be reachable, let the firewall pass incoming TCP connections to port {port}",
)
NOT_FROM_NEAR = Cause(
    "by members on the same network only: no; no member outside could test it",
    "members on the same network dial back",
    "let this machine's firewall pass incoming TCP connections to port {port}",
)
NOBODY_DIALS = Cause(
    "no member could test it",
    "no member is connected",
    "repeat `swarmd doctor network` with members connected",
)
NO_RELAY = Cause(
    "no relay has accepted this node yet, which may take a minute after the start",
    "no address through a relay, and no bootstrap address",
    "wait a minute, or set swarm.bootstrap to a bootstrap node, which relays",
)
UNREACHABLE = (
    LOOPBACK, PORT_TAKEN, BEHIND_ROUTER, BEHIND_FIREWALL, NOT_FROM_NEAR, NOBODY_DIALS, NO_RELAY
)  # fmt: skip


def certain(facts: Facts) -> Trouble | None:
    """Return a cause that later facts cannot change, or None."""
    return _first(facts, Stage.HEARD if facts.heard else Stage.SETTLED if facts.settled else Stage.AT_ONCE)


def why_alone(facts: Facts) -> Trouble:
    """Return the most likely cause if no peer was heard for long."""
    found = _first(facts, Stage.PATIENT)
    # The last row always fits.
    assert found is not None
    return found


def _first(facts: Facts, stage: Stage) -> Trouble | None:
    for cause in CAUSES:
        if cause.stage is not None and cause.stage <= stage and (blanks := cause.fits(facts)) is not None:
            return cause.trouble(**blanks)
    return None
