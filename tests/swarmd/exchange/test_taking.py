"""`[sharing] take` chooses J offers to fetch in the same way as it chooses from a pool of all rollouts.

The board and the choice are real. Eight other nodes offer rollouts of two specialties. The choosing node is
weak in one of them, and as good as the other nodes in the other.
"""

import random
from collections.abc import Callable, Iterator
from statistics import fmean

import pytest

from p2p.netgroup import LOCAL
from p2p.types import PeerId
from swarmd.exchange.offers import Board, Offered
from swarmd.experience.batch import OfferChoice, SharingSampler
from swarmd.experience.strategies import TAKES, Sharing, SharingSettings, Take, with_a_right_answer
from swarmd.types import Author, Completion, Rollout, Scored, TaskRef

WEAK, STRONG = "bf", "arc_1d"
WANTED = 4  # J
ROUNDS = 400


def author(peer: PeerId) -> Author:
    return Author(peer, LOCAL)


def scored(n: int, specialty: str, right: int, by: str, number: int = 1) -> Scored:
    rewards = (1.0,) * right + (0.0,) * (8 - right)
    return Scored(
        Rollout(TaskRef(specialty, n), (Completion("", True),) * 8, PeerId(by)), "?", rewards, number
    )


def offered(number: int) -> list[Scored]:
    """Return a round's rollouts of the other nodes: each specialty has four nodes with four rollouts each."""
    return [scored(100 * number + n, WEAK if n % 2 else STRONG, 5, f"a{n % 8}", number) for n in range(32)]


def from_the_whole_pool(known: Sharing, number: int, rng: random.Random) -> list[Scored]:
    return offered(number)


def from_offers(known: Sharing, number: int, rng: random.Random) -> list[Scored]:
    """Return the rollouts that the daemon chooses to fetch, with the trainer's knowledge."""
    choice = OfferChoice[Offered](known.settings, WANTED, lambda item: author(item.author))
    choice.begin(known.pass_rates)
    board, there = Board(lambda ref: True, kept_rounds=2), {scored.ref: scored for scored in offered(number)}
    board.add(
        [Offered(s.author, s.ref, ref.n.to_bytes(12, "big"), 100, s.author) for ref, s in there.items()]
    )
    return [there[item.ref] for item in board.choose(WANTED, rng, choice)]


def from_any_offers(known: Sharing, number: int, rng: random.Random) -> list[Scored]:
    """Return J random offers, whatever the strategy."""
    return rng.sample(offered(number), WANTED)


def batch(take: str, pool: Callable[[Sharing, int, random.Random], list[Scored]]) -> tuple[float, float]:
    """Return the average number of rollouts of the weak specialty in a batch, and of all rollouts in it."""
    known, rng = Sharing(SharingSettings(take=take)), random.Random(1)
    sample = SharingSampler(known, 0, WANTED, author)
    batches = [sample([], pool(known, number, rng), rng) for number in range(1, ROUNDS + 1)]
    return fmean(sum(s.ref.specialty == WEAK for s in each) for each in batches), fmean(map(len, batches))


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], str]]:
    """Return a function that adds a strategy: the weak specialty weighs 1, the strong a given number."""

    def add(strong: float) -> str:
        row = Take(with_a_right_answer, lambda each: [1 if c.ref.specialty == WEAK else strong for c in each])
        monkeypatch.setitem(TAKES, "own.py", row)
        return "own.py"

    yield add


def test_an_own_strategy_gets_as_much_of_a_specialty_from_offers_as_from_a_pool(
    own: Callable[[float], str],
) -> None:
    take = own(0.1)
    whole, fetched, any_of_them = (
        batch(take, pool)[0] for pool in (from_the_whole_pool, from_offers, from_any_offers)
    )
    assert whole > 3.2 and any_of_them == pytest.approx(2.0, abs=0.15)
    assert abs(fetched - whole) < 0.2


def test_weight_0_is_never_fetched_and_a_full_batch_is_fetched_of_the_rest(
    own: Callable[[float], str],
) -> None:
    take = own(0.0)
    assert batch(take, from_offers) == (4.0, 4.0) == batch(take, from_the_whole_pool)
    # With random offers, half of the batch would stay empty.
    assert batch(take, from_any_offers)[1] == pytest.approx(2.0, abs=0.15)


@pytest.mark.parametrize("take, share", [("uniform", 0.5), ("right", 0.5), ("unfiltered", 0.5)])
def test_the_other_strategies_choose_from_offers_as_from_the_pool(take: str, share: float) -> None:
    whole, fetched = (batch(take, pool) for pool in (from_the_whole_pool, from_offers))
    assert (
        whole[0] == pytest.approx(4 * share, abs=0.2)
        and fetched[0] == pytest.approx(whole[0], abs=0.2)
        and whole[1] == fetched[1] == 4
    )


def test_a_round_starts_with_free_places_and_authors_keep_to_their_share() -> None:
    choice = OfferChoice[Offered](SharingSettings(), 8, lambda item: author(item.author))

    def of_a(by: str, seed: int) -> int:
        offers = [
            Offered(PeerId(a), TaskRef(WEAK, n), bytes(12), 100, PeerId(a)) for a in by for n in range(20)
        ]
        choice.begin({})
        return sum(item.author == "a" for item in choice(offers, 8, random.Random(seed)))

    assert of_a("a", 0) == 8, "a single author did not get all places"
    assert {of_a("abc", seed) for seed in range(20)} == {2, 3}
