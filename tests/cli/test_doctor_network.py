"""`swarmd doctor network`: what it concludes from what it found, and what it finds with real members on loopback.

Behind NAT, on a public address and with a forwarded port it is tried in tests/nat.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.probes import ProbeProcess
from swarmd.config.config import NodeConfig
from swarmd.daemon.reachability_report import Diagnosis, diagnose, no_network
from swarmd.exchange.swarm_id import curriculum_of, swarm_digest
from tests.cli.test_cli import Run, run  # noqa: F401  run is a fixture

BOOT = "/ip4/11.0.0.1/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
ANSWERS = {"address": BOOT, "answers": True, "says": "answers in 3 ms", "refused": False}
SILENT = {"address": BOOT, "answers": False, "says": "no answer within 5 s", "refused": False}


def survey(**other: Any) -> dict[str, Any]:
    """Of a node behind NAT that nobody has tried to reach, with what is different."""
    return {
        "schema": 1,
        "peer_id": "12D3KooWMe",
        "name": "glad-cat",
        "swarm": {"name": "main", "topic": "/swarmd/1/main/0/0"},
        "engine": {"name": "libp2p", "why": "as configured"},
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
        ([verdict("NOT_REACHED"), verdict("REACHED")], True),  # one way in is a way in
        ([verdict("REFUSED"), verdict("TRYING")], None),
        ([verdict("REACHED", "192.168.2.10")], None),  # a neighbour's word does not hold for the internet
        ([verdict("NOT_REACHED", "127.0.0.1")], None),
        ([verdict("REACHED", "192.168.2.10"), verdict("NOT_REACHED")], False),
        ([verdict("REACHED", None)], None),
    ],
)
def test_who_counts(verdicts: list[dict[str, Any]], reachable: bool | None) -> None:
    assert diagnose(survey(verdicts=verdicts)).reachable is reachable


def test_behind_nat() -> None:
    diagnosis = diagnose(survey(verdicts=[verdict("NOT_REACHED")]))
    assert diagnosis.takes_part and "takes full part" in diagnosis.summary
    assert "others see it at 11.0.0.2: it is behind a router" in about(diagnosis, "addresses")
    said = about(diagnosis, "dialled back")
    assert "nothing has to be done; to be reachable, forward TCP port 4001 of your router to 192.168.2.10" in said
    assert "relay" not in {finding.about for finding in diagnosis.findings}  # this engine has none


def test_behind_a_firewall_on_a_public_address() -> None:
    found = survey(verdicts=[verdict("NOT_REACHED", "11.0.0.2")], own=["11.0.0.2"])
    said = about(diagnose(found), "dialled back")
    assert "let the firewall pass incoming TCP connections to port 4001" in said and "router" not in said
    assert "at least one is public" in about(diagnose(found), "addresses")


def test_a_port_that_changes_cannot_be_forwarded() -> None:
    found = survey(verdicts=[verdict("NOT_REACHED")], listen=["/ip4/0.0.0.0/tcp/0"], ports=[43151])
    assert 'set swarm.listen = ["/ip4/0.0.0.0/tcp/4001"]' in about(diagnose(found), "listening")
    assert "forward TCP port 4001" in about(diagnose(found), "dialled back")
    assert about(diagnose({**found, "verdicts": [verdict("REACHED")]}), "listening").endswith("-> ")


def test_only_this_machine() -> None:
    found = survey(addresses=["/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWMe"], listen=["/ip4/127.0.0.1/tcp/4001"])
    diagnosis = diagnose(found)
    assert "not reachable from other machines" in diagnosis.summary
    assert "only this machine can dial" in about(diagnosis, "listening")


def test_a_neighbour_could_not_get_in() -> None:
    said = about(diagnose(survey(verdicts=[verdict("NOT_REACHED", "192.168.2.10")])), "dialled back")
    assert "does a firewall on this machine" in said


@pytest.mark.parametrize(
    "entry, remedy",
    [
        (SILENT, "no firewall stops"),
        ({**SILENT, "says": "nothing listens on that port", "refused": True}, "the node is not running"),
        ({**SILENT, "says": "another peer answers there, 12D3KooWX"}, "a new key"),
    ],
)
def test_a_bootstrap_node_that_does_not_answer(entry: dict[str, Any], remedy: str) -> None:
    diagnosis = diagnose(survey(bootstrap=[entry], peers={"connected": 0, "relayed": 0}))
    assert not diagnosis.takes_part and "cannot take part" in diagnosis.summary
    assert remedy in about(diagnosis, "bootstrap")
    assert diagnose(survey(bootstrap=[entry])).takes_part  # there are members, found otherwise
    assert diagnose(survey(bootstrap=[entry, ANSWERS], peers={"connected": 0, "relayed": 0})).takes_part


def test_a_bootstrap_node_of_another_swarm() -> None:
    said = about(diagnose(survey(peers={"connected": 0, "relayed": 0})), "members")
    assert said.startswith("False") and "same swarm.name, curriculum and version" in said


def test_members_that_train_something_else_or_nothing() -> None:
    alone = {"peers": {"connected": 1, "relayed": 0}}
    others = about(diagnose(survey(**alone, seen={"helpers": 1, "companions": 0, "others": {"tiny-9": 3}})), "members")
    assert others.startswith("False no node of sapo-9 is here") and "3 of tiny-9" in others and "swarm.curriculum" in others
    helper = about(diagnose(survey(**alone, seen={"helpers": 1, "companions": 0, "others": {}})), "members")
    assert helper.startswith("None only bootstrap nodes (1), and no node that trains") and "wait" in helper
    company = about(diagnose(survey(**alone, seen={"helpers": 1, "companions": 2, "others": {"tiny-9": 3}})), "members")
    assert company.startswith("True connected to 1")


def test_without_a_bootstrap_address() -> None:
    diagnosis = diagnose(survey(bootstrap=[], peers={"connected": 0, "relayed": 0}))
    assert diagnosis.takes_part  # it may be the first one
    assert "none is configured" in about(diagnosis, "bootstrap")


def test_relays() -> None:
    engine = {"name": "hivemind", "why": "as configured"}
    found = survey(engine=engine, verdicts=[verdict("NOT_REACHED")])
    assert "may take a minute" in about(diagnose(found), "relay")
    relays = [f"{BOOT}/p2p-circuit", f"{BOOT}/p2p-circuit"]
    assert about(diagnose({**found, "relays": relays}), "relay").count(BOOT) == 1


def test_the_document_and_the_lines_say_the_same() -> None:
    found = survey(verdicts=[verdict("NOT_REACHED")])
    document, lines = diagnose(found).document(found), diagnose(found).lines()
    assert (document["schema"], document["reachable"], document["takes_part"], document["survey"]) == (1, False, True, found)
    for finding in document["findings"]:
        assert any(line.endswith(f"{finding['about']}: {finding['says']}") for line in lines)
        assert finding["remedy"] is None or f"    → {finding['remedy']}" in lines
    assert lines[0] == document["summary"]
    assert "trains alone" in no_network().summary


@pytest.mark.net
def test_a_member_for_the_question_alone(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("SWARMD_SWARM_ENGINE", "libp2p")
    digest = swarm_digest(curriculum_of(NodeConfig()))
    with ExitStack() as stack:
        member = stack.enter_context(ProbeProcess(tmp_path / "member", digest=digest, more=["--swarm", "main"]))
        listen = ["--listen", "/ip4/127.0.0.1/tcp/0", "--state-dir", tmp_path / "state"]
        said = run("doctor", "network", "--bootstrap", member.addresses[0], *listen, "--json")
        assert (said.code, said.err) == (0, "")
        document = json.loads(said.out)
        assert document["reachable"] is None and document["survey"]["peers"]["connected"] == 1
        [word] = document["survey"]["verdicts"]
        assert (word["by"], word["outcome"], word["seen_at"]) == (member.peer_id, "REACHED", "127.0.0.1")
        assert not (tmp_path / "state").exists()  # nothing is left behind

        port = member.addresses[0].split("/")[4]
        taken = run("doctor", "network", "--state-dir", tmp_path / "state", "--listen", f"/ip4/127.0.0.1/tcp/{port}")
        assert taken.code == 4 and f"another program is using port {port}" in taken.out

        other = member.addresses[0].rpartition("/")[0] + "/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
        monkeypatch.setattr("swarmd.daemon.reachability_survey.COMPANY", 1.0)
        wrong = run("doctor", "network", "--bootstrap", other, *listen)
        assert wrong.code == 4 and f"another peer answers there, {member.peer_id}" in wrong.out


def test_without_a_network(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("SWARMD_SWARM_ENGINE", "none")
    said = run("doctor", "network", "--state-dir", tmp_path / "state")
    assert said.code == 0 and "the node trains alone, as configured" in said.out
