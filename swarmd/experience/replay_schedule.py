"""The replay schedule: updates per round, and the guard that pauses reuse if the policy drifts. Pure."""

from dataclasses import dataclass, field

# Weight of the newest round in the smoothed figures; the figures of single rounds vary by half their value.
SMOOTHING = 0.1
# A single round above this multiple of the limit pauses reuse at once.
BURST_FACTOR = 1.5
# Each cooldown is twice as long as the one before.
FIRST_REST_ROUNDS, LONGEST_REST_ROUNDS = 8, 1024


@dataclass(frozen=True, slots=True)
class GuardState:
    """State of the guard, stored in checkpoints."""

    clip_fraction: float = 0.0  # smoothed, over rounds with reuse
    resting: int = 0  # remaining cooldown rounds, each with one update on fresh experience only
    rests: int = 0  # cooldowns so far; one is forgiven after an equally long healthy stretch
    healthy: int = 0  # rounds of reuse since the last cooldown or forgiveness
    drift: float = 0.0  # smoothed like the clip fraction


@dataclass
class ReplaySchedule:
    """Decides how many updates a round makes. One update per round (the default) is never guarded.

    A clip fraction above the limit means that the policy has moved away from the policy that generated its
    experience; so does a drift above its limit. Drift is the KL divergence, in nats per token, of the current
    policy from the generating one (not from the start of the run). On the tiny model, healthy runs had clip
    fractions of .03 to .08, and runs that decayed .08 to .11 (2026-11-21). During a cooldown a round is the
    paper's: one update on the round's own rollouts and the newest external ones. Each cooldown doubles the
    length of the next one and halves the updates after it, so a setting that is too aggressive ends as a run
    without reuse; if reuse then stays healthy, both recover.
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

        They are halved after each cooldown, down to two, so that reuse does not go too far again within a few
        rounds.
        """
        return 1 if self.resting else max(min(2, self.configured), self.configured >> self.state.rests)

    def observe(self, clip_fraction: float, drift: float = 0.0) -> bool:
        """Add a round's mean clip fraction and drift. Returns whether they start a cooldown."""
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
    """Return the length, in rounds, of the next cooldown after this many."""
    return min(FIRST_REST_ROUNDS << min(rests, 16), LONGEST_REST_ROUNDS)
