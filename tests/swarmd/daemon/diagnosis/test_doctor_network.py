"""`swarmd doctor network`: conclusions from given findings, and findings with real members on loopback.

tests/p2p/nat tests it behind NAT, on a public address and with a forwarded port.
"""

import io
import json
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.address import own_ports
from p2p.errors import CannotListen
from p2p.types import PeerId
from swarmd.cli.views.plain import PlainView
from swarmd.config.config import NodeConfig, SwarmConfig
from swarmd.config.sources import resolve
from swarmd.daemon.choices import remember
from swarmd.daemon.daemon import Daemon
from swarmd.daemon.diagnosis import isolation
from swarmd.daemon.diagnosis.isolation import FIRST_HERE, Cause
from swarmd.daemon.diagnosis.reachability_report import Diagnosis, diagnose, no_network
from swarmd.exchange.swarm_id import curriculum_of, swarm_digest
from swarmd.state.status import PauseCause
from testbed.probe_process import ProbeProcess
from tests.doubles import TIMEOUT_S
from tests.swarmd.conftest import Run

BOOT = "/ip4/11.0.0.1/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
ANSWERS = {"address": BOOT, "answers": True, "says": "answers in 3 ms"}
SILENT = {"address": BOOT, "answers": False, "says": "no answer within 5 s"}


def survey(**other: Any) -> dict[str, Any]:
    """Return the survey of a node behind NAT that no member has dialled back, with the changes `other`."""
    return {
        "schema": 1,
        "peer_id": "12D3KooWMe",
        "name": "glad-cat",
        "swarm": {"name": "main", "topic": "/swarmd/1/main/0"},
        "engine": "libp2p",
        "listen": ["/ip4/0.0.0.0/tcp/4001"],
        "ports": [4001],
        "addresses": ["/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWMe", "/ip4/192.168.2.10/tcp/4001/p2p/12D3KooWMe"],
        "own": ["192.168.2.10"],
        "relays": [],
        "peers": {"connected": 2, "relayed": 0},
        "bootstrap": [ANSWERS],
        "verdicts": [],
        "curriculum": "sapo-9",
        "seen": {"helpers": 0, "companions": 0, "others": {}},
        **other,
    }


def verdict(outcome: str, seen_at: str | None = "11.0.0.2") -> dict[str, Any]:
    return {"by": "12D3KooWThem", "name": "calm-owl", "outcome": outcome, "seen_at": seen_at}


def about(diagnosis: Diagnosis, subject: str) -> str:
    return " | ".join(f"{f.good} {f.says} -> {f.remedy}" for f in diagnosis.findings if f.about == subject)


@pytest.mark.parametrize(
    "verdicts, reachable",
    [
        ([], None),
        ([verdict("REACHED")], True),
        ([verdict("NOT_REACHED")], False),
        ([verdict("NOT_REACHED"), verdict("REACHED")], True),  # one reachable address is enough
        ([verdict("REFUSED"), verdict("TRYING")], None),
        ([verdict("REACHED", "192.168.2.10")], None),  # from a neighbour only
        ([verdict("NOT_REACHED", "127.0.0.1")], None),
        ([verdict("REACHED", "192.168.2.10"), verdict("NOT_REACHED")], False),
        ([verdict("REACHED", None)], None),
    ],
)
def test_whether_a_node_is_reachable_follows_from_the_members_verdicts(
    verdicts: list[dict[str, Any]], reachable: bool | None
) -> None:
    assert diagnose(survey(verdicts=verdicts)).reachable is reachable


NAT = {"verdicts": [verdict("NOT_REACHED")]}
PUBLIC = {"verdicts": [verdict("NOT_REACHED", "11.0.0.2")], "own": ["11.0.0.2"]}
BOTH = NAT | {"own": ["192.168.2.10", "2611::2"]}
OWN_PORT = own_ports(PeerId("12D3KooWMe"))[0]
OWN = NAT | {"listen": ["/ip4/0.0.0.0/tcp/0"], "ports": [OWN_PORT]}
MOVED = OWN | {"ports": [43151]}
LOOPBACK = {"addresses": ["/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWMe"], "listen": ["/ip4/127.0.0.1/tcp/4001"]}
OFFLINE = LOOPBACK | {"listen": ["/ip4/0.0.0.0/tcp/4001"], "own": []}
ALONE = {"peers": {"connected": 0, "relayed": 0}}
ONE = {"peers": {"connected": 1, "relayed": 0}}
RELAYS = [f"{BOOT}/p2p-circuit", f"{BOOT}/p2p-circuit"]
FORWARD = "nothing has to be done; to be reachable, forward TCP port 4001 of your router to 192.168.2.10"


def seen(companions: int, **others: int) -> dict[str, Any]:
    return ONE | {
        "seen": {
            "helpers": 1,
            "companions": companions,
            "others": {name.replace("_", "-"): n for name, n in others.items()},
        }
    }


@pytest.mark.parametrize(
    "found, subject, said",
    [
        (NAT, "summary", "takes full part"),
        (NAT, "addresses", "other nodes see it at 11.0.0.2: it is behind a router"),
        (NAT, "dialled back", FORWARD),
        (NAT, "relay", "may take a minute"),
        (
            PUBLIC,
            "dialled back",
            "to be reachable, let the firewall pass incoming TCP connections to port 4001",
        ),
        (PUBLIC, "addresses", "at least one is public"),
        (BOTH, "dialled back", FORWARD),
        (BOTH | {"own": ["2611::2"]}, "dialled back", "let the firewall pass"),
        (BOTH | {"verdicts": [verdict("REACHED", "2611::2")]}, "dialled back", "4001, by IPv6 alone"),
        (
            BOTH | {"verdicts": [verdict("REACHED", "2611::2"), verdict("REACHED")]},
            "dialled back",
            "by calm-owl, calm-owl, at TCP port 4001 -> ",
        ),
        (OWN, "listening", f"True on TCP port {OWN_PORT}; UDP"),
        (OWN, "dialled back", f"forward TCP port {OWN_PORT}"),
        (
            MOVED,
            "listening",
            f"None on TCP port 43151, because another program uses this node's port {OWN_PORT} ->",
        ),
        (MOVED, "listening", "-> stop that program and restart this node, because its earlier invitations"),
        (NAT | {"ports": [43151]}, "listening", "True on TCP port 43151"),  # the port was set
        (LOOPBACK, "summary", "not reachable from other machines"),
        (LOOPBACK, "listening", "only this machine can dial"),
        (OFFLINE, "listening", "True on TCP port 4001"),  # it would accept other nodes if it had a network
        (OFFLINE, "addresses", "this machine has none but loopback -> "),
        (
            {"verdicts": [verdict("NOT_REACHED", "192.168.2.10")]},
            "dialled back",
            "let this machine's firewall pass",
        ),
        (ALONE | {"bootstrap": [SILENT]}, "summary", "cannot take part"),
        (ALONE | {"bootstrap": [SILENT]}, "bootstrap", "a firewall stops"),
        (
            {"bootstrap": [SILENT | {"says": "another peer answers there, 12D3KooWX"}]},
            "bootstrap",
            "a new key",
        ),
        (
            ALONE,
            "members",
            "None no node of swarm main that trains sapo-9 is connected -> wait for other nodes",
        ),
        (ALONE | {"bootstrap": []}, "bootstrap", "none is configured"),
        (seen(0, tiny_9=3), "members", "None no node of swarm main that trains sapo-9"),
        (seen(2, tiny_9=3), "members", "True connected to 1"),
        (
            {"trouble": {"cause": "the clock is off", "remedy": "set it"}},
            "swarm",
            "False the clock is off -> set it",
        ),
        ({"trouble": {"cause": f"{FIRST_HERE}: x", "remedy": "y"}}, "swarm", f"None {FIRST_HERE}: x -> y"),
        ({"trouble": {"cause": "the clock is off", "remedy": "set it"}}, "members", ""),
        (
            {"judge": {"cause": "the judge asks sapo-9", "remedy": "use another"}},
            "judge",
            "False the judge asks sapo-9 -> use another",
        ),
        ({"judge": {"cause": "", "remedy": ""}}, "judge", ""),
        (NAT | {"relays": RELAYS}, "relay", f"through {BOOT} -> "),  # each relay is named once
    ],
)
def test_each_survey_gives_its_findings(found: dict[str, Any], subject: str, said: str) -> None:
    diagnosis = diagnose(survey(**found))
    text = diagnosis.summary if subject == "summary" else about(diagnosis, subject)
    assert said in text if said else text == ""


NEAR = {"verdicts": [verdict("NOT_REACHED", "192.168.2.10")]}
# For each cause: facts that lead to it, and facts after its remedy was followed.
CURES: list[tuple[Cause, dict[str, Any], dict[str, Any]]] = [
    (isolation.DEAD, {"bootstrap": [SILENT]}, {"bootstrap": [ANSWERS]}),  # the corrected address
    (isolation.LOOPBACK, LOOPBACK, {"listen": ["/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001"]}),
    (isolation.PORT_TAKEN, MOVED, {"ports": [OWN_PORT]}),  # the other program was stopped
    (isolation.PORT_TAKEN, MOVED, {"listen": ["/ip4/0.0.0.0/tcp/43151"]}),  # another port was set
    (isolation.BEHIND_ROUTER, NAT, {"verdicts": [verdict("REACHED")]}),  # the port was forwarded
    (isolation.BEHIND_FIREWALL, PUBLIC, {"verdicts": [verdict("REACHED")]}),  # the firewall lets it pass
    (isolation.NOT_FROM_NEAR, NEAR, {"verdicts": [verdict("REACHED", "192.168.2.10")]}),  # allowed
    (isolation.NOBODY_DIALS, ALONE, ONE | {"verdicts": [verdict("REACHED")]}),  # members were found
    (isolation.NO_RELAY, NAT | {"bootstrap": []}, {"bootstrap": [ANSWERS]}),  # a bootstrap node was set
]


@pytest.mark.parametrize("cause, state, healed", CURES)
def test_a_cause_ends_when_its_remedy_is_followed(
    cause: Cause, state: dict[str, Any], healed: dict[str, Any]
) -> None:
    def told(found: dict[str, Any]) -> bool:
        remedies = [finding.remedy for finding in diagnose(survey(**found)).findings]
        pattern = re.sub(r"\\{\w+\\}", ".*", re.escape(cause.remedy))
        return any(re.fullmatch(pattern, remedy) for remedy in remedies if remedy)

    assert told(state) and not told(state | healed)
    assert {row for row, *_ in CURES} == {*isolation.UNREACHABLE, isolation.DEAD}


@pytest.mark.parametrize(
    "facts, takes_part",
    [
        (ALONE | {"bootstrap": [SILENT]}, False),
        ({"bootstrap": [SILENT]}, True),  # members were found without the bootstrap node
        (ALONE | {"bootstrap": [SILENT, ANSWERS]}, True),
        (ALONE | {"bootstrap": []}, True),  # the node may be the first of its swarm
        (NAT, True),
    ],
)
def test_whether_a_node_takes_part_in_the_swarm(facts: dict[str, Any], takes_part: bool) -> None:
    assert diagnose(survey(**facts)).takes_part is takes_part


def test_the_json_document_and_the_lines_have_the_same_content() -> None:
    found = survey(verdicts=[verdict("NOT_REACHED")])
    document, lines = diagnose(found).document(found), diagnose(found).lines()
    assert (document["schema"], document["reachable"], document["takes_part"], document["survey"]) == (
        1,
        False,
        True,
        found,
    )
    for finding in document["findings"]:
        assert any(line.endswith(f"{finding['about']}: {finding['says']}") for line in lines)
        assert finding["remedy"] is None or f"    → {finding['remedy']}" in lines
    assert lines[0] == document["summary"]
    assert "trains alone" in no_network().summary


async def test_a_node_that_left_the_swarm_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def empty(*_: object) -> dict[str, Any]:
        return survey(peers={"connected": 0, "relayed": 0}, ports=[])

    monkeypatch.setattr("swarmd.daemon.daemon.survey", empty)
    daemon = Daemon(NodeConfig(), tmp_path, PlainView(io.StringIO()))
    daemon.member.leave()
    daemon.guest.away = [PauseCause("month", "20 GB are used up", None, "", "wait")]
    found = diagnose(await daemon._on_network({}))
    assert "bad swarm: 20 GB are used up" in found.lines() and "    → wait" in found.lines()
    assert "–   listening: at no port now" in found.lines()


@pytest.mark.net
def test_without_a_running_node_a_temporary_member_is_started_for_the_survey(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMD_SWARM_ENGINE", "libp2p")
    for patience in ("COMPANY_S", "SEEN_S"):
        monkeypatch.setattr(f"swarmd.daemon.diagnosis.reachability_survey.{patience}", TIMEOUT_S)
    digest = swarm_digest(curriculum_of(NodeConfig()))
    with ExitStack() as stack:
        member = stack.enter_context(
            ProbeProcess(tmp_path / "member", digest=digest, more=["--swarm", "main"])
        )
        listen = ["--listen", "/ip4/127.0.0.1/tcp/0", "--state-dir", tmp_path / "state"]
        said = run("doctor", "network", "--bootstrap", member.addresses[0], *listen, "--json")
        assert (said.code, said.err) == (0, "")
        document = json.loads(said.out)
        assert document["reachable"] is None and document["survey"]["peers"]["connected"] == 1
        [word] = document["survey"]["verdicts"]
        assert (word["by"], word["outcome"], word["seen_at"]) == (member.peer_id, "REACHED", "127.0.0.1")
        assert not (tmp_path / "state").exists()  # no folder is left

        port = member.addresses[0].split("/")[4]
        taken = run(
            "doctor", "network", "--state-dir", tmp_path / "state", "--listen", f"/ip4/127.0.0.1/tcp/{port}"
        )
        assert taken.code == 4 and f"another program is using port {port}" in taken.out

        other = (
            member.addresses[0].rpartition("/")[0] + "/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
        )
        monkeypatch.setattr("swarmd.daemon.diagnosis.reachability_survey.COMPANY_S", 1.0)
        wrong = run("doctor", "network", "--bootstrap", other, *listen)
        assert wrong.code == 4 and f"another peer answers there, {member.peer_id}" in wrong.out


@pytest.mark.net
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_doctor_leaves_no_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    """In particular, the folder with its temporary key is removed."""

    async def interrupted(*_: Any) -> Any:
        signal.raise_signal(by)
        await trio.sleep_forever()

    monkeypatch.setattr("swarmd.daemon.diagnosis.reachability_survey.survey", interrupted)
    monkeypatch.setattr("swarmd.daemon.diagnosis.reachability_survey.COMPANY_S", 0.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = run("doctor", "network", "--state-dir", tmp_path / "state", "--listen", "/ip4/127.0.0.1/tcp/0")
    assert (said.code, said.out) == (130, "") and not list(tmp_path.glob("swarmd-*"))


def test_without_a_network_the_doctor_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMD_SWARM_ENGINE", "none")
    said = run("doctor", "network", "--state-dir", tmp_path / "state")
    assert said.code == 0 and "the node trains alone, as configured" in said.out


def test_the_doctor_uses_the_remembered_swarm_unless_flags_override_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[SwarmConfig] = []

    def alone(config: NodeConfig, *_: Any) -> None:
        found.append(config.swarm)
        raise CannotListen("taken")

    monkeypatch.setattr("swarmd.daemon.diagnosis.reachability_survey.survey_alone", alone)
    first, second = BOOT, BOOT.replace("11.0.0.1", "11.0.0.2")
    remember(resolve(None, {}, {"swarm": "friends", "curriculum": "sapo-9", "bootstrap": [first]}), tmp_path)
    for flags in ([], ["--bootstrap", second]):
        assert run("doctor", "network", "--state-dir", tmp_path, *flags).code == 4
    assert [(swarm.name, swarm.curriculum, swarm.bootstrap) for swarm in found] == [
        ("friends", "sapo-9", (address,)) for address in (first, second)
    ]
