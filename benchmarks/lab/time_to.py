"""CPU time until a model answers 40 % of held-out questions: TRL alone, swarmd alone, swarmd in swarms.

    python -m benchmarks.lab.time_to --seeds 1 2 3 --out docs/time-to.png

Each node trains tiny-latent on one torch thread, with eight questions of eight completions a round and
learning rate 6e-4; in a swarm it also trains on up to 16 external rollouts (8/16, or --round). TRL is a
published package in a separate environment (`build/peers`). The lab simulates a swarm, whose nodes share by
offers, in one process; a node's time is an equal share of that process's time. Neither evaluation nor the
verifier is counted. The program draws the curves, and writes them to a CSV file with the picture's name.
--from-csv draws the picture again from this file.
"""

import argparse
import csv
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.lab.trl_swarm import SETTINGS
from testbed import ROOT
from testbed.environments import beside, default_environment, environment_of

TARGET = 0.4
ROUNDS, EVERY = 400, 10
# Held-out questions, and answers of a node to each. Nodes of a large swarm answer less, since their mean
# counts.
QUESTIONS, ANSWERS, ANSWERS_IN_ALL = 216, 4, 16
ARMS = {
    "trl": "TRL alone",
    "1": "swarmd alone",
    "4": "swarm of 4",
    "8": "swarm of 8",
    "16": "swarm of 16",
}
# Pairs of a node's CPU seconds so far and its pass@1; the first pair is from before the first round.
Curve = list[tuple[float, float]]


def swarm_curve(nodes: int, local: int, external: int, seed: int) -> Iterator[tuple[float, float]]:
    """Play a swarm, and yield the mean curve of its nodes."""
    from swarmd.config.config import NodeConfig
    from swarmd.exchange.swarm_id import curriculum_of
    from swarmd.lab.experiment import Evaluation, Setting
    from swarmd.lab.play import QUESTIONS_SEED, PlayedSwarm
    from swarmd.tasks.sandbox.client import Verifier
    from swarmd.tasks.source import open_tasks

    given = {
        "model": {"name": "tiny-latent", "device": "cpu", "threads": 1},
        "round": {"local": local, "external": external if nodes > 1 else 0},
        "train": {"learning_rate": SETTINGS["learning_rate"]},
        "swarm": {"engine": "none"},
    }
    config = NodeConfig.model_validate(given)
    with (
        Verifier(curriculum_of(config)) as verifier,
        closing(PlayedSwarm(Setting(name="time-to", nodes=(config,) * nodes), seed, verifier)) as swarm,
    ):
        held_out = open_tasks(swarm.curriculum, verifier).draw_held_out(
            QUESTIONS, random.Random(QUESTIONS_SEED)
        )
        spent, answers = 0.0, max(1, min(ANSWERS, ANSWERS_IN_ALL // nodes))
        for number in range(ROUNDS + 1):
            if number:
                began = time.process_time()
                swarm.round(number)
                spent += (time.process_time() - began) / nodes
            if number % EVERY == 0:
                right = swarm.evaluate(held_out, Evaluation(answers=answers), number)["right"]
                yield spent, fmean(fmean(node) for node in right) / answers


def trl_curve(seed: int) -> Iterator[tuple[float, float]]:
    """Train with TRL's GRPOTrainer, and yield its curve."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import swarmd
    from swarmd.lab.play import QUESTIONS_SEED
    from swarmd.policy.models.tiny import WEIGHTS
    from swarmd.trl import dataset, reward_func

    torch.set_num_threads(1)
    weights, curve = WEIGHTS["tiny-latent"], Curve()
    tokenizer = AutoTokenizer.from_pretrained(weights, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    with (
        tempfile.TemporaryDirectory() as folder,
        swarmd.join(
            name=f"alone-{seed}",
            curriculum="tiny-9",
            listen=["/ip4/127.0.0.1/tcp/0"],
            folder=folder,
            seed=seed,
        ) as swarm,
    ):  # joined only for its questions and its verifier
        held_out = swarm.tasks.source.draw_held_out(QUESTIONS, random.Random(QUESTIONS_SEED))
        asked = [[{"role": "user", "content": task.question}] for task in held_out]
        batch = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 16}

        def evaluate() -> float:
            with torch.no_grad():
                made = model.generate(**batch, **sampled, num_return_sequences=ANSWERS)
            texts = tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            items = [(task.ref, texts[n * ANSWERS : (n + 1) * ANSWERS]) for n, task in enumerate(held_out)]
            return fmean(reward for rewards in swarm.score(items) for reward in rewards)

        class Watch(TrainerCallback):  # type: ignore[misc]
            def __init__(self) -> None:
                self.before, self.spent = 0.0, 0.0

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.before = time.process_time()

            def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
                self.spent += time.process_time() - self.before
                if state.global_step % EVERY == 0:
                    curve.append((self.spent, evaluate()))
                    print(json.dumps(curve[-1]), flush=True)
                    control.should_training_stop = curve[-1][1] >= TARGET

        trainer = GRPOTrainer(
            model,
            reward_func(swarm),
            GRPOConfig(output_dir=f"{folder}/trl", max_steps=ROUNDS, seed=seed, **SETTINGS),
            dataset(swarm, 8 * ROUNDS, ""),
            processing_class=tokenizer,
            callbacks=[Watch()],
        )
        yield 0.0, evaluate()
        trainer.train()


def played(arm: str, seed: int, shares: str, python: Path) -> Curve:
    """Return the curve of one run, which is a separate process and ends at the target."""
    command = [sys.executable, "-m", "benchmarks.lab.time_to", "--run", arm, str(seed), shares]
    done = subprocess.run(command, env=beside(python), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{ARMS[arm]}, seed {seed}, failed:\n{done.stderr[-3000:]}")
    curve = [tuple(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]
    print(f"{ARMS[arm]}, seed {seed}: {reached(curve):.1f} s", file=sys.stderr, flush=True)
    return curve


def reached(curve: Curve) -> float:
    """Return the seconds to the target, interpolated between two evaluations; infinity if never reached."""
    for (before, low), (after, high) in itertools.pairwise(curve):
        if high >= TARGET:
            return before + (after - before) * (TARGET - low) / (high - low)
    return float("inf")


def draw(curves: dict[str, list[Curve]], to: Path) -> None:
    """Draw every run as a line, and for each arm the median of its times."""
    from matplotlib.figure import Figure

    from swarmd.lab.figures import COLOURS

    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    for (arm, runs), colour in zip(curves.items(), COLOURS, strict=False):
        seconds = median(map(reached, runs))
        for n, run in enumerate(runs):
            label = f"{ARMS[arm]}: {seconds:.0f} s" if not n else None
            # The first point, at 0 seconds, cannot be shown on a logarithmic axis.
            axes.plot(*zip(*run[1:], strict=True), color=colour, linewidth=1.6, alpha=0.85, label=label)
    axes.axhline(TARGET, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100]
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xticks([], minor=True)
    axes.set(
        xlabel="CPU seconds of a node, on a logarithmic scale",
        ylabel="held-out questions answered right",
        ylim=(0, None),
    )
    axes.set_title(f"Time until {TARGET:g} of held-out questions are answered right", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, title="median of the runs", alignment="left")
    figure.savefig(to, dpi=120)


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        arm, seed = sys.argv[2], int(sys.argv[3])
        local, external = map(int, sys.argv[4].split("/"))
        for point in trl_curve(seed) if arm == "trl" else swarm_curve(int(arm), local, external, seed):
            print(json.dumps(point), flush=True)
            if point[1] >= TARGET:
                break
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument(
        "--round", default="8/16", metavar="I/J", help="own and external rollouts a round (8/16)"
    )
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time (2)")
    parser.add_argument(
        "--out", type=Path, help="the picture; its curves go to data/<its name>.csv next to it"
    )
    parser.add_argument(
        "--from-csv", action="store_true", help="draw --out from its CSV file, and run nothing"
    )
    wanted = parser.parse_args()
    table = wanted.out and wanted.out.parent / "data" / f"{wanted.out.stem}.csv"
    if wanted.from_csv:
        draw(read(table), wanted.out)
        return
    if table:
        table.parent.mkdir(parents=True, exist_ok=True)
    python = environment_of("trl", default_environment("trl"))
    runs = [(arm, seed) for seed in wanted.seeds for arm in wanted.arms]
    with ThreadPoolExecutor(wanted.at_once) as pool:
        curves_of = pool.map(lambda run: played(run[0], run[1], wanted.round, python), runs)
        found = dict(zip(runs, curves_of, strict=True))
    curves = {arm: [found[arm, seed] for seed in wanted.seeds] for arm in wanted.arms}
    report(curves)
    if wanted.out:
        write(curves, table)
        draw(curves, wanted.out)


def report(curves: dict[str, list[Curve]]) -> None:
    first = median(map(reached, next(iter(curves.values()))))
    print(f"{'':14} {'median, CPU s':>14} {'of the runs':>24} {'times quicker':>14}")
    for arm, runs in curves.items():
        times = [reached(run) for run in runs]
        each = ", ".join(f"{seconds:.1f}" for seconds in times)
        print(f"{ARMS[arm]:14} {median(times):14.1f} {each:>24} {first / median(times):14.2f}")


def write(curves: dict[str, list[Curve]], to: Path) -> None:
    with to.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["arm", "run", "cpu_seconds", "pass_at_1"])
        for arm, runs in curves.items():
            for n, run in enumerate(runs, 1):
                rows.writerows([arm, n, f"{seconds:.2f}", f"{share:.4f}"] for seconds, share in run)


def read(table: Path) -> dict[str, list[Curve]]:
    curves: dict[str, dict[str, Curve]] = {}
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            curve = curves.setdefault(row["arm"], {}).setdefault(row["run"], [])
            curve.append((float(row["cpu_seconds"]), float(row["pass_at_1"])))
    return {arm: list(runs.values()) for arm, runs in curves.items()}


if __name__ == "__main__":
    main()
