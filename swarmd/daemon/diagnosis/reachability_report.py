"""The report of `swarmd doctor network`: explains a survey and recommends changes. Pure."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2p.errors import OperatorError
from p2p.netgroup import LOCAL, group_of_host, only_here
from p2p.peers.dial_back import Outcome
from swarmd.daemon.diagnosis.isolation import (
    BEHIND_FIREWALL,
    BEHIND_ROUTER,
    FIRST_HERE,
    LOOPBACK,
    NO_RELAY,
    NOBODY_DIALS,
    NOT_FROM_NEAR,
    PORT,
    dead_bootstrap,
    port_taken,
)
from swarmd.state.status import Trouble

# A survey as JSON, because it may come from the running node. `reachability_survey.survey` makes it.
Survey = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. good: None if it is neither good nor bad."""

    about: str
    good: bool | None
    says: str
    remedy: str = ""

    @classmethod
    def of(cls, about: str, trouble: Trouble, good: bool | None = None, *, advise: bool = True) -> "Finding":
        return cls(about, good, trouble.cause, trouble.remedy if advise else "")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    reachable: bool | None  # whether the internet can reach the node; None: no peer could say
    takes_part: bool  # whether the node takes part in the swarm, or could
    summary: str
    findings: Sequence[Finding]

    def document(self, found: Survey) -> dict[str, Any]:
        return {
            "schema": 1,
            "reachable": self.reachable,
            "takes_part": self.takes_part,
            "summary": self.summary,
            "findings": [
                {"about": f.about, "good": f.good, "says": f.says, "remedy": f.remedy or None}
                for f in self.findings
            ],
            "survey": dict(found),
        }

    def lines(self) -> list[str]:
        marks = {True: "ok  ", False: "bad ", None: "–   "}
        lines = [self.summary, ""]
        for finding in self.findings:
            lines.append(f"{marks[finding.good]}{finding.about}: {finding.says}")
            lines += [f"    → {finding.remedy}"] * bool(finding.remedy)
        return lines


def diagnose(found: Survey) -> Diagnosis:
    """Turn a survey into findings and a verdict. Pure."""
    reachable = _reachable(found)
    answering = any(entry["answers"] for entry in found["bootstrap"])
    takes_part = found["peers"]["connected"] > 0 or answering or not found["bootstrap"]
    return Diagnosis(
        reachable,
        takes_part,
        _summary(found, reachable, takes_part),
        [
            Finding("engine", True, found["engine"]),
            _listening(found),
            _addresses(found, reachable),
            *_bootstrap(found),
            _trouble(found) or _members(found),
            *_judged(found),
            _reached(found, reachable),
            *_relayed(found, reachable),
        ],
    )


def no_port(error: OperatorError, listen: Sequence[str]) -> Diagnosis:
    """Diagnose a member that could not listen."""
    return Diagnosis(
        None,
        False,
        f"the node cannot start: it cannot listen on {', '.join(listen)}",
        [Finding("listening", False, str(error))],
    )


def no_network() -> Diagnosis:
    """Diagnose a node without a configured network."""
    says = 'swarm.engine is "none": the node opens no socket'
    finding = Finding("engine", None, says, 'to join a swarm set it to "libp2p"')
    return Diagnosis(None, True, "the node trains alone, as configured", [finding])


def _verdicts(found: Survey, outcome: Outcome, *, far: bool = True) -> list[Mapping[str, Any]]:
    """Select the peers' verdicts with this outcome.

    far: if True, only of peers outside our network, whose verdict holds for the internet; else only of peers
        inside it.
    """
    return [
        v
        for v in found["verdicts"]
        if v["outcome"] == outcome.name
        and v["seen_at"] is not None
        and (group_of_host(v["seen_at"]) != LOCAL) == far
    ]


def _reachable(found: Survey) -> bool | None:
    if _verdicts(found, Outcome.REACHED):
        return True
    return False if _verdicts(found, Outcome.NOT_REACHED) else None


def _port(found: Survey) -> int:
    return int(found["ports"][0]) if found["ports"] else PORT


def _this_machine_only(found: Survey) -> bool:
    return bool(found["listen"]) and all(only_here(address) for address in found["listen"])


def _listening(found: Survey) -> Finding:
    port = _port(found)
    if not found["ports"]:
        return Finding("listening", None, "at no port now")
    if _this_machine_only(found):
        return Finding.of("listening", LOOPBACK.trouble(port=port))
    if (moved := port_taken(found["listen"], found["ports"], found["peer_id"])) is not None:
        return Finding.of("listening", moved)
    return Finding("listening", True, f"on TCP port {port}; UDP is not used")


def _addresses(found: Survey, reachable: bool | None) -> Finding:
    own = found["own"]
    seen = dict.fromkeys(v["seen_at"] for v in found["verdicts"] if v["seen_at"] not in (None, *own))
    far = [address for address in seen if group_of_host(address) != LOCAL]
    says = f"this machine has {', '.join(own) or 'none but loopback'}"
    if far:
        return Finding(
            "addresses",
            None,
            f"{says}; other nodes see it at {', '.join(far)}: it is behind a router that translates (NAT)",
        )
    if any(ipaddress.ip_address(address).is_global for address in own):
        return Finding("addresses", True, f"{says}; of these at least one is public")
    return Finding(
        "addresses",
        None,
        says
        + "; none of these is public" * bool(own)
        + ", so most likely it is behind NAT" * (bool(own) and not reachable),
    )


def _bootstrap(found: Survey) -> list[Finding]:
    if not found["bootstrap"]:
        return [
            Finding(
                "bootstrap",
                None,
                "none is configured: this node can only be found, or find nodes that it knows from before or"
                " on its own network",
                ""
                if found["peers"]["connected"]
                else "ask the swarm's people for one, and set swarm.bootstrap to it",
            )
        ]
    return [
        Finding("bootstrap", True, f"{entry['address']} {entry['says']}")
        if entry["answers"]
        else Finding(
            "bootstrap",
            False,
            f"{entry['address']} does not answer: {entry['says']}",
            dead_bootstrap(entry).remedy,
        )
        for entry in found["bootstrap"]
    ]


def _judged(found: Survey) -> list[Finding]:
    judge = found.get("judge") or {}
    return [Finding("judge", False, judge["cause"], judge["remedy"])] if judge.get("cause") else []


def _trouble(found: Survey) -> Finding | None:
    if not (trouble := found.get("trouble")):
        return None
    # Somebody has to found a swarm.
    good = None if trouble["cause"].startswith(FIRST_HERE) else False
    return Finding("swarm", good, trouble["cause"], trouble["remedy"])


def _members(found: Survey) -> Finding:
    connected, seen = found["peers"]["connected"], found["seen"]
    if connected > seen["helpers"] or (connected and seen["companions"]):
        return Finding("members", True, f"connected to {connected} of swarm {found['swarm']['name']}")
    return Finding(
        "members",
        None,
        f"no node of swarm {found['swarm']['name']} that trains {found['curriculum']} is connected",
        "wait for other nodes; a node says why it is alone 20 s after its start",
    )


def _reached(found: Survey, reachable: bool | None) -> Finding:
    port = _port(found)
    if reachable is True:
        those = _verdicts(found, Outcome.REACHED)
        by = ", ".join(v["name"] for v in those)
        alone = ", by IPv6 alone" * all(":" in v["seen_at"] for v in those)
        return Finding("dialled back", True, f"yes, by {by}, at TCP port {port}{alone}")
    if reachable is False:
        by = ", ".join(v["name"] for v in _verdicts(found, Outcome.NOT_REACHED))
        own = [*map(ipaddress.ip_address, found["own"])]
        four = [address for address in own if address.version == 4]
        cause = BEHIND_FIREWALL if any(address.is_global for address in four or own) else BEHIND_ROUTER
        local = str(next(iter(four), "this machine"))
        return Finding.of("dialled back", cause.trouble(by=by, port=port, local=local))
    if _verdicts(found, Outcome.REACHED, far=False):
        says = "by members on the same network only: yes; nobody could say whether the internet can reach it"
        return Finding("dialled back", True, says)
    if _verdicts(found, Outcome.NOT_REACHED, far=False):
        return Finding.of("dialled back", NOT_FROM_NEAR.trouble(port=port))
    return Finding.of("dialled back", NOBODY_DIALS.trouble(), advise=not found["peers"]["connected"])


def _relayed(found: Survey, reachable: bool | None) -> list[Finding]:
    if relays := list(dict.fromkeys(address.split("/p2p-circuit")[0] for address in found["relays"])):
        return [Finding("relay", True, f"other nodes can open streams to it through {', '.join(relays)}")]
    if reachable is False:
        return [Finding.of("relay", NO_RELAY.trouble(), advise=not found["bootstrap"])]
    return []


def _summary(found: Survey, reachable: bool | None, takes_part: bool) -> str:
    who = f"{found['name']} {found['peer_id']}"
    if not takes_part:
        return f"{who} cannot take part: no bootstrap node answers and no member is connected"
    if reachable is True:
        return f"{who} is reachable: other nodes can open connections to it"
    if reachable is False:
        return f"{who} is not reachable: it takes full part through the connections that it makes itself"
    if _this_machine_only(found):
        return f"{who} is not reachable from other machines: it listens on loopback alone"
    return f"{who}: nobody outside its own network could try whether it is reachable"
