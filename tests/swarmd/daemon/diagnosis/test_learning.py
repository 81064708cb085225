"""The diagnosis of why nothing is learnt, made from the metrics of the last rounds."""

from typing import Any

import pytest
from msgspec.structs import replace

from swarmd.daemon.diagnosis.learning import CAUSES, KEPT_LINES, lately, trouble_of
from swarmd.state.status import ModelDescription
from swarmd.types import AnswerFigures, RoundLine, TokenCounts

MODEL = ModelDescription(new_tokens=4, context=2048)


def line(seconds: float = 1.0, trained: int = 0, generated: int = 64, **changes: Any) -> RoundLine:
    answers = AnswerFigures(
        **{"made": 16, "cut": 0.0, "in_form": 1.0, "length": 4.0, **changes.pop("answers", {})}
    )
    rest = {"reward_sum": 3.0, **changes}
    tokens = TokenCounts(generated, trained)
    return RoundLine(round=1, seconds={"generate": seconds}, tokens=tokens, answers=answers, **rest)


NONE = {"made": 0, "cut": None, "in_form": None, "length": None}
STATES = [
    (line(skipped=1), "2 updates were skipped", "lower train.learning_rate"),
    (line(answers=NONE, generated=0), "round.local = 0 makes no local ones", "wait for other nodes"),
    (line(generated=0, answers={"cut": 1.0, "in_form": 0.0}), "context of 2,048 tokens", "a longer context"),
    (
        line(answers={"cut": 0.97, "in_form": 0.0}),
        "31 of 32 answers are cut at 4 tokens, and 0 are in the asked form, <answer>…</answer>",
        "raise generate.max_new_tokens",
    ),
    (
        line(answers={"in_form": 0.0}),
        "0 of 32 answers are in the asked form",
        'set model.examples = "on"',
    ),
    (line(reward_sum=0.0), "all 32 answers are wrong", "easier questions"),
    (line(reward_sum=16.0), "all 32 answers are right", "harder questions"),
    (line(), "the answers to each question earned the same", "raise round.completions"),
]


@pytest.mark.parametrize(("state", "cause", "remedy"), STATES)
def test_each_cause_is_reported_with_its_remedy_and_a_sample(
    state: RoundLine, cause: str, remedy: str
) -> None:
    found = trouble_of([state, state], MODEL, "The answer\n is  4")
    assert found is not None and cause in found.cause and remedy in found.remedy
    assert found.cause.startswith("nothing was learnt in the last 2 rounds: ")
    assert found.cause.endswith(", such as “The answer is 4”")


def test_every_row_of_the_table_has_a_state_that_triggers_it() -> None:
    remedies = [trouble_of([state, state], MODEL) for state, _, _ in STATES]
    shows = 'set model.examples = "on"'
    assert [found and found.remedy for found in remedies] == [
        remedy.format(shows=shows) for _, remedy, _ in CAUSES
    ]


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"examples": 0, "opening": ""}, 'set model.examples = "on"'),
        ({"examples": 2, "opening": ""}, 'set model.opening = "<answer>"'),
        ({"examples": 2, "opening": "<answer>"}, "choose another instruct model"),
    ],
)
@pytest.mark.parametrize("cut", [0.0, 0.97])
def test_a_remedy_for_the_form_is_a_setting_that_is_not_set_yet(
    asked: dict[str, Any], remedy: str, cut: float
) -> None:
    found = trouble_of([line(answers={"cut": cut, "in_form": 0.0})] * 2, replace(MODEL, **asked))
    assert found is not None and remedy in found.remedy and "{" not in found.remedy


def test_tasks_of_several_turns_may_have_no_examples_to_set() -> None:
    played = {"in_form": 0.0, "turns": 1.0}
    found = trouble_of([line(answers=played)] * 2, replace(MODEL, examples=0))
    assert found is not None and "0 of 32 answers got a reply from their environment" in found.cause
    assert found.remedy.startswith(
        'set model.examples = "on", or to pairs that you write if the tasks have none'
    )


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"answers": {"cut": 1.0}}, "none of 32 answers ends within 4 tokens"),
        ({"answers": {"cut": 0.5}}, "16 of 32 answers are cut at 4 tokens"),
        ({"reward_sum": 16.0}, "all 32 answers are right, so this node learns from external rollouts only"),
        ({"answers": {"cut": 0.4}, "reward_sum": 15.0}, ""),
        ({"answers": NONE, "reward_sum": 0.0}, ""),
    ],
)
def test_some_causes_are_reported_although_something_is_learnt(changes: dict[str, Any], cause: str) -> None:
    found = trouble_of([line(trained=9, **changes)] * 2, MODEL)
    assert (found.cause if found else "") == cause


def test_truncated_answers_are_reported_only_if_none_has_the_form() -> None:
    own = {"cut": 0.9, "limit": 32.0}
    assert trouble_of([line(trained=9, answers=own)] * 2, MODEL) is None
    found = trouble_of([line(answers={**own, "in_form": 0.0})] * 2, MODEL)
    assert found is not None and "29 of 32 answers are cut at 32 tokens" in found.cause
    assert "raise generate.max_new_tokens" in found.remedy


def test_short_rounds_are_combined_before_a_cause_is_reported() -> None:
    """A model with a few rounds a second often has two rounds in a row that teach nothing."""
    short = line(seconds=0.1)
    assert lately([line(seconds=60.0)]) is None and lately([short] * 19) is None
    seen = lately([line(trained=9), *[short] * 25])
    assert (seen is not None and (seen.rounds, seen.trained) == (20, 0)) or seen.rounds == 21
    seen = lately([line(seconds=0.0)] * KEPT_LINES)
    assert seen is not None and seen.rounds == KEPT_LINES


def test_an_environment_names_its_own_form() -> None:
    state = line(answers={"in_form": 0.0, "turns": 1.5})
    found = trouble_of([state, state], ModelDescription(new_tokens=4, context=2048, examples=2))
    assert found is not None and "0 of 32 answers got a reply from their environment" in found.cause
    assert found.remedy.startswith(
        "choose another instruct model"
    )  # and no opening, which would exclude calls
