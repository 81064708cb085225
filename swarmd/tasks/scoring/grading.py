"""Grade answers by ReasoningGYM's scorer, or by our own comparison if that scorer would `eval` them.

The results equal ReasoningGYM's on honest answers (tests/swarmd/tasks/test_parity.py). The strict curricula
use stricter rules (strict.py). Training questions use a stricter rule too, if it rejects no honest answer.
Answers of other peers are graded only in the contained process (sandbox/verifier.py), after `answers.read`.
"""

import decimal
from collections.abc import Callable, Mapping
from typing import Any

from swarmd.tasks.answers import PASS_SCORE, GradeReason, refusal
from swarmd.tasks.curriculum import TRAINING_TASKS, subject_of
from swarmd.tasks.scoring import strict
from swarmd.tasks.scoring.logic import proves
from swarmd.tasks.source import CurriculumTasks, Task

Entry = Mapping[str, Any]


def grade(tasks: CurriculumTasks, task: Task, answer: str) -> GradeReason:
    """Return CORRECT, WRONG, or the reason why the answer is not scored."""
    subject = subject_of(task.ref.specialty)
    if refused := refusal(subject, answer):
        return refused
    lenient = TRAINED if task.ref.n < TRAINING_TASKS else SCORES
    scores = STRICT if tasks.curriculum.strict else lenient
    score = scores.get(subject, _upstream)(tasks.dataset(task.ref.specialty), answer, task.entry)
    # A score above 1 is wrong too: calendar_arithmetic divides a wrong answer's distance by the right answer,
    # which may be negative.
    return GradeReason.CORRECT if PASS_SCORE <= score <= 1 else GradeReason.WRONG


def solution(tasks: CurriculumTasks, task: Task) -> str:
    """Return a right answer.

    For logic tasks this is ReasoningGYM's example if it is right, else one premise, else all premises joined.
    In fewer than one of a hundred logic tasks all premises are tautologies. In that case no answer is right,
    and the example is returned.
    """
    if task.entry["answer"] is not None:
        return str(task.entry["answer"])
    example, premises = (
        str(task.entry["metadata"]["example_answer"]),
        list(task.entry["metadata"]["premises"]),
    )
    candidates = [example, *premises, " ∧ ".join(premises)]
    return next(
        (answer for answer in candidates if grade(tasks, task, answer) is GradeReason.CORRECT), example
    )


def _upstream(dataset: Any, answer: str, entry: Entry) -> float:
    return float(dataset.score_answer(answer, entry))


def _decimal(dataset: Any, answer: str, entry: Entry) -> float:
    """Score decimal_arithmetic at the configured precision.

    Upstream uses the precision that the last generated task happened to set.
    """
    traps = [decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow]
    with decimal.localcontext(
        decimal.Context(prec=dataset.config.precision, rounding=decimal.ROUND_HALF_EVEN, traps=traps)
    ):
        return _upstream(dataset, answer, entry)


# Each function takes the data set, the answer and the task's entry.
SCORES: Mapping[str, Callable[[Any, str, Entry], float]] = {
    # ReasoningGYM would `eval` every wrong answer.
    "binary_matrix": lambda _, answer, entry: float(answer == entry["answer"]),
    "decimal_arithmetic": _decimal,
    "propositional_logic": lambda _, answer, entry: float(
        proves(entry["metadata"]["premises"], answer, entry["metadata"]["variables"])
    ),
}
TRAINED: Mapping[str, Callable[[Any, str, Entry], float]] = {
    **SCORES,
    # Otherwise text after a LaTeX fraction would be rewarded, and trained on.
    "fraction_simplification": lambda _, answer, entry: float(
        strict.is_fraction(
            answer, entry["metadata"]["simplified_numerator"], entry["metadata"]["simplified_denominator"]
        )
    ),
}
STRICT: Mapping[str, Callable[[Any, str, Entry], float]] = {
    **TRAINED,
    "decimal_arithmetic": lambda dataset, answer, entry: float(
        strict.is_decimal(
            answer,
            entry["question"].rpartition("\n")[2].removesuffix(" = ?"),
            dataset.config.precision,
            entry["answer"],
        )
    ),
    "propositional_logic": lambda _, answer, entry: float(
        strict.says_all(entry["metadata"]["premises"], answer, entry["metadata"]["variables"])
    ),
}
