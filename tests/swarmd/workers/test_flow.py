"""Questions and rollouts between the trainer and its generators: pure bookkeeping."""

import itertools
from collections.abc import Sequence

from swarmd.types import Completion, Generation, Task, TaskRef, Tokens
from swarmd.workers.question_queue import MAX_PASSED_OVER, MAX_TRIES, QuestionQueue


def flow(ahead: int = 4, enough: int = 100) -> QuestionQueue:
    numbers = itertools.count()

    def draw(count: int) -> Sequence[Task]:
        return [
            Task(TaskRef("binary_matrix", n), f"question {n}", {}) for n in itertools.islice(numbers, count)
        ]

    return QuestionQueue(draw, ahead, enough)


def answer(text: str = "1") -> Generation:
    return Generation((Completion(text, True),), Tokens(((1, 2),), ((-0.5, -0.5),), ((3, 4),)))


def test_each_generator_has_its_questions_in_hand_and_gets_as_many_as_it_answers() -> None:
    work = flow(ahead=3)
    first, second = work.hand_out(0), work.hand_out(1)
    assert [text for _, text in [*first, *second]] == [
        f"question {n}" for n in range(6)
    ] and work.in_flight == 6
    assert work.hand_out(0) == []
    work.answered(0, [(number, answer()) for number, _ in first[:2]])
    assert (work.finished, work.tokens) == (2, 4) and len(work.hand_out(0)) == 2


def test_what_a_dead_generator_had_is_asked_again_before_anything_new_and_given_up_in_the_end() -> None:
    work = flow(ahead=2)
    asked = work.hand_out(0)
    for deaths in range(1, MAX_TRIES):
        work.lost(0)
        assert work.put_back == 2 * deaths and work.in_flight == 0
        assert work.hand_out(0) == asked
    work.lost(0)
    assert work.given_up == 2 and [text for _, text in work.hand_out(0)] == ["question 2", "question 3"]


def test_unasked_answers_are_ignored() -> None:
    work = flow()
    ((number, _), *_) = work.hand_out(0)
    work.answered(1, [(number, answer())])
    work.answered(0, [(number, answer()), (number, answer()), (99, answer())])
    assert work.finished == 1


def test_the_freshest_are_taken_and_what_is_passed_over_too_often_is_dropped() -> None:
    work = flow(ahead=100)
    asked = work.hand_out(0)
    work.answered(0, [(number, answer("old")) for number, _ in asked[:2]])
    for n in range(MAX_PASSED_OVER):
        assert work.finished == 2 and work.overtaken == 0
        work.answered(0, [(asked[2 + n][0], answer("new"))])
        ((task, taken),) = work.collect(1)
        assert taken.completions[0].text == "new" and task.question == f"question {2 + n}"
    assert work.finished == 0 and work.overtaken == 2


def test_without_a_limit_everything_is_taken_oldest_first() -> None:
    work = flow(ahead=3)
    asked = work.hand_out(0)
    work.answered(0, [(number, answer()) for number, _ in asked])
    assert [task.question for task, _ in work.collect(None)] == [text for _, text in asked] and work.collect(
        None
    ) == []


def test_no_question_is_asked_that_no_round_would_take() -> None:
    work = flow(ahead=4, enough=6)
    asked = work.hand_out(0)
    assert (len(asked), len(work.hand_out(1)), work.hand_out(2)) == (4, 2, [])
    work.answered(0, [(number, answer()) for number, _ in asked])
    assert work.hand_out(0) == []
    work.collect(3)
    assert len(work.hand_out(0)) == 3
