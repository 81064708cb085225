"""The answer is extracted from every text as by ReasoningGYM, but in linear time; unsafe text is rejected."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarmd.tasks.answers import (
    MAX_ANSWER_CHARACTERS,
    MAX_COMPLETION_CHARACTERS,
    GradeReason,
    ScoredAnswer,
    added,
    answer_end,
    extract,
    read,
    read_own,
)
from swarmd.tasks.curriculum import CURRICULA, subject_of
from swarmd.tasks.gym import reasoning_gym

PIECES = [
    "<answer>",
    "</answer>",
    "<answer",
    "answer>",
    "</",
    ">",
    "<",
    *" \n\t\u00a0\u2003\x1c\x85",
    "1",
    "x y",
    "é",
]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@example("think <answer>1</answer> no: <answer> 2\n</answer> done")
@example("<answer>1</answer><answer>2")  # the second is truncated
@example("<answer>a<answer>b</answer>")
@example("</answer>1<answer>")
def test_extract_equals_upstream_even_for_a_text_that_stops_after_its_answer(text: str) -> None:
    assert extract(text) == reasoning_gym.utils.extract_answer(text)
    end = answer_end(text)
    assert extract(text) == (None if end is None else extract(text[:end]))
    assert end is None or extract(text[: end - 1]) != extract(text), "a shorter text has the same answer"


def test_a_repeated_answer_ends_after_its_first_occurrence() -> None:
    once = "so <answer>1</answer>"
    assert answer_end(once) == answer_end(once + " <answer> 1 </answer> or") == len(once)
    assert answer_end("<answer>1</answer>" + once.replace("1", "2")) == 18 + len(once)


@pytest.mark.parametrize(
    "flood",
    ["<answer>", "</answer>", "<answer> ", "<answer></answer>", "<answer>\n</answer", "</answer><answer>"],
)
def test_many_tags_take_little_time(flood: str) -> None:
    text = flood * (4_000_000 // len(flood))
    start = time.process_time()
    extract(text)
    assert time.process_time() - start < 2.0  # about 0.1 s; upstream takes 1.7 s for 2,000 tags


def test_every_specialty_has_a_limit_for_the_length_of_answers() -> None:
    subjects = {subject_of(specialty) for c in CURRICULA.values() for specialty in c.configs}
    assert subjects == set(MAX_ANSWER_CHARACTERS)


@pytest.mark.parametrize("specialty", sorted(MAX_ANSWER_CHARACTERS))
@pytest.mark.parametrize("character", "\0\t\r\x1b\x7f\u200b\u202e\u2066\ufeff\ud800\udfff５١−é")
def test_unsafe_characters_in_an_answer_are_rejected(specialty: str, character: str) -> None:
    assert read(specialty, f"<answer>1{character}1</answer>") is GradeReason.UNSAFE
    assert read(specialty, f"{character}<answer>1</answer>{character}") == "1"  # only the answer is checked


@pytest.mark.parametrize("word", ["می\u200cخواهم", "क्\u200dष", "1\u00a0234", "東\u3000京", "a\tb\r\nc"])
def test_answers_to_own_tasks_may_be_in_any_language(word: str) -> None:
    assert read_own(f"<answer>{word}</answer>", 20) == read_own(word, 20, whole=True) == word
    for odd in "\0\x1b\u200b\u202e\ud800":
        assert read_own(word + odd, 20, whole=True) is GradeReason.UNSAFE


@pytest.mark.parametrize("specialty", sorted(MAX_ANSWER_CHARACTERS))
def test_the_lengths_of_answers_and_completions_are_limited(specialty: str) -> None:
    most = MAX_ANSWER_CHARACTERS[specialty]
    assert read(specialty, f"<answer>{'1' * most}</answer>") == "1" * most
    assert read(specialty, f"<answer>{'1' * (most + 1)}</answer>") is GradeReason.TOO_LONG
    assert read(specialty, "<answer>1</answer>".rjust(MAX_COMPLETION_CHARACTERS)) == "1"
    assert read(specialty, "<answer>1</answer>".rjust(MAX_COMPLETION_CHARACTERS + 1)) is GradeReason.TOO_LONG
    assert read(specialty, "1") is GradeReason.NO_ANSWER


def test_rewards_are_rounded_scores_or_one_for_the_reason_correct() -> None:
    assert {r: ScoredAnswer.of(r).reward for r in GradeReason} == {
        r: float(r is GradeReason.CORRECT) for r in GradeReason
    }
    assert ScoredAnswer.of(1 / 3) == (GradeReason.PARTLY, 0.3333, ())
    assert ScoredAnswer.of(0.999) == (GradeReason.CORRECT, 1.0, ())
    assert ScoredAnswer.of(0.00004) == (GradeReason.WRONG, 0.0, ())
    assert added(*[0.1] * 3) == 0.3
