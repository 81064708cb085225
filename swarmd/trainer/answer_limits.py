"""Limits on the tokens of this node's answers, learnt from the lengths of its answers in the asked form.

An untrained model rarely writes the asked form, and its answers in other forms often continue up to the
limit. Such answers earn nothing, and they take most of a round: 64 answers of SmolLM2-135M took 45 CPU
seconds with 256 tokens and 9 with 32, and equally many of them were in the asked form (docs/performance.md).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Final

from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Scored, Task

# The limit is this multiple of the median length. Lengths of answers are skewed: if their logarithms are
# normal with a standard deviation of 0.5, one answer in 360 is longer than four medians.
MEDIANS: Final = 4
# Tokens for the form around an answer, whose characters are one token each at most.
FORM_TOKENS: Final = 32
# Number of answers in the asked form that are remembered for each specialty, and number from which their
# median is used.
KEPT, ENOUGH = 64, 8


@dataclass
class AnswerLimits:
    """Chooses the maximum number of tokens of an answer, for each question. Pure.

    The limit is MEDIANS times the median length of the latest answers in the asked form, right or wrong, of
    the question's specialty. If training makes answers longer, the limit grows with them. In a
    specialty with fewer than ENOUGH such answers those of all specialties count, if the right answer is
    known: the limit always leaves room for it. Without any such answer, or if the limit is not adaptive, the
    configured limit applies.
    """

    adaptive: bool = False
    # Tokens of the latest answers in the asked form, by specialty.
    lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    given: Sequence[int] = ()  # the limits of the latest questions; 0: the configured one

    def of(self, tasks: Iterable[Task]) -> Sequence[int]:
        """Return the maximum number of tokens of an answer to each task; 0 for the configured limit."""
        all_lengths = [length for each in self.lengths.values() for length in each]
        self.given = [self._limit(task, all_lengths) if self.adaptive else 0 for task in tasks]
        return self.given

    def _limit(self, task: Task, all_lengths: Sequence[int]) -> int:
        # A logic task has several right answers, and gives one of them as an example.
        right = task.entry.get("answer") or task.entry.get("metadata", {}).get("example_answer") or ""
        own = self.lengths.get(task.ref.specialty, ())
        lengths = all_lengths if right and len(own) < ENOUGH else own
        return max(MEDIANS * median_high(lengths), FORM_TOKENS + len(str(right))) if lengths else 0

    def saw(self, local: Iterable[Scored], curriculum: Curriculum) -> None:
        """Note the lengths of this node's own answers."""
        for scored in local:
            specialty, tokens = scored.ref.specialty, scored.tokens.ids if scored.tokens else ()
            in_form = curriculum.in_form(
                specialty, scored.rollout.completions, scored.rewards, scored.observations
            )
            new = tuple(len(ids) for ids, formed in zip(tokens, in_form, strict=False) if formed)
            self.lengths[specialty] = (*self.lengths.get(specialty, ()), *new)[-KEPT:]
