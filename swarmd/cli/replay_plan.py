"""`swarmd plan replay`: measure the cost of generating against training here, and the benefit of reuse."""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.errors import ConfigError, SwarmdError
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.experience.advantages import unweighed
from swarmd.experience.replay_theory import PAYS_FROM_MU, Reuse, best_reuse, compute_ratio, cost
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.files.progress import Download
from swarmd.protocols import Policy
from swarmd.tasks.curriculum import DrawnTasks
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import open_tasks
from swarmd.types import Rollout, Scored

WARM_UP_ROUNDS: Final = 1
ASSUMPTIONS: Final = (
    ("mu holds for this machine, this model and these lengths, without the verifier; it changes with each"),
    (
        "every completion of the measured updates has a gradient; rollouts with equal rewards train faster,"
        " which raises the mu of a real node"
    ),
    (
        "the variance of a rollout's gradient grows with its age as age^(2 alpha), and two uses of one"
        " correlate by rho: assumed, not measured"
    ),
    (
        "the theorem is about plain stochastic gradient descent on a bounded loss; it does not cover"
        " pass@8, which reuse lowered on tiny"
    ),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over rounds, in wall-clock seconds per rollout (one question, all its completions)."""

    generate: float
    train: float
    mu: float  # median of the rounds' ratios
    low: float  # the smallest ratio
    high: float
    rounds: int


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """R, N and B of Theorem 3.5 as settings of `[replay]`. pays: whether to switch it on."""

    measured: Measured
    rho: float
    alpha: float
    pays: bool
    theorem: Reuse
    own: int  # I: rollouts generated a round
    new: int  # R = I + J: with J rollouts of other nodes, which this node does not generate
    mu: float  # cost ratio of a new rollout: measured.mu · I / R
    size: int  # N
    batch: int  # rollouts of one update
    updates: int  # updates a round; batch · updates is the theorem's B
    # Compute of such a round, relative to a round that generates every rollout it trains on.
    gamma: float
    # Cost of the same progress relative to a run without reuse, by the theorem.
    same_progress: float


def measure(
    policy: Policy,
    tasks: DrawnTasks,
    questions: int,
    completions: int,
    rounds: int,
    seed: int,
    clock: Callable[[], float],
) -> Measured:
    """Measure rounds of generating and training.

    Rewards alternate, so that every completion has a gradient.
    """
    rng = random.Random(seed)
    pairs = [
        _one_round(policy, tasks, questions, completions, rng, clock) for _ in range(WARM_UP_ROUNDS + rounds)
    ][WARM_UP_ROUNDS:]
    ratios = [generate / train for generate, train in pairs]
    return Measured(
        statistics.median(generate for generate, _ in pairs),
        statistics.median(train for _, train in pairs),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        rounds,
    )


def _one_round(
    policy: Policy,
    tasks: DrawnTasks,
    questions: int,
    completions: int,
    rng: random.Random,
    clock: Callable[[], float],
) -> tuple[float, float]:
    drawn = tasks.draw(questions, rng)
    begun = clock()
    observe = tasks.observer([task.ref for task in drawn])
    answers = policy.generate([task.question for task in drawn], completions, observe=observe)
    generated = clock()
    rewards = tuple(float(i % 2) for i in range(completions))
    batch = [
        Scored(Rollout(task.ref, answer.completions, PeerId("")), task.question, rewards, 1, answer.tokens)
        for task, answer in zip(drawn, answers, strict=True)
    ]
    between = clock()
    while (report := policy.update(batch, unweighed)).skipped:
        # The next update scales a gradient in float16 by less. The learner gives up if no scale helps.
        between = clock()
    trained = clock()
    if not report.tokens:
        raise SwarmdError(
            "the update that was to be measured trained on nothing: no answer has a token. Choose a model"
            " with a longer context, or a shorter model.system_prompt."
        )
    return (generated - begun) / questions, (trained - between) / questions


def plan(measured: Measured, own: int, external: int, batch: int, rho: float, alpha: float) -> ReplayPlan:
    """Return the settings that Theorem 3.5 suggests, in whole numbers.

    own, external: new rollouts a round that the node generates, and that it takes from other nodes. batch:
    rollouts of one update.
    """
    new = own + external
    mu = measured.mu * own / new
    best = best_reuse(mu, rho, alpha)
    updates = max(1, round(best.trained * new / batch))
    return ReplayPlan(
        measured,
        rho,
        alpha,
        mu >= PAYS_FROM_MU,
        best,
        own,
        new,
        mu,
        max(batch, math.ceil(best.kept * new)),
        batch,
        updates,
        compute_ratio(mu, new, batch * updates),
        cost(best, mu, rho, alpha) / cost(Reuse(1, 1), mu, rho, alpha),
    )


def plan_replay(
    config: NodeConfig,
    rounds: int,
    rho: float,
    alpha: float,
    report: Callable[[Download], None] = lambda _: None,
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> ReplayPlan:
    """Load the configured model, measure, plan. Raises ConfigError, NoModel, Unreachable.

    Nothing is saved: the updates of the measurement are discarded. loading: entered while the model is
    loaded.
    """
    own, external = config.round.local, config.round.wanted
    if not own:
        raise ConfigError(
            "round.local is 0: this node generates nothing that reuse could save. Set round.local above 0."
        )
    curriculum = curriculum_of(config)
    with (
        closing(LanguagePolicy.open(config, seed=0, report=report, loading=loading)) as policy,
        closing(Verifier(curriculum)) as maker,
    ):
        measured = measure(
            policy, open_tasks(curriculum, maker), own, config.round.completions, rounds, 0, time.perf_counter
        )
    return plan(measured, own, external, config.replay.batch or own + external, rho, alpha)


def document(made: ReplayPlan) -> dict[str, Any]:
    """Return the plan as JSON data."""
    m = made.measured
    return {
        "schema": 1,
        "measured": {
            "mu": m.mu,
            "low": m.low,
            "high": m.high,
            "rounds": m.rounds,
            "seconds": {"generate": m.generate, "train": m.train},
        },
        "assumed": {"rho": made.rho, "alpha": made.alpha},
        "assumptions": list(ASSUMPTIONS),
        "mu": made.mu,
        "pays": made.pays,
        "pays_from": PAYS_FROM_MU,
        "theorem": {
            "kept_per_new": made.theorem.kept,
            "trained_per_new": made.theorem.trained,
            "cost": made.same_progress,
        },
        "plan": {
            "I": made.own,
            "R": made.new,
            "N": made.size,
            "B": made.batch * made.updates,
            "updates_per_round": made.updates,
            "batch": made.batch,
        },
        "gamma": made.gamma,
    }


def lines(made: ReplayPlan) -> Sequence[str]:
    """Return the plan as lines for people."""
    m = made.measured
    updates = f"{made.updates} update{'s' if made.updates > 1 else ''} of {made.batch}"
    measured = (
        f"generating a rollout took {1000 * m.generate:.1f} ms, training on one {1000 * m.train:.1f} ms:"
        f" mu = {m.mu:.2f} ({m.low:.2f} to {m.high:.2f} over {m.rounds} round{'s' * (m.rounds > 1)})"
    )
    if made.new > made.own:
        measured += (
            f".\nOf R = {made.new} new rollouts a round other nodes generate {made.new - made.own}: for each"
            f" of them mu is {made.mu:.2f}"
        )
    if made.pays:
        verdict = [
            (
                f"Replay can pay here. Theorem 3.5: N = {made.size}, R = {made.new}, B ="
                f" {made.batch * made.updates} a round ({updates})."
            ),
            (
                f"A round then costs {made.gamma:.2f} of a round that generates all its rollouts (gamma); "
                f"the theorem expects {made.same_progress:.2f} of the cost for the same progress."
            ),
            "To use it:",
            "",
            "    [replay]",
            '    mode = "on"',
            f"    size = {made.size}",
            f"    batch = {made.batch}",
            f"    updates_per_round = {made.updates}",
        ]
    else:
        verdict = [
            (
                f"Replay cannot pay here: mu is below {PAYS_FROM_MU:g}, so new rollouts cost too little to be"
                " worth reusing. Leave replay.mode off."
            ),
            (
                f"Theorem 3.5 alone would say: N = {made.size}, R = {made.new}, B ="
                f" {made.batch * made.updates} a round ({updates})."
            ),
        ]
    return [
        measured,
        *verdict,
        "",
        f"Assumed: rho = {made.rho:g}, alpha = {made.alpha:g}.",
        *(f"- {one}" for one in ASSUMPTIONS),
    ]
