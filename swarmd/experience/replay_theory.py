"""How much reuse pays: Theorem 3.5 of "Efficient RL Training for LLMs with Experience Replay". Pure.

The forms used here are numerically stable everywhere.

Here mu always has the meaning of the paper's section 2: the cost of generating a rollout divided by the cost
of training on it (6.84 measured there for Qwen3-0.6B). In the theorem's cost c = R + mu·B the same letter
multiplies *training*, so the theorem's mu is this module's 1/mu. (The caption of Figure 4 contradicts the
printed formulas.) Only `_training_cost` converts between the two.

Assumptions of the theorem: stochastic gradient descent without Adam, whose rate is set by cost times gradient
variance; the variance of a rollout that is s steps old grows as (s/tau)^(2·alpha), 0 < alpha < 1/2, without a
floor; two uses of one rollout are correlated by rho; rollouts are drawn uniformly. Neither alpha nor rho is
known for a model beforehand, so the answer is a starting point, not an optimum.
"""

import math
from dataclasses import dataclass

# Below this mu replay is left off: the break-even measured on the tiny model was 3.3 to 4.5 (2026-11-21).
PAYS_FROM_MU = 5.0


@dataclass(frozen=True, slots=True)
class Reuse:
    """x = N/R, rollouts kept per new rollout; y = B/R, rollouts trained on per new rollout."""

    kept: float
    trained: float


def best_reuse(mu: float, rho: float, alpha: float) -> Reuse:
    """Return x* and y* of Theorem 3.5.

    x* is at least 1, because a new rollout is kept at least until it is used; then y* is the optimum for x =
    1. With m = 1/mu, b = alpha·m + rho(1 − 2·alpha), s = sqrt(alpha²m² + m·rho(1 − 2·alpha)): x* = (1 −
    2·alpha)² / (2·alpha(b + s)) and y* = (1 − 2·alpha) / (alpha·m + s). These equal the printed forms, and
    are also valid at m = rho and at rho = 0, where the printed forms divide by zero.

    Raises ValueError outside mu > 0, rho >= 0, 0 < alpha < 1/2: there is no interior optimum.
    """
    m = _training_cost(mu, rho, alpha)
    b = alpha * m + rho * (1 - 2 * alpha)
    s = math.sqrt(alpha * alpha * m * m + m * rho * (1 - 2 * alpha))
    x = (1 - 2 * alpha) ** 2 / (2 * alpha * (b + s))
    if x < 1:
        return Reuse(1.0, 1 / math.sqrt(m * (rho + 1)))
    return Reuse(x, (1 - 2 * alpha) / (alpha * m + s))


def cost(reuse: Reuse, mu: float, rho: float, alpha: float) -> float:
    """Return the cost of a given progress, up to a factor that depends on neither x nor y.

    It is (1 + m·y)(1/y + 1/x + rho) · x^(2·alpha) / (2·alpha + 1). The last factor is the mean variance of
    the kept rollouts. `best_reuse` is its minimum over x >= 1 and y > 0.
    """
    m = _training_cost(mu, rho, alpha)
    x, y = reuse.kept, reuse.trained
    return math.pow(x, 2 * alpha) / (2 * alpha + 1) * (1 + m * y) * (1 / y + 1 / x + rho)


def compute_ratio(mu: float, generated: float, trained: float) -> float:
    """Return gamma: the cost of this generation and training, relative to a run without reuse.

    It is (generated·mu + trained) / (trained·(1 + mu)). The paper's (1 + W/T) / (1 + mu) is the same number
    if its W generators and T trainers are kept busy, W/T = mu·generated/trained. Raises ValueError if nothing
    is trained.
    """
    if not (mu > 0 and generated >= 0 and trained > 0):
        raise ValueError(f"no compute ratio for mu {mu}, {generated} generated and {trained} trained")
    return (generated * mu + trained) / (trained * (1 + mu))


def _training_cost(mu: float, rho: float, alpha: float) -> float:
    """Return the theorem's m: the cost of training on one rollout, in rollouts generated.

    Raises ValueError outside the theorem's range.
    """
    if not (0 < mu < math.inf and 0 <= rho < math.inf and 0 < alpha < 0.5):
        raise ValueError(
            f"Theorem 3.5 needs mu > 0, rho >= 0 and 0 < alpha < 1/2, not mu {mu}, rho {rho}, alpha {alpha}"
        )
    return 1 / mu
