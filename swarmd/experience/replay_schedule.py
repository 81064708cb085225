"""The replay schedule: updates per round, and the guard that pauses reuse when it goes too far. Pure."""

from dataclasses import dataclass, field

# The weight of the newest round in the figures that are watched: single rounds are noisy by half their value.
SMOOTHING = 0.1
# So many times the limit is too much even for a single round.
BURST_FACTOR = 1.5
# Each rest is twice the one before.
FIRST_REST_ROUNDS, LONGEST_REST_ROUNDS = 8, 1024


@dataclass(frozen=True, slots=True)
class GuardState:
    """The guard's state, which survives restarts with the checkpoint."""

    clip_fraction: float = 0.0  # smoothed, over rounds with reuse
    resting: int = 0  # rounds left of one update each, on fresh experience only
    rests: int = 0  # cooldowns so far; one is forgiven after an equally long healthy stretch
    healthy: int = 0  # rounds of reuse since that was counted
    drift: float = 0.0  # smoothed like the clip fraction


@dataclass
class ReplaySchedule:
    """Decides how many updates a round makes. One (the default) is never guarded: it is the fallback.

    A clip fraction above the limit means that the policy has moved away from what its experience was drawn
    with; so does a drift above its own: the KL divergence, in nats a token, of the policy as it is from the
    one that drew (not from the start of the run). Healthy runs on the tiny model had clip fractions of .03 to
    .08; those that decayed .08 to .11 (2026-11-21). The round after is the paper's own: one update on the
    round's own rollouts and the newest of others. Rests double and the updates after them halve, so a setting
    that is too aggressive ends as a plain run; where reuse then lasts, both come back.
    """

    configured: int = 1
    limit: float = 0.09
    drift_limit: float = 1.0
    state: GuardState = field(default_factory=GuardState)

    @property
    def resting(self) -> bool:
        return self.state.resting > 0

    @property
    def updates(self) -> int:
        """The updates of this round.

        They are halved after each rest, down to two, so that reuse does not go too far again within a few
        rounds.
        """
        return 1 if self.resting else max(min(2, self.configured), self.configured >> self.state.rests)

    def observe(self, clip_fraction: float, drift: float = 0.0) -> bool:
        """Take in a round's mean clip fraction and drift. Returns whether they pause reuse."""
        state = self.state
        if self.resting:
            self.state = GuardState(0.0, state.resting - 1, state.rests)
            return False
        if self.configured == 1:
            return False
        smoothed = (1 - SMOOTHING) * state.clip_fraction + SMOOTHING * clip_fraction
        drifted = (1 - SMOOTHING) * state.drift + SMOOTHING * drift
        clips = smoothed > self.limit or clip_fraction > BURST_FACTOR * self.limit
        if clips or drifted > self.drift_limit or drift > BURST_FACTOR * self.drift_limit:
            self.state = GuardState(0.0, _rest(state.rests), state.rests + 1)
            return True
        forgiven = bool(state.rests) and state.healthy + 1 >= _rest(state.rests - 1)
        self.state = GuardState(
            smoothed, 0, state.rests - forgiven, 0 if forgiven else state.healthy + 1, drifted
        )
        return False


def _rest(rests: int) -> int:
    """Return the length, in rounds, of the next rest after this many."""
    return min(FIRST_REST_ROUNDS << min(rests, 16), LONGEST_REST_ROUNDS)
