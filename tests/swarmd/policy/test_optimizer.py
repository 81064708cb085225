"""Adam on weights of 16 bits: no step is lost; and what a checkpoint keeps of it is all there is."""

import gc
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swarmd.policy.models.load import load_model
from swarmd.policy.models.memory_plan import Workload
from swarmd.policy.training import optimizer
from swarmd.policy.training.optimizer import NoOptimizer, Optimizer, rounded_at_random
from tests.swarmd.policy.conftest import BITSANDBYTES, config_of, external, open_policy

KINDS = ["adamw", pytest.param("adamw8bit", marks=BITSANDBYTES)]
RATE = 1e-6  # what all weights of a larger model are trained at


def weights_of(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, nn.Parameter]:
    """Return weights, the first of over 4,096 numbers so that 8-bit moments really have 8 bits."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"wide": (128, 96), "short": (48,), "square": (16, 16)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }


def give_gradients(weights: Mapping[str, nn.Parameter], step: int) -> None:
    """Give gradients of mostly one sign, as where training goes somewhere."""
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
    """Return the mean distance from the start, in the direction that every gradient points."""
    start = weights_of()
    return float(
        torch.cat([(start[name].detach().float() - w).flatten() for name, w in weights.items()]).mean()
    )


@pytest.mark.parametrize("precision", ["master", "stochastic"])
@pytest.mark.parametrize("kind", KINDS)
def test_small_steps_are_not_lost_in_16_bits(precision: str, kind: str) -> None:
    # The copy shows where it has come to a step of the weight itself
    steps = 200 if precision == "stochastic" else 1000
    start, rate = weights_of(), RATE if precision == "stochastic" else 1e-5
    moved = distance(trained(steps, rate=rate, kind=kind, precision=precision))
    exact = {name: w.detach().float() for name, w in start.items()}
    weights = {name: nn.Parameter(w.clone()) for name, w in exact.items()}
    adam = torch.optim.AdamW(weights.values(), lr=rate, weight_decay=0.0)
    for step in range(steps):
        give_gradients(weights, step)
        adam.step()
    assert moved == pytest.approx(distance({n: w.detach() for n, w in weights.items()}), rel=0.15)


def test_the_master_copy_goes_where_float32_goes() -> None:
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
    assert torch.equal(idle, weights_of()["short"]), "it had no gradient"


def test_stochastic_rounding_holds_no_float32_copy_between_steps() -> None:
    def held() -> int:
        found = [o for o in gc.get_objects() if type(o) is nn.Parameter and o.dtype == torch.float32]
        return sum(parameter.nbytes for parameter in found)

    # What earlier tests left behind may be freed at any time.
    gc.collect()
    weights, before = weights_of(), held()
    adam = Optimizer(weights, precision="stochastic")
    stepped(adam, weights, range(2))
    assert held() <= before


@pytest.mark.parametrize("value", [1.0 + 2**-10, -3.0 - 2**-9, 1e-30, 7.77e-3])
def test_rounding_at_random_is_between_neighbours_and_right_on_average(value: float) -> None:
    exact = torch.full((200_000,), value)
    rounded = rounded_at_random(exact, torch.bfloat16, torch.Generator().manual_seed(0)).float()
    low, high = sorted(set(rounded.tolist()))
    assert low < exact[0] < high
    assert torch.tensor(low).bfloat16().view(torch.int16) - torch.tensor(high).bfloat16().view(
        torch.int16
    ) in (-1, 1)
    error = (rounded.double().mean() - exact[0].double()).abs() / (high - low)
    assert error < 4 * 0.5 / 200_000**0.5, "of the step between the neighbours; four standard errors"


def test_rounding_at_random_leaves_what_bfloat16_can_show_and_what_is_no_number() -> None:
    shown = torch.tensor([0.0, -0.0, 1.0, -2.5, 3.0e38, float("inf"), float("-inf")]).bfloat16()
    assert torch.equal(
        rounded_at_random(shown.float(), torch.bfloat16, torch.Generator().manual_seed(1)), shown
    )
    assert rounded_at_random(torch.tensor([float("nan")]), torch.bfloat16, torch.Generator()).isnan().all()
    with pytest.raises(ValueError, match="float16"):
        rounded_at_random(shown.float(), torch.float16, torch.Generator())


def test_rounding_at_random_goes_by_its_seed() -> None:
    runs = []
    for seed in (1, 1, 2):
        weights = weights_of()
        stepped(Optimizer(weights, precision="stochastic", seed=seed), weights, [0], 1e-4)
        runs.append(weights["wide"].detach().clone())
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["master", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("piece", [2**24, 5000])
def test_the_saved_state_is_complete(
    kind: str, precision: str, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "PIECE_NUMBERS", piece)
    weights = weights_of(dtype)
    adam = Optimizer(weights, kind, precision)
    stepped(adam, weights, range(3), 1e-3)
    kept = {name: tensor.clone() for name, tensor in adam.tensors().items()}
    there = {name: weight.detach().clone() for name, weight in weights.items()}
    assert any("#2" in name for name in kept) is (piece == 5000 and dtype == torch.bfloat16)
    again_weights = weights_of(dtype, seed=7)
    again = Optimizer(again_weights, kind, precision, seed=7)
    assert (
        again.fits(kept)
        and again.fits({})
        and not again.fits({k: v for k, v in kept.items() if k != "step/short"})
    )
    again.load(there, kept, same_device=True)
    stepped(adam, weights, range(3, 6), 1e-3)
    stepped(again, again_weights, range(3, 6), 1e-3)
    for name, weight in weights.items():
        assert torch.equal(weight.detach(), again_weights[name].detach())
    for name, tensor in adam.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name
    assert not again.fits(kept | {"step/another": kept["step/short"]})
    again.load(there, {}, same_device=True)  # of before the first step
    assert {name.partition("/")[0] for name in again.tensors()} <= {"master", "rounding"}


@pytest.mark.parametrize("first, then", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_checkpoint_goes_on_in_another_precision_where_weights_are_large(
    first: str, then: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "PIECE_NUMBERS", 500)
    policy = open_policy(folders["qwen2"], dtype=first)
    policy.update([external("1+1?", [("two", True), ("7", False)], (1.0, 0.0))])
    policy.save(tmp_path)
    again = open_policy(folders["qwen2"], dtype=then)
    again.restore(tmp_path)
    assert again.version == 1
    for name, weight in again.trained.items():
        assert torch.equal(weight.detach().bfloat16(), policy.trained[name].detach().bfloat16())


def test_a_master_copy_goes_over_into_float32_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the weights are one piece or several, nothing is lost."""
    monkeypatch.setattr(optimizer, "PIECE_NUMBERS", 5000)
    weights = weights_of()
    adam = Optimizer(weights)
    stepped(adam, weights, range(3))
    kept = adam.tensors()
    assert adam.fits(kept) and not adam.fits(kept | {"master/short": torch.zeros(47)})
    plain = weights_of(torch.float32, seed=3)
    Optimizer(plain).load(
        {n: w.detach() for n, w in weights.items()},
        {k: v for k, v in kept.items() if k.startswith("master/")},
        True,
    )
    assert torch.equal(
        plain["wide"].detach().flatten(), torch.cat([kept[f"master/wide#{i}"] for i in range(3)])
    )
    assert not torch.equal(plain["short"].detach(), weights["short"].detach().float())
    back_weights = weights_of(seed=3)
    back = Optimizer(back_weights)
    back.load({n: w.detach() for n, w in plain.items()}, {}, True)
    assert all(
        torch.equal(back.tensors()[name], tensor)
        for name, tensor in kept.items()
        if name.startswith("master/")
    )


@BITSANDBYTES
def test_moments_of_eight_bits_are_a_quarter() -> None:
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
        NoOptimizer, match=r"bitsandbytes.*pip install 'swarmd\[bitsandbytes\]'.*train\.optimizer = 'adamw'"
    ):
        load_model(config_of(folders["qwen2"]).model, 0, work=Workload(optimizer="adamw8bit"))
    with pytest.raises(NoOptimizer):
        open_policy(folders["qwen2"], train={"optimizer": "adamw8bit"})


def test_moments_of_eight_bits_are_refused_on_mps_before_loading(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmd.policy.models.fit.choose_device", lambda _: torch.device("mps"))
    with pytest.raises(NoOptimizer, match=r"does not run on Apple's MPS.*train\.optimizer = 'adamw'"):
        load_model(config_of(folders["qwen2"]).model, 0, work=Workload(optimizer="adamw8bit"))
