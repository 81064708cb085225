"""Is this answer right? ReasoningGYM's own scorer, or our comparison where that one evaluates what it is given.

Equal to ReasoningGYM on honest answers (tests/tasks/test_parity.py); stricter on text no honest answer holds. The strict curricula ask for
more (strict.py). Answers of strangers come
here in the contained process alone (verifier.py), after `answers.read`.
"""

import decimal
from collections.abc import Callable, Mapping
from typing import Any

from swarmd.tasks import strict
from swarmd.tasks.answers import GradeReason, read, refusal
from swarmd.tasks.logic import proves
from swarmd.tasks.source import CurriculumTasks, Task

PASS = 0.999  # reward is 1 iff the score reaches this; ReasoningGYM's partial scores earn nothing

Entry = Mapping[str, Any]


def grade(tasks: CurriculumTasks, task: Task, answer: str) -> GradeReason:
    """CORRECT, WRONG, or why the answer is not marked at all."""
    refused = refusal(task.ref.specialty, answer)
    if refused:
        return refused
    scores = STRICT if tasks.curriculum.strict else SCORES
    score = scores.get(task.ref.specialty, _upstream)(tasks.dataset(task.ref.specialty), answer, task.entry)
    return GradeReason.CORRECT if score >= PASS else GradeReason.WRONG


def grade_text(tasks: CurriculumTasks, task: Task, text: str) -> GradeReason:
    """The same for a whole completion. For text of our own making: a stranger's is graded by `scoring.Verifier`."""
    answer = read(task.ref.specialty, text)
    return grade(tasks, task, answer) if isinstance(answer, str) else answer


def solution(tasks: CurriculumTasks, task: Task) -> str:
    """An answer that is right. Logic tasks have many, and ReasoningGYM's example is not always one: then a premise, or all together.

    Less than one logic question in a hundred has only tautologies for premises; nothing answers it, and its example is returned.
    """
    if task.entry["answer"] is not None:
        return str(task.entry["answer"])
    example, premises = str(task.entry["metadata"]["example_answer"]), list(task.entry["metadata"]["premises"])
    candidates = [example, *premises, " ∧ ".join(premises)]
    return next((answer for answer in candidates if grade(tasks, task, answer) is GradeReason.CORRECT), example)


def _upstream(dataset: Any, answer: str, entry: Entry) -> float:
    return float(dataset.score_answer(answer, entry))


def _exact(dataset: Any, answer: str, entry: Entry) -> float:  # noqa: ARG001
    """binary_matrix: the same string. ReasoningGYM would `eval` any other answer."""
    return 1.0 if answer == entry["answer"] else 0.0


def _decimal(dataset: Any, answer: str, entry: Entry) -> float:
    """decimal_arithmetic: upstream compares at whatever precision the last generation left behind; here it is always the configured one."""
    traps = [decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow]
    with decimal.localcontext(decimal.Context(prec=dataset.config.precision, rounding=decimal.ROUND_HALF_EVEN, traps=traps)):
        return _upstream(dataset, answer, entry)


def _logic(dataset: Any, answer: str, entry: Entry) -> float:  # noqa: ARG001
    """propositional_logic: by our own truth tables."""
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
    return float(strict.is_fraction(answer, metadata["simplified_numerator"], metadata["simplified_denominator"]))


def _strict_logic(dataset: Any, answer: str, entry: Entry) -> float:  # noqa: ARG001
    metadata = entry["metadata"]
    return float(strict.says_all(metadata["premises"], answer, metadata["variables"]))


STRICT: Mapping[str, Callable[[Any, str, Entry], float]] = {
    **SCORES,
    "decimal_arithmetic": _strict_decimal,
    "fraction_simplification": _strict_fraction,
    "propositional_logic": _strict_logic,
}
