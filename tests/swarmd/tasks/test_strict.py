"""Wrong answers that ReasoningGYM pays for: the faithful curricula pay as it does, the strict ones do not."""

import random
from collections.abc import Callable
from decimal import Context, Decimal, localcontext

import pytest

from swarmd.exchange.swarm_id import curriculum_named, swarm_digest
from swarmd.tasks.answers import GradeReason
from swarmd.tasks.curriculum import CURRICULA
from swarmd.tasks.grading import grade, solution
from swarmd.tasks.source import Task, TaskRef, tasks_of
from swarmd.tasks.strict import is_decimal, is_fraction, says_all

STRICT = sorted(name for name, c in CURRICULA.items() if c.strict)
Answer = Callable[[Task, random.Random], str]


def share(name: str, specialty: str, answer: Answer, count: int = 120) -> float:
    """Return on what share of so many questions this answer pays."""
    rng, tasks = random.Random(specialty), tasks_of(name)
    asked = [task for n in range(count) if (task := tasks.task(TaskRef(specialty, n))) is not None]
    return sum(grade(tasks, task, answer(task, rng)) is GradeReason.CORRECT for task in asked) / len(asked)


def off_by_one(task: Task, rng: random.Random) -> str:
    # The generator leaves its own precision behind in the thread's context
    with localcontext(Context(prec=50)):
        return str(
            Decimal(task.entry["answer"])
            + rng.choice((1, -1)) * Decimal(10) ** -task.entry["metadata"]["decimal_places"]
        )


def any_variable(task: Task, _: random.Random) -> str:
    return " ∨ ".join(task.entry["metadata"]["variables"])


def junk(task: Task, _: random.Random) -> str:
    return (
        rf"\frac{{{task.entry['metadata']['simplified_numerator']}}}{{{task.entry['metadata']['simplified_denominator']}}}"
        r" or so"
    )


@pytest.mark.parametrize("name", ["sapo-9", "tiny-9"])
@pytest.mark.parametrize(
    "specialty, wrong, faithful, strict",
    [
        ("decimal_arithmetic", off_by_one, 1.0, 0.0),
        ("propositional_logic", any_variable, 0.85, 0.0),
        ("fraction_simplification", junk, 1.0, 0.0),
    ],
)
def test_wrongly_paid_answers_earn_only_in_faithful_curricula(
    name: str, specialty: str, wrong: Answer, faithful: float, strict: float
) -> None:
    assert share(name, specialty, wrong) >= faithful
    assert share(f"{name}-strict", specialty, wrong) <= strict


@pytest.mark.parametrize("name", STRICT)
def test_right_answers_earn_in_strict_curricula_too(name: str) -> None:
    tasks = tasks_of(name)
    for specialty in tasks.curriculum.specialties:
        paid = share(name, specialty, lambda task, _: solution(tasks, task))
        # Premises may all be tautologies
        assert paid == 1 or (specialty == "propositional_logic" and paid > 0.97), specialty


@pytest.mark.parametrize("name", ["sapo-9", "sapo-9-strict"])
def test_digits_in_upper_case_are_wrong_in_both_as_the_question_says(name: str) -> None:
    assert "use lowercase letters" in tasks_of(name).dataset("base_conversion")[0]["question"]
    lower, upper = (
        share(name, "base_conversion", lambda task, _, case=case: case(task.entry["answer"]))
        for case in (str, str.upper)
    )
    assert lower == 1 and upper < 0.9


def test_strict_and_faithful_curricula_share_a_swarm() -> None:
    assert len({c.digest for c in CURRICULA.values()}) == len(CURRICULA) == 4
    for name in ("sapo-9", "tiny-9"):
        faithful, strict = CURRICULA[name], CURRICULA[f"{name}-strict"]
        assert (
            swarm_digest(faithful) == swarm_digest(strict) and curriculum_named(swarm_digest(strict)) == name
        )
        assert (
            faithful.asks_as(strict.digest)
            and strict.asks_as(faithful.digest)
            and not faithful.asks_as("0" * 16)
        )
    assert len({swarm_digest(c) for c in CURRICULA.values()}) == 2 and not CURRICULA["sapo-9"].asks_as(
        CURRICULA["tiny-9"].digest
    )


@pytest.mark.parametrize(
    "answer, right",
    [
        ("0.3333", True),
        (".3333", True),
        ("3.333e-1", True),
        ("0.3334", False),
        ("0.33333", False),
        ("1/3", False),
        ("nan", False),
    ],
)
def test_a_decimal_is_right_to_its_last_digit(answer: str, right: bool) -> None:
    assert is_decimal(answer, "-(0.5-1.5)/3.0", 4, "0.3332") is right
    assert is_decimal("0.3332", "1.0/3.0", 4, "0.3332"), "what the generator says is right as well"


@pytest.mark.parametrize(
    "conclusion, right",
    [
        ("P ∧ (P → Q)", True),
        ("P ∧ Q", True),
        ("P ∨ Q", False),
        ("P", False),
        ("P ∧ ¬P", False),
        ("P ∨ ¬P", False),
        ("P ∧", False),
    ],
)
def test_a_conclusion_says_what_all_premises_say(conclusion: str, right: bool) -> None:
    assert says_all(["P", "(P → Q)", "Q ∨ P"], conclusion, ["P", "Q"]) is right
    assert not says_all(["(P → P)"], "Q ∨ ¬Q", ["P", "Q"]), (
        "of tautologies nothing follows that says something"
    )


@pytest.mark.parametrize(
    "answer, right",
    [("1/2", True), (r"$\dfrac{1}{2}$", True), (r"\frac{ 1 }{2}", True), ("1/2 x", False), ("2/1", False)],
)
def test_a_fraction_must_stand_alone(answer: str, right: bool) -> None:
    assert is_fraction(answer, 1, 2) is right
