"""Each row in the tables of sharing and taking strategies acts as described."""

import math
import random
from itertools import count
from statistics import fmean

import pytest

from p2p.types import PeerId
from swarmd.experience.advantages import WEIGHS
from swarmd.experience.batch import OfferChoice, SharingSampler
from swarmd.experience.strategies import (
    ENOUGH_COMPLETIONS,
    LATELY_ROUNDS,
    MIN_WEIGHT,
    SHARES,
    TAKES,
    Sharing,
    SharingSettings,
    Success,
    beside_a_pair,
)
from swarmd.types import Author, Lead, Scored
from tests import ROOT
from tests.swarmd.experience.conftest import scored

POOL = [
    scored(1, 0, 1),
    scored(2, 1, 1),
    scored(3, 0, 0),
    scored(4, 0, 1, specialty="arc_1d", author="another", heard=3),
    scored(5, 1, 1, 1, 0),
]


def weights(take: str, lead: Lead | None = None) -> list[float]:
    """Return the weight of each rollout in POOL; 0 if the strategy does not keep it."""
    row = TAKES[take]
    kept = [scored for scored in POOL if row.keeps(scored)]
    found = dict(
        zip(
            [scored.ref.n for scored in kept],
            row.weights(kept, lead or Lead(elsewhere=MIN_WEIGHT)),
            strict=True,
        )
    )
    return [found.get(scored.ref.n, 0.0) for scored in POOL]


def test_first_rows_are_the_papers_and_the_defaults_except_weights_and_caps() -> None:
    papers = SharingSettings(weigh="paper", caps="off").model_dump()
    assert [*(next(iter(table)) for table in (SHARES, TAKES, WEIGHS)), "off"] == list(papers.values())
    assert SharingSettings().model_dump() == papers | {"weigh": "positive", "caps": "on"}


def test_the_document_describes_each_strategy() -> None:
    document = (ROOT / "docs" / "experiments.md").read_text()
    for key, table in (("share", SHARES), ("take", TAKES), ("weigh", WEIGHS)):
        rows = document.partition(f"| `sharing.{key}` |")[2].partition("\n| `")[0]
        missing = [name for name in table if not name.endswith(".py") and f" `{name}` |" not in rows]
        assert not missing, f"add rows of sharing.{key} to docs/experiments.md: {missing}"


def test_each_take_strategy_gives_the_expected_weights() -> None:
    assert (
        weights("uniform") == [1, 0, 0, 1, 1]
        and weights("unfiltered") == [1] * 5
        and weights("right") == [1, 1, 0, 1, 1]
    )


def test_an_author_whose_text_rarely_passes_the_gate_is_rarely_drawn_or_fetched() -> None:
    # Half of the candidates are the odd author's.
    candidates = [scored(n, 0, 1, author="odd" if n % 2 else f"author {n}") for n in range(8)]
    lead = Lead(pass_rates={PeerId("odd"): 1 / 8})
    sharing, choice = (
        Sharing(lead=lead),
        OfferChoice[Scored](SharingSettings(), 2, lambda each: Author(each.author)),
    )
    for draw in (
        lambda rng: SharingSampler(sharing, n_external=2)([], candidates, rng),
        lambda rng: (choice.begin(lead), choice(candidates, 2, rng))[1],
    ):
        drawn = [each.author for seed in range(500) for each in draw(random.Random(seed))]
        assert 0 < drawn.count(PeerId("odd")) < 0.05 * len(drawn) == 50


def test_need_weighs_by_other_nodes_lead_and_ahead_takes_only_rollouts_in_the_lead() -> None:
    lead = Lead({"bf": -0.4, "arc_1d": 0.25}, MIN_WEIGHT)
    assert weights("ahead", lead) == [0, 0, 0, 0.25, 0]
    assert weights("need", lead) == [MIN_WEIGHT, MIN_WEIGHT, 0, 0.25, MIN_WEIGHT]


def test_a_greater_weight_is_drawn_more_often_and_weight_0_never() -> None:
    pool = [
        scored(n, 0, 1, author=f"a{n}", specialty=specialty)
        for n, specialty in enumerate(["bf", "arc_1d", "calendar_arithmetic"])
    ]
    sharing = Sharing(
        SharingSettings(take="ahead"), lead=Lead({"bf": 0.1, "arc_1d": 0.3, "calendar_arithmetic": 0.0})
    )
    rng, sample = random.Random(1), SharingSampler(sharing, n_external=1)
    drawn = [s.ref.n for _ in range(600) for s in sample([], pool, rng)]
    assert drawn.count(2) == 0 and 400 < drawn.count(1) < 500


def test_the_lead_of_other_nodes_comes_from_recent_rollouts() -> None:
    sharing = Sharing()
    sharing.saw([scored(1, *[0] * 7, 1, author="me")], [scored(2, *[1] * 4, *[0] * 4)], 1)
    # A single rollout says nothing yet.
    assert not sharing.lead.by and sharing.lead.elsewhere == pytest.approx(1 / 2)
    sharing.saw([], [scored(n, *[1] * 4, *[0] * 4) for n in range(ENOUGH_COMPLETIONS // 6)], 2)
    assert sharing.lead.by == {"bf": pytest.approx(1 / 2)}
    sharing.saw([], [scored(9, 1, 1, specialty="arc_1d")], 2 + LATELY_ROUNDS)
    assert sharing.lead.by.keys() == {"bf"}
    specialist = Sharing()
    specialist.saw(
        [scored(n, 1, 1, author="me", specialty="arc_1d") for n in range(99)],
        [scored(n, 1, 1, 0, 0) for n in range(ENOUGH_COMPLETIONS)],
        1,
    )
    # The node never asks such questions itself, so its success on them is estimated separately.
    assert specialist.lead.by["bf"] > 0.4
    sharing.saw([], [], 3 + LATELY_ROUNDS)
    assert not sharing.lead.by
    sharing.saw([scored(n, 1, 1, 1, 1, author="me") for n in range(90)], [], 4 + LATELY_ROUNDS)
    assert sharing.lead.elsewhere == MIN_WEIGHT  # unknown specialties are tried, however good the node is


@pytest.mark.parametrize("size", [3, 8, 16])
@pytest.mark.parametrize("p", [0.01, 0.05, 0.1, 0.5, 0.95])
def test_success_estimated_from_pairs_is_unbiased_under_any_sharing(size: int, p: float) -> None:
    """The expectation is over all groups of a size. Each row of SHARES shares every group that counts."""
    right = seen = 0.0
    for many in range(size + 1):
        group = scored(1, *[1.0] * many, *[0.0] * (size - many))
        counted = beside_a_pair(group)
        assert not counted[1] or all(shares(group) for shares in SHARES.values())
        chance = math.comb(size, many) * p**many * (1 - p) ** (size - many)
        right, seen = right + chance * counted[0], seen + chance * counted[1]
    assert right / seen == pytest.approx(p)


def test_rewards_between_0_and_1_are_compared_in_all_pairs() -> None:
    rewards = [0.0, 0.25, 0.25, 1.0, 0.5]
    pairs = [
        ((a - b) ** 2, sum(rewards) - a - b)
        for i, a in enumerate(rewards) for b in rewards[:i]
    ]  # fmt: skip
    right, seen = beside_a_pair(scored(1, *rewards))
    assert right / seen == pytest.approx(sum(w * rest for w, rest in pairs) / sum(3 * w for w, _ in pairs))
    assert beside_a_pair(scored(1, 0.3, 0.3, 0.3)) == (0.0, 0.0) == beside_a_pair(scored(2, 1))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    ("own", "others"), [(0.03, 0.03), (0.1, 0.05), (0.1, 0.25), (0.3, 0.3), (0.95, 0.95), (0.9, 0.97)]
)
def test_the_estimated_lead_is_unbiased_under_any_sharing_of_other_nodes(
    share: str, own: float, others: float
) -> None:
    """Other nodes do not send all groups, and local groups all count, so plain means cannot be compared."""
    rng, numbers = random.Random(f"{own} {others}"), count()

    def drawn(p: float, author: str) -> Scored:
        return scored(next(numbers), *(float(rng.random() < p) for _ in range(8)), author=author)

    leads = []
    sharing = Sharing()
    for number in range(1, 1001):
        local = [drawn(own, "me") for _ in range(2)]
        sharing.saw(local, [s for _ in range(4) if SHARES[share](s := drawn(others, "a"))], number)
        leads.append(sharing.lead.of("bf"))
    assert fmean(leads[100:]) == pytest.approx(others - own, abs=0.025)


def test_a_specialty_whose_local_groups_all_agree_counts_with_their_mean() -> None:
    half = [scored(n, *[1] * 4, *[0] * 4) for n in range(ENOUGH_COMPLETIONS)]
    for reward in (0, 1):
        sharing = Sharing()
        sharing.saw([scored(n, *[reward] * 8, author="me") for n in range(4)], half, 1)
        assert sharing.lead.of("bf") == pytest.approx(0.5 - reward)


def test_each_sharing_strategy_selects_the_expected_rollouts() -> None:
    strategies = [Sharing(SharingSettings(share=share)) for share in SHARES]
    assert [len(sharing.to_share(POOL)) for sharing in strategies] == [3, 4, 5]


def test_estimated_success_forgets_old_rollouts() -> None:
    success = Success()
    assert success.of("bf") > 0
    success.saw([scored(n, 0, 0, 0, 0, 0, 0, 0, 0, author="me") for n in range(100)])
    success.saw([scored(n, 1, 1, 1, 1, 1, 1, 1, 1, author="me") for n in range(100)])
    assert success.of("bf") > 0.9 and success.of("never asked") == success.of("bf")
