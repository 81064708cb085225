"""Held-out pass@1 of the tiny model before and after a run of one real node.

    python -m benchmarks.lab.learning [--rounds 300] [--local 8] [--external 0] [--items 40] [--samples 4]
        [--seed 1] [--json]

Held-out items are drawn from the range of question numbers that is reserved for judges, so no node trains on
them. Answers are sampled at temperature 1.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from swarmd.config.config import NodeConfig
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.curriculum import HELD_OUT
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import CurriculumTasks
from swarmd.trainer.checkpoint import Checkpoints
from swarmd.types import TaskRef


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab.learning", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--local", type=int, default=8)
    parser.add_argument("--external", type=int, default=0)
    parser.add_argument("--items", type=int, default=40, help="held-out items per specialty")
    parser.add_argument("--samples", type=int, default=4, help="answers to each held-out item")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    config = NodeConfig.model_validate({"model": {"name": "tiny", "device": "cpu", "threads": 1}})
    with tempfile.TemporaryDirectory() as folder, Verifier(curriculum_of(config).name) as verifier:
        before = held_out(config, None, verifier, arguments.items, arguments.samples)
        command = [
            sys.executable,
            "-m",
            "swarmd",
            "join",
            "--model",
            "tiny",
            "--device",
            "cpu",
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
        ]
        command += [
            "--local",
            str(arguments.local),
            "--external",
            str(arguments.external),
            "--rounds",
            str(arguments.rounds),
        ]
        command += ["--seed", str(arguments.seed), "--state-dir", folder]
        begun = time.perf_counter()
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        seconds = time.perf_counter() - begun
        after = held_out(config, Path(folder), verifier, arguments.items, arguments.samples)
    out = sys.stderr if arguments.json else sys.stdout
    print(f"\n{'held-out pass@1':26} {'before':>8} {'after':>8}", file=out)
    for specialty in before:
        print(f"{specialty:26} {before[specialty]:8.3f} {after[specialty]:8.3f}", file=out)
    mean = [sum(x.values()) / len(x) for x in (before, after)]
    print(
        f"{'mean':26} {mean[0]:8.3f} {mean[1]:8.3f}   {mean[1] - mean[0]:+.3f} in {arguments.rounds} rounds,"
        f" {seconds:.0f} s",
        file=out,
    )
    if arguments.json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "work": vars(arguments),
                    "before": mean[0],
                    "after": mean[1],
                    "seconds": seconds,
                }
            )
        )


def held_out(
    config: NodeConfig, state_dir: Path | None, verifier: Verifier, items: int, samples: int
) -> dict[str, float]:
    """Return pass@1 by specialty of the newest checkpoint, or of the model before the run."""
    policy = LanguagePolicy.open(config, seed=0)
    if state_dir is not None:
        found = Checkpoints(state_dir / "checkpoints").newest()
        assert found is not None, "the run wrote no checkpoint"
        policy.restore(found[1])
    tasks = CurriculumTasks(curriculum_of(config))
    scores = {}
    for specialty in tasks.curriculum.specialties:
        numbers = random.Random(0).sample(range(HELD_OUT, HELD_OUT + 10**8), items)
        drawn = [task for n in numbers if (task := tasks.task(TaskRef(specialty, n))) is not None]
        answers = policy.generate([task.question for task in drawn], samples)
        rewards = verifier(
            [(task.ref, answer.completions) for task, answer in zip(drawn, answers, strict=True)]
        )
        scores[specialty] = sum(map(sum, rewards)) / (samples * len(drawn))
    return scores


if __name__ == "__main__":
    main()
