"""Measures how often the judge says that the swarm is better.

The swarm is either not better (A/A) or better by a fifth (power).

    python -m benchmarks.judge.significance --runs 1000

Simulated nodes learn along different curves: they differ in skill (log-normal, 20 %), in pace, and in how
often they are evaluated (every 1, 2, 3 or 5 rounds). A node's level drifts every five rounds, so its
evaluations depend on each other. Nodes begin at different times and leave for good at different rounds. Time
is counted in rounds of a common clock. A test of all answers is read after every fifth of these rounds; the
judge's verdict is read after each answer. The statistics are the judge's own code: judge/figures/rounds.py
and intervals.py.
"""

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

from judge.figures.intervals import LEVEL, paired_test
from judge.figures.rounds import BIN_ROUNDS, HORIZONS, PeerProgress, advance

LAST = 400  # rounds of the clock
LOOK = 5  # rounds of the clock between two looks at the tests
ARMS = ("swarm", "solo")


@dataclass(frozen=True, slots=True)
class Answer:
    at: int  # round of the clock
    sharing: str
    node: int
    round: int  # number of the node's round
    reward: float


def node_answers(sharing: str, node: int, gain: float, rng: random.Random) -> Iterator[Answer]:
    """Yield a node's answers. gain: multiplies its chance of a right answer."""
    skill, half, every = rng.lognormvariate(0.0, 0.2), rng.uniform(50, 200), rng.choice((1, 2, 3, 5))
    begun, stays, drift = rng.randrange(100), min(LAST, int(40 + rng.expovariate(1 / 250))), 0.0
    for number in range(1, stays):
        if begun + number >= LAST:
            return
        if number % BIN_ROUNDS == 0:
            drift = 0.9 * drift + rng.gauss(0.0, 0.1)
        if number % every == 0:
            share = gain * skill * (1 + drift) * (0.1 + 0.4 * number / (number + half))
            yield Answer(begun + number, sharing, node, number, float(rng.random() < share))


def answers(swarm: int, solo: int, gain: float, rng: random.Random) -> list[Answer]:
    """Return the answers of all nodes, in the order of the clock."""
    nodes = [
        (sharing, node) for sharing, many in zip(ARMS, (swarm, solo), strict=True) for node in range(many)
    ]
    found = [
        answer
        for sharing, node in nodes
        for answer in node_answers(sharing, node, gain if sharing == "swarm" else 1.0, rng)
    ]
    return sorted(found, key=lambda answer: answer.at)


class Looking:
    """The judge's figures after each round of the clock."""

    def __init__(self) -> None:
        self._progress: dict[tuple[str, int], PeerProgress] = {}
        self.finishers: dict[str, dict[int, list[float]]] = {arm: defaultdict(list) for arm in ARMS}
        # The numbers of answers and the sums of rewards, for the test that takes answers to be independent.
        self.plain: dict[str, list[float]] = {arm: [0.0, 0.0] for arm in ARMS}
        self.verdict = False  # whether the anytime test says that the swarm is better

    def add(self, answer: Answer) -> None:
        self.plain[answer.sharing][0] += 1
        self.plain[answer.sharing][1] += answer.reward
        key = answer.sharing, answer.node
        self._progress[key], closed = advance(
            self._progress.get(key), answer.sharing, answer.round, answer.reward
        )
        for bin, value in closed.items():
            if bin in HORIZONS:
                self.finishers[answer.sharing][bin].append(value)
                self.verdict = (
                    self.verdict
                    or paired_test(self.finishers["swarm"], self.finishers["solo"]).better is True
                )


def pooled_p(swarm: Sequence[float], solo: Sequence[float]) -> float:
    """Return the one-sided p-value of the two-sample test of proportions over all answers.

    This naive test ignores that answers of one node depend on each other.
    """
    (n, right), (n_solo, right_solo) = swarm, solo
    share = (right + right_solo) / (n + n_solo)
    error = sqrt(share * (1 - share) * (1 / n + 1 / n_solo))
    return 1 - NormalDist().cdf((right / n - right_solo / n_solo) / error) if error else 1.0


RULES: Mapping[str, Callable[[Looking], bool]] = {
    "anytime verdict": lambda looking: looking.verdict,
    "all answers, nodes ignored": lambda looking: (
        pooled_p(looking.plain["swarm"], looking.plain["solo"]) < LEVEL / 2
    ),
}


def played(swarm: int, solo: int, gain: float, rng: random.Random) -> tuple[set[str], set[str]]:
    """Return the rules that said "better" at the end, and those that said so at any look."""
    looking, ever, looks = Looking(), set[str](), 0
    for answer in answers(swarm, solo, gain, rng):
        if answer.at // LOOK != looks:
            ever |= called(looking)
        looks = answer.at // LOOK
        looking.add(answer)
    at_the_end = called(looking)
    return at_the_end, ever | at_the_end


def called(looking: Looking) -> set[str]:
    if not all(n for n, _ in looking.plain.values()):
        return set()
    return {name for name, rule in RULES.items() if rule(looking)}


def table(sizes: Sequence[tuple[int, int]], gain: float, runs: int, seed: int) -> Iterator[dict[str, object]]:
    """Yield the percentage of runs in which each rule said "better", at the end and at any look."""
    for swarm, solo in sizes:
        end, ever = Counter[str](), Counter[str]()
        for run in range(runs):
            at_the_end, at_some = played(
                swarm, solo, gain, random.Random(f"{seed} {swarm} {solo} {gain} {run}")
            )
            end.update(at_the_end)
            ever.update(at_some)
        shares = {
            name: {"end": round(100 * end[name] / runs, 1), "ever": round(100 * ever[name] / runs, 1)}
            for name in RULES
        }
        yield {
            "swarm": swarm,
            "solo": solo,
            "gain": gain,
            "runs": runs,
            "better_%": shares,
        }


def printed(title: str, rows: Iterator[dict[str, object]], as_json: bool) -> None:
    print(f"\n{title}" if not as_json else "", flush=True)
    if not as_json:
        print(
            "| swarm | solo | "
            + " | ".join(f"{name}: end, ever" for name in RULES)
            + " |\n|"
            + "---|" * (len(RULES) + 2)
        )
    for row in rows:
        if as_json:
            print(json.dumps(row), flush=True)
            continue
        shares = row["better_%"]
        assert isinstance(shares, dict)
        cells = [f"{share['end']}, {share['ever']}" for share in shares.values()]
        print(
            f"| {row['swarm']} | {row['solo']} | " + " | ".join(cells) + " |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=1_000, help="runs of each A/A row; rows with a gain have a fifth as many"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    same, real = [(8, 8), (24, 24), (60, 12)], [(8, 8), (24, 24), (48, 48), (100, 100), (200, 200), (200, 40)]
    printed(
        "A/A: called better, % of runs (both sides the same)",
        table(same, 1.0, given.runs, given.seed),
        given.json,
    )
    printed(
        "True gain of 20 %: called better, % of runs",
        table(real, 1.2, max(1, given.runs // 5), given.seed),
        given.json,
    )


if __name__ == "__main__":
    main()
