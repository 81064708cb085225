"""Shows whether bfloat16 weights lose small steps, compared with float32 weights under the same gradients.

    python -m benchmarks.round.precision [--steps 200] [--rate 1e-6] [--json]

The weights of the tiny model are trained on made-up gradients: a constant direction plus noise of the same
size. Every variant gets the same gradients and begins from the same weights:

    float32              the reference: plain AdamW on float32 weights
    bfloat16, plain      torch's AdamW on bfloat16 weights, as in most trainers
    bfloat16, master     swarmd's optimizer
    …, 8 bits            swarmd's with train.optimizer = "adamw8bit", if bitsandbytes is installed

"gone" is the distance that the weights moved along float32's path, as a share of float32's distance: 1 is all
of it, 0 is none. With a master copy, "gone" is the copy's share; "shown" is the share of the bfloat16 weights
that the model computes with, which move in coarser steps. "moments" is the memory of Adam's moments.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from swarmd.config.config import NodeConfig
from swarmd.policy.models.load import load_model
from swarmd.policy.training.optimizer import MASTER, Optimizer


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.round.precision", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = table(arguments.steps, arguments.rate)
    out = sys.stderr if arguments.json else sys.stdout
    print(
        f"{'':24} {'gone':>8} {'shown':>8} {'moments':>10} {'CPU s':>8}   {arguments.steps} steps of"
        f" {arguments.rate:g}",
        file=out,
    )
    for name, row in rows.items():
        print(
            f"{name:24} {row['gone']:8.3f} {row['shown']:8.3f} {row['moments'] / 1e6:7.2f} MB"
            f" {row['seconds']:8.2f}",
            file=out,
        )
    if arguments.json:
        ours, peer = rows["bfloat16, master"]["gone"], rows["bfloat16, plain"]["gone"]
        print(
            json.dumps(
                {
                    "schema": 1,
                    "work": vars(arguments),
                    "ours": ours,
                    "peer": peer,
                    "ratio": peer / ours,
                    "rows": rows,
                }
            )
        )


def table(steps: int, rate: float) -> dict[str, dict[str, float]]:
    """Return for each variant: gone and shown, as shares; bytes of the moments; CPU seconds."""
    ways = {
        "float32": ("float32", "adamw"),
        "bfloat16, plain": ("bfloat16", "plain"),
        "bfloat16, master": ("bfloat16", "adamw"),
    }
    if importlib.util.find_spec("bitsandbytes"):
        ways["bfloat16, master, 8 bits"] = ("bfloat16", "adamw8bit")
    rows: dict[str, dict[str, float]] = {}
    measure: Tensor | None = None
    for name, way in ways.items():
        exact, shown, moments, seconds = gone(*way, steps, rate)
        measure = exact if measure is None else measure
        square = float(measure.square().sum())
        rows[name] = {
            "gone": float(exact @ measure) / square,
            "shown": float(shown @ measure) / square,
            "moments": moments,
            "seconds": seconds,
        }
    return rows


def gone(dtype: str, kind: str, steps: int, rate: float) -> tuple[Tensor, Tensor, int, float]:
    """Return the flattened change of the stepped copy and of the weights since the start.

    Also return the bytes of Adam's moments, and CPU seconds.
    """
    # Start from weights that bfloat16 can represent, so that all variants start from the same weights.
    network = load_model(
        NodeConfig().model.model_copy(update={"device": "cpu", "dtype": "bfloat16"}), 0
    ).network
    network = network if dtype == "bfloat16" else network.float()
    weights = dict(network.named_parameters())
    start = flat(weights)
    plain = torch.optim.AdamW(weights.values(), lr=rate, weight_decay=0.0) if kind == "plain" else None
    adam = Optimizer(weights, "adamw" if plain else kind)
    begun = time.process_time()
    for i in range(steps):
        give_gradients(weights, i)
        if plain is None:
            adam.step(rate)
        else:
            plain.step()
    seconds = time.process_time() - begun
    state: Mapping[str, Tensor] = {} if plain else adam.tensors()
    moments = sum(t.nbytes for key, t in state.items() if not key.startswith((MASTER, "step")))
    if plain:
        moments = sum(s[field].nbytes for s in plain.state.values() for field in ("exp_avg", "exp_avg_sq"))
    copies = {name: state.get(f"{MASTER}/{name}", weight) for name, weight in weights.items()}
    return flat(copies) - start, flat(weights) - start, moments, seconds


def give_gradients(weights: Mapping[str, nn.Parameter], step: int) -> None:
    """Set gradients, the same for each variant: a fixed direction per weight plus noise of the same size."""
    directions, noise = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + step)
    for weight in weights.values():
        gradient = torch.randn(weight.shape, generator=directions) + torch.randn(
            weight.shape, generator=noise
        )
        weight.grad = (1e-3 * gradient).to(weight.dtype)


def flat(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weight.detach().float().flatten() for weight in weights.values()])


if __name__ == "__main__":
    main()
