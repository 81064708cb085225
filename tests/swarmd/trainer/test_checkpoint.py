import errno
import hashlib
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import msgspec
import pytest

from p2p.types import PeerId
from swarmd.cli.trained.snapshot import read_snapshot
from swarmd.errors import CannotRecord, SwarmdError
from swarmd.experience.pool import PoolEntry
from swarmd.state.metrics import each_round
from swarmd.trainer.checkpoint import (
    DAY_S,
    Checkpoints,
    RunState,
    Timetable,
    folder_bytes,
    saved_in,
)
from swarmd.types import Completion, Rollout, Scored, TaskRef, Tokens
from tests.processes import killed_after


def state(number: int) -> RunState:
    rng = random.Random(number)
    rollout = Rollout(TaskRef("bf", 3), (Completion("é", True), Completion("", False)), PeerId("p"))
    tokens = Tokens(((1, 2), ()), ((-0.5, -1.0), ()))
    pool = (
        PoolEntry(Scored(rollout, "q", (0.0, 1.0), number)),
        PoolEntry(Scored(rollout, "q", (0.0, 1.0), number, tokens), uses=2, last_use=5, since=4),
    )
    return RunState(number, 7, rng.getstate(), random.Random(1).getstate(), pool)


def uneven(state: RunState) -> RunState:
    """Return the state without one reward of its first rollout."""
    first, *others = state.pool
    scored = replace(first.scored, rewards=first.scored.rewards[1:])
    return replace(state, pool=(replace(first, scored=scored), *others))


def policy(text: str = "weights") -> list[tuple[str, bytes]]:
    return [("policy.bin", text.encode())]


def test_a_checkpoint_is_due_after_each_interval() -> None:
    timetable = Timetable(60, 50e9, last=1000.0)
    assert [timetable.until_due(now) for now in (1000.0, 1060.0)] == [60, 0] and timetable.until_due(
        1059.9
    ) > 0
    timetable.wrote(10_000_000, 1065.0)
    assert timetable.until_due(1065.0) == 60 and timetable.affordable(1065.0 + timetable.interval(10_000_000))


def test_large_checkpoints_are_less_frequent() -> None:
    timetable = Timetable(60, 50e9, last=0.0)
    timetable.wrote(6_000_000_000, 60.0)
    assert timetable.until_due(60.0) == pytest.approx(6 / 50 * DAY_S) and timetable.until_due(3600.0) > 0


def test_urgent_saves_stay_within_the_daily_limit() -> None:
    """The judge asks whenever a checkpoint is affordable, and the node is paused every hour."""
    size, now, written = 100_000_000, 0.0, 0
    timetable = Timetable(60, 50e9, last=0.0)
    while now < DAY_S:
        asked = timetable.affordable(now) or now % 3600 == 0
        for _ in range((timetable.until_due(now) == 0) + asked):
            timetable.wrote(size, now)
            written += size
        now += 10
    assert 0.9 * 50e9 < written <= 50e9 + 3 * size


def test_the_state_folder_stays_within_its_limit(tmp_path: Path) -> None:
    """The limit allows two checkpoints.

    The latest is never removed for the next; if there is no room for both, the next is rejected.
    """
    checkpoints = Checkpoints(tmp_path / "c", most=40_000)
    for number in range(1, 5):
        checkpoints.save(state(number), policy("w" * 8_000))
        assert folder_bytes(tmp_path) <= 40_000
    assert [path.name for path in saved_in(checkpoints.folder)] == ["round-00000003", "round-00000004"]
    (tmp_path / "metrics.jsonl").write_text("x" * 15_000)
    with pytest.raises(CannotRecord, match=r"limits\.state"):
        checkpoints.save(state(5), policy("w" * 8_000))
    assert checkpoints.newest()[0].round == 4 and len(list((tmp_path / "c").iterdir())) == 1
    assert folder_bytes(tmp_path) <= 40_000
    (tmp_path / "metrics.jsonl").unlink()
    checkpoints.save(state(5), policy("w" * 8_000))


def test_a_saved_checkpoint_can_be_read_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.newest() is None
    checkpoints.save(state(3), policy())
    back, folder, notes = checkpoints.newest()
    assert back == state(3) and (folder / "policy.bin").read_text() == "weights" and notes == []
    rng = random.Random()
    rng.setstate(back.task_rng)
    assert rng.random() == random.Random(3).random()


def test_only_the_two_latest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number in (8, 9, 10, 11):
        checkpoints.save(state(number), policy())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-00000010", "round-00000011"]


def test_a_checkpoint_gets_its_name_only_once_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a power failure at any moment leaves no incomplete checkpoint.

    The order is: sync the files, sync their folder, rename the folder, sync the parent folder.
    """
    done: list[int | str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        done.append(os.fstat(descriptor).st_ino)

    def renamed(path: Path, target: Path) -> Path:
        done.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    saved = Checkpoints(tmp_path).save(state(1), policy())
    files = {path.stat().st_ino for path in saved.iterdir()}
    assert len(files) == 3 and set(done[:3]) == files
    assert done[3:] == [saved.stat().st_ino, "renamed", tmp_path.stat().st_ino]


def test_saving_a_round_again_replaces_the_earlier_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for text in ("once", "again"):
        assert (checkpoints.save(state(1), policy(text)) / "policy.bin").read_text() == text
    assert checkpoints.newest()[2] == []


def test_a_partial_checkpoint_of_a_killed_node_is_removed(tmp_path: Path) -> None:
    (tmp_path / "partial-99999999").mkdir()
    (tmp_path / f"partial-{os.getpid()}").mkdir()
    (tmp_path / f"partial-{os.getpid()}" / "left.bin").write_bytes(b"x")
    saved = Checkpoints(tmp_path).save(state(1), policy())
    assert [p.name for p in tmp_path.iterdir()] == [saved.name] and not (saved / "left.bin").exists()


def test_a_partial_checkpoint_does_not_count_towards_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    left = folder / "partial-99999999"
    checkpoints = Checkpoints(folder, most=40_000)
    left.mkdir(parents=True)
    (left / "weights.bin").write_bytes(bytes(40_000))
    checkpoints.save(state(1), policy())
    assert not left.exists()


def test_another_program_can_read_a_checkpoint(tmp_path: Path) -> None:
    """The reference implementation of msgpack and the manifest are enough."""
    saved = Checkpoints(tmp_path).save(replace(state(2), before={1: 3}, used=(b"digest",)), policy())
    files = json.loads((saved / "manifest.json").read_text())["files"]
    content = (saved / "run.msgpack").read_bytes()
    assert files["run.msgpack"] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    run = msgpack.unpackb(content, strict_map_key=False)
    rollout = {"ref": {"specialty": "bf", "n": 3}, "author": "p", "heard": 0, "group": ""}
    rollout["completions"] = [
        {"text": "é", "ended": True, "earlier": []},
        {"text": "", "ended": False, "earlier": []},
    ]
    assert (run["schema"], run["round"], run["seed"], run["before"], run["used"]) == (
        1,
        2,
        7,
        {1: 3},
        [b"digest"],
    )
    assert [each["uses"] for each in run["pool"]] == [0, 2]
    external, ours = (each["scored"] for each in run["pool"])
    assert external == {
        "rollout": rollout,
        "question": "q",
        "rewards": [0.0, 1.0],
        "round": 2,
        "tokens": None,
        "whole": [],
        "observations": [],
    }
    assert ours["tokens"] == {
        "ids": [[1, 2], []],
        "logprobs": [[-0.5, -1.0], []],
        "versions": [],
        "sampled": [],
        "own": True,
    }
    version, internal, spare = run["task_rng"]
    drawn = random.Random()
    drawn.setstate((version, tuple(internal), spare))
    assert drawn.random() == random.Random(2).random()


def test_the_latest_damaged_checkpoint_is_kept(tmp_path: Path) -> None:
    """A run that continues from an earlier round removes neither a damaged checkpoint nor later ones."""
    checkpoints = Checkpoints(tmp_path)
    newer = ["round-00000007", "round-00000008", "round-00000009"]
    for name in ("damaged-round-00000003", "damaged-round-00000005", *newer):
        (tmp_path / name).mkdir()
    checkpoints.save(state(2), policy())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged-round-00000005", "round-00000002", *newer]


def test_a_round_whose_checkpoint_is_damaged_again_is_renamed_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), policy())
    (tmp_path / "round-of-notes.txt").write_text("mine")
    for text in ("once", "again"):
        (checkpoints.save(state(2), policy()) / "policy.bin").write_text(text)
        found, _, notes = checkpoints.newest()
        assert found.round == 1 and len(notes) == 1
        assert (tmp_path / "damaged-round-00000002" / "policy.bin").read_text() == text


@pytest.mark.parametrize(
    "number, said",
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "Free some space"),
        (errno.EACCES, "owner and mode"),
        (errno.EIO, "owner and mode"),
    ],
)
def test_disk_errors_give_the_cause_and_a_remedy(tmp_path: Path, number: int, said: str) -> None:
    def refused() -> Iterator[tuple[str, bytes]]:
        yield "policy.bin", b"half"
        raise OSError(number, os.strerror(number))

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), policy())
    with pytest.raises(CannotRecord, match=said) as error:
        checkpoints.save(state(2), refused())
    assert os.strerror(number) in str(error.value) and [p.name for p in tmp_path.iterdir()] == [
        "round-00000001"
    ]
    assert checkpoints.newest()[0].round == 1


def written(folder: Path, name: str, content: bytes | None) -> None:
    """Put a file into a checkpoint and its manifest, or remove it from the manifest if `content` is None."""
    document = json.loads((folder / "manifest.json").read_text())
    document["files"].pop(name, None)
    if content is not None:
        (folder / name).write_bytes(content)
        document["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(document))


def manifest(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "manifest.json").write_text(text)


def edited(**changes: object) -> Callable[[Path], object]:
    """Return a function that changes these values of a checkpoint's manifest."""
    return lambda folder: manifest(json.dumps(json.loads((folder / "manifest.json").read_text()) | changes))(
        folder
    )


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda folder: (folder / "policy.bin").write_text("nEw"),
    "longer": lambda folder: (folder / "policy.bin").write_text("new and more"),
    "cut": lambda folder: (folder / "run.msgpack").write_bytes((folder / "run.msgpack").read_bytes()[:-3]),
    "missing": lambda folder: (folder / "policy.bin").unlink(),
    "no JSON": manifest("{"),
    "an empty manifest": manifest("{}"),
    "a list": manifest("[]"),
    "no files": edited(files=None),
    "a later schema": edited(schema=2),
    "names nothing": edited(files={}),
    "names less": lambda folder: written(folder, "policy.bin", None),
    "null entry": edited(files={"policy.bin": None}),
    "nested too deeply": manifest('{"schema": 1, "more": ' + "[" * 200_000),
    "undecodable": lambda folder: written(folder, "run.msgpack", msgspec.msgpack.encode({"round": "two"})),
    "another round": lambda folder: written(folder, "run.msgpack", msgspec.msgpack.encode(state(9))),
    "outside": lambda folder: written(folder, "../outside", b"x"),
    "uneven pool": lambda folder: written(folder, "run.msgpack", msgspec.msgpack.encode(uneven(state(2)))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_renamed_and_the_previous_one_is_used(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, ["policy.bin"])
    checkpoints.save(state(1), policy("old"))
    DAMAGES[damage](checkpoints.save(state(2), policy("new")))
    found, folder, notes = checkpoints.newest()
    assert found.round == 1 and (folder / "policy.bin").read_text() == "old"
    assert len(notes) == 1 and "round-00000002 is damaged" in notes[0]
    assert (tmp_path / "damaged-round-00000002").is_dir()


def test_a_checkpoint_that_cannot_be_restored_is_skipped_with_a_note(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number in (1, 2):
        checkpoints.save(state(number), policy())

    def take_up(state: RunState, folder: Path) -> None:
        if state.round == 2:
            raise TypeError("a state vector of 3 numbers")

    found, _, notes = checkpoints.newest(take_up)
    assert found.round == 1 and "a state vector" in notes[0]


def test_a_run_whose_checkpoints_are_all_damaged_ends_with_an_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    (checkpoints.save(state(1), policy()) / "policy.bin").write_text("x")
    for _ in range(2):  # the second start fails as well
        with pytest.raises(SwarmdError, match=r"round-00000001 is damaged.*--state-dir"):
            checkpoints.newest()


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/dev/full").exists(), reason="needs a device that is always full"
)
def test_saving_on_a_full_device_gives_an_error(tmp_path: Path) -> None:
    with pytest.raises(CannotRecord):
        Checkpoints(tmp_path).save(state(1), [("/dev/full", b"x" * 100_000)])


# Commands that export or answer read checkpoints without the lock.


def test_the_latest_checkpoint_and_the_metrics_up_to_it_are_read(tmp_path: Path) -> None:
    for number in (1, 2):
        Checkpoints(tmp_path / "checkpoints").save(state(number), policy(f"of {number}"))
    # A conversation reads each new checkpoint but never the metrics, which may be gigabytes.
    (tmp_path / "metrics.jsonl").mkdir()
    run = read_snapshot(tmp_path, ["policy.bin"])
    (tmp_path / "metrics.jsonl").rmdir()
    (tmp_path / "metrics.jsonl").write_text('{"round":1}\n{"round":2}\n{"round":3}\n')
    assert (run.round, run.files["policy.bin"]) == (2, b"of 2")
    assert [line.round for line in each_round(tmp_path / "metrics.jsonl", run.round)] == [1, 2]


def test_readers_skip_a_damaged_checkpoint_and_leave_it_in_place(tmp_path: Path) -> None:
    older, newest = (Checkpoints(tmp_path / "checkpoints").save(state(n), policy()) for n in (1, 2))
    (newest / "policy.bin").write_bytes(b"weightz")
    assert read_snapshot(tmp_path, ["policy.bin"]).round == 1 and newest.is_dir()
    edited(schema=2)(older)
    said = r"are damaged.*02: policy\.bin differs from its manifest; .*01: its manifest is of another version"
    with pytest.raises(SwarmdError, match=said):
        read_snapshot(tmp_path, ["policy.bin"])


def test_a_reader_takes_a_later_checkpoint_if_its_own_is_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    first = checkpoints.save(state(1), policy()) / "policy.bin"
    first.unlink()
    os.mkfifo(first)  # a reader of the pipe waits for the node

    def node() -> None:
        with first.open("wb"):
            for number in (2, 3):  # removes the first
                checkpoints.save(state(number), policy(f"of {number}"))

    thread = threading.Thread(target=node)
    thread.start()
    run = read_snapshot(tmp_path, ["policy.bin"])
    thread.join()
    assert (run.round, run.files["policy.bin"]) == (3, b"of 3")


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_latest_complete_checkpoint(tmp_path: Path) -> None:
    """A child process saves repeatedly and prints each saved round; the test kills it at random moments."""
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from tests.swarmd.trainer.test_checkpoint import policy, state
        from swarmd.trainer.checkpoint import Checkpoints
        checkpoints = Checkpoints(Path(sys.argv[1]))
        found = checkpoints.newest()
        number = found[0].round if found else 0
        while True:
            number += 1
            checkpoints.save(state(number), policy("w" * 200_000))
            print(number, flush=True)
    """
    )
    rng = random.Random(0)
    last = 0
    for _ in range(12):
        with killed_after(
            subprocess.Popen(
                [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
            )
        ) as child:
            for _ in range(rng.randrange(1, 12)):
                last = int(child.stdout.readline())
            child.kill()
            last = max([last, *(int(line) for line in child.stdout.read().split())])
        found, _, notes = Checkpoints(tmp_path).newest()
        assert found.round >= last and notes == []
        last = found.round
