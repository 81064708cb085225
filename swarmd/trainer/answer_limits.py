"""Limits on the tokens of this node's answers, learnt from the lengths of its answers in the asked form.

An untrained model rarely writes the asked form, and its other answers often go on until the limit. They earn
nothing, and they take most of a round: 64 answers of SmolLM2-135M took 45 CPU seconds with 256 tokens and 9
with 32, and as many of them were in the asked form (docs/performance.md).
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high
from typing import Final

from swarmd.tasks.answers import GradeReason
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Scored, Task

# The limit is this multiple of the median length. Lengths of answers are skewed: if their logarithms are
# normal with a standard deviation of 0.5, one answer in 360 is longer than four medians.
MEDIANS: Final = 4
LEAST_TOKENS: Final = 32
# Answers in the asked form that are remembered for each specialty.
KEPT: Final = 64


class AnswerLimits:
    """Chooses the most tokens of an answer, for each specialty. Pure.

    The limit is MEDIANS times the median length of the latest answers in the asked form, right or wrong, and
    at least LEAST_TOKENS. So answers may grow longer by training, and the limit grows with them. A specialty
    without such an answer keeps the configured limit, as do all if the limit is not adaptive.
    """

    def __init__(self, *, adaptive: bool = False) -> None:
        self.given: Sequence[int] = ()  # the limits of the latest questions; 0: the configured one
        self._adaptive, self._lengths = adaptive, dict[str, deque[int]]()

    @property
    def lengths(self) -> Mapping[str, tuple[int, ...]]:
        """The lengths in tokens of the latest answers in the asked form, by specialty."""
        return {specialty: tuple(lengths) for specialty, lengths in self._lengths.items()}

    def of(self, tasks: Iterable[Task]) -> Sequence[int]:
        """Return the most tokens of an answer to each task; 0 for the configured limit."""
        known = [self._lengths.get(task.ref.specialty) for task in tasks]
        self.given = [
            max(LEAST_TOKENS, MEDIANS * median_high(lengths)) if lengths else 0 for lengths in known
        ]
        return self.given

    def saw(self, local: Iterable[Scored], curriculum: Curriculum) -> None:
        """Note the lengths of this node's own answers."""
        for scored in local if self._adaptive else ():
            specialty = scored.ref.specialty
            tokens = scored.tokens.ids if scored.tokens else ()
            for completion, ids in zip(scored.rollout.completions, tokens, strict=False):
                if curriculum.read(specialty, completion.text) is not GradeReason.NO_ANSWER:
                    self._lengths.setdefault(specialty, deque(maxlen=KEPT)).append(len(ids))

    def restore(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """Continue from a checkpoint's lengths."""
        if self._adaptive:
            self._lengths = {specialty: deque(known, KEPT) for specialty, known in lengths.items()}
