"""Compares experience replay with plain runs on the tiny models.

The measure is the number of rollouts generated until a held-out pass@1 is reached.

    python -m benchmarks.lab.replay [--model tiny|tiny-latent] [--rounds 120] [--seeds 3] [--json]
    # A sweep that finds the best learning rate of each side
    python -m benchmarks.lab.replay --rates 2e-4,3e-4,5e-4,8e-4 --replay-rates 1.5e-4,2e-4,3e-4
    # The best rates on seeds that did not choose them
    python -m benchmarks.lab.replay --rounds 60 --every 4 --first-seed 4 --seeds 6 --answers 6 --unguarded
    # With the guard of replay, and without
    python -m benchmarks.lab.replay --rates 5e-4 --replay-rates 5e-4 --updates 8 --size 64 \\
        --importance-cap 0 --max-kl 0.1 [--unguarded]

Each node runs alone. Both sides of a pair have the same seed, hence the same questions, and generate the same
number of rollouts. A side's best rate is the one with the greatest mean of the curve, over seeds. The target
is nine tenths of the way from the start to the end of the plain runs at their best rate. A plain run that did
not reach the target counts as if it had reached it with its last rollout, which favours the plain side.
Compute counts a generated rollout `--mu` times as much as a trained one, whatever the costs on this machine.
On both sides, a rollout without an advantage costs nothing to train on. In the last line, `ratio` is the
number of rollouts generated until the target, plain over replay (median of pairs); null if replay did not
reach it.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from p2p.topic import Topic
from swarmd.config.config import NodeConfig
from swarmd.exchange.exchange import Exchange
from swarmd.exchange.swarm_id import curriculum_of, swarm_digest
from swarmd.exchange.virtual import VirtualNode
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.curriculum import CURRICULA, HELD_OUT, HELD_OUT_END
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import CurriculumTasks
from swarmd.trainer.node import build
from swarmd.trainer.parts import RoundParts
from swarmd.trainer.round import run_round
from swarmd.types import Task, TaskRef

REACHED = 0.9  # the target, as a share of the plain side's gain
PASS_AT = 8
# The best learning rates found, of plain runs and with replay (docs/performance.md).
BEST = {"tiny": (5e-4, 2e-4), "tiny-latent": (3e-4, 3e-4)}
SETTING = {"tiny": (4, 32), "tiny-latent": (2, 24)}  # updates a round, pool size
SPREAD = "{median:g} ({low:g} – {high:g})"
FIGURES = ("pass_1", "pass_8", "clip_fraction", "drift", "staleness", "rests", "cpu_seconds")


@dataclass
class Run:
    """One side of a pair.

    curve: (rollouts generated, rollouts trained on, held-out pass@1); rollouts without a gradient do not
    count as trained on.
    """

    rate: float
    seed: int
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    pass_1: float = 0.0  # pass@1 and pass@8 at the end
    pass_8: float = 0.0
    clip_fraction: float = 0.0  # mean over rounds
    drift: float = 0.0  # nats, as the guard measures it; mean over rounds
    staleness: float = 0.0
    rests: int = 0
    cpu_seconds: float = 0.0  # of the rounds, without the verifier

    @property
    def height(self) -> float:
        """Return the mean of the curve; the best rate is the one with the greatest mean."""
        return statistics.fmean(p for _, _, p in self.curve)

    def until(self, target: float, mu: float) -> tuple[float | None, float | None]:
        """Return the rollouts generated and the compute spent when the curve first crosses the target."""
        smooth = rising(
            [
                statistics.fmean(p for _, _, p in self.curve[max(0, i - 1) : i + 2])
                for i in range(len(self.curve))
            ]
        )
        points = [(g, mu * g + t, p) for (g, t, _), p in zip(self.curve, smooth, strict=True)]
        for (g0, c0, p0), (g1, c1, p1) in pairwise(points):
            if p0 < target <= p1:
                share = (target - p0) / (p1 - p0)
                return g0 + share * (g1 - g0), c0 + share * (c1 - c0)
        return None, None

    def spent(self, mu: float) -> tuple[float, float]:
        """Return how many rollouts the run generated and the compute it spent."""
        generated, trained, _ = self.curve[-1]
        return generated, mu * generated + trained


def rising(values: Sequence[float]) -> list[float]:
    """Return the closest curve that never falls, so that one lucky measurement is not a crossing.

    This is the isotonic least-squares fit, found by pooling adjacent violators.
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (b, m), (a, n) = blocks.pop(), blocks.pop()
            blocks.append(((a * n + b * m) / (n + m), n + m))
    return [value for value, n in blocks for _ in range(n)]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    runs: dict[str, list[Run]] = {"plain": [], "replay": []}
    curriculum = curriculum_of(_config(arguments, "plain", 0.0)).name
    with Verifier(curriculum) as verifier:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            for side in ("plain", "replay") if seed % 2 else ("replay", "plain"):
                for rate in arguments.rates if side == "plain" else arguments.replay_rates:
                    one = run(_config(arguments, side, rate), seed, arguments, verifier)
                    runs[side].append(one)
                    print(f"seed {seed} {side:7} {rate:g} {_line(one)}", file=sys.stderr, flush=True)
    told = compare(runs["plain"], runs["replay"], arguments.mu)
    out = sys.stderr if arguments.json else sys.stdout
    for side in ("plain", "replay"):
        for rate, height in told["heights"][side].items():
            print(f"{side:7} at {rate}: mean of the curve {height:.3f}", file=out)
    print(_table(told), file=out)
    if arguments.json:
        each = {side: [asdict(one) for one in done] for side, done in runs.items()}
        print(json.dumps({"schema": 3, "work": vars(arguments), **told, "runs": each}))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def rates(text: str) -> tuple[float, ...]:
        return tuple(float(part) for part in text.split(","))

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab.replay", description=__doc__.split("\n")[0] if __doc__ else None
    )
    for name, kind, default in (
        ("rounds", int, 120),
        ("seeds", int, 3),
        ("first-seed", int, 1),
        ("rates", rates, ()),
        ("replay-rates", rates, ()),
        ("answers", int, 3),
        ("updates", int, 0),
        ("size", int, 0),
        ("importance-cap", float, 2.0),
        ("max-kl", float, 1.0),
        ("mu", float, 6.0),
        ("every", int, 10),
        ("items", int, 24),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--model", choices=BEST, default="tiny")
    parser.add_argument("--unguarded", action="store_true", help="set limits that the guard never reaches")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    best, setting = BEST[arguments.model], SETTING[arguments.model]
    arguments.updates, arguments.size = arguments.updates or setting[0], arguments.size or setting[1]
    arguments.rates, arguments.replay_rates = arguments.rates or best[:1], arguments.replay_rates or best[1:]
    return arguments


def _config(arguments: argparse.Namespace, side: str, rate: float) -> NodeConfig:
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": arguments.model, "device": "cpu", "threads": 1},
        "round": {"local": 8, "external": 0},
        "train": {"learning_rate": rate},
    }
    if side == "replay":
        sections["replay"] = {
            "mode": "on",
            "updates_per_round": arguments.updates,
            "size": arguments.size,
            "max_kl": arguments.max_kl,
        }
        sections["train"]["importance_cap"] = arguments.importance_cap
        if arguments.unguarded:
            sections["replay"] |= {"max_clip_fraction": 1.0, "max_kl": 100.0}
    return NodeConfig.model_validate(sections)


def compare(plain: Sequence[Run], replay: Sequence[Run], mu: float) -> dict[str, Any]:
    """Compare the rollouts generated until the target, with replay and without, each at its best rate.

    Medians and ranges are over the seeds.
    """
    heights = {"plain": _heights(plain), "replay": _heights(replay)}
    peer, ours = _best(plain), _best(replay)
    start, end = (
        statistics.median(values) for values in ([r.curve[0][2] for r in peer], [r.pass_1 for r in peer])
    )
    target = start + REACHED * (end - start)
    reached = [[r.until(target, mu) for r in side] for side in (peer, ours)]
    reached[0] = [there if there[0] else r.spent(mu) for there, r in zip(reached[0], peer, strict=True)]
    ratios = [
        [a[which] / b[which] if a[which] and b[which] else None for a, b in zip(*reached, strict=True)]
        for which in (0, 1)
    ]

    def side(runs: Sequence[Run], there: Sequence[tuple[float | None, float | None]]) -> dict[str, Any]:
        figures = {"generated": [r[0] for r in there], "compute": [r[1] for r in there]}
        figures |= {name: [getattr(r, name) for r in runs] for name in FIGURES}
        return {"rate": runs[0].rate, **{name: _spread(values) for name, values in figures.items()}}

    replayed, alone = side(ours, reached[1]), side(peer, reached[0])
    return {
        "target": target,
        "heights": heights,
        "ours": replayed["generated"]["median"],
        "peer": alone["generated"]["median"],
        "replay": replayed,
        "plain": alone,
        "ratio": _spread(ratios[0])["median"],
        "ratios": ratios[0],
        "compute_ratio": _spread(ratios[1])["median"],
        "compute_ratios": ratios[1],
    }


def _table(told: Mapping[str, Any]) -> str:
    """Return a table of both sides at their best rates: medians, and ranges over the seeds.

    "-" means that a run did not reach the target.
    """

    rows = [("", *(f"{side}, rate {told[side]['rate']:g}" for side in ("plain", "replay")))]
    for name in ("generated", "compute", *FIGURES):
        spreads = [told[side][name] for side in ("plain", "replay")]
        rows.append((name, *("-" if s["median"] is None else SPREAD.format(**s) for s in spreads)))
    return "\n".join(
        [
            *(f"{name:<14}{plain:>34}{replay:>34}" for name, plain, replay in rows),
            f"to pass@1 {told['target']:.3f}, plain over replay: rollouts generated {told['ratio'] or '-'},"
            f" compute {told['compute_ratio'] or '-'}",
        ]
    )


def _heights(runs: Sequence[Run]) -> Mapping[str, float]:
    rates = sorted({r.rate for r in runs})
    return {
        f"{rate:g}": round(statistics.fmean(r.height for r in runs if r.rate == rate), 4) for rate in rates
    }


def _best(runs: Sequence[Run]) -> list[Run]:
    best = max(
        {r.rate for r in runs}, key=lambda rate: statistics.fmean(r.height for r in runs if r.rate == rate)
    )
    return sorted((r for r in runs if r.rate == best), key=lambda r: r.seed)


def _spread(values: Sequence[Any]) -> dict[str, Any]:
    """Return median and range; None if a run never reached the target."""
    if any(value is None for value in values):
        return {"median": None, "low": None, "high": None}
    return {
        "median": round(statistics.median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
    }


def _line(one: Run) -> str:
    curve = " ".join(f"{p:.3f}" for _, _, p in one.curve)
    guard = f"clip {one.clip_fraction:.3f} drift {one.drift:.3f} rests {one.rests}"
    return f"pass@1 {one.pass_1:.3f} pass@{PASS_AT} {one.pass_8:.3f} {guard} | {curve}"


def run(config: NodeConfig, seed: int, arguments: argparse.Namespace, verifier: Verifier) -> Run:
    """Run one node alone. On both sides evaluations use the policy's random generator."""
    rounds, every, items, answers = arguments.rounds, arguments.every, arguments.items, arguments.answers
    node, policy = _alone(config, seed, verifier)
    result, trained, tokens, drawn = Run(config.train.learning_rate, seed), 0, 0, 0
    result.curve.append((0, 0.0, _held_out(config, policy, verifier, items, answers)[0]))
    for t in range(1, rounds + 1):
        begun = time.process_time()
        report = run_round(t, node)
        result.cpu_seconds += time.process_time() - begun
        trained, tokens, drawn = (
            trained + report.tokens.trained,
            tokens + report.tokens.generated,
            drawn + report.generated,
        )
        result.clip_fraction += report.clip_fraction / rounds
        result.drift += report.drift / rounds
        result.staleness += report.staleness.mean / rounds
        if t % every == 0:
            result.curve.append(
                (drawn, trained * drawn / tokens, _held_out(config, policy, verifier, items, answers)[0])
            )
    result.rests = node.schedule.state.rests
    result.pass_1, result.pass_8 = _held_out(config, policy, verifier, items, PASS_AT)
    return result


def _alone(config: NodeConfig, seed: int, verifier: Verifier) -> tuple[RoundParts, LanguagePolicy]:
    identity = Identity(bytes([seed]) * 32)
    topic = Topic("bench", swarm_digest(curriculum_of(config)))
    exchange = Exchange(curriculum_of(config), config.round, config.sharing, "tiny", random.Random(seed))
    node = VirtualNode(exchange, identity, topic, partial(MemorySwarm().join, identity.peer_id), time.time)
    policy = LanguagePolicy.open(config, seed)
    return build(config, seed, identity.peer_id, node, policy, verifier), policy


def _held_out(
    config: NodeConfig, policy: LanguagePolicy, verifier: Verifier, items: int, samples: int
) -> tuple[float, float]:
    """Return pass@1 and pass@`samples` on held-out items, which are the same each time."""
    drawn = _questions(curriculum_of(config).name, items)
    answers = policy.generate([task.question for task in drawn], samples)
    rewards = verifier([(task.ref, answer.completions) for task, answer in zip(drawn, answers, strict=True)])
    return statistics.fmean(x for r in rewards for x in r), statistics.fmean(max(r) for r in rewards)


@cache
def _questions(curriculum: str, items: int) -> Sequence[Task]:
    tasks, rng = CurriculumTasks(CURRICULA[curriculum]), random.Random(0)
    refs = [
        TaskRef(s, rng.randrange(HELD_OUT, HELD_OUT_END))
        for s in tasks.curriculum.specialties
        for _ in range(items)
    ]
    return [task for ref in refs if (task := tasks.task(ref)) is not None]


if __name__ == "__main__":
    main()
