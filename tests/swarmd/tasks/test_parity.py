"""swarmd and ReasoningGYM agree on right answers, answers to other items, and answers with small mistakes.

Thousands of items are compared. Some wrong answers earn a reward from ReasoningGYM; these earn it in the
faithful curricula as well, and nothing in the strict ones.
"""

import contextlib
import decimal
import io
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Context, Decimal, localcontext
from pathlib import Path
from typing import Any

import pytest

from swarmd.exchange.swarm_id import curriculum_named, swarm_digest
from swarmd.tasks.answers import PASS_SCORE, GradeReason, refusal
from swarmd.tasks.curriculum import CURRICULA, HELD_OUT, HELD_OUT_END, TRAINING_TASKS, subject_of
from swarmd.tasks.gym import reasoning_gym
from swarmd.tasks.sandbox.client import Completion, Verifier
from swarmd.tasks.scoring.grading import grade, solution
from swarmd.tasks.scoring.logic import proves, table
from swarmd.tasks.scoring.strict import is_decimal, is_fraction, says_all
from swarmd.tasks.source import CurriculumTasks, Task, TaskRef, tasks_of
from testbed.hostile_answers import CODE
from tests.swarmd.tasks.watched import watched
from tiny_models.evaluation import grade_text

ITEMS = 250  # per specialty of sapo-9 and tiny-9; a fifth of this per level of ladder-9
FAITHFUL = sorted(name for name, c in CURRICULA.items() if not c.strict)
KINDS = [(name, specialty) for name in FAITHFUL for specialty in CURRICULA[name].specialties]


def upstream(name: str, ref: TaskRef) -> tuple[Any, Any]:
    """Return ReasoningGYM's data set and entry, made without swarmd's code."""
    dataset = reasoning_gym.create_dataset(
        subject_of(ref.specialty), seed=ref.n, size=1, **CURRICULA[name].configs[ref.specialty]
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return dataset, dataset[0]


def drawn(tasks: CurriculumTasks, specialty: str, rng: random.Random, count: int) -> list[Task]:
    candidates = (tasks.task(TaskRef(specialty, rng.randrange(HELD_OUT_END))) for _ in range(2 * count))
    return [task for task in candidates if task is not None][:count]


def slips(task: Task, answer: str, rng: random.Random) -> list[str]:
    """Return the answer with different small mistakes."""
    # These formulas are well-formed, because upstream does not really mark malformed formulas.
    if subject_of(task.ref.specialty) == "propositional_logic":
        names, premises = task.entry["metadata"]["variables"], task.entry["metadata"]["premises"]
        joined = " ∨ ".join(premises)
        swapped = answer.translate({ord(a): ord(rng.choice("∧∨→↔")) for a in "∧∨→↔"})
        made = [
            f"¬({joined})",
            f"¬{names[0]}",
            f"({joined}) → {names[-1]}",
            f"{names[0]} ∨ ¬{names[0]}",
            swapped,
            f"(({answer}))",
        ]
        return [*premises, joined, *made]
    i = rng.randrange(len(answer))
    other = rng.choice("0123456789/ -.a")
    made = [
        answer[:i] + answer[i + 1 :],
        answer[:i] + other + answer[i:],
        answer[:i] + other + answer[i + 1 :],
        answer[::-1],
        answer + "0",
    ]
    return [
        *made,
        answer.upper(),
        answer.replace(" ", "  "),
        f"{answer}.",
        f"+{answer}",
        f"0{answer}",
        f" {answer}\n",
        "",
        "x",
    ]


@pytest.mark.parametrize("name, specialty", KINDS)
def test_marks_equal_upstreams_and_solutions_are_marked_right(name: str, specialty: str) -> None:
    rng, tasks, subject = random.Random(f"{name} {specialty}"), tasks_of(name), subject_of(specialty)
    count = ITEMS // 5 if name == "ladder-9" else ITEMS
    items = drawn(tasks, specialty, rng, count)
    assert len(items) == count
    solutions = [solution(tasks, task) for task in items]
    marks: Counter[bool] = Counter()
    solved = 0
    for task, right in zip(items, solutions, strict=True):
        solved += grade(tasks, task, right) is GradeReason.CORRECT
        dataset, entry = upstream(name, task.ref)
        assert entry["question"] == task.question
        for answer in [right, *rng.sample(solutions, 4), *slips(task, right, rng)]:
            text = f"I think <answer>{answer}</answer>"
            theirs = dataset.score_answer(reasoning_gym.utils.extract_answer(text), entry) >= PASS_SCORE
            ours = grade_text(tasks, task, text)
            stricter = subject == "fraction_simplification" and task.ref.n < TRAINING_TASKS
            paid = theirs and (not stricter or alone(task, answer))
            assert (ours is GradeReason.CORRECT) == paid, (task.ref, answer, ours)
            marks[theirs] += 1
    # If all premises are tautologies, there is no right answer.
    assert solved >= count * (0.95 if subject == "propositional_logic" else 1)
    assert min(marks[True], marks[False]) >= count // 2, (
        "too few right or too few wrong answers were compared"
    )


def alone(task: Task, answer: str) -> bool:
    """Return whether the answer is only the fraction, without other text."""
    metadata = task.entry["metadata"]
    return is_fraction(answer, metadata["simplified_numerator"], metadata["simplified_denominator"])


@pytest.mark.parametrize("ambient", [3, 12, 28])
@pytest.mark.parametrize("name", ["sapo-9", "tiny-9"])
def test_the_tolerance_for_decimals_equals_upstreams_at_any_precision(name: str, ambient: int) -> None:
    rng, tasks = random.Random(name), tasks_of(name)
    marks: Counter[bool] = Counter()
    for task in drawn(tasks, "decimal_arithmetic", rng, 100):
        with decimal.localcontext(decimal.Context(prec=50)):
            tolerance = (
                decimal.Decimal(10) ** -tasks.dataset("decimal_arithmetic").config.max_num_decimal_places
            )
            off = [
                tolerance * decimal.Decimal(f)
                for f in ("0.9", "1", "1.0004", "1.00000000000000004", "1.1", "-1", "-1.0004")
            ]
            given = [str(decimal.Decimal(task.entry["answer"]) + x) for x in off]
        with decimal.localcontext():
            dataset, entry = upstream(name, task.ref)  # sets its own precision, and scores with it
            theirs = [dataset.score_answer(answer, entry) >= PASS_SCORE for answer in given]
        with decimal.localcontext(decimal.Context(prec=ambient)):
            assert [grade(tasks, task, answer) is GradeReason.CORRECT for answer in given] == theirs, given
        marks.update(theirs)
    assert min(marks.values()) >= 100


@pytest.mark.parametrize("name, specialty", KINDS)
def test_marking_executes_no_answer_even_without_containment(
    name: str, specialty: str, tmp_path: Path
) -> None:
    tasks = tasks_of(name)
    task = next(t for n in range(9) if (t := tasks.task(TaskRef(specialty, n))))
    with watched(tmp_path / "watched") as target:
        # Payloads with other signals would end this process.
        for payload in (
            code for code in CODE if ("{path}" in code or "{port}" in code) and "fork" not in code
        ):
            answer = payload.format(path=target.path, port=target.port)
            assert grade(tasks, task, answer) is (refusal(subject_of(specialty), answer) or GradeReason.WRONG)
        assert target.touched() == []


def formula(rng: random.Random, names: str, depth: int) -> str:
    """Return a well-formed formula with fewer parentheses than ReasoningGYM writes.

    The precedence of the operators must agree as well.
    """
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(names)
    if rng.random() < 0.25:
        return (
            "¬"
            + rng.choice(("", " ", "¬"))
            + rng.choice((rng.choice(names), f"({formula(rng, names, depth - 1)})"))
        )
    sign, space = rng.choice("∧∨→↔"), rng.choice((" ", "", "\n"))
    both = f"{formula(rng, names, depth - 1)}{space}{sign}{space}{formula(rng, names, depth - 1)}"
    return rng.choice((both, both, f"({both})"))


def test_precedence_and_entailment_of_formulas_equal_upstreams() -> None:
    rng, tasks = random.Random(11), tasks_of("sapo-9")
    marks: Counter[bool] = Counter()
    for task in drawn(tasks, "propositional_logic", rng, 150):
        dataset = tasks.dataset("propositional_logic")
        for _ in range(20):
            answer = formula(rng, "".join(task.entry["metadata"]["variables"]), 3)
            theirs = dataset.score_answer(answer, task.entry) >= PASS_SCORE
            assert (grade(tasks, task, answer) is GradeReason.CORRECT) == theirs, (task.ref, answer)
            marks[theirs] += 1
    assert min(marks.values()) > 300


@pytest.mark.parametrize(
    "junk",
    [
        "",
        " ",
        "()",
        "(P",
        "P)",
        ")P(",
        "P Q",
        "PQ",
        "P ∧",
        "∧ P",
        "¬",
        "P ¬Q",
        "P ∧∧ junk",
        "P ∨ (Q",
        "Z ∨ ¬P",
        "P→¬",
        "P = Q",
    ],
)
def test_malformed_formulas_follow_from_no_premises(junk: str) -> None:
    assert table(junk, ["P", "Q"]) is None
    assert not proves(["P", "¬P"], junk, ["P", "Q"])  # every formula follows from a contradiction


def test_long_formulas_are_evaluated_quickly() -> None:
    for long in ("P∧" * 127 + "P", "¬" * 255 + "P", "(" * 127 + "¬P" + ")" * 127, "P↔" * 127 + "P"):
        took = []
        for _ in range(3):  # garbage collection may slow one of them
            start = time.process_time()
            assert table(long, ["P", "Q", "R", "S"]) is not None
            took.append(time.process_time() - start)
        assert min(took) < 0.05  # usually well below 1 ms


@pytest.mark.net
@pytest.mark.parametrize("name", sorted(CURRICULA))
def test_the_contained_process_gives_the_same_marks(name: str) -> None:
    rng, tasks = random.Random(name), tasks_of(name)
    items: list[tuple[TaskRef, Sequence[Completion]]] = []
    expected: list[tuple[GradeReason, ...]] = []
    for specialty in tasks.curriculum.specialties:
        for task in drawn(tasks, specialty, rng, 900 // len(tasks.curriculum.specialties)):
            right = solution(tasks, task)
            texts = [f"<answer>{a}</answer>" for a in [right, *slips(task, right, rng)[:3]]]
            items.append((task.ref, [Completion(text, True) for text in texts]))
            expected.append(tuple(grade_text(tasks, task, text) for text in texts))
    with Verifier(name) as verifier:
        verifier.judge(items[:1])  # the verifier has started
        restarts = verifier.restarts
        assert [tuple(score.reason for score in row) for row in verifier.judge(items)] == expected
        assert verifier.restarts == restarts


def test_an_upstream_score_above_one_counts_as_wrong() -> None:
    """Upstream divides by the right number; if this number is negative, wrong answers score above 1."""
    tasks = tasks_of("sapo-9")
    found = drawn(tasks, "calendar_arithmetic", random.Random(0), 1)[0]
    entry = {
        **found.entry,
        "answer": "-1",
        "metadata": {**found.entry["metadata"], "task": "recurring_event_day"},
    }
    task = Task(found.ref, found.question, entry)
    assert tasks.dataset("calendar_arithmetic").score_answer("3", entry) > 1
    assert [grade(tasks, task, answer) for answer in ("-1", "3", "0")] == [
        GradeReason.CORRECT,
        GradeReason.WRONG,
        GradeReason.WRONG,
    ]


STRICT = sorted(name for name, c in CURRICULA.items() if c.strict)
Answer = Callable[[Task, random.Random], str]


def share(name: str, specialty: str, answer: Answer, first: int = HELD_OUT, count: int = 120) -> float:
    """Return the share of `count` questions for which this answer earns a reward."""
    rng, tasks = random.Random(specialty), tasks_of(name)
    numbers = range(first, first + count)
    asked = [task for n in numbers if (task := tasks.task(TaskRef(specialty, n))) is not None]
    return sum(grade(tasks, task, answer(task, rng)) is GradeReason.CORRECT for task in asked) / len(asked)


def off_by_one(task: Task, rng: random.Random) -> str:
    # The generator changes the precision of the thread's decimal context.
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
    "specialty, wrong, judged, trained",
    [
        ("decimal_arithmetic", off_by_one, 1.0, 1.0),
        ("propositional_logic", any_variable, 0.85, 0.85),
        ("fraction_simplification", junk, 1.0, 0.0),
    ],
)
def test_wrong_answers_that_upstream_rewards_earn_only_in_faithful_curricula(
    name: str, specialty: str, wrong: Answer, judged: float, trained: float
) -> None:
    """An answer with extra text earns nothing on training questions, so that this text is not trained on."""
    assert share(name, specialty, wrong) >= judged
    found = share(name, specialty, wrong, first=0)
    assert found >= trained and (trained or not found)
    for first in (0, HELD_OUT):
        assert share(f"{name}-strict", specialty, wrong, first) < 0.01  # a question with a single variable


@pytest.mark.parametrize("name", STRICT)
def test_right_answers_earn_in_strict_curricula(name: str) -> None:
    tasks = tasks_of(name)
    for specialty in tasks.curriculum.specialties:
        paid = share(name, specialty, lambda task, _: solution(tasks, task))
        # If all premises are tautologies, there is no right answer.
        assert paid == 1 or (subject_of(specialty) == "propositional_logic" and paid > 0.97), specialty


@pytest.mark.parametrize("name", ["sapo-9", "sapo-9-strict"])
def test_digits_in_upper_case_are_wrong_because_the_question_forbids_them(name: str) -> None:
    assert "use lowercase letters" in tasks_of(name).dataset("base_conversion")[0]["question"]
    lower, upper = (
        share(name, "base_conversion", lambda task, _, case=case: case(task.entry["answer"]))
        for case in (str, str.upper)
    )
    assert lower == 1 and upper < 0.9


def test_a_strict_curriculum_and_its_faithful_one_share_a_swarm() -> None:
    assert len({c.digest for c in CURRICULA.values()}) == len(CURRICULA) == 6
    for name in ("ladder-9", "sapo-9", "tiny-9"):
        faithful, strict = CURRICULA[name], CURRICULA[f"{name}-strict"]
        assert (
            swarm_digest(faithful) == swarm_digest(strict) and curriculum_named(swarm_digest(strict)) == name
        )
        assert (
            faithful.asks_as(strict.digest)
            and strict.asks_as(faithful.digest)
            and not faithful.asks_as("0" * 16)
        )
    assert len({swarm_digest(c) for c in CURRICULA.values()}) == 3 and not CURRICULA["sapo-9"].asks_as(
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
def test_a_decimal_must_be_right_to_its_last_digit(answer: str, right: bool) -> None:
    assert is_decimal(answer, "-(0.5-1.5)/3.0", 4, "0.3332") is right
    assert is_decimal("0.3332", "1.0/3.0", 4, "0.3332"), "the generator's own answer is marked wrong"


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
def test_a_conclusion_must_use_all_premises(conclusion: str, right: bool) -> None:
    assert says_all(["P", "(P → Q)", "Q ∨ P"], conclusion, ["P", "Q"]) is right
    assert not says_all(["(P → P)"], "Q ∨ ¬Q", ["P", "Q"]), (
        "a tautology is accepted as a conclusion from tautologies"
    )


@pytest.mark.parametrize(
    "answer, right",
    [("1/2", True), (r"$\dfrac{1}{2}$", True), (r"\frac{ 1 }{2}", True), ("1/2 x", False), ("2/1", False)],
)
def test_a_fraction_must_stand_without_other_text(answer: str, right: bool) -> None:
    assert is_fraction(answer, 1, 2) is right
