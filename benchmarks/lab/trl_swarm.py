"""Compares TRL trainers that share in a swarm with TRL trainers alone: their rewards, and the cost of a step.

python -m benchmarks.lab.trl_swarm --seeds 11 12 --nodes 4 --steps 100

Each trainer is a process with one torch thread that trains tiny-latent; the swarm is on loopback. Prints for
each trainer the mean reward of its own completions, summed over the steps, and its CPU seconds without the
verifier.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from testbed import ROOT
from testbed.environments import beside, default_environment, environment_of

# Settings of TRL for eight questions of eight completions a step, on a CPU.
SETTINGS: dict[str, Any] = {
    "epsilon_high": 0.28, "lr_scheduler_type": "constant", "learning_rate": 6e-4,
    "per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 16,
    "gradient_checkpointing": False, "use_cpu": True, "bf16": False, "shuffle_dataset": False,
    "report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


def train(folder: Path, node: int, nodes: int, steps: int, seed: int, *, shares: bool) -> None:
    """Run one trainer, which finds the other trainers through a file in the common folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    import swarmd
    from swarmd.policy.models.tiny import WEIGHTS
    from swarmd.trl import SwarmGRPOTrainer, dataset, reward_func

    torch.set_num_threads(1)
    model, mine, meeting = WEIGHTS["tiny-latent"], folder / str(node), folder / "address"
    while shares and node and not meeting.exists():
        time.sleep(0.1)
    swarm = swarmd.join(
        name="main" if shares else f"alone-{node}",
        curriculum="tiny-9",
        listen=["/ip4/127.0.0.1/tcp/0"],
        bootstrap=[meeting.read_text()] if shares and node else [],
        external=8,
        folder=mine / "state",
        seed=1000 * seed + node,
    )
    if not node:
        (mine / "address").write_text(swarm.report()["addresses"][0])
        (mine / "address").rename(meeting)
    while shares and swarm.report()["connected"] < nodes - 1:
        time.sleep(0.1)
    trainer = (SwarmGRPOTrainer if shares else GRPOTrainer)(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_func(swarm),
        GRPOConfig(output_dir=str(mine / "trl"), max_steps=steps, seed=1000 * seed + node, **SETTINGS),
        dataset(swarm, 8 * steps, ""),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        **({"swarm": swarm} if shares else {}),
    )
    before = time.process_time()
    trainer.train()
    rewards = [float(line["reward"]) for line in trainer.state.log_history if "reward" in line]
    found = {"reward": sum(rewards), "cpu": time.process_time() - before}
    (mine / "found.json").write_text(json.dumps(found))
    swarm.close()


def run(python: Path, nodes: int, steps: int, seed: int, *, shares: bool) -> list[dict[str, float]]:
    """Run all trainers of one seed, and return the figures of each."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for node in range(nodes):
            words = [folder, str(node), str(nodes), str(steps), str(seed), "shares" if shares else "alone"]
            (Path(folder) / str(node)).mkdir()
            command = [sys.executable, "-m", "benchmarks.lab.trl_swarm", "--node", *words]
            output = sys.stderr if "-v" in sys.argv else subprocess.DEVNULL
            processes.append(
                subprocess.Popen(command, env=beside(python), cwd=ROOT, stdout=output, stderr=output)
            )
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a trainer failed; see its output with -v")
        return [json.loads((Path(folder) / str(node) / "found.json").read_text()) for node in range(nodes)]


def main() -> None:
    if sys.argv[1:2] == ["--node"]:
        folder, *numbers, way = sys.argv[2:]
        train(Path(folder), *map(int, numbers), shares=way == "shares")
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[11])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("-v", action="store_true", help="show the trainers' output")
    wanted = parser.parse_args()
    python = environment_of("trl", default_environment("trl"))
    for seed in wanted.seeds:
        for shares in (True, False):
            found = run(python, wanted.nodes, wanted.steps, seed, shares=shares)
            rewards = ", ".join(f"{one['reward']:.1f}" for one in found)
            cpu = fmean(one["cpu"] for one in found)
            print(
                f"seed {seed}, {'in a swarm' if shares else 'alone'}: {rewards}; {cpu:.1f} s of CPU",
                flush=True,
            )


if __name__ == "__main__":
    main()
