"""After saving and restoring, the next round is the same as without the interruption, bit for bit.

A checkpoint of another base model is rejected.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.training.policy_files import CheckpointUnfit, tensor_file
from swarmd.types import UpdateReport
from tests.doubles import TIMEOUT_S
from tests.swarmd.policy.conftest import (
    BITSANDBYTES,
    answered,
    config_of,
    edit_json,
    external,
    make_model,
    open_policy,
)

KINDS = {
    "whole": {},
    "adapter": {"lora": "on", "lora_rank": 4},
    "adapter on bfloat16": {"lora": "on", "lora_rank": 4, "dtype": "bfloat16"},
    "whole in bfloat16": {"dtype": "bfloat16"},
    "8 bits": {"train": {"learning_rate": 1e-2, "optimizer": "adamw8bit"}},
}


def one_round(policy: LanguagePolicy, number: int) -> tuple[object, UpdateReport]:
    batch = answered(policy, [f"{number}+{number}?", "and another, longer question"], round_number=number)
    batch.append(external("third?", [("one", True), ("two", False)], (0.0, 1.0), number))
    return batch, policy.update(batch)


def save(policy: LanguagePolicy, folder: Path) -> Path:
    folder.mkdir()
    policy.save(folder)
    return folder


NEXT_ROUND = """
import sys
from pathlib import Path
from swarmd.config.config import NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from tests.swarmd.policy.test_saved import one_round, save
config, start, end = sys.argv[1:]
policy = LanguagePolicy.open(NodeConfig.model_validate_json(config), seed=99)
policy.restore(Path(start))
print(repr(one_round(policy, 3)))
save(policy, Path(end))
"""


@pytest.mark.slow
def test_another_process_continues_with_the_same_next_round(folders: dict[str, Path], tmp_path: Path) -> None:
    config = config_of(folders["qwen2"], train={"learning_rate": 1e-2})
    torch.set_num_threads(1)
    policy = LanguagePolicy.open(config, seed=5)
    one_round(policy, 1)
    one_round(policy, 2)
    save(policy, tmp_path / "two")
    command = [
        sys.executable,
        "-c",
        NEXT_ROUND,
        config.model_dump_json(),
        tmp_path / "two",
        tmp_path / "three elsewhere",
    ]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ, timeout=TIMEOUT_S
    )
    assert done.stdout.strip() == repr(one_round(policy, 3))
    save(policy, tmp_path / "three")
    for name in ("weights.safetensors", "training.safetensors", "policy.json"):
        assert (tmp_path / "three" / name).read_bytes() == (tmp_path / "three elsewhere" / name).read_bytes()


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        *((kind, 1) for kind in KINDS if kind != "8 bits"),
        pytest.param("8 bits", 1, marks=BITSANDBYTES),
        ("whole", 0),
        ("whole in bfloat16", 0),
    ],
)
def test_a_restored_policy_continues_exactly(
    kind: str,
    rounds: int,
    folders: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = {"train": {"learning_rate": 1e-2}, **KINDS[kind]}
    policy = open_policy(folders["qwen3"], seed=5, **changes)
    for number in range(rounds):
        one_round(policy, number)
    saved = save(policy, tmp_path / "saved")
    again = open_policy(folders["qwen3"], seed=6, **changes)
    again.restore(saved)
    assert caplog.text == ""
    assert one_round(again, 2) == one_round(policy, 2) and one_round(again, 3) == one_round(policy, 3)


def test_a_restored_policy_tells_whether_its_prompts_have_changed(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    saved = save(open_policy(folders["qwen2"]), tmp_path / "saved")
    changes = ({}, {"opening": "<answer>"}, {"examples": [["1?", "2"]]}, {"system_prompt": "x"})
    policies = [open_policy(folders["qwen2"], **each) for each in changes]
    assert [policy.restore(saved) for policy in policies] == [False, True, True, True]


def test_a_checkpoint_of_an_adapter_has_no_other_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    policy = open_policy(folders["qwen2"], lora="on")
    saved = save(policy, tmp_path / "saved")
    assert all("lora_" in name for name in safetensors.torch.load_file(saved / "weights.safetensors"))
    assert sorted(p.name for p in saved.iterdir()) == [
        "policy.json",
        "training.safetensors",
        "weights.safetensors",
    ]


def test_a_checkpoint_of_all_weights_of_another_model_is_rejected_without_effect(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    saved = save(open_policy(folders["qwen2"]), tmp_path / "saved")
    identity = json.loads((saved / "policy.json").read_text())["base"]
    folder = make_model(tmp_path / "other", "qwen2", seed=1)
    one, other = open_policy(folder, seed=1), open_policy(folder, seed=1)
    for at, more in {"": "", " at abc": ", model.revision = 'abc'"}.items():
        edit_json(saved / "policy.json", base=identity | {"revision": at.removeprefix(" at ") or None})
        said = (
            rf"from \S*{at}, this is \S*: another base model\. Set model\.name = '\S*'{more}, or give .*dir"
        )
        with pytest.raises(CheckpointUnfit, match=said):
            one.restore(saved)
    assert one_round(one, 1) == one_round(other, 1)


def test_a_checkpoint_is_accepted_if_the_model_folder_was_moved(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    policy = open_policy(folders["qwen2"], train={"learning_rate": 1e-2})
    policy.update([external("1+1?", [("two", True), ("7", False)], (1.0, 0.0))])
    moved = open_policy(make_model(tmp_path / "moved", "qwen2"))  # the same weights in another folder
    assert any(not torch.equal(weight, policy.trained[name]) for name, weight in moved.trained.items())
    moved.restore(save(policy, tmp_path / "saved"))
    assert all(torch.equal(weight, policy.trained[name]) for name, weight in moved.trained.items())


def test_an_adapter_for_other_base_weights_is_rejected_even_under_the_same_name(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen2")
    saved = save(open_policy(folder, lora="on"), tmp_path / "saved")
    make_model(folder, "qwen2", seed=1)
    with pytest.raises(CheckpointUnfit, match="another base model"):
        open_policy(folder, lora="on").restore(saved)


def test_a_checkpoint_of_another_rank_or_training_method_is_rejected(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    saved = save(open_policy(folders["qwen2"], lora="on", lora_rank=4), tmp_path / "saved")
    for changes in ({}, {"lora": "on", "lora_rank": 8}):
        with pytest.raises(CheckpointUnfit, match=r"LoRA adapter of rank 4.*model\.lora"):
            open_policy(folders["qwen2"], **changes).restore(saved)


@pytest.mark.parametrize("name", ["policy.json", "weights.safetensors", "training.safetensors"])
def test_damaged_checkpoint_files_are_rejected(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    policy = open_policy(folders["qwen2"])
    one_round(policy, 1)
    saved = save(policy, tmp_path / "saved")
    whole = (saved / name).read_bytes()
    for part in (whole[: len(whole) // 2], b"", whole[:3] + b"\xff" + whole[4:]):
        (saved / name).write_bytes(part)
        with pytest.raises(ValueError, match=r"cannot be read|malformed|truncated|trailing|UTF-8"):
            policy.restore(saved)
    (saved / name).unlink()
    with pytest.raises(FileNotFoundError):
        policy.restore(saved)


def test_a_checkpoint_of_another_schema_version_is_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    policy = open_policy(folders["qwen2"])
    saved = save(policy, tmp_path / "saved")
    edit_json(saved / "policy.json", schema=2)
    with pytest.raises(CheckpointUnfit, match="schema 2"):
        policy.restore(saved)


def test_weights_of_another_architecture_are_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    policy = open_policy(folders["qwen2"])
    saved = save(policy, tmp_path / "saved")
    elsewhere = save(open_policy(folders["llama"]), tmp_path / "other")
    (saved / "weights.safetensors").write_bytes((elsewhere / "weights.safetensors").read_bytes())
    with pytest.raises(CheckpointUnfit, match="other tensor names or shapes"):
        policy.restore(saved)


def test_after_a_change_of_optimizer_the_moments_are_reset_with_a_message(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The float32 copy of 16-bit weights is kept."""
    policy = open_policy(folders["qwen2"], dtype="bfloat16")
    one_round(policy, 1)
    saved = save(policy, tmp_path / "saved")
    edit_json(saved / "policy.json", optimizer="adamw8bit")
    again = open_policy(folders["qwen2"], dtype="bfloat16")
    again.restore(saved)
    assert "optimizer was adamw8bit, this run's is adamw: the optimizer's moments are reset" in caplog.text
    before, after = (
        safetensors.torch.load_file(folder / "training.safetensors")
        for folder in (saved, save(again, tmp_path / "again"))
    )
    assert len(before) > len(after) > 1
    assert set(after) == {name for name in before if name.startswith(("master/", "random"))}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize(("first", "then"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_training_continues_from_a_checkpoint_in_another_dtype(
    first: str, then: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    policy = open_policy(folders["qwen2"], dtype=first)
    one_round(policy, 1)
    again = open_policy(folders["qwen2"], dtype=then)
    again.restore(save(policy, tmp_path / "saved"))
    assert again.version == 1
    for name, weight in again.trained.items():
        assert torch.equal(weight.detach().bfloat16(), policy.trained[name].detach().bfloat16())
    one_round(again, 2)


def test_after_a_change_of_device_the_random_generator_is_seeded_again_with_a_message(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = open_policy(folders["qwen2"])
    saved = save(policy, tmp_path / "saved")
    document = json.loads((saved / "policy.json").read_text())
    document["base"] |= {"device": "cuda", "dtype": "bfloat16"}
    (saved / "policy.json").write_text(json.dumps(document | {"updates": 3}))
    training = safetensors.torch.load_file(saved / "training.safetensors")
    random = {"random": torch.zeros(16, dtype=torch.uint8)}  # CUDA's state has another size
    (saved / "training.safetensors").write_bytes(safetensors.torch.save(training | random))
    restored = open_policy(folders["qwen2"])
    restored.restore(saved)
    assert restored.generate(["1+1?"], 4) != open_policy(folders["qwen2"]).generate(["1+1?"], 4)
    assert "the random generator is seeded again" in caplog.text and "made in bfloat16" in caplog.text


TENSORS = {
    "weight": torch.arange(15, dtype=torch.float32).view(3, 5),
    "step": torch.tensor(3.0),
    "é": torch.arange(7, dtype=torch.uint8),
    "transposed": torch.arange(16, dtype=torch.float64).view(4, 4).t(),
    "half": torch.tensor([1.5, -2.0, 0.25]).to(torch.bfloat16),
    "nothing": torch.empty(0, 3),
    "long": torch.arange(3),
    "trained": torch.nn.Parameter(torch.ones(2, 2)),
}


@pytest.mark.parametrize("tensors", [TENSORS, {}])
def test_a_tensor_file_is_identical_to_the_output_of_safetensors(tensors: dict[str, torch.Tensor]) -> None:
    assert bytes(tensor_file(tensors)) == safetensors.torch.save(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    )


def test_a_tensor_file_does_not_change_with_its_tensors() -> None:
    tensor = torch.zeros(4)
    data = tensor_file({"x": tensor})
    before = bytes(data)
    tensor.fill_(1.0)
    assert bytes(data) == before
