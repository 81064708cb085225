"""The trial at the first start finds a prompt style with which the model answers in the asked form."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from swarmd.config.config import NodeConfig
from swarmd.errors import CannotRecord
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.curriculum import EXAMPLES, TINY_9
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import CurriculumTasks
from swarmd.trainer.trial import (
    FILE,
    LEAST_QUESTIONS,
    LEAST_TOKENS,
    QUESTIONS,
    SECONDS,
    PromptStyle,
    StyleFigures,
    by_style,
    chosen,
    sentences,
    settled,
    styles_of,
    table,
    tried,
)
from swarmd.types import Completion, Generation, Tokens
from tests.swarmd.policy.conftest import make_model
from tests.swarmd.trainer.conftest import TrainerIn

PLAIN, SHOWN = PromptStyle(), PromptStyle(EXAMPLES)
OPENED, BOTH = PromptStyle((), "<answer>"), PromptStyle(EXAMPLES, "<answer>")
IN_FORM, PROSE = "<answer>no</answer>", "I think"


def config(**model: Any) -> NodeConfig:
    given = {"model": {"name": "a/b", **model}, "swarm": {"curriculum": "tiny-9"}}
    return NodeConfig.model_validate(given)


@dataclass
class Asked:
    """A model with fixed answers for each prompt style (`says`), a fixed speed, and its own clock."""

    says: Mapping[PromptStyle, Sequence[str]]
    a_token: float = 0.0
    now: float = 100.0
    first: float = 0.0  # extra seconds of the first answer

    def __post_init__(self) -> None:
        self.calls = list[tuple[PromptStyle, int]]()

    def showing(self, *style: Any) -> Any:
        return _AskedSo(self, PromptStyle(*style))

    def clock(self) -> float:
        return self.now


@dataclass
class _AskedSo:
    model: Asked
    style: PromptStyle

    def generate(
        self,
        questions: Sequence[str],
        completions: int,
        limits: Sequence[int],
        *,
        seed: int,
        observe: object = None,
    ) -> Sequence[Generation]:
        assert seed == 7 and len(questions) == 1
        self.model.now += self.model.first
        self.model.first = 0.0
        (most_tokens,) = limits
        if most_tokens == 1:
            return ()
        self.model.calls.append((self.style, most_tokens))
        self.model.now += self.model.a_token * most_tokens
        texts = [*self.model.says.get(self.style, ()), *[PROSE] * completions][:completions]
        tokens = Tokens(((1, 2),) * completions, ((-1.0, -1.0),) * completions)
        return [Generation(tuple(Completion(text, text != PROSE) for text in texts), tokens)]


def trial(
    model: Asked, verifier: Verifier, whole: bool = False, **settings: Any
) -> Mapping[PromptStyle, StyleFigures]:
    policy: Any = model
    tasks = CurriculumTasks(TINY_9)
    return tried(policy, config(**settings), tasks, verifier, 7, model.clock, whole=whole)


@pytest.mark.parametrize(
    ("model", "styles"),
    [
        ({}, [PLAIN, SHOWN, OPENED, BOTH]),
        ({"examples": "off"}, [PLAIN, OPENED]),
        ({"examples": "on"}, [SHOWN, BOTH]),
        ({"opening": ""}, [PLAIN, SHOWN]),
        ({"examples": [["a", "b"]], "opening": "<a>"}, [PromptStyle((("a", "b"),), "<a>")]),
        ({"name": "tiny"}, [PLAIN]),  # tiny was trained without examples
        ({"name": "tiny", "examples": "on", "opening": "<answer>"}, [BOTH]),
    ],
)
def test_settings_determine_the_prompt_styles_that_are_tried(
    model: dict[str, Any], styles: list[PromptStyle]
) -> None:
    assert styles_of(config(**model), TINY_9) == styles
    without = replace(TINY_9, examples=())
    assert SHOWN not in styles_of(config(), without) and OPENED in styles_of(config(), without)


def test_the_trial_ends_if_the_first_style_gives_answers_in_the_asked_form(verifier: Verifier) -> None:
    model = Asked({PLAIN: [IN_FORM]})
    found = trial(model, verifier)
    assert [style for style, _ in model.calls] == [PLAIN] * LEAST_QUESTIONS
    assert found[PLAIN] == StyleFigures(4, 0, 32, 4, 0, 28, 64) and chosen(found) == PLAIN
    assert sentences(found) == [
        "answers in the asked form: without examples 4 of 32, 0 right: training without examples"
    ]


def test_the_first_style_that_works_is_used(verifier: Verifier) -> None:
    """A style that rarely gives the asked form does not work, because groups without it teach nothing."""
    answers = [f"<answer>{n}</answer>" for n in (3, 4, 5, 6, 7, 8)]
    model = Asked({SHOWN: [IN_FORM] * 3, OPENED: [*answers, IN_FORM]})
    found = trial(model, verifier)
    assert [style for style, _ in model.calls] == [PLAIN, SHOWN] * LEAST_QUESTIONS
    assert chosen(found) == SHOWN
    assert sentences(found)[0].endswith("with examples 12 of 32, 0 right: training with examples")
    whole = trial(model, verifier, whole=True)
    assert [seen.groups for seen in whole.values()] == [QUESTIONS] * 4 and chosen(whole) == SHOWN
    assert 0 < whole[OPENED].right == whole[OPENED].mixed < 9
    head, _, shown, *_ = (" ".join(line.split()) for line in table(whole))
    assert head == "ASKED IN FORM RIGHT MIXED GROUPS TOKENS CUT"
    assert shown == "with examples 38 % 0 % 0 of 9 2.0 62 %"
    assert by_style(whole)[1]["works"] is True and by_style(whole)[0]["works"] is False


def test_if_no_style_works_the_one_with_most_right_answers_is_used(verifier: Verifier) -> None:
    model = Asked({})
    found = dict(trial(model, verifier))
    assert all(seen.groups == QUESTIONS for seen in found.values()) and chosen(found) == PLAIN
    said, remedy = sentences(found)
    assert said.endswith("training without examples") and "model.examples" in remedy
    found[OPENED] = replace(found[OPENED], in_form=5)
    assert chosen(found) == OPENED
    found[SHOWN] = replace(found[SHOWN], in_form=2, right=1)
    assert chosen(found) == SHOWN and len(sentences(found)) == 2


@pytest.mark.parametrize("a_token", [1e-4, 0.02, 0.1, 0.6, 1.5, 9.0])
def test_a_slow_model_is_asked_fewer_questions(verifier: Verifier, a_token: float) -> None:
    model = Asked({}, a_token, first=56.0)
    found = trial(model, verifier)
    one = a_token * LEAST_TOKENS
    assert model.now - 156 <= max(SECONDS, one), "the trial took longer than its limit or its first question"
    assert len(table(trial(Asked({}, a_token), verifier, whole=True))) == 1 + len(found)
    asked = max(seen.groups for seen in found.values())
    assert ("a slow model" in sentences(found)[0]) == (asked < LEAST_QUESTIONS) == (a_token >= 0.6)
    assert all(most >= LEAST_TOKENS for _, most in model.calls)
    if a_token <= 0.6:
        assert len(found) == 4, "a style was not tried"
    if a_token == 1e-4:
        assert model.calls[-1][1] > 256, "a fast model could not answer as long as in training"


def test_a_trial_does_not_change_the_training(tmp_path: Path, verifier: Verifier) -> None:
    made = make_model(tmp_path, max_position_embeddings=512)
    settings = config(name=str(made), device="cpu", system_prompt="")
    one, other = (LanguagePolicy.open(settings, seed=3) for _ in range(2))
    found = tried(one, settings, CurriculumTasks(TINY_9), verifier, 3)
    assert all(seen.answers for seen in found.values())
    assert one.generate(["1+1?"], 2) == other.generate(["1+1?"], 2)


def test_the_chosen_style_is_saved(tmp_path: Path) -> None:
    asked = list[int]()

    def find(style: PromptStyle = SHOWN) -> Callable[[], Mapping[PromptStyle, StyleFigures]]:
        def found() -> Mapping[PromptStyle, StyleFigures]:
            asked.append(1)
            return {style: StyleFigures(1, 0, 8, 8)}

        return found

    assert settled(config(), TINY_9, tmp_path, find())[0] == SHOWN
    assert settled(config(), TINY_9, tmp_path, find()) == (SHOWN, []) and len(asked) == 1
    # A setting overrides the saved choice.
    assert settled(config(examples="off", opening=""), TINY_9, tmp_path, find()) == (PLAIN, [])
    assert len(asked) == 1
    assert settled(config(examples="off"), TINY_9, tmp_path, find(OPENED))[0] == OPENED
    # The choice does not apply to another model or curriculum.
    assert settled(config(name="b/c"), TINY_9, tmp_path, find())[0] == SHOWN
    assert settled(config(name="b/c"), replace(TINY_9, strict=True), tmp_path, find())[0] == SHOWN
    assert len(asked) == 4
    path = tmp_path / FILE
    whole = path.read_text()
    for damaged in ("", "[" * 10_000, whole[:-9], whole.replace("true", "7"), '{"style": 3}', "\udcff"):
        path.write_bytes(damaged.encode("utf-8", "surrogateescape"))
        before = len(asked)
        settled(config(name="b/c"), replace(TINY_9, strict=True), tmp_path, find())
        assert (len(asked) > before) == (damaged != whole), damaged
        assert json.loads(path.read_text())["style"] == {"examples": list(map(list, EXAMPLES)), "opening": ""}
    with pytest.raises(CannotRecord, match="cannot be written"):
        settled(config(), TINY_9, path / "below a file", find())


def test_a_choice_is_not_saved_if_there_was_no_time_to_try_another_style(tmp_path: Path) -> None:
    for found, kept in (
        ({PLAIN: StyleFigures(1, 0, 8, 0)}, False),
        ({PLAIN: StyleFigures(1, 0, 8, 0), SHOWN: StyleFigures(1, 0, 8, 0)}, True),
        ({PLAIN: StyleFigures(1, 0, 8, 8)}, True),
    ):
        settled(config(), TINY_9, tmp_path, lambda found=found: found)  # type: ignore[misc]
        assert (tmp_path / FILE).exists() == kept
        (tmp_path / FILE).unlink(missing_ok=True)


def test_a_trainer_runs_the_trial_once_per_model(tmp_path: Path, trainer_in: TrainerIn) -> None:
    made = make_model(tmp_path / "model", max_position_embeddings=2048)
    asked = {"name": str(made), "system_prompt": "", "opening": ""}
    found = set[int]()
    for first in (True, False):
        with trainer_in(tmp_path / "state", rounds=1, model=asked) as (trainer, _):
            found.add(trainer.policy.description.examples)
            assert trainer.policy.description.opening == ""
        assert (tmp_path / "state" / FILE).exists()
        if first:
            kept = json.loads((tmp_path / "state" / FILE).read_text())
            (tmp_path / "state" / FILE).write_text(json.dumps(kept | {"style": {"examples": [["1", "2"]]}}))
    assert len(found) == 1, "after an invalid saved choice, the trial did not find the same style again"
    other = () if found == {2} else EXAMPLES
    kept["style"] = {"examples": other, "opening": ""}
    (tmp_path / "state" / FILE).write_text(json.dumps(kept))
    with trainer_in(tmp_path / "state", rounds=1, model=asked) as (trainer, _):
        assert trainer.policy.description.examples == len(other)
        assert trainer.config.model.examples == other, "the trainer's generators would get other examples"
