"""Adam loses no step on 16-bit weights, and a checkpoint keeps the optimizer's whole state."""

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swarmd.errors import NoModel
from swarmd.policy.models.load import load_model
from swarmd.policy.models.memory_plan import Workload
from swarmd.policy.training.optimizer import Optimizer
from tests.swarmd.policy.conftest import BITSANDBYTES, config_of, open_policy

KINDS = ["adamw", pytest.param("adamw8bit", marks=BITSANDBYTES)]
RATE = 1e-6  # the learning rate if all weights of a larger model are trained


def weights_of(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, nn.Parameter]:
    """Return weights.

    The first has more than 4,096 numbers; bitsandbytes stores moments in 8 bits only above that size.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {"wide": (128, 96), "short": (48,), "square": (16, 16)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }


def give_gradients(weights: Mapping[str, nn.Parameter], step: int) -> None:
    """Set gradients that mostly have one sign, as in training with a steady direction."""
    generator = torch.Generator().manual_seed(1000 + step)
    for weight in weights.values():
        weight.grad = (1 + 0.5 * torch.randn(weight.shape, generator=generator)).to(weight.dtype)


def stepped(
    adam: Optimizer, weights: Mapping[str, nn.Parameter], steps: Iterable[int], rate: float = RATE
) -> None:
    for step in steps:
        give_gradients(weights, step)
        adam.step(rate)


def trained(
    steps: int, dtype: torch.dtype = torch.bfloat16, rate: float = RATE, **settings: str
) -> dict[str, Tensor]:
    weights = weights_of(dtype)
    stepped(Optimizer(weights, **settings), weights, range(steps), rate)
    return {name: weight.detach().float() for name, weight in weights.items()}


def distance(weights: Mapping[str, Tensor]) -> float:
    """Return the mean distance from the initial weights, in the direction of the descent."""
    start = weights_of()
    return float(
        torch.cat([(start[name].detach().float() - w).flatten() for name, w in weights.items()]).mean()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_small_steps_are_not_lost_in_16_bits(kind: str) -> None:
    # Rounding to bfloat16 hides at most one step of the weight itself, so the mean distance is close to
    # float32's.
    steps, start, rate = 1000, weights_of(), 1e-5
    moved = distance(trained(steps, rate=rate, kind=kind))
    exact = {name: w.detach().float() for name, w in start.items()}
    weights = {name: nn.Parameter(w.clone()) for name, w in exact.items()}
    adam = torch.optim.AdamW(weights.values(), lr=rate, weight_decay=0.0)
    for step in range(steps):
        give_gradients(weights, step)
        adam.step()
    assert moved == pytest.approx(distance({n: w.detach() for n, w in weights.items()}), rel=0.15)


def test_the_master_copy_follows_float32_training() -> None:
    weights = weights_of() | {"plain": weights_of(torch.float32, seed=1)["short"]}
    idle = nn.Parameter(weights_of()["short"].detach().clone())
    adam = Optimizer(weights | {"idle": idle})
    exact = {name: nn.Parameter(w.detach().to(torch.float32, copy=True)) for name, w in weights.items()}
    reference = torch.optim.AdamW(exact.values(), lr=RATE, weight_decay=0.0, fused=True)
    for step in range(30):
        give_gradients(weights, step)
        for name, weight in exact.items():
            weight.grad = weights[name].grad.float()  # type: ignore[union-attr]
        adam.step(RATE)
        reference.step()
    copies = {
        name.removeprefix("master/"): t for name, t in adam.tensors().items() if name.startswith("master/")
    }
    for name, weight in exact.items():
        assert torch.equal(copies.get(name, weights["plain"].detach()), weight.detach())
        assert torch.equal(weights[name].detach(), weight.detach().to(weights[name].dtype))
    assert all(weight.grad is None for weight in weights.values())
    assert torch.equal(idle, weights_of()["short"]), "a weight without a gradient has changed"


def test_there_is_no_float32_copy_before_the_first_step() -> None:
    """A process that never trains never makes this copy."""
    weights = weights_of()
    adam = Optimizer(weights)
    assert adam.tensors() == {}
    stepped(adam, weights, range(1))
    assert adam.tensors().keys() >= {f"master/{name}" for name in weights}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_restored_optimizer_continues_exactly(kind: str, dtype: torch.dtype) -> None:
    weights = weights_of(dtype)
    adam = Optimizer(weights, kind)
    stepped(adam, weights, range(3), 1e-3)
    kept = {name: tensor.clone() for name, tensor in adam.tensors().items()}
    there = {name: weight.detach().clone() for name, weight in weights.items()}
    again_weights = weights_of(dtype, seed=7)
    again = Optimizer(again_weights, kind)
    again.load(there, kept)
    stepped(adam, weights, range(3, 6), 1e-3)
    stepped(again, again_weights, range(3, 6), 1e-3)
    for name, weight in weights.items():
        assert torch.equal(weight.detach(), again_weights[name].detach())
    for name, tensor in adam.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name
    again.load(there, {})  # the state before the first step
    assert {name.partition("/")[0] for name in again.tensors()} <= {"master"}


def test_a_master_copy_becomes_float32_weights_and_back() -> None:
    """The moments are kept as well, and nothing is lost."""
    weights = weights_of()
    adam = Optimizer(weights)
    stepped(adam, weights, range(3))
    kept = adam.tensors()
    plain = weights_of(torch.float32, seed=3)
    there = Optimizer(plain)
    there.load({name: w.detach() for name, w in weights.items()}, kept)
    for name, weight in plain.items():
        assert torch.equal(weight.detach(), kept[f"master/{name}"])
    assert not torch.equal(plain["short"].detach(), weights["short"].detach().float())
    back = Optimizer(weights_of(seed=3))
    back.load({name: w.detach() for name, w in plain.items()}, there.tensors())
    assert back.tensors().keys() == kept.keys()
    assert all(torch.equal(back.tensors()[name], tensor) for name, tensor in kept.items())


@BITSANDBYTES
def test_eight_bit_moments_take_a_quarter_of_the_memory() -> None:
    sizes = []
    for kind in ("adamw", "adamw8bit"):
        weights = weights_of(torch.float32)
        stepped(adam := Optimizer(weights, kind), weights, [0])
        sizes.append(
            sum(
                t.nbytes
                for name, t in adam.tensors().items()
                if name.endswith("/wide") and "qmap" not in name
            )
        )
    assert 0.25 <= sizes[1] / sizes[0] < 0.26


def test_a_missing_optimizer_library_is_reported_before_loading(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        NoModel, match=r"bitsandbytes.*pip install 'swarmd\[bitsandbytes\]'.*train\.optimizer = 'adamw'"
    ):
        load_model(config_of(folders["qwen2"]).model, 0, work=Workload(optimizer="adamw8bit"))
    with pytest.raises(NoModel):
        open_policy(folders["qwen2"], train={"optimizer": "adamw8bit"})


def test_eight_bit_moments_are_rejected_on_mps_before_loading(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmd.policy.models.fit.choose_device", lambda _: torch.device("mps"))
    with pytest.raises(NoModel, match=r"does not run on Apple's MPS.*train\.optimizer = 'adamw'"):
        load_model(config_of(folders["qwen2"]).model, 0, work=Workload(optimizer="adamw8bit"))
