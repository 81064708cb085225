"""Invitations: `swarmd invite` prints an argument of `swarmd join`. Invitations come from strangers."""

import hashlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p.identity import Identity
from swarmd.config.config import NodeConfig, SwarmConfig
from swarmd.config.invitation import Invitation, read_invitation, write_invitation
from swarmd.config.sources import FLAGS
from swarmd.daemon.inviting import invite
from swarmd.daemon.local_api import control
from swarmd.errors import ConfigError, Unreachable
from swarmd.exchange.swarm_id import swarm_digest
from swarmd.tasks.curriculum import SAPO_9, TINY_9
from tests.doubles import TIMEOUT_S
from tests.processes import wait_until
from tests.swarm.waiting import until
from tests.swarmd.conftest import Run
from tests.terminals import rest_of, terminal

PEER = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
ID = PEER.rpartition("/")[2]
PUBLIC = PEER.replace("203.0.113.7", "1.1.1.1")
LOCAL = PEER.replace("203.0.113.7", "127.0.0.1")
WHOLE = Invitation(
    "main", "sapo-9", swarm_digest(SAPO_9), "qwen2.5-0.5b", (PEER, LOCAL), "https://judge.example:8443"
)
SIX = PEER.replace("ip4/203.0.113.7", "ip6/2001:db8::7")
NAMED = PEER.replace("ip4/203.0.113.7", "dns/node.example")
OTHER = f"/ip4/203.0.113.7/tcp/4001/p2p/{Identity(bytes([3]) * 32).peer_id}"
MUTATIONS = 500


def checked(text: str) -> str:
    """Return the invitation with a correct check value, as a hostile invitation has."""
    body = text.rpartition(",check=")[0]
    return f"{body},check={hashlib.sha256(body.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


@pytest.mark.parametrize(
    "invitation",
    [
        WHOLE,
        Invitation("main"),
        Invitation("lab", bootstrap=(PEER,)),
        replace(WHOLE, model="Qwen/Qwen2.5-0.5B-Instruct"),
        replace(WHOLE, curriculum="own_tasks", judge="http://[::1]:8400"),
        replace(WHOLE, bootstrap=(PEER, SIX, NAMED, OTHER)),
    ],
)
def test_a_written_invitation_is_read_unchanged(invitation: Invitation) -> None:
    text = write_invitation(invitation)
    assert (
        read_invitation(text)
        == read_invitation(f" <{text}>\n")
        == read_invitation(text.replace("swarm:", "swarm://", 1))
        == invitation
    )
    assert text.isascii() and not set(text) & set(" &;?#*!$\\|()[]{}'\"`<>~\n")  # a shell does not change it


def test_an_invitation_is_short_and_readable() -> None:
    """A peer's id occurs once, however many addresses the peer has."""
    text = write_invitation(replace(WHOLE, bootstrap=(PEER, SIX, NAMED)))
    assert text.startswith(
        f"swarm:main,curriculum=sapo-9,digest={swarm_digest(SAPO_9)},model=qwen2.5-0.5b,"
        "at=203.0.113.7:4001+2001:db8::7:4001+node.example:4001/12D3KooW"
    )
    assert len(text) < 250
    assert len(write_invitation(Invitation("main", "tiny-9", 16 * "0", "tiny", (PEER,)))) == 151


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is not an invitation. Copy the line of `swarmd invite`: it begins with swarm:"),
        ("https://judge.example", "is not an invitation"),
        ("swarm:main", "its end is missing"),
        (write_invitation(WHOLE)[:-1], "changed or truncated"),
        (write_invitation(WHOLE).replace("4001", "4002"), "changed or truncated"),
        ("swarm:" + 3000 * "a", "3,006 characters (limit 2,000)"),
        (checked("swarm:,check="), "its name is ''; expected"),
        (checked("swarm:UPPER,check="), "its name is 'UPPER'"),
        (checked("swarm:main,modle=tiny,check="), "unknown field, 'modle'; did you mean model?"),
        (checked("swarm:main,state-dir=/home/ada,check="), "unknown field, 'state-dir'"),
        (
            checked("swarm:main,model=/home/ada/model,check="),
            "its model is '/home/ada/model'; expected a short name or owner/name",
        ),
        (checked("swarm:main,model=../model,check="), "its model is"),
        (checked("swarm:main,model=a/../b,check="), "its model is"),
        (checked("swarm:main,model=tiny,model=tiny,check="), "it says model 2 times"),
        (
            checked("swarm:main,curriculum=/tmp/evil.py,digest=0123456789abcdef,check="),
            "its curriculum is '/tmp/evil.py'",
        ),
        (
            checked("swarm:main,curriculum=evil.py,digest=0123456789abcdef,check="),
            "its curriculum is 'evil.py'",
        ),
        (
            checked("swarm:main,curriculum=auto,digest=0123456789abcdef,check="),
            "name a curriculum and its digest",
        ),
        (checked("swarm:main,curriculum=sapo-9,check="), "name a curriculum and its digest"),
        (
            checked("swarm:main,at=192.0.2.7:0/x,check="),
            "its at is '192.0.2.7:0/x'; expected addresses and a peer id, such as",
        ),
        (checked(f"swarm:main,at=192.0.2.7:0/{ID},check="), "its at is '192.0.2.7:0/"),
        (checked(f"swarm:main,at=192.0.2.7/{ID},check="), "its at is '192.0.2.7/"),
        (checked(f"swarm:main,at=a/b:1/{ID},check="), "its at is 'a/b:1/"),
        (checked(f"swarm:main,at=1.2.3.4:1++1.2.3.4:2/{ID},check="), "its at is '1.2.3.4:1++"),
        (checked(f"swarm:main,at={ID},check="), "its at is '12D3KooW"),
        (checked("swarm:main,at=1.2.3.4:1,check="), "its at is '1.2.3.4:1'"),
        (checked(f"swarm:main,at={PEER},check="), "its at is '/ip4/"),
        (checked("swarm:main,judge=file:///etc/passwd,check="), "its judge is 'file:///etc/passwd'"),
        (checked("swarm:main,judge=%1b[31m,check="), "not canonically percent-encoded ASCII"),
        (checked("swarm:main,judge=%1B%5B31m,check="), "its judge is '\\x1b[31m'"),
        (checked("swarm:main,model=,check="), "its model is '', which is not canonically"),
        (checked("swarm:main,model=%74iny,check="), "not canonically percent-encoded"),
        (
            checked(f"swarm:main,at=1.2.3.4:1{8 * '+1.2.3.4:1'}/{ID},check="),
            "it names 9 addresses (limit 8)",
        ),
    ],
)
def test_a_malformed_invitation_gives_a_message_that_names_the_mistake(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_invitation(text)
    assert said in str(refused.value) and str(refused.value).isprintable()


def mutated(text: str, rng: random.Random) -> str:
    letters = list(text)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(len(letters))
        match rng.randrange(6):
            case 0:
                letters[at] = chr(rng.choice((rng.randrange(256), rng.randrange(0x3000), 0xD800)))
            case 1:
                del letters[at : at + rng.choice((1, 3, 40))]
            case 2:
                letters[at:at] = rng.choice(
                    (",at=", "%00", "..", "/", ",", "=", "swarm:", "\n", "%", ",model=", "--", "é")
                )
            case 3:
                letters[at:at] = letters[at : at + 30]
            case 4:
                letters[at] = letters[at].swapcase()
            case 5:
                letters = letters[:at] + letters[at + 2 :] + letters[at : at + 2]
        letters = letters or ["x"]
    return "".join(letters)


@pytest.mark.parametrize("hostile", [False, True], ids=["mangled", "hostile"])
def test_mutated_invitations_are_rejected_or_are_valid_invitations(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: bool
) -> None:
    """There is no traceback, no dial and no new folder. Hostile invitations have a correct check value."""
    rng, dialled = random.Random(7), []
    watched = [True]
    sys.addaudithook(
        lambda event, _: (
            dialled.append(event) if watched and event.startswith(("socket.", "subprocess.")) else None
        )
    )
    readable = refused = 0
    for _ in range(MUTATIONS):
        text = mutated(write_invitation(WHOLE), rng)
        text = checked(text) if hostile and ",check=" in text else text
        try:
            found = read_invitation(text)
        except ConfigError as error:
            refused += 1
            assert str(error).isprintable() and len(str(error)) < 600
            if refused % 5 == 0:  # also on the command line
                said = run("join", "--state-dir", tmp_path / "state", "--", text)
                assert (said.code, said.out) == (2, "") and said.err.startswith("swarmd: ")
        else:
            readable += 1
            assert set(found.settings()) <= {
                FLAGS[flag] for flag in ("swarm", "curriculum", "model", "bootstrap", "judge")
            }
            assert not found.model.startswith((".", "/", "~")) and not found.curriculum.endswith(
                (".py", ".jsonl")
            )
            assert read_invitation(write_invitation(found)) == found and (hostile or found == WHOLE)
    watched.clear()
    assert refused > 0.7 * MUTATIONS and (readable > 0 or not hostile)
    assert dialled == [] and not (tmp_path / "state").exists()


def test_an_invitation_cannot_name_a_folder_of_this_machine(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    said = run(
        "join", write_invitation(replace(WHOLE, model="models/mine")), "--state-dir", tmp_path / "state"
    )
    assert said.code == 2 and "its model is models/mine, and that is a folder here" in said.err
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "text, remedy",
    [
        (write_invitation(WHOLE)[:-2], "Copy the whole line again"),
        (write_invitation(WHOLE).rpartition(",")[0], "Copy the whole line again"),
        (checked("swarm:main,modle=red,check="), "Ask for a new one, and update swarmd if it is old"),
        (checked("swarm:main,model=a,model=b,check="), "Ask for a new one, and update swarmd if it is old"),
    ],
)
def test_a_complete_invitation_gives_no_advice_to_copy_it_again(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as found:
        read_invitation(text)
    assert str(found.value).endswith(f" {remedy}.") and "?." not in str(found.value)
    assert str(found.value).count("opy") == ("Copy" in remedy)


@pytest.mark.parametrize(
    "invitation, flags, said",
    [
        (replace(WHOLE, digest=16 * "0"), [], "its questions of sapo-9 differ from those of swarmd"),
        (replace(WHOLE, curriculum="riddles", digest=16 * "0"), [], "is for the tasks riddles, which swarmd"),
        (WHOLE, ["--curriculum", "tiny-9"], "is for sapo-9, and --curriculum says tiny-9"),
    ],
)
def test_an_invitation_to_a_swarm_with_other_tasks_is_rejected(
    run: Run, tmp_path: Path, invitation: Invitation, flags: list[str], said: str
) -> None:
    told = run("join", write_invitation(invitation), *flags, "--state-dir", tmp_path / "state")
    assert told.code == 2 and said in told.err and not (tmp_path / "state").exists()


def test_flags_override_an_invitation_with_a_message(run: Run, tmp_path: Path) -> None:
    invitation = write_invitation(replace(WHOLE, digest=16 * "0"))  # ends before the start
    flags = ["--model", "tiny", "--judge", "", "--swarm", "lab", "--bootstrap", PUBLIC]
    said = run("join", invitation, *flags, "--state-dir", tmp_path / "state").err
    told = [
        "swarm.name: lab, as --swarm says; the invitation says main",
        "model.name: tiny, as --model says; the invitation says qwen2.5-0.5b",
        f"swarm.bootstrap: {PUBLIC}, as --bootstrap says; the invitation says {PEER} {LOCAL}",
        "judge.url: none, as --judge says; the invitation says https://judge.example:8443",
    ]
    assert [line for line in told if line not in said] == []


def test_an_invitation_to_own_tasks_needs_the_same_tasks(run: Run, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "riddles.jsonl", tmp_path / "theirs" / "riddles.jsonl"
    theirs.parent.mkdir()
    ours.write_text('{"question": "1?", "answer": "1"}\n{"question": "2?", "answer": "2"}\n')
    theirs.write_text('{"question": "1?", "answer": "3"}\n{"question": "2?", "answer": "2"}\n')
    asked = run(
        "invite",
        "--json",
        "--config",
        written(tmp_path, f'[swarm]\ncurriculum = "{theirs}"\nbootstrap = ["{PEER}"]\n'),
    )
    document = json.loads(asked.out)
    assert (
        ",curriculum=riddles,digest=" in document["invitation"]
        and str(tmp_path) not in document["invitation"]
    )
    without = run("join", document["invitation"], "--state-dir", tmp_path / "state")
    assert without.code == 2 and "is for the tasks riddles" in without.err and "--curriculum" in without.err
    other = run("join", document["invitation"], "--curriculum", ours, "--state-dir", tmp_path / "state")
    assert other.code == 2 and "is for other tasks called riddles" in other.err


def written(folder: Path, text: str) -> Path:
    (folder / "node.toml").write_text(text)
    return folder / "node.toml"


GLOBAL_SIX = PEER.replace("ip4/203.0.113.7", "ip6/2600::2")
NEAR = PEER.replace("203.0.113.7", "10.1.2.3")
LAN = PEER.replace("203.0.113.7", "192.168.1.9")
RELAYED = f"{PEER}/p2p-circuit/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
TINY = Invitation("main", "tiny-9", swarm_digest(TINY_9), "tiny", (PUBLIC,))
HERE = {"url": "http://127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("sections", "addresses", "invitation", "notes"),
    [
        (
            {"swarm": {"bootstrap": (PEER,)}},
            [LOCAL, RELAYED, LAN, PUBLIC],
            TINY,  # a friend can reach no address of another network
            [],
        ),
        # One address for IPv4 and one for IPv6; public addresses have precedence.
        (
            {"swarm": {"bootstrap": (NAMED,)}},
            [PUBLIC, PUBLIC.replace("1.1.1.1", "1.1.1.2"), GLOBAL_SIX, GLOBAL_SIX.replace("::2", "::3")],
            replace(TINY, bootstrap=(PUBLIC, GLOBAL_SIX, NAMED)),
            [],
        ),
        ({"swarm": {"bootstrap": (LAN,)}}, [NEAR, LOCAL], replace(TINY, bootstrap=(LAN, NEAR)), ["network"]),
        ({"swarm": {"bootstrap": (NAMED,)}}, [LAN], replace(TINY, bootstrap=(NAMED,)), []),
        # For the invited person, 127.0.0.1 is another machine.
        ({"swarm": {"bootstrap": (LOCAL,)}}, [LOCAL, LAN], replace(TINY, bootstrap=(LAN,)), ["network"]),
        ({}, [LOCAL], replace(TINY, bootstrap=(LOCAL,)), ["good on this machine alone"]),
        ({"judge": HERE}, [PUBLIC], TINY, ["the judge http:"]),
        # The judge on this machine also works for another node on it.
        (
            {"judge": HERE},
            [LOCAL],
            replace(TINY, bootstrap=(LOCAL,), judge=HERE["url"]),
            ["this machine alone"],
        ),
        ({"model": {"name": "/home/ada/model"}}, [PUBLIC], replace(TINY, model=""), ["is a folder of this"]),
        ({"model": {"name": "Qwen/Qwen3-0.6B"}}, [PUBLIC], replace(TINY, model="qwen3-0.6b"), []),
    ],
)
def test_a_nodes_invitation_works_on_other_machines(
    sections: dict[str, Any], addresses: list[str], invitation: Invitation, notes: list[str]
) -> None:
    made = invite(NodeConfig.model_validate(sections), TINY_9, addresses)
    assert read_invitation(made["invitation"]) == invitation
    assert all(part in said for part, said in zip(notes, made["notes"], strict=True)), made["notes"]


def test_a_bootstrap_nodes_invitation_names_no_curriculum() -> None:
    judge = {"judge": {"url": "https://judge.example"}}
    made = invite(NodeConfig.model_validate(judge), None, [PUBLIC])
    assert read_invitation(made["invitation"]) == Invitation(
        "main", bootstrap=(PUBLIC,), judge="https://judge.example"
    )


def test_a_node_that_cannot_be_dialled_cannot_invite() -> None:
    with pytest.raises(Unreachable, match="no address that other nodes could dial"):
        invite(NodeConfig(), TINY_9, [])
    with pytest.raises(ConfigError, match="this node trains alone"):
        invite(NodeConfig(swarm=SwarmConfig(engine="none")), TINY_9, [PUBLIC])


def test_invite_without_a_running_node_uses_the_configuration(run: Run, tmp_path: Path) -> None:
    assert run("invite", "--state-dir", tmp_path / "none").code == 6
    said = run(
        "invite", "--json", "--config", written(tmp_path, f'[swarm]\nname = "lab"\nbootstrap = ["{PEER}"]\n')
    )
    document = json.loads(said.out)
    assert said.code == 0 and read_invitation(document["invitation"]).name == "lab"


@pytest.mark.net
def test_the_live_page_names_the_joined_swarm(tmp_path: Path) -> None:
    """The page replaces the screen, so earlier output is hidden."""
    ours, theirs = terminal()
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the port is taken, so that the node ends at once
        port = taken.getsockname()[1]
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "swarmd",
                    "join",
                    write_invitation(TINY),
                    "--state-dir",
                    str(tmp_path),
                ),
                *("--listen", f"/ip4/127.0.0.1/tcp/{port}"),
            ],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8"},
        )
        os.close(theirs)
        _, _, shown = rest_of(ours).partition("\x1b[?1049h")
        assert process.wait(TIMEOUT_S) != 0 and "joining swarm main: tiny-9" in shown


@pytest.mark.slow
@pytest.mark.net
def test_a_second_node_joins_by_invitation_and_shares(tmp_path: Path) -> None:
    """The nodes are real processes; the second has nothing but the first node's invitation.

    Later, `swarmd join` without arguments finds the first node again.
    """
    loopback = ["--device", "cpu", "--listen", "/ip4/127.0.0.1/tcp/0", "--pace", "0.3", "--json"]

    def start(name: str, *words: str) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-m",
            "swarmd",
            "join",
            *words,
            *loopback,
            "--state-dir",
            str(tmp_path / name),
        ]
        with (tmp_path / f"{name}.log").open("a") as log:
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, text=True)

    def says(name: str, process: "subprocess.Popen[str]", holds: Callable[[dict[str, Any]], bool]) -> None:
        wait_until(lambda: (tmp_path / name / "run.json").exists() or process.poll() is not None)
        until(tmp_path / name, holds, process)

    def shares(name: str, process: "subprocess.Popen[str]") -> None:
        says(name, process, lambda status: bool(status["last"]) and status["last"]["external"] > 0)

    def connects(name: str, process: "subprocess.Popen[str]") -> None:
        says(name, process, lambda status: status["connected"] > 0)

    def ended(process: "subprocess.Popen[str]", end: Callable[[], None]) -> None:
        end()
        process.wait(TIMEOUT_S)

    first = start("first", "--model", "tiny", "--swarm", "lab")
    try:
        wait_until(lambda: (tmp_path / "first" / "run.json").exists())
        asked = [sys.executable, "-m", "swarmd", "invite", "--state-dir", str(tmp_path / "first")]
        with ThreadPoolExecutor() as threads:  # because the node answers before it listens
            surveyed = threads.submit(control.call, tmp_path / "first", "network", dict, timeout=TIMEOUT_S)
            at_once = control.call(tmp_path / "first", "invitation", dict, timeout=TIMEOUT_S)["invitation"]
        assert len(surveyed.result()["ports"]) == 1
        invitation = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        assert invitation == at_once and len(read_invitation(invitation).bootstrap) == 1
        assert read_invitation(invitation).name == "lab"
        for words, met in (([invitation], shares), ([], connects)):  # then it remembers the swarm
            second = start("second", *words)
            try:
                met("second", second)
            finally:
                ended(second, second.terminate)
        log = (tmp_path / "second.log").read_text()
        assert (
            "joining swarm lab: tiny-9, model tiny, no judge, 1 address to dial first" in log
            and "as before: swarm lab" in log
        )
    finally:
        ended(first, first.kill)
