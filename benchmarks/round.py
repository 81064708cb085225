"""What a round costs: wall and CPU seconds of each stage, one torch thread, in one process. With --peer, beside another trainer.

    python -m benchmarks.round [--model tiny] [--local 8] [--external 0] [--completions 8] [--rounds 30] [--json]
    python -m benchmarks.round --peer trl …      (its options: python -m benchmarks.compare --help)

With --external, a second node of the same kind shares over the memory engine; its cost is not counted. CPU seconds are this process's
alone: the verifier's show up in the wall time of "score". Wall and CPU are taken in alternate rounds; medians, after two
rounds each of warm-up.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from functools import partial
from typing import Any

from benchmarks import compare
from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from p2p.member import Member
from p2p.topic import Topic
from swarmd.config import NodeConfig
from swarmd.exchange.swarm import RolloutExchange
from swarmd.exchange.topic import curriculum_of, swarm_digest
from swarmd.node import build, trainable
from swarmd.policy.model import LanguagePolicy
from swarmd.round import Node, run_round
from swarmd.tasks.scoring import Verifier

WARM_UP = 2  # rounds
STAGES = ("generate", "score", "share", "collect", "train")


def main() -> None:
    if "--peer" in sys.argv:
        compare.main()
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.round", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--local", type=int, default=8)
    parser.add_argument("--external", type=int, default=0)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    document: dict[str, Any] = {
        "model": {"name": arguments.model, "threads": 1},
        "round": {"local": arguments.local, "external": arguments.external, "completions": arguments.completions},
    }
    rows = measure(NodeConfig.model_validate(document), arguments.rounds)
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{'stage':10} {'wall s':>9} {'CPU s':>9}   median of {arguments.rounds} rounds", file=out)
    for stage, (wall, cpu) in rows.items():
        print(f"{stage:10} {wall:9.4f} {cpu:9.4f}", file=out)
    if arguments.json:
        seconds = {stage: {"wall": wall, "cpu": cpu} for stage, (wall, cpu) in rows.items()}
        print(json.dumps({"schema": 1, "work": vars(arguments), "seconds": seconds}))


def measure(config: NodeConfig, rounds: int) -> dict[str, tuple[float, float]]:
    """stage -> (wall, CPU) seconds of the median round; "round" is the whole."""
    swarm = MemorySwarm()
    with Verifier(curriculum_of(config).name) as verifier:
        node = _join(swarm, 1, config, verifier)
        other = _join(swarm, 2, config, verifier) if config.round.external else None
        walls: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "round")}
        cpus: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "round")}
        for t in range(1, 2 * (rounds + WARM_UP) + 1):
            if other is not None:
                run_round(t, other)
            # Wall and CPU in alternate rounds: a round has one clock.
            node.clock, seconds = (time.perf_counter, walls) if t % 2 else (time.process_time, cpus)
            begun = node.clock()
            report = run_round(t, node)
            if t > 2 * WARM_UP:
                seconds["round"].append(node.clock() - begun)
                for stage in STAGES:
                    seconds[stage].append(report.seconds[stage])
    return {stage: (statistics.median(walls[stage]), statistics.median(cpus[stage])) for stage in walls}


def _join(swarm: MemorySwarm, number: int, config: NodeConfig, verifier: Verifier) -> Node:
    identity = Identity.from_seed(bytes([number]) * 32)
    topic = Topic("bench", swarm_digest(curriculum_of(config)))
    member = Member(identity, topic, partial(swarm.join, identity.peer_id), sequence=itertools.count(1), clock=time.time)
    exchange = RolloutExchange(member, config.model.name, partial(trainable, curriculum_of(config)))
    return build(config, number, identity.peer_id, exchange, LanguagePolicy.open(config, seed=number), verifier)


if __name__ == "__main__":
    main()
