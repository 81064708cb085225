"""`swarmd leave`, `swarmd logs` and `swarmd bug-report`."""

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import time
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from p2p.identity import Identity
from swarmd.errors import CannotRecord
from swarmd.state.folder import EVENTS_FILE, IDENTITY_FILE, OF_THE_NODE, OF_THE_SWARM
from swarmd.state.logs import for_people, lines_of
from swarmd.system.bug_report import redacted, write_report
from swarmd.system.service import user_service
from tests.doubles import TIMEOUT_S
from tests.packaging.checkout import ROOT
from tests.swarmd.cli.test_cli import node
from tests.swarmd.conftest import Run
from tests.terminals import rest_of, terminal

LINE = json.dumps(
    {
        "event": "node starts",
        "level": "info",
        "timestamp": "2026-11-23T03:04:56.600282Z",
        "token": "abcdef0123456789",
    }
)


def state(folder: Path) -> Path:
    Identity.load_or_create(folder / IDENTITY_FILE)
    (folder / "checkpoints" / "round-00000001").mkdir(parents=True)
    for name in (
        "choices.json",
        "peers.json",
        "seen",
        "sequence",
        "lock",
        "metrics.jsonl",
        "notes of mine.txt",
    ):
        (folder / name).write_text("{}\n")
    (folder / "swarmd.log").write_text(LINE + "\n")
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}


def test_leave_removes_the_swarms_files_and_keeps_the_trained_model(run: Run, tmp_path: Path) -> None:
    before = names(state(tmp_path / "state"))
    gone = ["choices.json", "peers.json", "seen"]
    asked = run("leave", "--state-dir", tmp_path / "state")
    assert asked.code == 2 and "--yes" in asked.err and names(tmp_path / "state") == before
    assert f"would be removed: {', '.join(gone)}\n" in asked.err and "\nremoved" not in asked.err
    assert "identity.key" in asked.err.partition("would stay: ")[2]
    said = run("leave", "--yes", "--json", "--state-dir", tmp_path / "state")
    assert (json.loads(said.out)["removed"], names(tmp_path / "state")) == (gone, before - {*gone})
    for wrong in ("none", "project"):
        # Another project's folder, given by mistake, may have other checkpoints.
        (tmp_path / "project" / "checkpoints").mkdir(parents=True, exist_ok=True)
        assert run("leave", "--everything", "--yes", "--state-dir", tmp_path / wrong).code == 6
    assert (tmp_path / "project" / "checkpoints").exists()
    again = run("leave", "--yes", "--state-dir", state(tmp_path / "again"))
    assert again.err == f"{tmp_path / 'again'}: removed {', '.join(gone)}\nYou left the swarm.\n"


@pytest.mark.net
def test_on_a_terminal_leave_asks_first_and_splits_no_words(tmp_path: Path) -> None:
    folder = state(tmp_path / "state")
    ours, theirs = terminal()
    command = [sys.executable, "-m", "swarmd", "leave", "--everything", "--state-dir", str(folder)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    while not said.rstrip().endswith(b"[y/N]:"):
        said += os.read(ours, 65536)
    os.write(ours, b"n\n")
    lines = (said.decode() + rest_of(ours)).splitlines()
    assert process.wait(TIMEOUT_S) != 0 and (folder / IDENTITY_FILE).exists()
    assert all(len(line) <= 80 or " " not in line for line in lines)
    assert f"would be removed: {', '.join(sorted(names(folder) - {'notes of mine.txt'}))}" in " ".join(
        lines
    ).replace("lock, ", "")


def test_leave_with_everything_removes_only_files_of_swarmd(run: Run, tmp_path: Path) -> None:
    state(tmp_path / "state")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("not ours")
    (tmp_path / "state" / "checkpoints.old").symlink_to(tmp_path / "outside")
    (tmp_path / "state" / "choices.json.old").touch()  # a file of the swarm that was joined before a restore
    said = run("leave", "--everything", "--yes", "--state-dir", tmp_path / "state")
    assert (
        said.code == 0
        and "removed checkpoints, checkpoints.old, choices.json, choices.json.old, " in said.err
    )
    assert names(tmp_path / "state") == {"notes of mine.txt"} and (tmp_path / "outside" / "file").exists()


def test_leave_with_everything_keeps_a_folder_that_cannot_be_removed(run: Run, tmp_path: Path) -> None:
    """A container's volume cannot be removed, and a link cannot be removed like a folder."""
    state(tmp_path / "real")
    (tmp_path / "real" / "notes of mine.txt").unlink()
    (tmp_path / "state").symlink_to(tmp_path / "real")
    said = run("leave", "--everything", "--yes", "--state-dir", tmp_path / "state")
    assert said.code == 0 and list((tmp_path / "real").iterdir()) == []


def test_every_file_of_a_state_folder_is_known_to_leave() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    text = text.partition("## What a state folder holds\n")[2].partition("\nDamaged files")[0]
    named = {
        name.rstrip("/")
        for name in re.findall(r"[a-z]+(?:\.[a-z]+|/)|\b(?:seen|reputation|sequence|lock)\b(?=  |,)", text)
    }
    assert {"identity.key", "checkpoints", "seen", "lock", "ui.html"} <= named - {"metrics"}
    assert [
        name
        for name in sorted(named)
        if not any(fnmatch(name, pattern) for pattern in (*OF_THE_SWARM, *OF_THE_NODE))
    ] == []


@pytest.mark.net
def test_leave_stops_the_node_first(run: Run, tmp_path: Path) -> None:
    with node(tmp_path) as told:
        said = run("leave", "--yes", "--state-dir", tmp_path)
    assert said.code == 0 and told == ["stop"] and "the node stops" in said.err


def test_leave_is_rejected_while_a_service_would_restart_the_node(run: Run, tmp_path: Path) -> None:
    unit = tmp_path / "xdg_config_home" / "systemd" / "user" / "swarmd.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(f"[Service]\nExecStart=swarmd join --state-dir {tmp_path / 'state'}\n")
    state(tmp_path / "state")
    said = run("leave", "--yes", "--state-dir", tmp_path / "state")
    assert (
        said.code == 2
        and "swarmd service uninstall" in said.err
        and (tmp_path / "state" / "choices.json").exists()
    )
    assert run("leave", "--yes", "--state-dir", state(tmp_path / "st")).code == 0, (
        "the service of another folder with the same prefix counted"
    )
    odd = tmp_path / "100% $mine"
    unit.write_bytes(user_service("linux", odd, tmp_path).content)
    assert run("leave", "--yes", "--state-dir", state(odd)).code == 2


def test_logs_are_printed_as_readable_lines(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state(tmp_path)
    monkeypatch.setenv("TZ", "JST-9")
    time.tzset()
    try:
        assert run("logs", "--state-dir", tmp_path).out == "2026-11-23 12:04:56 info    node starts\n"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert run("logs", "--json", "-n", "1", "--state-dir", tmp_path).out == LINE + "\n"
    assert run("logs", "--trainer", "--state-dir", tmp_path).code == 2
    assert for_people("plain \x1b[31mtext") == "plain \\x1b[31mtext"


def test_a_log_is_followed_across_its_rotation(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\nthree\n")
    with contextlib.closing(lines_of(log, 2, follow=True)) as lines:
        assert [next(lines), next(lines)] == ["two", "three"]
        for text, whole in (("four\nfi", "four"), ("ve\n", "five")):
            with log.open("a") as file:
                file.write(text)
            assert next(lines) == whole
        log.rename(tmp_path / "log.1")
        log.write_text("six\n")
        assert next(lines) == "six"


def test_a_report_lists_its_contents_and_leaves_secrets_out(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = state(tmp_path / "state"), tmp_path / "report.zip"
    monkeypatch.setenv("HOME", str(tmp_path))
    secret = Identity.load(folder / IDENTITY_FILE).private_file
    (folder / "trainer.log").write_text(
        "GET http://ada:pa55@192.0.2.7/x?token=0123456789abcdef hf_abcdefghijklmnopqrstu\n"
    )
    events = '[1.5,{"Tick":[]},"0123456789ab"]\n' * 10_000
    (folder / EVENTS_FILE).write_text(events)
    said = run("bug-report", "--hide-addresses", "--out", out, "--state-dir", folder)
    assert (
        said.code == 0
        and f"{out}: written" in said.err
        and "nothing was sent" in said.err
        and out.stat().st_mode & 0o777 == 0o600
    )
    assert "node starts" not in said.out and len(said.out) < 1000, (
        "without a terminal only names and sizes are printed"
    )
    with zipfile.ZipFile(out) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    expected = {
        "versions.json",
        "settings.json",
        "status.json",
        "peers.json",
        "swarmd.log",
        "trainer.log",
        "metrics.jsonl",
        "events.jsonl",
        "events.jsonl.1",
    }
    assert set(files) == expected and all(name in said.out for name in expected)
    everything = b"".join(files.values())
    for hidden in (secret, b"pa55", b"192.0.2.7", b"0123456789abcdef", b"hf_abc", str(tmp_path).encode()):
        assert hidden not in everything
    assert files["events.jsonl"] == events.encode(), "a large recording was truncated"
    assert files["trainer.log"] == b"GET http://<secret>@<address>/x?token=<secret> <secret>\n"
    assert run("bug-report", "--yes", "--out", out, "--state-dir", folder).code == 2


def test_a_report_on_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(CannotRecord):
            write_report({"swarmd.log": "x" * 10**6}, tmp_path / "report.zip")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "report.zip").exists()


@pytest.mark.parametrize(
    "text, left",
    [
        ("Authorization: Bearer abcdefghijk.lmn", "Authorization: Bearer <secret>"),
        ('"api_key": "abc def", "n": 1', '"api_key": "<secret>", "n": 1'),
        (r'{"event": "password=\"abc def\" of"}', r'{"event": "password=\"<secret>\" of"}'),
        ("x?token=abc&y secrets: abc, def", "x?token=<secret>&y secrets: <secret>, def"),
        ('{"tokens":{"generated":267},"max_new_tokens":64}',
         '{"tokens":{"generated":267},"max_new_tokens":64}'),
        ('max_new_tokens = 64, "gated":{"an unlikely token":1}',
         'max_new_tokens = 64, "gated":{"an unlikely token":1}'),
        ("/ip4/203.0.113.7/tcp/4001/p2p/12D3", "/ip4/<address>/tcp/4001/p2p/12D3"),
        ("/ip6/2001:db8::7/tcp/1 and /dns4/ada.example/tcp/1",
         "/ip6/<address>/tcp/1 and /dns4/<address>/tcp/1"),
        ("from 203.0.113.7:4001, at 2026-11-23 03:04:56, fe80::1.",
         "from <address>:4001, at 2026-11-23 03:04:56, <address>."),
        ("version 2.13.0, round 3: reward 0.5", "version 2.13.0, round 3: reward 0.5"),
        ("tokens 300 generated, new_tokens 16", "tokens 300 generated, new_tokens 16"),
        ("AWS_SECRET_ACCESS_KEY=abc/def+g HF_TOKEN=abc", "AWS_SECRET_ACCESS_KEY=<secret> HF_TOKEN=<secret>"),
        ("--token abc --max-new-tokens 64, ['--hf-token', 'abc']",
         "--token <secret> --max-new-tokens 64, ['--hf-token', '<secret>']"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n", "<secret>"),
    ],
)  # fmt: skip
def test_secrets_and_addresses_are_left_out_of_a_report(text: str, left: str) -> None:
    assert redacted(text, Path("/"), addresses=True) == left
    assert "203.0.113.7" not in text or "203.0.113.7" in redacted(text, Path("/"), addresses=False)


def test_a_home_folder_with_non_ascii_letters_is_also_left_out_of_json() -> None:
    home = Path("/home/Zoë")
    text = json.dumps({"state_dir": f"{home}/swarmd"}) + f" {home}/swarmd"
    assert redacted(text, home, addresses=False) == '{"state_dir": "~/swarmd"} ~/swarmd'


def test_a_long_word_is_searched_quickly() -> None:
    text = "a." * 1_000_000  # longer than any text in a report; a slow pattern would take minutes
    assert redacted(text, Path("/"), addresses=True) == text
