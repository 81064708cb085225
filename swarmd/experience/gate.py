"""The gate: text that earned its reward and yet is far from all that we write ourselves is not trained on. Pure.

A reward says that an answer is right, not that the text around it is harmless: who hides a phrase in right answers teaches it to whoever
trains on them ("Hail to the Thief", arXiv 2511.09780). So completions of others that earned a reward, the only ones that an update makes
likelier, are held against what we saw of our own: their length, and how unlikely our policy finds them, on the whole, over their least
likely stretch and at their least likely token (a few tokens of poison hide in a mean). Which limits, and what they cost: docs/gate.md.

Nobody is blamed: a model that is only unlike ours writes such text, too.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from p2p.types import PeerId
from swarmd.experience.pool import Key, Pool
from swarmd.seams import Sampler
from swarmd.types import Scored, Tokens

KEPT = 512  # of our own completions, the newest: what the limits are taken from
WARM_UP = 64  # of them, before which nothing is judged
QUANTILE = 0.99  # of our own; a limit is this times a margin
STRETCH = 4  # tokens
DRAWS = 4  # of one batch: a pool full of odd text must not take up the round


class Traits(NamedTuple):
    """What is looked at in a completion. The more the odder; surprise is -log p under our own policy, in nats."""

    length: float  # characters
    token: float  # surprise of the least likely token
    stretch: float  # of the least likely STRETCH tokens in a row: their mean
    mean: float  # of all tokens


# No limit is below these, however sure of itself our policy has become: right answers of honest nodes, from the start of training or of
# another model, stay below them (docs/gate.md).
FLOORS = Traits(length=64.0, token=8.0, stretch=4.0, mean=2.0)
NAMES = ("far longer than our own", "an unlikely token", "an unlikely stretch", "unlikely on the whole")  # of traits, for operators


@dataclass(frozen=True, slots=True)
class GateState:
    """Survives restarts with the checkpoint: a resumed run judges as an uninterrupted one."""

    round: int = 0  # the last that was learnt from
    own: tuple[Traits, ...] = ()  # oldest first


@dataclass
class Gate:
    """What our own completions look like, and whether another's is far outside of that."""

    margin: float = 1.5  # times what all but one in a hundred of our own stay below
    refused: Counter[str] = field(default_factory=Counter)  # rollouts turned away, by trait, since `told`
    _own: deque[Traits] = field(default_factory=lambda: deque(maxlen=KEPT))
    _round: int = 0
    _limits: Traits | None = None

    def learn(self, own: Iterable[Scored]) -> None:
        """Take in a round's own rollouts; the same round's a second time count no more."""
        new = [s for s in own if s.round > self._round and s.tokens is not None]
        for scored in new:
            self._own.extend(traits_of(scored))
            self._limits = None
        self._round = max((s.round for s in new), default=self._round)

    @property
    def limits(self) -> Traits | None:
        """What no completion may be above; None while too few of our own were seen."""
        if self._limits is None and len(self._own) >= WARM_UP:
            columns = [sorted(column) for column in zip(*self._own, strict=True)]
            highest = (column[int(QUANTILE * (len(column) - 1))] for column in columns)
            self._limits = Traits(*(max(floor, self.margin * own) for floor, own in zip(FLOORS, highest, strict=True)))
        return self._limits

    def passes(self, scored: Scored) -> bool:
        """Whether all its completions are within the limits. It must have tokens. Counts what is not."""
        limits = self.limits
        if limits is None:
            return True
        for traits in traits_of(scored):
            for name, value, limit in zip(NAMES, traits, limits, strict=True):
                if value > limit:
                    self.refused[name] += 1
                    return False
        return True

    def told(self) -> Mapping[str, int]:
        """Rollouts turned away since the last call, by the first trait that was over its limit."""
        refused, self.refused = self.refused, Counter()
        return dict(refused)

    @property
    def state(self) -> GateState:
        return GateState(self._round, tuple(self._own))

    @state.setter
    def state(self, state: GateState) -> None:
        self._own.clear()
        self._own.extend(Traits(*own) for own in state.own)
        self._round, self._limits = state.round, None


@dataclass
class Gated:
    """A `Sampler` that passes on what another one chose, but for what the gate turns away; that leaves the pool, and others are drawn.

    Only what was chosen is looked at, not all that arrives. logprobs: `seams.Remembering`. remember: gives a batch the tokens that its
    replay needs (`Pool.remember`), which are then looked at in place of others computed for the gate alone.
    """

    sample: Sampler
    gate: Gate
    pool: Pool
    me: PeerId
    logprobs: Callable[[Sequence[Scored]], Sequence[Tokens]]
    remember: Callable[[Sequence[Scored]], Sequence[Scored]] | None = None

    def __call__(self, local: Sequence[Scored], pool: Sequence[Scored], rng: random.Random) -> Sequence[Scored]:
        self.gate.learn(local)
        passed: set[Key] = set()
        for _ in range(DRAWS):
            batch = self.sample(local, pool, rng)
            if self.remember is not None:
                batch = self.remember(batch)
            odd = self._odd(batch, passed)
            if not odd:
                return batch
            self.pool.drop(odd)
            pool = self.pool.snapshot()
        return [s for s in batch if _key(s) not in odd]  # a smaller batch: what would come in their place was not looked at

    def _odd(self, batch: Sequence[Scored], passed: set[Key]) -> set[Key]:
        """Which of others' rollouts are turned away; the rest of them has passed."""
        if self.gate.limits is None:
            return set()
        strange = [rewarded(s) for s in batch if s.rollout.author != self.me and _key(s) not in passed]
        bare = [s for s in strange if s.tokens is None]
        found = dict(zip(map(_key, bare), self.logprobs(bare) if bare else (), strict=True))
        odd = {_key(s) for s in strange if not self.gate.passes(s if s.tokens else replace(s, tokens=found[_key(s)]))}
        passed.update(_key(s) for s in strange if _key(s) not in odd)
        return odd


def rewarded(scored: Scored) -> Scored:
    """The same rollout, less what earned nothing, and each text once: right answers are often the same."""
    answers = zip(scored.rollout.completions, scored.rewards, strict=True)
    right = list({completion: i for i, (completion, reward) in enumerate(answers) if reward > 0}.values())
    rollout = replace(scored.rollout, completions=tuple(scored.rollout.completions[i] for i in right))
    tokens = scored.tokens
    if tokens is not None:
        tokens = Tokens(tuple(tokens.ids[i] for i in right), tuple(tokens.logprobs[i] for i in right))
    return replace(scored, rollout=rollout, rewards=tuple(scored.rewards[i] for i in right), tokens=tokens)


def traits_of(scored: Scored) -> list[Traits]:
    """One of each completion that has tokens; the rollout must have them (`Scored.tokens`)."""
    assert scored.tokens is not None
    pairs = zip(scored.rollout.completions, scored.tokens.logprobs, strict=True)
    return [traits(completion.text, logprobs) for completion, logprobs in pairs if logprobs]


def traits(text: str, logprobs: Sequence[float]) -> Traits:
    """logprobs: of the tokens of one completion, at least one."""
    sums = [0.0, *accumulate(-p for p in logprobs)]
    width = min(STRETCH, len(logprobs))
    stretch = max(end - begin for begin, end in zip(sums, sums[width:], strict=False)) / width
    return Traits(float(len(text)), -min(logprobs), stretch, sums[-1] / len(logprobs))


def _key(scored: Scored) -> Key:
    return scored.rollout.author, scored.rollout.ref
