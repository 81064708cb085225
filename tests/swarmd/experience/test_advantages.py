"""Advantages: every loss with every weighting, and also losses and weightings that a user adds."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.experience.advantages import WEIGHS, advantages, shifted, unweighed
from swarmd.experience.strategies import Sharing, SharingSettings, Success
from swarmd.policy.training.losses import LOSSES, Loss, LossSettings, grpo
from swarmd.types import Scored, Weigh
from tests.swarmd.experience.conftest import ME
from tests.swarmd.experience.conftest import scored as scored_task

scored = partial(scored_task, 1)
# A loss that a user adds to the table: the reward minus the group's mean.
TABLE: Mapping[str, Loss] = {
    **LOSSES,
    "added": Loss(grpo, lambda scored, _: [r - fmean(scored.group) for r in scored.rewards]),
}
REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=8).map(tuple)
NEVER_PUSHES_DOWN = ("positive", "right")


def given_by(loss: str, one: Scored, weigh: Weigh = unweighed) -> Sequence[float]:
    return advantages(one, lambda s: TABLE[loss].advantages(s, LossSettings()), weigh)


def weighed(loss: str, weigh: str, one: Scored) -> Sequence[float]:
    return given_by(loss, one, Sharing(SharingSettings(weigh=weigh)).weighing(ME))


@pytest.mark.parametrize("weigh", WEIGHS)
@pytest.mark.parametrize("loss", TABLE)
@given(rewards=REWARDS)
def test_a_weighting_acts_on_any_loss_but_only_on_external_rollouts(
    loss: str, weigh: str, rewards: tuple[float, ...]
) -> None:
    mine, theirs = scored(*rewards, author=ME), scored(*rewards)
    plain, found = given_by(loss, theirs), weighed(loss, weigh, theirs)
    assert weighed(loss, weigh, mine) == given_by(loss, mine), (
        "the weighting changed advantages of local rollouts"
    )
    assert len(found) == len(rewards) and all(map(math.isfinite, found))
    if weigh in NEVER_PUSHES_DOWN:
        assert min(found) >= 0, "an external completion has a negative advantage"
    if weigh == "paper":
        assert found == plain
    if weigh == "positive":
        assert list(found) == [max(0.0, a) for a in plain]


@pytest.mark.parametrize(
    ("weigh", "rewards", "expected"),
    [
        ("positive", (0, 1), (0, 1)),
        ("positive", (0.2, 0.4), (0, 1)),
        ("right", (0, 1), (0, 1)),
        ("right", (0.2, 0.4), (0.2, 0.4)),
        ("paper", (1, 1, 1), (0, 0, 0)),
    ],
)
def test_each_weighting_gives_the_expected_advantages_of_a_group(
    weigh: str, rewards: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    assert weighed("grpo", weigh, scored(*rewards)) == pytest.approx(expected, abs=1e-2)


def of_success(share: float) -> Success:
    return Success({"bf": 100 * share}, {"bf": 100.0})


@pytest.mark.parametrize("loss", TABLE)
@pytest.mark.parametrize("weigh", sorted(set(WEIGHS) - {"paper"}))
def test_a_single_right_answer_counts_more_if_the_node_fails_more_often(weigh: str, loss: str) -> None:
    given = []
    for success in (0.0, 0.3, 0.8):
        one = Sharing(SharingSettings(weigh=weigh), of_success(success)).judged(scored(1))
        assert one.informative and one.rewards == (1,)
        given.append(weighed(loss, weigh, one)[0])
    assert given == sorted(given, reverse=True) and given[-1] > 0


def test_a_single_right_answer_counts_as_one_of_sixteen_and_zero_without_failures() -> None:
    judged = [Sharing(success=of_success(success)).judged(scored(1)) for success in (0.0, 0.2, 0.5, 0.9, 1.0)]
    assert [sum(one.group) for one in judged] == [1, 4, 9, 15, 16] and {len(one.group) for one in judged} == {
        16
    }
    advantages = [given_by("grpo", one)[0] for one in judged]
    assert (
        advantages == pytest.approx([15**0.5, 3**0.5, (7 / 9) ** 0.5, 15**-0.5, 0], rel=1e-3)
        and not judged[-1].informative
    )


def test_a_single_partly_right_answer_counts_if_the_nodes_answers_are_worse() -> None:
    better, worse = (Sharing(success=of_success(success)).judged(scored(0.5)) for success in (0.2, 0.6))
    assert better.informative and given_by("grpo", better)[0] > 0
    assert worse == scored(0.5)


@pytest.mark.parametrize("other", [scored(0), scored(1, 1), scored(0, 0), scored(0, 1)], ids=str)
@pytest.mark.parametrize("success", [0.0, 0.3])
def test_only_single_right_answers_are_compared_with_the_nodes_success(other: Scored, success: float) -> None:
    assert Sharing(success=of_success(success)).judged(other) is other


def test_with_the_papers_weights_a_single_right_answer_has_no_advantage() -> None:
    one = Sharing(SharingSettings(weigh="paper"), of_success(0.3)).judged(scored(1))
    assert not one.informative and weighed("grpo", "paper", one) == (0.0,)


def test_asymre_weighs_better_answers_more() -> None:
    assert shifted(scored(1, 0, 0, 1), -0.1) == pytest.approx((0.6, -0.4, -0.4, 0.6))
    assert shifted(scored(1, 1), 0.0) == (0.0, 0.0)
