"""The judge's committed questions follow from a seed alone, and held-out texts are not trained on."""

import hashlib
import hmac
import itertools
import random
from operator import itemgetter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.tasks.curriculum import (
    CURRICULA,
    HELD_OUT,
    HELD_OUT_END,
    SAPO_9,
    TINY_9,
    TRAINING_TASKS,
    Curriculum,
)
from swarmd.tasks.held_out import (
    MAX_FAILURES,
    MAX_TRIES,
    SEED_BYTES,
    Terms,
    commitment,
    place_in_set,
    question,
)
from swarmd.tasks.own_tasks import NoQuestion
from swarmd.tasks.source import CurriculumTasks, tasks_of
from swarmd.types import Task, TaskRef

SEEDS = st.binary(min_size=SEED_BYTES, max_size=SEED_BYTES)
NUMBERS = st.integers(1, 2**40)
TERMS = st.builds(
    Terms, st.text("0123456789abcdef", min_size=16, max_size=16), NUMBERS, NUMBERS, NUMBERS, NUMBERS
)


@given(TERMS, TERMS, SEEDS, SEEDS)
def test_a_commitment_matches_only_its_own_terms_and_seed(
    terms: Terms, others: Terms, seed: bytes, other: bytes
) -> None:
    said = commitment(terms, seed)
    assert said == commitment(terms, bytes(seed)) and len(said) == 64
    assert (said == commitment(others, other)) == ((terms, seed) == (others, other))


def test_commitment_and_questions_follow_the_documented_protocol() -> None:
    """The expected values are computed from docs/judge-protocol.md, without the product's code."""
    seed = bytes(range(32))
    lines = ["swarmd judge window v1", TINY_9.digest, "7", "1800000000", "1800086400", "1000", seed.hex()]
    terms = Terms(TINY_9.digest, 7, 1_800_000_000, 1_800_086_400, 1_000)
    assert commitment(terms, seed) == hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def number(purpose: str) -> int:
        return int.from_bytes(hmac.new(seed, purpose.encode(), hashlib.sha256).digest()[:8], "big")

    assert place_in_set(seed, "12D3KooWpeer", 999, 1_000) == (number("peer 12D3KooWpeer") + 999) % 1_000
    names = sorted(TINY_9.configs)
    for index in range(30):
        task = question(tasks_of("tiny-9"), seed, index)
        assert task.ref.specialty == names[number(f"specialty {index}") % 9]
        tried = [
            HELD_OUT + number(f"question {index} {attempt}") % (HELD_OUT_END - HELD_OUT)
            for attempt in range(200)
        ]
        assert task.ref.n in tried
        # The question is the first that exists and, if the specialty holds out texts, has a held-out text.
        for n in tried[: tried.index(task.ref.n)]:
            passed = tasks_of("tiny-9").task(TaskRef(task.ref.specialty, n))
            assert passed is None or hashlib.sha256(passed.question.encode()).digest()[0] >= 16


@given(SEEDS, st.text("abc123", min_size=1, max_size=9), st.integers(1, 2_000))
def test_a_peer_is_asked_the_whole_set_before_a_question_repeats(
    seed: bytes, peer: str, questions: int
) -> None:
    places = [place_in_set(seed, peer, place, questions) for place in range(questions)]
    assert sorted(places) == list(range(questions))
    assert place_in_set(seed, peer, questions, questions) == places[0]


@pytest.mark.parametrize("name", ["ladder-9", "sapo-9", "tiny-9"])
def test_the_judge_asks_held_out_texts_and_no_node_trains_on_them(name: str) -> None:
    tasks = tasks_of(name)
    asked = [question(tasks, b"\x01" * 32, index) for index in range(60)]
    trained = tasks.draw(300, random.Random(1))
    assert all(HELD_OUT <= task.ref.n < HELD_OUT_END and not tasks.trains_on(task) for task in asked)
    assert all(tasks.trains_on(task) for task in trained)
    split = tasks.curriculum.held_by_text
    assert all(tasks.curriculum.holds_out(task) == (task.ref.specialty in split) for task in asked)
    texts = {task.question for task in trained}
    assert not [task for task in asked if task.ref.specialty in split and task.question in texts]
    assert all(tasks.task(task.ref) == task for task in asked)


def test_a_training_draw_skips_numbers_whose_text_is_held_out() -> None:
    tasks = CurriculumTasks(TINY_9, ["bf"])

    def drawn_at(n: int) -> Task:
        return tasks.draw(1, SimpleNamespace(choice=itemgetter(0), randrange=lambda *_: n))[0]

    held = next(n for n in range(10_000) if TINY_9.holds_out(tasks.task(TaskRef("bf", n))))
    found = drawn_at(held)
    assert found.ref.n > held and not TINY_9.holds_out(found)
    assert tasks.trains_on(found) and not tasks.trains_on(tasks.task(TaskRef("bf", held)))
    assert all(TINY_9.holds_out(tasks.task(TaskRef("bf", n))) for n in range(held, found.ref.n))
    assert 0 <= drawn_at(TRAINING_TASKS - 1).ref.n < TRAINING_TASKS


def test_about_one_text_in_sixteen_is_held_out() -> None:
    tasks = tasks_of("sapo-9")
    for specialty in ("arc_1d", "base_conversion"):
        drawn = [task for n in range(2_000) if (task := tasks.task(TaskRef(specialty, n)))]
        assert 90 < sum(map(SAPO_9.holds_out, drawn)) < 160  # 125 are expected
        for task in drawn:
            first = hashlib.sha256(task.question.encode()).digest()[0]
            assert SAPO_9.holds_out(task) == (first < 16)
    last = TRAINING_TASKS - 1
    assert [SAPO_9.trains_on(TaskRef("arc_1d", n)) for n in (-1, 0, last, last + 1)] == [
        False,
        True,
        True,
        False,
    ]


def test_a_strict_curriculum_holds_out_the_same_texts() -> None:
    for name in ("ladder-9", "sapo-9", "tiny-9"):
        assert CURRICULA[name].held_by_text == CURRICULA[f"{name}-strict"].held_by_text


def test_a_specialty_that_makes_no_question_gives_an_error() -> None:
    asked: list[TaskRef] = []
    silent = SimpleNamespace(curriculum=Curriculum("silent", {"one": {}}), task=asked.append)
    with pytest.raises(NoQuestion, match="one of silent makes no question"):
        question(silent, bytes(32), 0)
    assert len(asked) == MAX_FAILURES


def test_a_specialty_that_makes_few_questions_gives_no_error() -> None:
    """If none of its questions has a held-out text, the last question is asked."""
    lessons = Curriculum("some", {"one": {}}, held_by_text=frozenset({"one"}))
    made: list[Task | None] = []

    def task(ref: TaskRef) -> Task | None:
        texts = itertools.chain(
            [None] * (MAX_FAILURES - 1), ["first"], [None] * MAX_FAILURES, itertools.repeat("last")
        )
        text = next(itertools.islice(texts, len(made), None))
        made.append(None if text is None else Task(ref, text, {}))
        return made[-1]

    for text in ("first", "last"):
        assert not lessons.holds_out(Task(TaskRef("one", 1), text, {}))
    found = question(SimpleNamespace(curriculum=lessons, task=task), bytes(32), 0)
    assert found is made[-1] and found.question == "last" and len(made) == MAX_TRIES


def test_a_seed_of_the_wrong_length_is_rejected() -> None:
    for length in (SEED_BYTES - 1, SEED_BYTES + 1):
        with pytest.raises(ValueError, match="has 32 bytes"):
            commitment(Terms(TINY_9.digest, 1, 0, 60, 10), bytes(length))
