"""Compatibility filter: drops others' rollouts that our tokenizer or context length cannot take. Pure."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from p2p.types import PeerId
from swarmd.experience.outliers import DRAWS
from swarmd.experience.pool import Pool
from swarmd.protocols import Sampler
from swarmd.types import Scored

QUESTION_TOO_LONG = "the question fills our context"
ANSWER_TOO_LONG = "a right answer is longer than ours may be"
UNKNOWN_LETTERS = "characters that our tokenizer has not"


@dataclass
class Fitting:
    """A `Sampler` that filters another: what our model cannot be trained on leaves the pool, and others are drawn in its place.

    Only what was chosen is looked at. unfit: `protocols.Limited`. Nobody is blamed: other models can be trained on it.
    """

    sample: Sampler
    pool: Pool
    me: PeerId
    unfit: Callable[[Scored], str | None]
    refused: Counter[str] = field(default_factory=Counter)  # rollouts, by reason, since `take_refused`

    def __call__(self, local: Sequence[Scored], pool: Sequence[Scored], rng: random.Random) -> Sequence[Scored]:
        fits: Sequence[Scored] = []
        for _ in range(DRAWS):
            batch = self.sample(local, pool, rng)
            why = [None if s.rollout.author == self.me else self.unfit(s) for s in batch]
            fits = [s for s, reason in zip(batch, why, strict=True) if reason is None]
            if len(fits) == len(batch):
                break
            self.refused.update(filter(None, why))
            self.pool.drop((s.rollout.author, s.rollout.ref) for s, reason in zip(batch, why, strict=True) if reason)
            pool = self.pool.snapshot()
        return fits

    def take_refused(self) -> Mapping[str, int]:
        """Rollouts turned away since the last call, by reason."""
        refused, self.refused = self.refused, Counter()
        return dict(refused)
