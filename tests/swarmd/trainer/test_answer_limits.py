"""A node's limits on the number of tokens per answer reach the policy, the report and checkpoints."""

import random
from collections.abc import Sequence

import pytest

from p2p.engines.memory import MemorySwarm
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.curriculum import LADDER_9, TINY_9
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import CurriculumTasks
from swarmd.trainer.answer_limits import ENOUGH, FORM_TOKENS, KEPT, MEDIANS, AnswerLimits
from swarmd.trainer.node import build, run_state
from swarmd.trainer.parts import RoundParts
from swarmd.trainer.round import run_round
from swarmd.types import Completion, Generation, Rollout, Scored, Task, TaskRef, Tokens
from tests.doubles import memory_node
from tests.played import PlayedPolicy

ME = PeerId("me")
BF, MATRIX = TaskRef("bf", 1), TaskRef("binary_matrix", 2)
FORM, PROSE = "<answer>4</answer>", "I think that"


def scored(ref: TaskRef, *answers: tuple[str, int]) -> Scored:
    """Return a rollout of texts with these numbers of tokens."""
    completions = tuple(Completion(text, ended=True) for text, _ in answers)
    tokens = Tokens(tuple((0,) * length for _, length in answers), tuple((-1.0,) * n for _, n in answers))
    return Scored(Rollout(ref, completions, ME), "?", (0.0,) * len(answers), 1, tokens)


def of(limits: AnswerLimits, *refs: TaskRef) -> list[int]:
    return list(limits.of([Task(ref, "?", {}) for ref in refs]))


def test_the_limit_of_a_specialty_follows_its_median_answer_in_the_asked_form() -> None:
    limits = AnswerLimits(adaptive=True)
    assert of(limits, BF, MATRIX) == [0, 0]
    limits.saw([scored(BF, (FORM, 10), (FORM, 12), (FORM, 200), (PROSE, 256), (PROSE, 256))], TINY_9)
    assert of(limits, BF, MATRIX) == [MEDIANS * 12, 0] == list(limits.given)
    limits.saw([scored(MATRIX, (FORM, 2)), scored(BF, (PROSE, 256))], TINY_9)
    assert of(limits, MATRIX, BF) == [FORM_TOKENS, MEDIANS * 12]


def test_the_limit_of_a_specialty_without_answers_fits_all_and_the_right_answer() -> None:
    limits = AnswerLimits(adaptive=True)
    matrix, short = Task(MATRIX, "?", {"answer": "0 1 " * 50}), Task(MATRIX, "?", {"answer": "1"})
    logic = Task(MATRIX, "?", {"answer": None, "metadata": {"example_answer": "P" * 60}})
    assert limits.of([matrix, short, logic]) == [0, 0, 0]
    limits.saw([scored(BF, (FORM, 10)), scored(MATRIX, (PROSE, 256))], TINY_9)
    assert limits.of([matrix, short, logic]) == [FORM_TOKENS + 200, MEDIANS * 10, FORM_TOKENS + 60]
    # One answer is too few to estimate the length of answers; eight are enough.
    limits.saw([scored(MATRIX, (FORM, 200)), scored(BF, (FORM, 10), (FORM, 10))], TINY_9)
    assert limits.of([matrix, short, logic]) == [FORM_TOKENS + 200, MEDIANS * 10, FORM_TOKENS + 60]
    limits.saw([scored(MATRIX, *[(FORM, 9)] * (ENOUGH - 1))], TINY_9)
    assert limits.of([matrix, short, logic]) == [FORM_TOKENS + 200, MEDIANS * 9, FORM_TOKENS + 60]


def test_the_limit_has_room_for_a_right_answer_to_each_question_of_ladder_9() -> None:
    tasks, limits = CurriculumTasks(LADDER_9), AnswerLimits(adaptive=True)
    limits.saw([scored(BF, (FORM, 1))], TINY_9)
    drawn = tasks.draw(200, random.Random(7), all_levels=True)
    for task, limit in zip(drawn, limits.of(drawn), strict=True):
        assert len(tasks.curriculum.tagged(task.ref.specialty, solution(tasks, task))) <= limit, task


def test_the_limit_grows_with_the_length_of_the_answers() -> None:
    limits = AnswerLimits(adaptive=True)
    length, reached = 10, []
    for _ in range(4):
        limits.saw([scored(BF, *[(FORM, length)] * KEPT)], TINY_9)
        (limit,) = of(limits, BF)
        reached.append(limit)
        length = limit  # a model that always uses the whole limit
    assert reached == [40, 160, 640, 2560]


def test_a_configured_limit_is_not_changed() -> None:
    limits = AnswerLimits()
    limits.saw([scored(BF, (FORM, 10))], TINY_9)
    assert of(limits, BF) == [0]


class Rambling(PlayedPolicy):
    """A policy that gives every second answer in the asked form, with 10 tokens, and records its limits."""

    def __init__(self) -> None:
        super().__init__(lambda _: [FORM, PROSE] * 4)
        self.limits: list[list[int]] = []

    def generate(
        self, questions: Sequence[str], completions: int, limits: Sequence[int] = (), **_: object
    ) -> Sequence[Generation]:
        self.limits.append(list(limits))
        ten = Tokens(((1,) * 10,) * completions, ((-1.0,) * 10,) * completions)
        return [Generation(g.completions, ten) for g in super().generate(questions, completions)]


def node(max_new_tokens: int) -> tuple[RoundParts, Rambling]:
    sections = {
        "round": {"local": 2, "external": 0},
        "swarm": {"curriculum": "tiny-9"},
        "tasks": {"specialties": ("bf",)},
        "generate": {"max_new_tokens": max_new_tokens},
        "gate": {"mode": "off"},
    }
    config, policy = NodeConfig.model_validate(sections), Rambling()
    ours = memory_node(MemorySwarm(), 1, lambda: 1_700_000_000.0, curriculum=TINY_9, config=config)
    me = ours.member.identity.peer_id
    return build(config, 1, me, ours, policy, lambda items: [(0.0,) * len(c) for _, c in items]), policy


def test_rounds_pass_the_limits_to_the_policy_and_report_them() -> None:
    parts, policy = node(0)
    reports = [run_round(t, parts) for t in (1, 2)]
    assert policy.limits == [[0, 0], [40, 40]]
    assert [r.answers and r.answers.limit for r in reports] == [None, 40.0]
    # A node that continues from a checkpoint has the same limits.
    again, resumed = node(0)
    again.limits.lengths = dict(run_state(2, 1, parts).lengths)
    run_round(3, again)
    assert resumed.limits == [[40, 40]]


def test_a_configured_limit_applies_in_all_rounds() -> None:
    parts, policy = node(64)
    reports = [run_round(t, parts) for t in (1, 2)]
    assert policy.limits == [[0, 0]] * 2 and {r.answers and r.answers.limit for r in reports} == {None}


@pytest.mark.parametrize("limits", [(), (0, 0, 0), (3, 0, 99)])
def test_each_question_has_its_own_limit(limits: tuple[int, ...]) -> None:
    config = NodeConfig.model_validate(
        {"model": {"name": "tiny", "device": "cpu"}, "generate": {"max_new_tokens": 12, "temperature": 9.0}}
    )
    policy = LanguagePolicy.open(config, seed=random.Random(1).getrandbits(8))
    given = policy.generate(["1 + 1?", "What is the answer to 2 + 3?", "3"], 32, limits, seed=5)
    longest = [max(map(len, generation.tokens.ids)) for generation in given]
    assert longest == [limits[0] or 12 if limits else 12, 12, 12]
