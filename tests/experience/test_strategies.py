"""What is shared, taken and how it is weighed: the tables' rows, and what a node does by default."""

import math
import random
from dataclasses import replace

import pytest

from p2p.types import PeerId
from swarmd.experience.strategies import (
    SHARES,
    TAKES,
    WEIGHS,
    Sharing,
    SharingSettings,
    Success,
    shared,
    taken,
)
from swarmd.types import Author, Completion, Rollout, Scored, TaskRef, Tokens

ME = PeerId("me")


def scored(n: int, *rewards: float, author: str = "them", specialty: str = "bf", heard: int = 1) -> Scored:
    completions = tuple(Completion(f"{n} {i}", True) for i in range(len(rewards)))
    return Scored(Rollout(TaskRef(specialty, n), completions, PeerId(author)), "?", rewards, heard)


POOL = [
    scored(1, 0, 1), scored(2, 1, 1), scored(3, 0, 0), scored(4, 0, 1, specialty="arc_1d", author="another", heard=3),
    scored(5, 1, 1, 1, 0),
]  # fmt: skip


def weights(take: str, success: Success | None = None) -> list[float]:
    return list(TAKES[take](POOL, success or Success(), 3))


def test_the_first_row_of_each_table_is_the_papers_and_the_default_but_for_the_weights() -> None:
    papers = SharingSettings(weigh="paper").model_dump(exclude={"share_most"})
    assert [next(iter(table)) for table in (SHARES, TAKES, WEIGHS)] == list(papers.values())
    assert SharingSettings().model_dump(exclude={"share_most"}) == papers | {"weigh": "positive"}


def test_what_each_way_of_taking_prefers() -> None:
    assert weights("uniform") == [1, 0, 0, 1, 1] and weights("unfiltered") == [1] * 5 and weights("right") == [1, 1, 0, 1, 1]
    assert weights("novelty") == weights("authors") == [0.5, 0, 0, 1, 0.5]
    assert weights("newest") == [0.25, 0, 0, 1, 0.25]


def test_need_goes_by_how_far_others_are_ahead_and_ahead_takes_nothing_else() -> None:
    good_at_bf = Success()
    good_at_bf.saw([scored(9, 1, 1, 1, 1, author="me"), scored(8, 0, 0, 0, 1, author="me", specialty="arc_1d")])
    assert weights("ahead", good_at_bf) == [0, 0, 0, pytest.approx(0.25), 0]
    assert weights("need", good_at_bf)[0] < weights("need", good_at_bf)[3]


def test_a_greater_weight_is_drawn_more_often_and_nought_never() -> None:
    rng, pool = random.Random(1), [scored(n, 0, 1, author=f"a{n}") for n in range(3)]
    drawn = [s.rollout.ref.n for _ in range(600) for s in taken(pool, [1.0, 3.0, 0.0], 1, lambda peer: Author(peer), rng)]
    assert drawn.count(2) == 0 and 400 < drawn.count(1) < 500


@pytest.mark.parametrize(
    ("weigh", "expected"),
    [("positive", (0, 1)), ("right", (0, 1)), ("own", (-0.577, 1.732)), ("own-positive", (0, 1.732))],
)
def test_how_each_weighs_a_wrong_and_a_right_answer(weigh: str, expected: tuple[float, float]) -> None:
    success = Success({"bf": 1.0}, {"bf": 4.0})
    assert WEIGHS[weigh](scored(1, 0, 1), success, ()) == pytest.approx(expected, abs=1e-3)


def test_a_single_answer_and_a_group_that_is_right_throughout_count_against_our_own_success() -> None:
    for group in (scored(1, 1), scored(1, 1, 1, 1)):
        assert not any(WEIGHS["paper"](group, Success(), ())) and all(a > 0 for a in WEIGHS["own"](group, Success(), ()))


def test_only_others_are_weighed() -> None:
    sharing = Sharing(SharingSettings(weigh="right"))
    mine, theirs = sharing.weighed([scored(1, 0, 1, author="me"), scored(1, 0, 1)], ME)
    assert mine.advantages == scored(1, 0, 1).advantages and theirs.advantages == (0, 1)
    assert Sharing(SharingSettings(weigh="paper")).weighed([theirs], ME) == [theirs]
    (pushed,) = Sharing().weighed([scored(1, 0, 1)], ME)
    assert pushed.advantages[0] == 0 < pushed.advantages[1], "by default nothing that others wrote is pushed down"


def test_what_our_policy_finds_unlikely_counts_less_and_nothing_counts_more() -> None:
    def found(*logprobs: tuple[float, ...]) -> Tokens:
        return Tokens(tuple((0,) * len(each) for each in logprobs), logprobs)

    mine = replace(scored(1, 0, 1, author="me"), tokens=found((-1.0, -1.0), (-1.0,)))
    sharing = Sharing(SharingSettings(weigh="truncated"), logprobs=lambda batch: [found((-2.0, -4.0), (-0.5,)) for _ in batch])
    theirs, kept = scored(1, 0, 1), replace(scored(2, 0, 1), tokens=found((-1.0,), (-1.0 - math.log(2),)))
    own, new, replayed = sharing.weighed([mine, theirs, kept], ME)
    assert own.advantages == mine.advantages
    assert new.advantages == pytest.approx([theirs.advantages[0] * math.exp(-2), theirs.advantages[1]])
    assert replayed.advantages == pytest.approx([kept.advantages[0], kept.advantages[1] / 2]), "by what it was remembered with"
    assert sharing.weighed([kept], ME)[0].advantages == kept.advantages, "with nothing of our own to go by"
    assert Sharing(sharing.settings).weighed([theirs], ME)[0].advantages == theirs.advantages, "a policy without log-probabilities"


def test_what_is_shared() -> None:
    rng = random.Random(0)
    assert [len(shared(POOL, share, 0, rng)) for share in SHARES.values()] == [3, 4, 5]
    assert len(shared(POOL, SHARES["all"], 2, rng)) == 2 and rng.random() != random.Random(0).random()


def test_success_forgets_and_is_copied() -> None:
    success = Success()
    assert success.of("bf") > 0
    success.saw([scored(n, 0, 0, 0, 0, 0, 0, 0, 0, author="me") for n in range(100)])
    success.saw([scored(n, 1, 1, 1, 1, 1, 1, 1, 1, author="me") for n in range(100)])
    assert success.of("bf") > 0.9 and success.of("never asked") == success.of("bf")
    copy = success.copy()
    success.saw([scored(1, 0, 0)])
    assert copy.of("bf") > success.of("bf")
    assert replace(scored(1, 0, 1), weighed=(2.0, 3.0)).advantages == (2.0, 3.0)
