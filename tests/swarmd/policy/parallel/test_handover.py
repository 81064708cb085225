"""Handover of weights between processes: weights are never mixed, even if a process dies or is decoding."""

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.policy.inference import decode
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.parallel.weight_sync import WeightReader, WeightWriter, private_folder
from tests.processes import killed_after
from tests.swarmd.policy.conftest import open_policy, plainly

# For each version number that it reads, this process hands over the following versions until it is killed. A
# version has four tensors filled with its number.
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


def test_a_folder_that_the_system_removed_is_created_again(tmp_path: Path) -> None:
    """systemd removes a user's files in memory at the last logout, and old temporary files."""
    ours, folder = {"a": torch.zeros(3)}, private_folder(tmp_path, 100, memory=tmp_path)
    handover, pickup = WeightWriter(folder), WeightReader(folder, ours)
    handover.publish(1, {"a": torch.ones(3)})
    assert pickup() == 1
    shutil.rmtree(folder)
    assert pickup() == 1
    handover.publish(2, {"a": torch.full((3,), 2.0)})
    assert pickup() == 2 and ours["a"].tolist() == [2.0] * 3 and folder.stat().st_mode & 0o777 == 0o700


def test_weights_of_another_model_are_rejected(tmp_path: Path) -> None:
    WeightWriter(tmp_path).publish(1, {"a": torch.zeros(3)})
    with pytest.raises(ValueError, match="belong to another model"):
        WeightReader(tmp_path, {"b": torch.zeros(3)})()


@pytest.mark.slow
@pytest.mark.net
def test_a_writer_killed_during_a_write_leaves_complete_weights(tmp_path: Path) -> None:
    weights = {f"layer {i}": torch.zeros(250_000) for i in range(4)}
    pickup, rng, version, killed = WeightReader(tmp_path, weights), random.Random(1), 0, 0
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with killed_after(subprocess.Popen(command, text=True, bufsize=1, **pipes)) as writers:
        for _ in range(3):
            writers.stdin.write(f"{version}\n")
            pid = int(writers.stdout.readline())
            while pid == killed:  # read the last message of the killed process
                pid = int(writers.stdout.readline())
            seen, enough = set(), rng.randint(2, 9)  # versions seen while the writer writes
            while len(seen) < enough:
                os.kill(pid, 0)
                seen.add(found := pickup())
                assert found >= version and all(bool((w == found).all()) for w in weights.values())
                version = found
            time.sleep(rng.uniform(0.0, 0.05))  # so that the kill comes at any moment of a write
            os.kill(killed := pid, signal.SIGKILL)
            assert all(bool((w == pickup()).all()) for w in weights.values())
            version = pickup()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_without_space_older_weights_are_kept_and_a_message_is_logged(
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


def test_the_folder_is_private_and_in_memory_only_if_there_is_space(tmp_path: Path) -> None:
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
    # A version that did not fit leaves no partial file.
    assert not inside.exists()


def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
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


QUESTIONS = ["What is 2 + 3?", "Which word is longer: no or yes?"]


def switching(folder: Path, at: int) -> LanguagePolicy:
    """Change the weights to version 1 before decoding step `at`, counted from 0."""
    calls = 0

    def between() -> int:
        nonlocal calls
        if calls == at:
            for weight in policy.trained.values():
                weight.mul_(1.5)
        calls += 1
        return int(calls > at)

    policy = open_policy(folder, seed=3, between=between)
    return policy


@pytest.mark.parametrize("family", ["qwen2", "lfm2"])
def test_each_token_has_its_version_and_earlier_tokens_do_not_change(
    folders: dict[str, Path], family: str
) -> None:
    plain = open_policy(folders[family], seed=3).generate(QUESTIONS, 4)
    mixed = switching(folders[family], 5).generate(QUESTIONS, 4)
    for before, after in zip(plain, mixed, strict=True):
        assert before.tokens.versions == ()
        for ids, versions in zip(after.tokens.ids, after.tokens.versions, strict=True):
            assert versions == tuple(int(step >= 5) for step in range(len(ids)))
        assert [ids[:5] for ids in after.tokens.ids] == [ids[:5] for ids in before.tokens.ids]
        assert [p[:5] for p in after.tokens.logprobs] == [p[:5] for p in before.tokens.logprobs]
    assert [g.tokens.logprobs for g in plain] != [g.tokens.logprobs for g in mixed]


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_newer_weights_reach_every_layer_in_every_cache_layout(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str, at: int
) -> None:
    """Shared prompts and padded rows have only the network in common.

    No layout may keep old weights that another layout would replace.
    """
    ways = []
    for padded in (False, True):
        policy = switching(folders[family], at)
        if padded:
            monkeypatch.setattr(decode, "adopt", lambda _: False)
        with plainly(policy.network) if padded else nullcontext():
            ways.append(policy.generate(QUESTIONS, 4))
    for shared, row in zip(*ways, strict=True):
        assert shared.tokens.ids == row.tokens.ids and shared.tokens.versions == row.tokens.versions
        for ours, theirs in zip(shared.tokens.logprobs, row.tokens.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
    if at == 0:
        changed = open_policy(folders[family], seed=3)
        with torch.no_grad():
            for weight in changed.trained.values():
                weight.mul_(1.5)
        with plainly(changed.network):
            again = changed.generate(QUESTIONS, 4)
        assert [g.tokens.ids for g in again] == [g.tokens.ids for g in ways[0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_with_a_handed_over_adapter_are_the_same(
    folders: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    trainer = open_policy(folders["qwen2"], seed=1, lora="on", lora_rank=4, dtype=dtype)
    generator = open_policy(folders["qwen2"], seed=1, lora="on", lora_rank=4, dtype=dtype)
    handover, pickup = WeightWriter(tmp_path), WeightReader(tmp_path, generator.trained)
    assert all("lora" in name for name in trainer.trained), "more than the adapter was handed over"
    for version in (1, 2):
        with torch.no_grad():
            for weight in trainer.trained.values():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(version)) * 0.3)
        handover.publish(version, trainer.trained)
        with torch.inference_mode():
            assert pickup() == version
        pairs = zip(trainer.network.parameters(), generator.network.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    question = QUESTIONS[:1]
    assert generator.generate(question, 3) == trainer.generate(question, 3)
