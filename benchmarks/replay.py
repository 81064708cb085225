"""Does reuse pay? A run with experience replay beside a plain one, on the tiny model: rollouts generated until held-out pass@1 is reached.

    python -m benchmarks.replay [--rounds 120] [--seeds 3] [--rate 3e-4] [--replay-rate 1.5e-4] [--updates 4] [--size 64] [--bias 0.2]
                                [--strategy uniform] [--every 10] [--items 24] [--json]

Pairs of one seed: the same questions, node alone, 8 rollouts of 8 completions a round, as many rounds on both sides. The target is nine
tenths of the way from the start to where the plain runs end (median). Compute counts a generated rollout `--mu` times as dear as one
trained on, whatever both cost here. An honest comparison sweeps both rates: call it once for each. In the last line, `ratio` is plain
over replay in rollouts generated to the target (median of pairs); null where a side did not get there.
"""

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

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
from swarmd.tasks.curriculum import HELD_OUT, HELD_OUT_END
from swarmd.tasks.scoring import Verifier
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import TaskRef

ROLLOUTS = 8  # a round, and in a batch
REACHED = 0.9
PASS_AT = 8


@dataclass
class Run:
    """One side of a pair. curve: (rollouts generated, rollouts trained on, held-out pass@1)."""

    curve: list[tuple[int, int, float]] = field(default_factory=list)
    pass_1: float = 0.0  # at the end, and so is pass@8
    pass_8: float = 0.0
    clip_fraction: float = 0.0  # mean over rounds
    staleness: float = 0.0
    rests: int = 0
    cpu_seconds: float = 0.0  # of the rounds; the verifier's not counted

    def until(self, target: float, mu: float) -> tuple[float | None, float | None]:
        """Rollouts generated, and compute, when the curve (means of three) first crosses the target, between two looks."""
        smooth = [
            (g, mu * g + t, statistics.fmean(p for _, _, p in self.curve[max(0, i - 1) : i + 2])) for i, (g, t, _) in enumerate(self.curve)
        ]
        for (g0, c0, p0), (g1, c1, p1) in pairwise(smooth):
            if p0 < target <= p1:
                share = (target - p0) / (p1 - p0)
                return g0 + share * (g1 - g0), c0 + share * (c1 - c0)
        return None, None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__.split("\n")[0] if __doc__ else None)
    for name, kind, default in (
        ("rounds", int, 120), ("seeds", int, 3), ("rate", float, 3e-4), ("replay-rate", float, 1.5e-4), ("updates", int, 4),
        ("size", int, 64), ("bias", float, 0.2), ("mu", float, 6.0), ("every", int, 10), ("items", int, 24), ("model", str, "tiny"),
        ("strategy", str, "uniform"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    base = {"model": {"name": arguments.model, "device": "cpu", "threads": 1}, "round": {"local": ROLLOUTS, "external": 0}}
    replay = {"mode": "on", "updates_per_round": arguments.updates, "size": arguments.size, "positive_bias": arguments.bias}
    replay |= {"strategy": arguments.strategy}
    plain = NodeConfig.model_validate({**base, "train": {"learning_rate": arguments.rate}})
    reused = NodeConfig.model_validate({**base, "train": {"learning_rate": arguments.replay_rate}, "replay": replay})
    pairs: list[tuple[Run, Run]] = []
    with Verifier(curriculum_of(plain).name) as verifier:
        for seed in range(1, arguments.seeds + 1):
            order = (plain, reused) if seed % 2 else (reused, plain)
            runs = {id(c): run(c, seed, arguments.rounds, arguments.every, arguments.items, verifier) for c in order}
            pairs.append((runs[id(plain)], runs[id(reused)]))
            for name, one in zip(("plain", "replay"), pairs[-1], strict=True):
                print(f"seed {seed} {name:7} " + " ".join(f"{p:.3f}" for _, _, p in one.curve), file=sys.stderr, flush=True)
    told = compare(pairs, arguments.mu)
    out = sys.stderr if arguments.json else sys.stdout
    for name in ("peer", "ours"):
        print(f"{'plain' if name == 'peer' else 'replay':8}" + ", ".join(f"{k} {v}" for k, v in told[name].items()), file=out)
    print(f"target {told['target']:.3f}, ratio {told['ratio']}, compute ratio {told['compute_ratio']}", file=out)
    if arguments.json:
        print(json.dumps({"schema": 1, "work": vars(arguments), **told, "pairs": [[asdict(a), asdict(b)] for a, b in pairs]}))


def compare(pairs: list[tuple[Run, Run]], mu: float) -> dict[str, Any]:
    """ours: with replay; peer: without. Medians and ranges over the pairs."""
    start = statistics.median(a.curve[0][2] for a, _ in pairs)
    end = statistics.median(a.pass_1 for a, _ in pairs)
    target = start + REACHED * (end - start)
    reached = [(a.until(target, mu), b.until(target, mu)) for a, b in pairs]
    ratios = [[a[i] / b[i] if a[i] and b[i] else None for a, b in reached] for i in (0, 1)]  # type: ignore[operator]

    def side(which: int) -> dict[str, Any]:
        runs = [pair[which] for pair in pairs]
        figures: dict[str, list[Any]] = {
            "generated": [r[which][0] for r in reached],
            "compute": [r[which][1] for r in reached],
            **{
                name: [getattr(r, name) for r in runs]
                for name in ("pass_1", "pass_8", "clip_fraction", "staleness", "rests", "cpu_seconds")
            },
        }
        return {name: _spread(values) for name, values in figures.items()}

    return {
        "target": target,
        "ours": side(1),
        "peer": side(0),
        "ratio": _spread(ratios[0])["median"],
        "ratios": ratios[0],
        "compute_ratio": _spread(ratios[1])["median"],
        "compute_ratios": ratios[1],
    }


def _spread(values: list[Any]) -> dict[str, Any]:
    """null where a run never got there."""
    if any(value is None for value in values):
        return {"median": None, "low": None, "high": None}
    return {"median": round(statistics.median(values), 4), "low": round(min(values), 4), "high": round(max(values), 4)}


def run(config: NodeConfig, seed: int, rounds: int, every: int, items: int, verifier: Verifier) -> Run:
    """One node alone. Looks at held-out items draw from the policy's own randomness, alike on both sides."""
    node, policy = _alone(config, seed, verifier)
    result, trained = Run(), 0
    result.curve.append((0, 0, _held_out(config, policy, verifier, items, 2)[0]))
    for t in range(1, rounds + 1):
        begun = time.process_time()
        report = run_round(t, node)
        result.cpu_seconds += time.process_time() - begun
        trained += report.local
        result.clip_fraction += report.update.clip_fraction / rounds
        result.staleness += report.staleness_mean / rounds
        if t % every == 0:
            result.curve.append((t * ROLLOUTS, trained, _held_out(config, policy, verifier, items, 2)[0]))
    result.rests = node.schedule.state.rests
    result.pass_1, result.pass_8 = _held_out(config, policy, verifier, items, PASS_AT)
    return result


def _alone(config: NodeConfig, seed: int, verifier: Verifier) -> tuple[Node, LanguagePolicy]:
    identity = Identity.from_seed(bytes([seed]) * 32)
    topic = Topic("bench", swarm_digest(curriculum_of(config)))
    member = Member(identity, topic, partial(MemorySwarm().join, identity.peer_id), sequence=iter(range(1, 2**31)), clock=time.time)
    policy = LanguagePolicy.open(config, seed)
    exchange = RolloutExchange(member, config.model.name, partial(trainable, curriculum_of(config)))
    return build(config, seed, identity.peer_id, exchange, policy, verifier), policy


def _held_out(config: NodeConfig, policy: LanguagePolicy, verifier: Verifier, items: int, samples: int) -> tuple[float, float]:
    """pass@1 and pass@`samples` on items no node trains on, the same each time."""
    tasks = CurriculumTasks(curriculum_of(config))
    rng = random.Random(0)
    refs = [TaskRef(s, rng.randrange(HELD_OUT, HELD_OUT_END)) for s in tasks.curriculum.specialties for _ in range(items)]
    drawn = [task for ref in refs if (task := tasks.task(ref)) is not None]
    answers = policy.generate([task.question for task in drawn], samples)
    rewards = verifier([(task.ref, answer.completions) for task, answer in zip(drawn, answers, strict=True)])
    return statistics.fmean(x for r in rewards for x in r), statistics.fmean(max(r) for r in rewards)


if __name__ == "__main__":
    main()
