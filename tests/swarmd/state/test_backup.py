"""Backups of the key and of the training, and what restoring one does to what is there."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p.identity import Identity
from swarmd.errors import ConfigError
from swarmd.state.folder import IDENTITY_FILE, StateFolder
from swarmd.trainer.checkpoint import Checkpoints, RunState
from tests.disk import failing_at, on_disk
from tests.swarmd.conftest import Run

WEIGHTS = bytes(range(256)) * 40


def trained(folder: Path, rounds: int = 7) -> Path:
    """Return a state folder with a key and a checkpoint."""
    Identity.load_or_create(folder / IDENTITY_FILE)
    state = random.Random(0).getstate()
    files = [("weights.safetensors", WEIGHTS), ("training.safetensors", b"moments"), ("policy.json", b"{}")]
    Checkpoints(folder / "checkpoints").save(RunState(rounds, 3, state, state, (), ()), files)
    (folder / "node.json").write_text('{"schema": 1, "seed": 3}')
    (folder / "metrics.jsonl").write_text('{"round": 1}\n')
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_a_key_goes_there_and_back_and_the_old_one_is_kept(run: Run, tmp_path: Path) -> None:
    mine, other = (
        Identity.load_or_create(tmp_path / "a" / IDENTITY_FILE),
        Identity.load_or_create(tmp_path / "b" / IDENTITY_FILE),
    )
    assert run("identity", "backup", tmp_path / "key", "--state-dir", tmp_path / "a").code == 0
    (tmp_path / "key").chmod(0o644)  # as on a stick
    said = run("identity", "restore", tmp_path / "key", "--state-dir", tmp_path / "b", "--json")
    document = json.loads(said.out)
    assert (document["peer_id"], document["round"]) == (mine.peer_id, None)
    assert Identity.load(tmp_path / "b" / IDENTITY_FILE).peer_id == mine.peer_id
    assert Identity.load(Path(document["kept"][0])).peer_id == other.peer_id
    again = json.loads(
        run("identity", "restore", tmp_path / "key", "--state-dir", tmp_path / "b", "--json").out
    )
    assert again["kept"] == []  # it is the same key
    assert run("identity", "restore", tmp_path / "key", "--state-dir", tmp_path / "new").code == 0


def test_the_training_goes_there_and_back(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "a")
    with on_disk() as names:
        said = run("identity", "backup", tmp_path / "all.zip", "--training", "--state-dir", tmp_path / "a")
    assert said.code == 0 and "all.zip" in names, said.err
    assert (tmp_path / "all.zip").stat().st_mode & 0o777 == 0o600
    assert (
        "never replaces a file"
        in run("identity", "backup", tmp_path / "all.zip", "--training", "--state-dir", tmp_path / "a").err
    )
    old = contents(trained(tmp_path / "b", rounds=9))
    said = run("identity", "restore", tmp_path / "all.zip", "--state-dir", tmp_path / "b")
    assert said.code == 0 and "its key and its training, 7 rounds" in said.out
    new = contents(tmp_path / "b")
    assert {name: new[name] for name in contents(tmp_path / "a")} == contents(tmp_path / "a")
    assert all(content in new.values() for content in old.values())  # nothing is lost
    assert run("identity", "restore", tmp_path / "all.zip", "--state-dir", tmp_path / "fresh").code == 0


def test_a_backup_with_more_figures_than_memory_is_not_refused_for_that(
    run: Run, good: Path, tmp_path: Path
) -> None:
    """Its size is claimed only."""
    with zipfile.ZipFile(good, "a") as archive:
        archive.getinfo("metrics.jsonl").file_size = 2**31
        archive.comment = b"to be written again"
    said = run("identity", "restore", good, "--state-dir", tmp_path / "b")
    assert said.code == 0, said.err


def test_a_place_that_takes_no_backup_is_told_and_no_checkpoint_is_blamed(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "a")
    said = run(
        "identity", "backup", tmp_path / "none" / "all.zip", "--training", "--state-dir", tmp_path / "a"
    )
    assert said.code == 2 and "all.zip: cannot be written: No such file or directory" in said.err


def test_what_a_killed_backup_left_goes_with_the_next_one(run: Run, tmp_path: Path) -> None:
    """It holds the key, and the training. Another process may be writing its own."""
    trained(tmp_path / "a")
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)
    kept = [f".all.zip.{os.getppid()}", ".all.zip.old", f".other.zip.{int(ended.stdout)}"]
    for name in (*kept, f".all.zip.{int(ended.stdout)}"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / f".all.zip.{10**8 + int(ended.stdout)}").mkdir()
    said = run("identity", "backup", tmp_path / "all.zip", "--training", "--state-dir", tmp_path / "a")
    assert said.code == 0, said.err
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "all.zip", "a"}


def test_a_running_node_keeps_its_files(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "a")
    run("identity", "backup", tmp_path / "key", "--state-dir", tmp_path / "a")
    with StateFolder.open(tmp_path / "a"):
        assert run("identity", "restore", tmp_path / "key", "--state-dir", tmp_path / "a").code == 5


@pytest.fixture
def good(run: Run, tmp_path: Path) -> Path:
    """Return a backup of the key and the training in `a`."""
    trained(tmp_path / "a")
    run("identity", "backup", tmp_path / "good.zip", "--training", "--state-dir", tmp_path / "a")
    return tmp_path / "good.zip"


def rewritten(
    source: Path, to: Path, change: Callable[[dict[str, bytes]], None], packing: int = zipfile.ZIP_STORED
) -> Path:
    """Return a backup with other contents."""
    with zipfile.ZipFile(source) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    with zipfile.ZipFile(to, "w", packing) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return to


CHECKPOINT = "checkpoints/round-00000007/"
HOSTILE: dict[str, Callable[[dict[str, bytes]], None]] = {
    "it holds '../../escaped'": lambda files: files.update({"../../escaped": b"x"}),
    "it holds '/etc/escaped'": lambda files: files.update({"/etc/escaped": b"x"}),
    "it holds 'checkpoints/round-00000007/../../escaped'": lambda files: files.update(
        {CHECKPOINT + "../../escaped": b"x"}
    ),
    "it holds 'checkpoints/round-00000007/.hidden'": lambda files: files.update(
        {CHECKPOINT + ".hidden": b"x"}
    ),
    "it holds 'lock'": lambda files: files.update({"lock": b"x"}),
    "not a backup of swarmd": lambda files: files.update({f"{CHECKPOINT}{n}": b"" for n in range(99)}),
    "more than one checkpoint": lambda files: files.update({"checkpoints/round-00000008/x": b"x"}),
    "it holds no whole key": lambda files: files.update({"identity.key": b"x"}),
    "has no key": lambda files: files.pop("identity.key") and None,
    "its key is not that": lambda files: files.update({"identity.key": Identity(bytes(32)).private_file}),
    "its checkpoint is not whole": lambda files: files.update({CHECKPOINT + "weights.safetensors": b"other"}),
    "node.json has 100000 bytes": lambda files: files.update({"node.json": bytes(100_000)}),
}


@pytest.mark.parametrize("said", HOSTILE)
def test_a_hostile_backup_changes_nothing(run: Run, good: Path, tmp_path: Path, said: str) -> None:
    before = contents(trained(tmp_path / "b", rounds=9))
    bad = rewritten(good, tmp_path / "bad.zip", HOSTILE[said])
    told = run("identity", "restore", bad, "--state-dir", tmp_path / "b")
    assert told.code == 2 and said in told.err and "Nothing was changed" in told.err
    assert contents(tmp_path / "b") == before and not list(tmp_path.rglob("escaped"))


def test_packed_torn_and_flipped_backups_change_nothing(run: Run, good: Path, tmp_path: Path) -> None:
    before = contents(trained(tmp_path / "b", rounds=9))
    bad = tmp_path / "bad.zip"
    rewritten(
        good,
        bad,
        lambda files: files.update({"metrics.jsonl": bytes(10**6)}),
        zipfile.ZIP_DEFLATED,
    )
    assert "packed" in run("identity", "restore", bad, "--state-dir", tmp_path / "b").err
    whole, rng = good.read_bytes(), random.Random(1)
    for _ in range(60):
        content = bytearray(whole)
        if rng.random() < 0.3:
            del content[rng.randrange(len(content)) :]
        else:
            at = (
                rng.randrange(len(content) - 2000, len(content))
                if rng.random() < 0.5
                else rng.randrange(len(content))
            )
            content[at] ^= 1 << rng.randrange(8)
        bad.write_bytes(content)
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        told = run("identity", "restore", bad, "--state-dir", tmp_path / "c")
        if told.code == 0:  # a flipped bit of what nobody reads: times, attributes
            assert contents(tmp_path / "c") == contents(tmp_path / "a")
        else:
            assert told.code == 2 and "Nothing was changed" in told.err and contents(tmp_path / "c") == {}
    assert contents(tmp_path / "b") == before


@pytest.mark.slow
def test_a_disk_that_fails_at_any_step_costs_no_file_and_starts_no_node(
    run: Run, good: Path, tmp_path: Path
) -> None:
    """Beside half a restore a node would draw another key, or cut the figures off and begin at round 1."""
    before = contents(trained(tmp_path / "b", rounds=9))
    for step in itertools.count(1):
        folder = shutil.copytree(tmp_path / "b", tmp_path / f"step-{step}")
        with failing_at(step) as begun:
            said = run("identity", "restore", good, "--state-dir", folder)
        if len(begun) < step:
            break
        after = contents(folder)
        assert set(before.values()) <= set(after.values())
        if said.code:
            assert said.code == 2 and "Input/output error" in said.err
        if (folder / "restoring").exists():
            assert "run the command again" in said.err
            with pytest.raises(ConfigError, match="a restore was cut off here"):
                StateFolder.open(folder)
        else:
            assert after == before or said.code == 0
        assert run("identity", "restore", good, "--state-dir", folder).code == 0
        StateFolder.open(folder).close()
        restored = contents(folder)
        assert restored.items() >= contents(tmp_path / "a").items()
        assert set(before.values()) <= set(restored.values())
    assert step > 20


def test_half_of_an_earlier_restore_is_removed_by_the_next(run: Run, good: Path, tmp_path: Path) -> None:
    trained(tmp_path / "b", rounds=9)
    (tmp_path / "b" / "restoring" / "checkpoints" / "round-00000001").mkdir(parents=True)
    assert run("identity", "restore", good, "--state-dir", tmp_path / "b").code == 0
    assert not (tmp_path / "b" / "restoring").exists()
