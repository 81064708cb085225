"""The report of `swarmd doctor network`: what a survey means, and what to change. Pure."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2p.errors import OperatorError
from p2p.nat.dial_back import Outcome
from p2p.netgroup import LOCAL, group_of_host, only_here

# The port that we advise.
PORT = 4001

Survey = Mapping[str, Any]  # JSON, because it may come from the running node; keys as `survey` writes them


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. good: None if it is neither good nor bad."""

    about: str
    good: bool | None
    says: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    reachable: bool | None  # from the internet; None: nobody could say
    takes_part: bool  # whether it is, or could be, in the swarm
    summary: str
    findings: Sequence[Finding]

    def document(self, found: Survey) -> dict[str, Any]:
        rows = [
            {"about": f.about, "good": f.good, "says": f.says, "remedy": f.remedy or None}
            for f in self.findings
        ]
        answer = {
            "reachable": self.reachable,
            "takes_part": self.takes_part,
            "summary": self.summary,
            "findings": rows,
        }
        return {"schema": 1, **answer, "survey": dict(found)}

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
    answering = [entry for entry in found["bootstrap"] if entry["answers"]]
    takes_part = found["peers"]["connected"] > 0 or bool(answering) or not found["bootstrap"]
    findings = [
        Finding("engine", True, f"{found['engine']['name']}: {found['engine']['why']}"),
        _listening(found, reachable),
        _addresses(found, reachable),
        *_bootstrap(found),
        _trouble(found) or _members(found, bool(answering)),
        *_judged(found),
        _reached(found, reachable),
        *_relayed(found, reachable),
    ]
    return Diagnosis(reachable, takes_part, _summary(found, reachable, takes_part), findings)


def no_port(error: OperatorError, listen: Sequence[str]) -> Diagnosis:
    """Diagnose a member that could not listen."""
    finding = Finding("listening", False, str(error), "")
    return Diagnosis(
        None, False, f"the node cannot start: it cannot listen on {', '.join(listen)}", [finding]
    )


def no_network() -> Diagnosis:
    """Diagnose a node without a configured network."""
    finding = Finding(
        "engine", None, 'swarm.engine is "none": the node opens no socket', 'to join a swarm set it to "auto"'
    )
    return Diagnosis(None, True, "the node trains alone, as configured", [finding])


def _verdicts(found: Survey, outcome: Outcome, *, far: bool = True) -> list[Mapping[str, Any]]:
    """Select the peers' verdicts with this outcome.

    far: of peers outside our own network only, whose word holds for the internet; if False, of the others.
    """
    said = [v for v in found["verdicts"] if v["outcome"] == outcome.name]
    return [v for v in said if v["seen_at"] is not None and (group_of_host(v["seen_at"]) != LOCAL) == far]


def _reachable(found: Survey) -> bool | None:
    if _verdicts(found, Outcome.REACHED):
        return True
    return False if _verdicts(found, Outcome.NOT_REACHED) else None


def _port(found: Survey) -> int:
    return int(found["ports"][0]) if found["ports"] else PORT


def _changes_port(found: Survey) -> bool:
    return any(text.endswith("/tcp/0") for text in found["listen"])


def _this_machine_only(found: Survey) -> bool:
    return bool(found["addresses"]) and all(only_here(address) for address in found["addresses"])


def _listening(found: Survey, reachable: bool | None) -> Finding:
    port = _port(found)
    if _this_machine_only(found):
        says = f"on TCP port {port} of the loopback address, which only this machine can dial"
        return Finding(
            "listening", None, says, f'to be reachable set swarm.listen = ["/ip4/0.0.0.0/tcp/{PORT}"]'
        )
    if _changes_port(found):
        remedy = (
            f'set swarm.listen = ["/ip4/0.0.0.0/tcp/{PORT}"], so that a router can forward it'
            if reachable is not True
            else ""
        )
        return Finding(
            "listening", True if reachable else None, f"on TCP port {port}, another one at each start", remedy
        )
    return Finding("listening", True, f"on TCP port {port}; UDP is not used")


def _addresses(found: Survey, reachable: bool | None) -> Finding:
    own = found["own"]
    seen = list(
        dict.fromkeys(
            v["seen_at"] for v in found["verdicts"] if v["seen_at"] is not None and v["seen_at"] not in own
        )
    )
    far = [address for address in seen if group_of_host(address) != LOCAL]
    says = f"this machine has {', '.join(own) or 'none but loopback'}"
    if far:
        return Finding(
            "addresses",
            None,
            f"{says}; others see it at {', '.join(far)}: it is behind a router that translates (NAT)",
        )
    if any(ipaddress.ip_address(address).is_global for address in own):
        return Finding("addresses", True, f"{says}; of these at least one is public")
    return Finding(
        "addresses",
        None,
        f"{says}; none of these is public" + ("" if reachable else ", so most likely it is behind NAT"),
    )


def _bootstrap(found: Survey) -> list[Finding]:
    if not found["bootstrap"]:
        says = (
            "none is configured: this node can only be found, or find nodes that it knows from before or on"
            " its own network"
        )
        alone = not found["peers"]["connected"]
        return [
            Finding(
                "bootstrap",
                None,
                says,
                "ask the swarm's people for one, and set swarm.bootstrap to it" if alone else "",
            )
        ]
    findings = []
    for entry in found["bootstrap"]:
        remedy = "" if entry["answers"] else bootstrap_remedy(entry)
        findings.append(
            Finding("bootstrap", entry["answers"], f"{entry['address']} {_silence(entry)}", remedy)
        )
    return findings


def _silence(entry: Mapping[str, Any]) -> str:
    return str(entry["says"]) if entry["answers"] else f"does not answer: {entry['says']}"


def bootstrap_remedy(entry: Mapping[str, Any]) -> str:
    if "another peer" in entry["says"]:
        return "that node has a new key: ask its people for its address as it is now"
    if entry["refused"]:
        return "the machine is there and the node is not running, or has another port: ask its people"
    return "that node is down, or a firewall stops outgoing TCP connections to that port: ask its people"


def _judged(found: Survey) -> list[Finding]:
    """Report what keeps the running node from its judge, if anything."""
    judge = found.get("judge") or {}
    return [Finding("judge", False, judge["cause"], judge["remedy"])] if judge.get("cause") else []


def _trouble(found: Survey) -> Finding | None:
    trouble = found.get("trouble")
    return Finding("swarm", False, trouble["cause"], trouble["remedy"]) if trouble else None


def _members(found: Survey, bootstrap_answers: bool) -> Finding:
    peers, seen = found["peers"], found["seen"]
    if peers["connected"] > seen["helpers"] or (peers["connected"] and seen["companions"]):
        return Finding(
            "members", True, f"connected to {peers['connected']} of swarm {found['swarm']['name']}"
        )
    there = ", ".join(f"{count} of {name}" for name, count in sorted(seen["others"].items()))
    if there:
        says = (
            f"no node of {found['curriculum']} is here, which this node trains; nodes that are here: {there}"
        )
        remedy = (
            f"wait for nodes of {found['curriculum']}, or train what they train: --model or swarm.curriculum"
        )
        return Finding("members", False, says, remedy)
    if peers["connected"]:
        says = f"only bootstrap nodes ({peers['connected']}), and no node that trains {found['curriculum']}"
        return Finding("members", None, says, "wait: others are found as they come")
    remedy = (
        "wait for others, or check that they have the same swarm.name, curriculum and version of swarmd"
        if bootstrap_answers
        else ""
    )
    return Finding(
        "members",
        False if found["bootstrap"] else None,
        f"none of swarm {found['swarm']['name']} is connected",
        remedy,
    )


def _reached(found: Survey, reachable: bool | None) -> Finding:
    port = _port(found)
    if reachable is True:
        by = ", ".join(v["name"] for v in _verdicts(found, Outcome.REACHED))
        return Finding("dialled back", True, f"yes, by {by}, at TCP port {port}")
    if reachable is False:
        by = ", ".join(v["name"] for v in _verdicts(found, Outcome.NOT_REACHED))
        says = f"no: {by} could not open a connection to it at TCP port {port}"
        return Finding("dialled back", None, says, _how_to_open(found))
    if near := _verdicts(found, Outcome.REACHED, far=False) + _verdicts(
        found, Outcome.NOT_REACHED, far=False
    ):
        yes = [v["name"] for v in near if v["outcome"] == Outcome.REACHED.name]
        says = (
            f"by members on the same network only: {'yes' if yes else 'no'}; nobody could say whether the"
            " internet can reach it"
        )
        firewall = (
            ""
            if yes
            else f"does a firewall on this machine stop incoming TCP connections to port {port}? Allow them"
        )
        return Finding("dialled back", bool(yes) or None, says, firewall)
    return Finding(
        "dialled back",
        None,
        "no member could say",
        "" if found["peers"]["connected"] else "ask again when it has met members",
    )


def _how_to_open(found: Survey) -> str:
    local = next((a for a in found["own"] if ipaddress.ip_address(a).version == 4), "this machine")
    port = PORT if _changes_port(found) else _port(found)
    public = any(ipaddress.ip_address(address).is_global for address in found["own"])
    if public:
        return (
            "nothing has to be done; to be reachable, let the firewall pass incoming TCP connections to port"
            f" {port}"
        )
    return f"nothing has to be done; to be reachable, forward TCP port {port} of your router to {local}"


def _relayed(found: Survey, reachable: bool | None) -> list[Finding]:
    relays = list(dict.fromkeys(address.split("/p2p-circuit")[0] for address in found["relays"]))
    if relays:
        return [Finding("relay", True, f"others can open streams to it through {', '.join(relays)}")]
    if reachable is False:
        says = "none has taken this node in yet; that may take a minute after the start"
        return [
            Finding(
                "relay",
                None,
                says,
                "" if found["bootstrap"] else "a bootstrap node relays: set swarm.bootstrap to one",
            )
        ]
    return []


def _summary(found: Survey, reachable: bool | None, takes_part: bool) -> str:
    who = f"{found['name']} {found['peer_id']}"
    if not takes_part:
        return f"{who} cannot take part: no bootstrap node answers and no member is connected"
    if reachable is True:
        return f"{who} is reachable: others can open connections to it"
    if reachable is False:
        return f"{who} is not reachable: it takes full part through the connections that it makes itself"
    if _this_machine_only(found):
        return f"{who} is not reachable from other machines: it listens on loopback alone"
    return f"{who} may or may not be reachable: no member far away could try"
