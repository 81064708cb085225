"""A node's own limits on the tokens of its answers, in the policy, the report and checkpoints."""

import random
from collections.abc import Sequence

import pytest

from p2p.engines.memory import MemorySwarm
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.curriculum import TINY_9
from swarmd.trainer.answer_limits import KEPT, LEAST_TOKENS, MEDIANS, AnswerLimits
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
    """Return a rollout of texts with so many tokens."""
    completions = tuple(Completion(text, ended=True) for text, _ in answers)
    tokens = Tokens(tuple((0,) * length for _, length in answers), tuple((-1.0,) * n for _, n in answers))
    return Scored(Rollout(ref, completions, ME), "?", (0.0,) * len(answers), 1, tokens)


def of(limits: AnswerLimits, *refs: TaskRef) -> list[int]:
    return list(limits.of([Task(ref, "?", {}) for ref in refs]))


def test_a_specialty_is_limited_by_the_median_of_its_answers_in_the_asked_form() -> None:
    limits = AnswerLimits(adaptive=True)
    assert of(limits, BF, MATRIX) == [0, 0]
    limits.saw([scored(BF, (FORM, 10), (FORM, 12), (FORM, 200), (PROSE, 256), (PROSE, 256))], TINY_9)
    assert of(limits, BF, MATRIX) == [MEDIANS * 12, 0] == list(limits.given)
    limits.saw([scored(MATRIX, (FORM, 2)), scored(BF, (PROSE, 256))], TINY_9)
    assert of(limits, MATRIX, BF) == [LEAST_TOKENS, MEDIANS * 12]


def test_the_limit_grows_with_the_answers() -> None:
    limits = AnswerLimits(adaptive=True)
    length, reached = 10, []
    for _ in range(4):
        limits.saw([scored(BF, *[(FORM, length)] * KEPT)], TINY_9)
        (limit,) = of(limits, BF)
        reached.append(limit)
        length = limit  # a model that uses all the room that it has
    assert reached == [40, 160, 640, 2560]


def test_a_configured_limit_is_left_alone() -> None:
    limits = AnswerLimits()
    limits.saw([scored(BF, (FORM, 10))], TINY_9)
    limits.restore({"bf": (10,)})
    assert of(limits, BF) == [0] and not limits.lengths


class Rambling(PlayedPolicy):
    """Answers in the form half of the time, with 9 tokens; notes its limits."""

    def __init__(self) -> None:
        super().__init__(lambda _: [FORM, PROSE] * 4)
        self.limits: list[list[int]] = []

    def generate(
        self, questions: Sequence[str], completions: int, limits: Sequence[int] = ()
    ) -> Sequence[Generation]:
        self.limits.append(list(limits))
        nine = Tokens(((1,) * 9,) * completions, ((-1.0,) * 9,) * completions)
        return [Generation(g.completions, nine) for g in super().generate(questions, completions)]


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


def test_rounds_give_the_policy_its_limits_and_report_them() -> None:
    parts, policy = node(0)
    reports = [run_round(t, parts) for t in (1, 2)]
    assert policy.limits == [[0, 0], [36, 36]]
    assert [r.answers and r.answers.limit for r in reports] == [None, 36.0]
    # A node that goes on from a checkpoint has the same limits.
    again, resumed = node(0)
    again.limits.restore(run_state(2, 1, parts).lengths)
    run_round(3, again)
    assert resumed.limits == [[36, 36]]


def test_a_configured_limit_holds_for_all_rounds() -> None:
    parts, policy = node(64)
    reports = [run_round(t, parts) for t in (1, 2)]
    assert policy.limits == [[0, 0]] * 2 and {r.answers and r.answers.limit for r in reports} == {None}


@pytest.mark.parametrize("limits", [(), (0, 0, 0), (3, 0, 99)])
def test_each_question_has_a_limit_of_its_own(limits: tuple[int, ...]) -> None:
    config = NodeConfig.model_validate(
        {"model": {"name": "tiny", "device": "cpu"}, "generate": {"max_new_tokens": 12, "temperature": 9.0}}
    )
    policy = LanguagePolicy.open(config, seed=random.Random(1).getrandbits(8))
    given = policy.generate(["1 + 1?", "What is the answer to 2 + 3?", "3"], 32, limits, seed=5)
    longest = [max(map(len, generation.tokens.ids)) for generation in given]
    assert longest == [limits[0] or 12 if limits else 12, 12, 12]
