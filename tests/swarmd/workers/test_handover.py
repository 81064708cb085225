"""Weights from one process to another, without a tear whoever dies and when."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.policy.parallel.weight_sync import WeightReader, WeightWriter, private_folder
from tests.processes import killed_after

# For each version that it reads, a process of its own hands over the versions after it, of four tensors, each
# full of its version, until it is killed.
WRITER = """
import os, sys, torch
from itertools import count
from pathlib import Path
from swarmd.policy.parallel.weight_sync import WeightWriter
for line in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    handover = WeightWriter(Path(sys.argv[1]))
    for version in count(int(line) + 1):
        handover.publish(version, {f"layer {i}": torch.full((250_000,), float(version)) for i in range(4)})
        print(os.getpid(), flush=True)
"""


def test_each_version_of_the_weights_is_read_once(tmp_path: Path) -> None:
    ours, theirs = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}, {"a": torch.arange(3.0), "b": torch.eye(2)}
    pickup, handover = WeightReader(tmp_path, ours), WeightWriter(tmp_path)
    assert pickup() == -1
    for version in (4, 5):
        handover.publish(version, theirs)
        assert pickup() == pickup() == version
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        theirs["a"] += 1
    handover.publish(5, theirs)
    assert pickup() == 5 and not torch.equal(ours["a"], theirs["a"])


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    WeightWriter(tmp_path).publish(1, {"a": torch.zeros(3)})
    with pytest.raises(ValueError, match="not those of this model"):
        WeightReader(tmp_path, {"b": torch.zeros(3)})()


@pytest.mark.slow
@pytest.mark.net
def test_a_writer_that_is_killed_while_it_writes_leaves_whole_weights(tmp_path: Path) -> None:
    weights = {f"layer {i}": torch.zeros(250_000) for i in range(4)}
    pickup, rng, version, killed = WeightReader(tmp_path, weights), random.Random(1), 0, 0
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with killed_after(subprocess.Popen(command, text=True, bufsize=1, **pipes)) as writers:
        for _ in range(3):
            writers.stdin.write(f"{version}\n")
            pid = int(writers.stdout.readline())
            while pid == killed:  # what it said last
                pid = int(writers.stdout.readline())
            seen, enough = set(), rng.randint(2, 9)  # versions: it is written to while we look
            while len(seen) < enough:
                os.kill(pid, 0)
                seen.add(found := pickup())
                assert found >= version and all(bool((w == found).all()) for w in weights.values())
                version = found
            time.sleep(rng.uniform(0.0, 0.05))  # it is killed at any moment of a write
            os.kill(killed := pid, signal.SIGKILL)
            assert all(bool((w == pickup()).all()) for w in weights.values())
            version = pickup()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_without_room_older_weights_stay_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handover, weights = WeightWriter(tmp_path), {"a": torch.ones(3)}
    handover.publish(1, weights)
    (tmp_path / f".weights.safetensors.{os.getpid()}").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        handover.publish(2, weights)
    assert handover.version == 1 and "older weights" in caplog.text
    handover.publish(2, weights)
    assert handover.version == 2 and WeightReader(tmp_path, {"a": torch.zeros(3)})() == 2


def test_the_folder_is_private_and_in_memory_only_where_there_is_room(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    inside = private_folder(tmp_path / "state", 1000, memory)
    assert inside.parent == memory and inside.stat().st_mode & 0o777 == 0o700
    (inside / "left").write_text("by a run that was killed")
    assert private_folder(tmp_path / "state", 1000, memory) == inside and list(inside.iterdir()) == []
    for elsewhere in (
        private_folder(tmp_path / "state", 2**60, memory),
        private_folder(tmp_path / "state", 1, tmp_path / "nowhere"),
    ):
        assert elsewhere.parent != memory and elsewhere.stat().st_mode & 0o777 == 0o700
        elsewhere.rmdir()
    # What was left takes no room, and does not stay, where there was none for the next.
    assert not inside.exists()


def test_somebody_elses_link_is_not_followed(tmp_path: Path) -> None:
    memory, precious = tmp_path / "memory", tmp_path / "precious"
    for folder in (memory, precious):
        folder.mkdir()
    (precious / "file").write_text("kept")
    inside = private_folder(tmp_path / "state", 1, memory)
    inside.rmdir()
    inside.symlink_to(precious)
    elsewhere = private_folder(tmp_path / "state", 1, memory)
    assert elsewhere.parent != memory and (precious / "file").read_text() == "kept"
    elsewhere.rmdir()
