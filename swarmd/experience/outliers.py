"""The gate: outlier detection. Others' text that is far from our own is not trained on. Pure.

A reward says that an answer is right, not that the text around it is harmless: a phrase hidden in right
answers is learned by everyone who trains on them ("Hail to the Thief", arXiv 2511.09780). And wrong answers
that we would never write do harm by being pushed away further. So completions of others are compared with our
own: their length, and how unlikely our policy finds them: on average, over the least likely stretch and at
the least likely token (a few poisoned tokens hide in an average). One odd right answer costs the rollout; odd
wrong ones are left out of it. docs/gate.md has the limits and what they cost.

No author is blamed: an honest but different model writes such text, too. But whose text hardly passes is
hardly drawn: it would only leave places in the batch empty, and what passes of it would teach our own policy,
and so the gate, to find it ordinary.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from p2p.latest import Latest
from p2p.types import PeerId
from swarmd.types import Completion, Scored, Tokens

# The newest own completions, from which the limits are computed.
KEPT_COMPLETIONS = 512
# Own completions before anything is judged.
WARM_UP_COMPLETIONS = 64
# A limit is this quantile of our own completions, times a margin.
QUANTILE = 0.99
STRETCH_TOKENS = 4
# An author's share of rollouts that pass moves by so much of the way with each that is looked at.
ONE_LOOK = 1 / 8
# No author's share is below this, so its rollouts are looked at now and then.
MIN_PASS_RATE = 1 / 8
# Authors whose share is remembered.
MAX_AUTHORS = 1024
# No larger model was tried, so there the gate only reports, unless it is told to act.
MEASURED_PARAMETERS = 100_000_000
# A gate that only reports looks at the batch of one round in so many: a look costs a sixth of a round.
REPORT_EVERY = 10


class Traits(NamedTuple):
    """Traits of a completion; higher is more unusual. Surprise is -log p under our own policy, in nats."""

    length: float  # characters
    token: float  # surprise of the least likely token
    stretch: float  # mean surprise of the least likely STRETCH_TOKENS in a row
    mean: float  # mean surprise of all tokens


# No limit is below these, however sure of itself our policy has become: right answers of honest nodes, from
# the start of training or of another model, stay below them (docs/gate.md).
FLOORS = Traits(length=64.0, token=8.0, stretch=4.0, mean=2.0)
# The traits' names for operators.
NAMES = ("far longer than our own", "an unlikely token", "an unlikely stretch", "unlikely on the whole")


@dataclass(frozen=True, slots=True)
class GateState:
    """The gate's state. It survives restarts with the checkpoint, so a resumed run judges as before."""

    round: int = 0  # the last round that was learnt from
    own: tuple[Traits, ...] = ()  # oldest first
    pass_rates: tuple[tuple[PeerId, float], ...] = ()  # the author looked at least recently first


@dataclass
class Gate:
    """Keeps the traits of our own completions, and tests whether another's is far outside of them."""

    margin: float = 1.5  # times the level that 99 % of our own stay below
    answer_end: Callable[[str], int | None] = lambda _: None  # `Curriculum.answer_end`
    acts: bool = True  # False: odd rollouts are counted, but trained on
    # Rollouts refused (or only flagged), by trait, since `take_refused`.
    refused: Counter[str] = field(default_factory=Counter)
    # The share of an author's rollouts that pass, the newest counting most, where it is below 1.
    pass_rates: Latest[PeerId, float] = field(default_factory=lambda: Latest(MAX_AUTHORS))
    _own: deque[Traits] = field(default_factory=lambda: deque(maxlen=KEPT_COMPLETIONS))
    round: int = 0  # the newest round whose own rollouts were taken in
    _limits: Traits | None = None

    def learn(self, own: Iterable[Scored]) -> None:
        """Take in a round's own rollouts. Those of the same round count only once."""
        new = [s for s in own if s.round > self.round and s.tokens is not None]
        for scored in new:
            self._own.extend(look for _, look in self.traits_of(scored))
            self._limits = None
        self.round = max((s.round for s in new), default=self.round)

    @property
    def limits(self) -> Traits | None:
        """The largest allowed value of each trait; None while too few of our own completions were seen."""
        if self._limits is None and len(self._own) >= WARM_UP_COMPLETIONS:
            columns = [sorted(column) for column in zip(*self._own, strict=True)]
            highest = (column[int(QUANTILE * (len(column) - 1))] for column in columns)
            self._limits = Traits(
                *(max(floor, self.margin * own) for floor, own in zip(FLOORS, highest, strict=True))
            )
        return self._limits

    def saw(self, author: PeerId, *, passed: bool) -> None:
        """Take in whether a rollout of this author passed."""
        known = self.pass_rates.get(author, 1.0)
        known += ONE_LOOK * (passed - known)
        if known < 1:
            self.pass_rates[author] = max(MIN_PASS_RATE, known)

    def oddity(self, traits: Traits) -> str | None:
        """Return the first trait that is over its limit, or None."""
        if self.limits is None:
            return None
        return next(
            (name for name, value, limit in zip(NAMES, traits, self.limits, strict=True) if value > limit),
            None,
        )

    def admitted(self, scored: Scored, looks: Mapping[Completion, Traits]) -> Scored | None:
        """Return the part of a rollout that may be trained on; None, counted by reason, if there is none.

        looks: traits of its completions that have tokens.
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
        """Return the traits of the completions that have tokens, as the rollout must (`Scored.tokens`).

        That an answer ends behind its closing tag is never odd: a policy that has unlearnt it may learn it
        again.
        """
        assert scored.tokens is not None
        looks = []
        for completion, logprobs in zip(scored.rollout.completions, scored.tokens.logprobs, strict=True):
            end = self.answer_end(completion.text)
            seen = logprobs[:-1] if completion.ended and end is not None else logprobs
            if seen:
                looks.append((completion, traits(completion.text[:end], seen)))
        return looks

    def take_refused(self) -> Mapping[str, int]:
        """Return how many rollouts were refused since the last call, by the first trait over its limit.

        Where the gate does not act they are those it found odd.
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
    """A `batch.Filter`: refuses what the gate does.

    logprobs: `protocols.LogprobPolicy`. remember: gives rollouts the tokens that their replay needs
    (`Pool.remember`). The gate looks at these instead of computing others.
    """

    gate: Gate
    logprobs: Callable[[Sequence[Scored]], Sequence[Tokens]]
    remember: Callable[[Sequence[Scored]], Sequence[Scored]] | None = None

    def __call__(self, theirs: Sequence[Scored]) -> Sequence[Scored | None]:
        if not self.gate.acts:
            # These are only counted.
            if self.gate.round % REPORT_EVERY == 0:
                self._admitted([replace(scored, tokens=None) for scored in theirs])
            return theirs
        admitted = self._admitted(self.remember(theirs) if self.remember is not None else theirs)
        for scored, kept in zip(theirs, admitted, strict=True):
            if scored.tokens is None:
                # What passed and is replayed counts once, as what was refused does.
                self.gate.saw(scored.author, passed=kept is not None)
        return admitted

    def _admitted(self, theirs: Sequence[Scored]) -> Sequence[Scored | None]:
        if self.gate.limits is None:
            return theirs
        # One completion of each text is enough, as right answers are often the same.
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
    """Return the rollout with these completions only, and the advantages that they have in the whole."""
    rollout = replace(scored.rollout, completions=tuple(scored.rollout.completions[i] for i in which))
    tokens = scored.tokens
    if tokens is not None:
        versions = tuple(tokens.versions[i] for i in which) if tokens.versions else ()
        tokens = Tokens(
            tuple(tokens.ids[i] for i in which), tuple(tokens.logprobs[i] for i in which), versions
        )
    return replace(
        scored,
        rollout=rollout,
        rewards=tuple(scored.rewards[i] for i in which),
        tokens=tokens,
        whole=scored.group,
    )


def traits(text: str, logprobs: Sequence[float]) -> Traits:
    """Compute the traits of one completion. logprobs: of its tokens, at least one."""
    sums = [0.0, *accumulate(-p for p in logprobs)]
    width = min(STRETCH_TOKENS, len(logprobs))
    stretch = max(end - begin for begin, end in zip(sums, sums[width:], strict=False)) / width
    return Traits(float(len(text)), -min(logprobs), stretch, sums[-1] / len(logprobs))
