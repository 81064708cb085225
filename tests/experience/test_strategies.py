"""What is shared and taken: the tables' rows, and what a node does by default."""

import random

import pytest

from p2p.types import PeerId
from swarmd.experience.advantages import WEIGHS
from swarmd.experience.strategies import (
    SHARES,
    TAKES,
    SharingSettings,
    Success,
    shared,
    taken,
)
from swarmd.types import Author, Completion, Rollout, Scored, TaskRef

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
