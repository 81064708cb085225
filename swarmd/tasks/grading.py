"""Grades answers by ReasoningGYM's scorer, or by our own comparison where that scorer would `eval` them.

Equal to ReasoningGYM on honest answers (tests/swarmd/tasks/test_parity.py). The strict curricula use stricter
rules (strict.py); so do training questions, where that costs honest answers nothing. Answers of other peers
are graded only in the contained process (sandbox/verifier.py), after `answers.read`.
"""

import decimal
from collections.abc import Callable, Mapping
from typing import Any

from swarmd.tasks import strict
from swarmd.tasks.answers import PASS_SCORE, GradeReason, refusal
from swarmd.tasks.curriculum import TRAINING_TASKS, subject_of
from swarmd.tasks.logic import proves
from swarmd.tasks.source import CurriculumTasks, Task

Entry = Mapping[str, Any]


def grade(tasks: CurriculumTasks, task: Task, answer: str) -> GradeReason:
    """Return CORRECT, WRONG, or why the answer is not scored."""
    subject = subject_of(task.ref.specialty)
    refused = refusal(subject, answer)
    if refused:
        return refused
    lenient = TRAINED if task.ref.n < TRAINING_TASKS else SCORES
    scores = STRICT if tasks.curriculum.strict else lenient
    score = scores.get(subject, _upstream)(tasks.dataset(task.ref.specialty), answer, task.entry)
    # Above 1: calendar_arithmetic divides a wrong answer's distance by the right one, which may be below 0.
    return GradeReason.CORRECT if PASS_SCORE <= score <= 1 else GradeReason.WRONG


def solution(tasks: CurriculumTasks, task: Task) -> str:
    """Return a right answer.

    For logic tasks it is ReasoningGYM's example if that is right, else a premise, or all premises joined. In
    less than one of a hundred logic tasks all premises are tautologies; nothing is right then, and the
    example is returned.
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


def _exact(dataset: Any, answer: str, entry: Entry) -> float:  # noqa: ARG001
    """Compare strings (binary_matrix); ReasoningGYM would `eval` any other answer."""
    return 1.0 if answer == entry["answer"] else 0.0


def _decimal(dataset: Any, answer: str, entry: Entry) -> float:
    """Score decimal_arithmetic at the configured precision.

    Upstream uses whatever precision the last generated task left behind.
    """
    traps = [decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow]
    with decimal.localcontext(
        decimal.Context(prec=dataset.config.precision, rounding=decimal.ROUND_HALF_EVEN, traps=traps)
    ):
        return _upstream(dataset, answer, entry)


def _logic(dataset: Any, answer: str, entry: Entry) -> float:  # noqa: ARG001
    metadata = entry["metadata"]
    return 1.0 if proves(metadata["premises"], answer, metadata["variables"]) else 0.0


SCORES: Mapping[str, Callable[[Any, str, Entry], float]] = {
    "binary_matrix": _exact,
    "decimal_arithmetic": _decimal,
    "propositional_logic": _logic,
}


def _strict_decimal(dataset: Any, answer: str, entry: Entry) -> float:
    expression = entry["question"].rpartition("\n")[2].removesuffix(" = ?")
    return float(strict.is_decimal(answer, expression, dataset.config.precision, entry["answer"]))


def _strict_fraction(dataset: Any, answer: str, entry: Entry) -> float:  # noqa: ARG001
    metadata = entry["metadata"]
    return float(
        strict.is_fraction(answer, metadata["simplified_numerator"], metadata["simplified_denominator"])
    )


def _strict_logic(dataset: Any, answer: str, entry: Entry) -> float:  # noqa: ARG001
    metadata = entry["metadata"]
    return float(strict.says_all(metadata["premises"], answer, metadata["variables"]))


# Text behind a LaTeX fraction would earn its reward, and be trained on.
TRAINED = {**SCORES, "fraction_simplification": _strict_fraction}
STRICT: Mapping[str, Callable[[Any, str, Entry], float]] = {
    **TRAINED,
    "decimal_arithmetic": _strict_decimal,
    "propositional_logic": _strict_logic,
}
