"""Measures the cost of a round.

Alone, it measures each stage of swarmd's round, in one process. With --peer, it compares swarmd with another
trainer on the same work.

    python -m benchmarks.round.cost [--model tiny] [--local 8] [--external 0] [--completions 8] [--rounds 30]
        [--json]
    python -m benchmarks.round.cost --peer trl|genrl [--size 1.25m|2.4m|14m|360m] [--lengths full|varied]
        [--questions trials|sapo-9] [--tokens 64] [--completions 8] [--pairs 5] [--environment FOLDER]
        [--defaults] [--device cpu|cuda] [--json]

Alone: with --external, a second node with the same settings shares over the memory engine; its cost is not
counted. CPU seconds are of this process only; the verifier's time is part of the wall time of "score". Wall
and CPU time are measured in alternate rounds. The figures are medians after two warm-up rounds of each clock.

With --peer: both sides generate and make one update on 8 questions with 8 completions each. The peer runs
from its published package in a separate environment, which is created at the first run (build/peers, or the
folder $BENCHMARK_PEERS). The two sides play rounds in turn, each on one torch thread; the ratio is the peer's
CPU seconds over swarmd's, as the median of the pairs.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.round import compare
from benchmarks.round.pairs import add_options, parser_of, plan_of, positive
from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from p2p.topic import Topic
from swarmd.config.config import NodeConfig
from swarmd.exchange.exchange import Exchange
from swarmd.exchange.swarm_id import curriculum_of, swarm_digest
from swarmd.exchange.virtual import VirtualNode
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.sandbox.client import Verifier
from swarmd.trainer.node import build
from swarmd.trainer.parts import RoundParts
from swarmd.trainer.round import run_round

WARM_UP = 2  # rounds
STAGES = ("generate", "score", "share", "collect", "train")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = options(argv)
    if arguments.peer:
        compare.beside(arguments, plan_of(arguments))
    else:
        alone(arguments)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("cost", __doc__)
    parser.add_argument("--peer", choices=compare.TRAINERS, help="the trainer to compare with")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the figures as a JSON object on the last line, and the table on stderr",
    )
    one = parser.add_argument_group("alone")
    one.add_argument("--model", help="model (tiny)")
    one.add_argument("--local", type=positive, help="own rollouts a round (8)")
    one.add_argument("--external", type=int, help="external rollouts a round (0)")
    one.add_argument("--rounds", type=positive, help="rounds for each of the two clocks (30)")
    two = parser.add_argument_group("beside a peer")
    add_options(two)
    two.add_argument(
        "--environment", type=Path, help="folder of the peer's virtual environment; created if it is missing"
    )
    two.add_argument(
        "--defaults",
        action="store_true",
        default=None,
        help="keep the peer's default checkpointing and minibatches, instead of the cheapest",
    )
    arguments = parser.parse_args(argv)
    misplaced, place = (one, "without") if arguments.peer else (two, "with")
    for action in misplaced._group_actions:
        if action.dest == "completions":  # allowed with and without --peer
            continue
        if getattr(arguments, action.dest) is not None:
            parser.error(f"{action.option_strings[0]} goes {place} --peer")
        delattr(arguments, action.dest)
    return arguments


def alone(arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    work: dict[str, Any] = {
        "model": "tiny",
        "local": 8,
        "external": 0,
        "completions": 8,
        "rounds": 30,
    } | given
    document: dict[str, Any] = {
        "model": {"name": work["model"], "threads": 1},
        "round": {name: work[name] for name in ("local", "external", "completions")},
    }
    rows = measure(NodeConfig.model_validate(document), work["rounds"])
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{'stage':10} {'wall s':>9} {'CPU s':>9}   median of {work['rounds']} rounds", file=out)
    for stage, (wall, cpu) in rows.items():
        print(f"{stage:10} {wall:9.4f} {cpu:9.4f}", file=out)
    if arguments.json:
        del work["json"]
        seconds = {stage: {"wall": wall, "cpu": cpu} for stage, (wall, cpu) in rows.items()}
        figures = {"ours": rows["round"][1], "peer": None, "ratio": None, "seconds": seconds}
        print(json.dumps({"schema": 1, "work": work, **figures}), flush=True)


def measure(config: NodeConfig, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median (wall, CPU) seconds of each stage; "round" is the whole round."""
    swarm = MemorySwarm()
    with Verifier(curriculum_of(config).name) as verifier:
        node = _join(swarm, 1, config, verifier)
        other = _join(swarm, 2, config, verifier) if config.round.external else None
        walls: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "round")}
        cpus: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "round")}
        for t in range(1, 2 * (rounds + WARM_UP) + 1):
            if other is not None:
                run_round(t, other)
            # Wall and CPU time are measured in alternate rounds, because a round uses one clock.
            clock, seconds = (time.perf_counter, walls) if t % 2 else (time.process_time, cpus)
            begun = clock()
            report = run_round(t, replace(node, clock=clock))
            if t > 2 * WARM_UP:
                seconds["round"].append(clock() - begun)
                for stage in STAGES:
                    seconds[stage].append(report.seconds[stage])
    return {stage: (statistics.median(walls[stage]), statistics.median(cpus[stage])) for stage in walls}


def _join(swarm: MemorySwarm, number: int, config: NodeConfig, verifier: Verifier) -> RoundParts:
    identity = Identity(bytes([number]) * 32)
    topic = Topic("bench", swarm_digest(curriculum_of(config)))
    exchange = Exchange(curriculum_of(config), config.round, config.sharing, "tiny", random.Random(number))
    node = VirtualNode(exchange, identity, topic, partial(swarm.join, identity.peer_id), time.time)
    return build(config, number, identity.peer_id, node, LanguagePolicy.open(config, seed=number), verifier)


if __name__ == "__main__":
    main()
