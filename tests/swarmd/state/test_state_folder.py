"""One node at a time owns a state folder, and the next can open it however the last one ended."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2p import durable
from p2p.errors import KeyFileUnusable
from p2p.identity import Identity
from swarmd.errors import CannotRecord, ConfigError, StateFolderInUse
from swarmd.state.folder import LOCK_FILE, StateFolder, in_use, node_seed, write_atomically
from tests.doubles import TIMEOUT_S

OWNER = """
import os, sys
from pathlib import Path
from swarmd.state.folder import StateFolder
state = StateFolder.open(Path(sys.argv[1]))
# The child inherits the lock's file descriptor and closes nothing.
child = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
print(child, flush=True)
sys.stdin.read()
"""


def test_a_new_state_folder_is_private(tmp_path: Path) -> None:
    with StateFolder.open(tmp_path / "deep" / "state") as state:
        assert stat.S_IMODE(state.path.stat().st_mode) == 0o700 and in_use(state.path)
    assert not in_use(tmp_path / "deep" / "state")


def test_another_user_such_as_root_can_see_that_a_node_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `sudo swarmd stop` would not wait for the node to stop."""
    with StateFolder.open(tmp_path):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert in_use(tmp_path)


def test_a_second_owner_is_rejected_with_the_pid_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "Application Support"
    with StateFolder.open(folder), pytest.raises(StateFolderInUse, match=f"pid {os.getpid()}") as refused:
        StateFolder.open(folder)
    assert f"`swarmd stop --state-dir '{folder}'`" in str(refused.value) and refused.value.exit_code == 5
    StateFolder.open(folder).close()


def test_checking_for_a_running_node_does_not_stop_another_from_opening_the_folder(tmp_path: Path) -> None:
    """The check holds a lock for 0.4 s here, as it might on a slow machine."""
    StateFolder.open(tmp_path).close()
    (tmp_path / LOCK_FILE).write_text("")
    with (tmp_path / LOCK_FILE).open("r+") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not in_use(tmp_path)
        threading.Timer(0.4, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        StateFolder.open(tmp_path).close()


def test_partial_files_of_a_killed_node_are_removed_at_the_next_start(tmp_path: Path) -> None:
    """Partial key files too, because `swarmd leave --everything` must leave no copy of the key."""
    own = {".gitignore", ".notes.txt", "notes.0123456789abcdef"}
    for name in (*own, ".identity.key.0123456789abcdef", ".seen.fedcba9876543210"):
        (tmp_path / name).write_text("half")
    StateFolder.open(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {LOCK_FILE, *own}


def test_a_node_waits_for_a_command_that_uses_the_folder_briefly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a service that starts its node during `swarmd doctor network` would fail for good."""
    command = StateFolder.open(tmp_path, briefly=True)
    assert in_use(tmp_path)
    threading.Timer(0.4, command.close).start()
    StateFolder.open(tmp_path).close()
    assert len(caplog.messages) == 1 and "`swarmd doctor network`" in caplog.text


@pytest.mark.net
def test_a_killed_owner_frees_the_folder_even_if_its_child_process_lives(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = int(owner.stdout.readline())
    try:
        with pytest.raises(StateFolderInUse, match=f"pid {owner.pid}"):
            StateFolder.open(tmp_path)
        owner.kill()
        owner.wait(TIMEOUT_S)
        os.kill(child, 0)  # the child is alive
        StateFolder.open(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        owner.stdin.close()
        owner.stdout.close()


def test_unusable_state_folders_are_rejected_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    not_utf8 = tmp_path / os.fsdecode(b"\xff")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", open_to_all, Path("/proc/nowhere"), not_utf8):
        with pytest.raises(ConfigError, match="--state-dir"):
            StateFolder.open(bad)


def test_an_atomic_write_replaces_the_whole_file_and_leaves_no_other_file(tmp_path: Path) -> None:
    for pid in (1, 2):
        write_atomically(tmp_path / "run.json", {"pid": pid})
    (tmp_path / "folder").mkdir()
    with pytest.raises(CannotRecord, match="Is a directory"):
        write_atomically(tmp_path / "folder", {})
    assert (tmp_path / "run.json").read_text() == '{"pid": 2}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run.json"]


def test_writing_works_on_file_systems_that_cannot_sync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VirtualBox's shared folders cannot be synced. PostgreSQL ignores this error as well."""
    real = os.fsync

    def refusing(refuses: Callable[[int], bool]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            if refuses(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            real(descriptor)

        return call

    monkeypatch.setattr(os, "fsync", refusing(stat.S_ISDIR))
    write_atomically(tmp_path / "run.json", {"pid": 1})
    key = Identity.load_or_create(tmp_path / "identity.key")
    assert Identity.load(tmp_path / "identity.key").peer_id == key.peer_id
    monkeypatch.setattr(os, "fsync", refusing(stat.S_ISREG))
    with pytest.raises(OSError, match="Invalid argument"):
        durable.sync(tmp_path / "run.json")


FOREIGN: dict[str, Callable[[Path, Path], object]] = {
    "symlink": Path.symlink_to,
    "hard link": Path.hardlink_to,
    "folder": lambda lock, _: lock.mkdir(),
    "fifo": lambda lock, _: os.mkfifo(lock),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_lock_file_that_is_a_link_or_no_regular_file_is_not_written_to(tmp_path: Path, kind: str) -> None:
    state, lock, precious = tmp_path / "state", tmp_path / "state" / LOCK_FILE, tmp_path / "precious"
    state.mkdir(mode=0o700)
    precious.write_text("mine")
    FOREIGN[kind](lock, precious)
    with pytest.raises(ConfigError, match=r"Remove it|remove it|Choose another"):
        StateFolder.open(state)
    assert precious.read_text() == "mine" and not in_use(state)


SEEDS = [
    b"",
    b"[]",
    b'{"seed": null}',
    b'{"seed": -1}',
    b'{"seed": 1e400}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"seed": "7"}',
    b"[" * 200_000,
    b"\xff",
]


@pytest.mark.parametrize("content", SEEDS, ids=range(len(SEEDS)))
def test_an_invalid_seed_file_is_renamed_and_another_seed_drawn(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "node.json").write_bytes(content)
    drawn = node_seed(None, tmp_path)
    assert 0 <= drawn < 2**63 and node_seed(None, tmp_path) == drawn
    assert (tmp_path / "node.json.corrupt").read_bytes() == content


def test_a_seed_that_cannot_be_saved_gives_an_error_message(tmp_path: Path) -> None:
    for name in ("node.json", "node.json.corrupt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    with pytest.raises(CannotRecord, match=r"node\.json: cannot be written: Is a directory"):
        node_seed(None, tmp_path)


def test_a_file_system_without_permissions_gives_another_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On FAT and 9p, every file has the same mode, and chmod has no effect."""
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="Run `chmod o-w"):
        StateFolder.open(tmp_path)
    monkeypatch.setattr("os.fstat", lambda _: SimpleNamespace(st_mode=stat.S_IFREG | 0o777))
    with pytest.raises(ConfigError, match=r"keeps no permissions\. Choose another with --state-dir"):
        StateFolder.open(tmp_path)
    monkeypatch.undo()
    tmp_path.chmod(0o700)
    key = tmp_path / "identity.key"
    Identity.load_or_create(key)
    key.chmod(0o644)
    with pytest.raises(KeyFileUnusable, match="Run `chmod 600"):
        Identity.load(key)
    monkeypatch.setattr("p2p.durable.keeps_modes", lambda _: False)
    with pytest.raises(KeyFileUnusable, match="has no permissions"):
        Identity.load(key)
