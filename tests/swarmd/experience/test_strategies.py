"""Each row in the tables of sharing and taking strategies acts as described."""

import random

import pytest

from p2p.types import PeerId
from swarmd.experience.advantages import WEIGHS
from swarmd.experience.batch import OfferChoice, SharingSampler
from swarmd.experience.strategies import (
    SHARES,
    TAKES,
    Sharing,
    SharingSettings,
    Success,
    Take,
)
from swarmd.types import Author, Scored
from tests import ROOT
from tests.swarmd.experience.conftest import scored

POOL = [
    scored(1, 0, 1),
    scored(2, 1, 1),
    scored(3, 0, 0),
    scored(4, 0, 1, specialty="arc_1d", author="another", heard=3),
    scored(5, 1, 1, 1, 0),
]


def weights(take: str) -> list[float]:
    """Return the weight of each rollout in POOL; 0 if the strategy does not keep it."""
    row = TAKES[take]
    kept = [scored for scored in POOL if row.keeps(scored)]
    found = dict(zip([scored.ref.n for scored in kept], row.weights(kept), strict=True))
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
    rates = {PeerId("odd"): 1 / 8}
    sharing, choice = (
        Sharing(pass_rates=rates),
        OfferChoice[Scored](SharingSettings(), 2, lambda each: Author(each.author)),
    )
    for draw in (
        lambda rng: SharingSampler(sharing, n_external=2)([], candidates, rng),
        lambda rng: (choice.begin(rates), choice(candidates, 2, rng))[1],
    ):
        drawn = [each.author for seed in range(500) for each in draw(random.Random(seed))]
        assert 0 < drawn.count(PeerId("odd")) < 0.05 * len(drawn) == 50


def test_a_greater_weight_is_drawn_more_often_and_weight_0_never(monkeypatch: pytest.MonkeyPatch) -> None:
    by = {"bf": 0.1, "arc_1d": 0.3, "calendar_arithmetic": 0.0}
    row = Take(SHARES["informative"], lambda each: [by[one.ref.specialty] for one in each])
    monkeypatch.setitem(TAKES, "mine.py", row)
    pool = [
        scored(n, 0, 1, author=f"a{n}", specialty=specialty)
        for n, specialty in enumerate(["bf", "arc_1d", "calendar_arithmetic"])
    ]
    rng, sample = random.Random(1), SharingSampler(Sharing(SharingSettings(take="mine.py")), n_external=1)
    drawn = [s.ref.n for _ in range(600) for s in sample([], pool, rng)]
    assert drawn.count(2) == 0 and 400 < drawn.count(1) < 500


def test_each_sharing_strategy_selects_the_expected_rollouts() -> None:
    strategies = [Sharing(SharingSettings(share=share)) for share in SHARES]
    assert [len(sharing.to_share(POOL)) for sharing in strategies] == [3, 4, 5]


def test_estimated_success_forgets_old_rollouts() -> None:
    success = Success()
    assert success.of("bf") > 0
    success.saw([scored(n, 0, 0, 0, 0, 0, 0, 0, 0, author="me") for n in range(100)])
    success.saw([scored(n, 1, 1, 1, 1, 1, 1, 1, 1, author="me") for n in range(100)])
    assert success.of("bf") > 0.9 and success.of("never asked") == success.of("bf")
