"""The gate: outlier detection. External text that differs strongly from this node's own is rejected. Pure.

A reward says that an answer is right, not that the text around it is harmless: a phrase hidden in right
answers is learned by every node that trains on them ("Hail to the Thief", arXiv 2511.09780). Wrong answers
that this node would never write do harm too, because training pushes them even further away. So external
completions are compared with this node's own: their length, and how unlikely its policy finds them: on
average, over the least likely stretch, and at the least likely token (an average hides a few poisoned
tokens). One outlier among the right answers rejects the whole rollout; wrong outliers are removed from it.
docs/gate.md lists the limits and their cost.

No author is blamed, because an honest but different model also writes such text. But an author whose text
rarely passes is rarely drawn: it would leave places in the batch empty, and the part that passes would teach
this policy, and so the gate, to find such text ordinary.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from p2p.latest import Latest
from p2p.types import PeerId
from swarmd.types import Completion, Scored, Tokens

# The limits are computed from this many newest own completions.
KEPT_COMPLETIONS = 512
# Own completions needed before the gate judges.
WARM_UP_COMPLETIONS = 64
# A limit is this quantile of the traits of own completions, times a margin.
QUANTILE = 0.99
STRETCH_TOKENS = 4
# Weight of the newest rollout in an author's pass rate (exponential average).
ONE_LOOK = 1 / 8
# Lowest pass rate of an author, so that its rollouts are still drawn now and then.
MIN_PASS_RATE = 1 / 8
# Maximum number of authors whose pass rate is remembered.
MAX_AUTHORS = 1024
# The gate was measured on models up to this size. For a larger one it only reports, unless gate.mode is "on".
MEASURED_PARAMETERS = 100_000_000
# A gate that only reports checks one round in this many, because a check costs a sixth of a round.
REPORT_EVERY = 10


class Traits(NamedTuple):
    """Traits of a completion; higher is more unusual. Surprise: -log p under this node's policy, in nats."""

    length: float  # characters
    token: float  # surprise of the least likely token
    stretch: float  # mean surprise of the least likely STRETCH_TOKENS in a row
    mean: float  # mean surprise of all tokens


# No limit is below these, however confident the policy has become: right answers of honest nodes stay below
# them, also at the start of training and with another model (docs/gate.md).
FLOORS = Traits(length=64.0, token=8.0, stretch=4.0, mean=2.0)
# The traits' names for operators.
NAMES = ("far longer than own answers", "an unlikely token", "an unlikely stretch", "unlikely on average")


@dataclass(frozen=True, slots=True)
class GateState:
    """State of the gate. Checkpoints store it, so a resumed run judges as before."""

    round: int = 0  # the last round whose completions are included
    own: tuple[Traits, ...] = ()  # oldest first
    pass_rates: tuple[tuple[PeerId, float], ...] = ()  # least recently checked author first


@dataclass
class Gate:
    """Keeps the traits of own completions, and tests whether an external one is far outside of them."""

    margin: float = 1.5  # factor on the 99 % quantile of own completions
    answer_end: Callable[[str], int | None] = lambda _: None  # `Curriculum.answer_end`
    acts: bool = True  # False: outliers are counted, but trained on
    # Rollouts rejected (or only flagged), by trait, since `take_refused`.
    refused: Counter[str] = field(default_factory=Counter)
    # Share of an author's rollouts that pass, newest weighted most; only shares below 1 are stored.
    pass_rates: Latest[PeerId, float] = field(default_factory=lambda: Latest(MAX_AUTHORS))
    _own: deque[Traits] = field(default_factory=lambda: deque(maxlen=KEPT_COMPLETIONS))
    round: int = 0  # the newest round whose own rollouts are included
    _limits: Traits | None = None

    def learn(self, own: Iterable[Scored]) -> None:
        """Add the traits of a round's own rollouts. Each round counts only once."""
        new = [s for s in own if s.round > self.round and s.tokens is not None]
        for scored in new:
            self._own.extend(look for _, look in self.traits_of(scored))
            self._limits = None
        self.round = max((s.round for s in new), default=self.round)

    @property
    def limits(self) -> Traits | None:
        """The largest allowed value of each trait; None before WARM_UP_COMPLETIONS own completions."""
        if self._limits is None and len(self._own) >= WARM_UP_COMPLETIONS:
            columns = [sorted(column) for column in zip(*self._own, strict=True)]
            highest = (column[int(QUANTILE * (len(column) - 1))] for column in columns)
            self._limits = Traits(
                *(max(floor, self.margin * own) for floor, own in zip(FLOORS, highest, strict=True))
            )
        return self._limits

    def saw(self, author: PeerId, *, passed: bool) -> None:
        """Update the author's pass rate by one rollout."""
        known = self.pass_rates.get(author, 1.0)
        known += ONE_LOOK * (passed - known)
        if known < 1:
            self.pass_rates[author] = max(MIN_PASS_RATE, known)

    def oddity(self, traits: Traits) -> str | None:
        """Return the name of the first trait over its limit, or None."""
        if self.limits is None:
            return None
        return next(
            (name for name, value, limit in zip(NAMES, traits, self.limits, strict=True) if value > limit),
            None,
        )

    def admitted(self, scored: Scored, looks: Mapping[Completion, Traits]) -> Scored | None:
        """Return the part of a rollout that may be trained on; None, counted by reason, if there is none.

        looks: traits of the completions that have tokens.
        """
        odd = [self.oddity(looks[c]) if c in looks else None for c in scored.rollout.completions]
        why = next(
            (name for name, reward in zip(odd, scored.rewards, strict=True) if name and reward > 0), None
        )
        if why is not None:
            self.refused[why] += 1
            return None
        return part(scored, [i for i, name in enumerate(odd) if not name]) if any(odd) else scored

    def traits_of(self, scored: Scored) -> list[tuple[Completion, Traits]]:
        """Return the traits of the completions that have tokens. The rollout must have `Scored.tokens`.

        The end token after a closing tag is ignored: a policy that has unlearned to stop there may learn it
        again.
        """
        assert scored.tokens is not None
        looks = []
        for completion, logprobs in zip(scored.rollout.completions, scored.tokens.logprobs, strict=True):
            end = self.answer_end(completion.whole)
            seen = logprobs[:-1] if completion.ended and end is not None else logprobs
            if seen:
                looks.append((completion, traits(completion.whole[:end], seen)))
        return looks

    def take_refused(self) -> Mapping[str, int]:
        """Return how many rollouts were rejected since the last call, by the first trait over its limit.

        If the gate only reports, these are the rollouts it flagged.
        """
        refused, self.refused = self.refused, Counter()
        return dict(refused)

    @property
    def state(self) -> GateState:
        return GateState(self.round, tuple(self._own), tuple(self.pass_rates.items()))

    @state.setter
    def state(self, state: GateState) -> None:
        self._own.clear()
        self._own.extend(Traits(*own) for own in state.own)
        self.round, self._limits = state.round, None
        self.pass_rates = Latest(MAX_AUTHORS, state.pass_rates)


@dataclass
class Gated:
    """A `batch.Filter` that applies the gate.

    logprobs: `protocols.LogprobPolicy`. remember: gives rollouts the tokens that their replay needs
    (`Pool.remember`), so that the gate does not compute them again.
    """

    gate: Gate
    logprobs: Callable[[Sequence[Scored]], Sequence[Tokens]]
    remember: Callable[[Sequence[Scored]], Sequence[Scored]] | None = None

    def __call__(self, theirs: Sequence[Scored]) -> Sequence[Scored | None]:
        if not self.gate.acts:
            # The gate only reports: rollouts are counted, none is rejected.
            if self.gate.round % REPORT_EVERY == 0:
                self._admitted([replace(scored, tokens=None) for scored in theirs])
            return theirs
        admitted = self._admitted(self.remember(theirs) if self.remember is not None else theirs)
        for scored, kept in zip(theirs, admitted, strict=True):
            if scored.tokens is None:
                # Each rollout counts once: a replayed rollout already has the tokens of its first check.
                self.gate.saw(scored.author, passed=kept is not None)
        return admitted

    def _admitted(self, theirs: Sequence[Scored]) -> Sequence[Scored | None]:
        if self.gate.limits is None:
            return theirs
        # Identical completions are checked once, because right answers are often the same.
        bare = [
            part(scored, list({each: i for i, each in enumerate(scored.rollout.completions)}.values()))
            for scored in theirs
            if scored.tokens is None
        ]
        found = iter(
            [
                replace(scored, tokens=tokens)
                for scored, tokens in zip(bare, self.logprobs(bare) if bare else (), strict=True)
            ]
        )
        seen = [scored if scored.tokens is not None else next(found) for scored in theirs]
        return [
            self.gate.admitted(scored, dict(self.gate.traits_of(look)))
            for scored, look in zip(theirs, seen, strict=True)
        ]


def part(scored: Scored, which: Sequence[int]) -> Scored:
    """Return the rollout with only these completions; advantages are still taken over the whole group."""
    rollout = replace(scored.rollout, completions=tuple(scored.rollout.completions[i] for i in which))
    if (tokens := scored.tokens) is not None:
        tokens = Tokens(
            tuple(tokens.ids[i] for i in which),
            tuple(tokens.logprobs[i] for i in which),
            tuple(tokens.versions[i] for i in which) if tokens.versions else (),
            tuple(tokens.sampled[i] for i in which) if tokens.sampled else (),
            tokens.own,
        )
    return replace(
        scored,
        observations=tuple(scored.observations[i] for i in which) if scored.observations else (),
        rollout=rollout,
        rewards=tuple(scored.rewards[i] for i in which),
        tokens=tokens,
        whole=scored.group,
    )


def traits(text: str, logprobs: Sequence[float]) -> Traits:
    """Compute the traits of one completion. logprobs: one for each token, at least one."""
    sums = [0.0, *accumulate(-p for p in logprobs)]
    width = min(STRETCH_TOKENS, len(logprobs))
    stretch = max(end - begin for begin, end in zip(sums, sums[width:], strict=False)) / width
    return Traits(float(len(text)), -min(logprobs), stretch, sums[-1] / len(logprobs))
