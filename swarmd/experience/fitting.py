"""Compatibility filter: drops others' rollouts that our tokenizer or context length cannot take. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmd.types import Scored

QUESTION_TOO_LONG = "the question fills our context"
ANSWER_TOO_LONG = "a right answer is longer than ours may be"
UNKNOWN_CHARACTERS = "characters that our tokenizer has not"


@dataclass
class Fitting:
    """A `batch.Filter`: refuses what our model cannot be trained on. Nobody is blamed, as other models can.

    unfit: `protocols.SelectivePolicy`.
    """

    unfit: Callable[[Scored], str | None]
    refused: Counter[str] = field(default_factory=Counter)  # rollouts, by reason, since `take_refused`

    def __call__(self, theirs: Sequence[Scored]) -> Sequence[Scored | None]:
        why = [self.unfit(scored) for scored in theirs]
        self.refused.update(filter(None, why))
        return [None if reason else scored for scored, reason in zip(theirs, why, strict=True)]

    def take_refused(self) -> Mapping[str, int]:
        """Return how many rollouts were refused since the last call, by reason."""
        refused, self.refused = self.refused, Counter()
        return dict(refused)
