import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2p.netgroup import LOCAL
from p2p.types import PeerId
from swarmd.experience.batch import OfferChoice, SharingSampler, by_weight
from swarmd.experience.caps import Order, choose
from swarmd.experience.pool import Pool
from swarmd.experience.replay_schedule import ReplaySchedule
from swarmd.experience.sampling import Replay
from swarmd.experience.strategies import Sharing, SharingSettings, Take, everything
from swarmd.experience.usefulness import UselessRollouts, useful
from swarmd.types import Author, Completion, Rollout, Scored, TaskRef


@dataclass(frozen=True)
class Item:
    author: Author
    n: int = 0


def author_of(item: Item) -> Author:
    return item.author


def crowd(names: str, group: str, *, each: int = 8) -> list[Item]:
    """Return `each` items of each author. "*" in the group stands for the author's name."""
    return [Item(Author(PeerId(a), group.replace("*", a)), n) for a in names.split() for n in range(each)]


def counted(items: list[Item]) -> Counter[str]:
    return Counter(item.author.id for item in items)


def chosen_of(
    items: list[Item], n: int, rng: random.Random, kind_of: Callable[[Item], Hashable] | None = None
) -> list[Item]:
    """Choose `n` of the items in random order, as for a batch."""
    return choose(items, lambda _: rng.random(), n, author_of, kind_of)


def in_calls(
    n: int, kind_of: Callable[[Item], Hashable] | None = None
) -> Callable[[list[Item], Order[Item], int], list[Item]]:
    """Return a function that chooses `n` in several calls, as `OfferChoice` does."""
    had: list[Item] = []

    def more(items: list[Item], order: Order[Item], count: int) -> list[Item]:
        chosen = choose(items, order, count, author_of, kind_of, in_all=n, had=had)
        had.extend(chosen)
        return chosen

    return more


def nth(item: Item) -> float:
    return ord(item.author.id)


def test_without_a_binding_cap_the_first_rollouts_are_chosen() -> None:
    items = crowd("a b c d e f g h i j k l", LOCAL, each=1)
    for n in (1, 4, 8):
        assert choose(items[::-1], nth, n, author_of) == items[:n] == in_calls(n)(items, nth, n)
    assert choose(items, nth, 12, author_of) == choose(items, nth, 40, author_of) == items
    loud = crowd("a", LOCAL, each=7) + crowd("l", LOCAL, each=1)
    assert choose(loud, nth, 8, author_of) == loud, "not all rollouts were chosen, although there was room"
    assert choose(items, nth, 0, author_of) == [] == choose([], nth, 4, author_of)


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_a_draw_follows_the_weights(scale: float) -> None:
    """Only the ratios of the weights count, even if the weights are tiny."""
    rng, first = random.Random(0), Counter[int]()
    take = Take(everything, lambda candidates: [scale * c.ref.n for c in candidates])
    for _ in range(4000):
        found, order = by_weight([scored("a", n) for n in range(4)], take, {}, rng)
        assert [s.ref.n for s in found] == [1, 2, 3]
        first[min(found, key=order).ref.n] += 1
    assert [first[n] / 4000 for n in (1, 2, 3)] == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=0.03)


def test_a_group_gets_at_most_a_quarter_and_an_author_half_if_there_are_enough_rollouts() -> None:
    rng = random.Random(0)
    rack = crowd("s t u v w x y z", "44.1", each=20)
    homes = crowd("a b c d e", "home *")
    hidden = loud = 0
    for _ in range(200):
        chosen = chosen_of(rack + homes, 4, rng)
        assert len(chosen) == 4 and sum(item.author.group == "44.1" for item in chosen) <= 1
        chosen = chosen_of(crowd("s", LOCAL, each=90) + crowd("a b", LOCAL), 8, rng)
        assert len(chosen) == 8
        loud = max(loud, counted(chosen)["s"])
        chosen = chosen_of(crowd("s t u v", "", each=90) + homes, 4, rng)  # of unknown group: one group
        hidden = max(hidden, sum(item.author.group == "" for item in chosen))
    assert (hidden, loud) == (2, 4)


def test_a_hundred_authors_in_few_groups_count_as_few() -> None:
    rng, tally = random.Random(0), Counter[bool]()
    racks = crowd(" ".join(f"s{n}" for n in range(100)), "rack", each=2)
    racks = [Item(Author(item.author.id, f"rack {n % 3}"), n) for n, item in enumerate(racks)]
    homes = crowd("a b c d e f g h i j", "home *", each=4)
    for _ in range(1000):
        chosen = chosen_of(racks + homes, 4, rng)
        assert len(chosen) == 4
        tally.update(item.author.group.startswith("rack") for item in chosen)
    assert 0.20 < tally[True] / 4000 < 0.27  # three groups of thirteen
    first = choose(racks + homes, (racks + homes).index, 13, author_of)
    assert {item.author.group for item in first} >= {
        "rack 0",
        "rack 1",
        "rack 2",
    }
    # If the other authors have no more, the choice is still full.
    assert len(chosen_of(racks + homes, 150, rng)) == 150


def test_soft_caps_are_raised_rather_than_leaving_places_empty() -> None:
    rng = random.Random(0)
    rack = crowd("s t", "44.1", each=20)
    for _ in range(50):
        chosen = chosen_of(rack + crowd("a", "12.1", each=1), 4, rng)
        assert len(chosen) == 4 and counted(chosen)["a"] == 1


def test_an_author_counts_for_no_more_than_the_median_author() -> None:
    """There are two loud authors and four with few rollouts, all on one machine."""
    rng, tally = random.Random(0), Counter[str]()
    items = crowd("l m", LOCAL, each=40) + crowd("a b c d", LOCAL, each=2)
    for _ in range(1000):
        tally.update(i.author.id for i in chosen_of(items, 4, rng))
    assert 0.30 < (tally["l"] + tally["m"]) / 4000 < 0.37  # two of six authors


def test_one_authors_rollouts_of_one_kind_get_no_more_than_an_equal_share() -> None:
    """The author may get as many rollouts of each other kind again."""
    rng = random.Random(0)
    items = crowd("l", LOCAL, each=40) + crowd("a b c", LOCAL, each=1)
    chosen = chosen_of(items, 8, rng, lambda item: "easy")
    assert counted(chosen) == {"l": 2, "a": 1, "b": 1, "c": 1}
    assert len(chosen_of(items, 8, rng, lambda item: item.n % 3)) == 8
    assert len(chosen_of(items[:40], 8, rng, lambda item: "easy")) == 8, "a single author was capped"


def test_an_author_slightly_over_the_median_is_not_displaced() -> None:
    rng, tally = random.Random(0), Counter[str]()
    items = crowd("l", LOCAL, each=40) + crowd("a", LOCAL, each=3) + crowd("b c d", LOCAL, each=1)
    for _ in range(200):
        tally.update(i.author.id for i in chosen_of(items, 9, rng))
    assert tally["a"] == 3 * 200 and tally["l"] == 3 * 200


def test_each_rollout_beyond_the_median_is_equally_likely() -> None:
    """The rollout may be the first or last of its author in the pool, and of the first or second author."""
    rng, tally = random.Random(0), Counter[Item]()
    items = crowd("a b", LOCAL, each=3) + crowd("c d", LOCAL, each=1)
    for _ in range(600):
        tally.update(chosen_of(items, 5, rng))
    assert all(tally[item] / 600 == pytest.approx(0.5, abs=0.06) for item in items[:6])


def test_a_choice_in_several_steps_has_one_cap_for_each_author_and_group() -> None:
    """Failed fetches are replaced one at a time, and half of a single place is one place."""
    rng = random.Random(0)
    ration = in_calls(4)
    loud, quiet = crowd("a", "11.0", each=400), crowd("b c d e", "home *", each=4)
    for _ in range(50):
        taken = Counter(
            item.author.id for _ in range(4) for item in ration(loud + quiet, lambda _: rng.random(), 1)
        )
        assert taken.total() == 4 and taken["a"] <= 1  # the quarter of its group
        ration = in_calls(4)
    # If no other author has rollouts, the loud author is chosen.
    assert [len(ration(loud, lambda _: rng.random(), 1)) for _ in range(50)] == [1] * 50


@pytest.mark.parametrize(("kind_of", "most"), [(None, 4), (lambda _: "easy", 2)])
def test_the_caps_of_a_choice_in_several_steps_are_shares_of_the_whole(
    kind_of: Callable[[Item], str] | None, most: int
) -> None:
    rng, taken = random.Random(0), []
    for _ in range(50):
        ration = in_calls(8, kind_of)
        taken.append(
            Counter(
                i.author.id
                for _ in range(8)
                for i in ration(crowd("a b c d e", LOCAL), lambda _: rng.random(), 1)
            )
        )
    assert {each.total() for each in taken} == {8} and max(max(each.values()) for each in taken) == most


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    authors=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["", LOCAL, "11.0", "12.0", "13.0"])), max_size=60
    ),
    n=st.integers(0, 12),
    seed=st.integers(0, 99),
)
@example(authors=[(0, LOCAL)] * 8, n=4, seed=0)  # a single other node fills the batch
@example(authors=[(0, "")] * 8, n=4, seed=0)
@example(authors=[(0, "11.0")] * 8, n=4, seed=0)
def test_a_choice_is_full_and_has_no_duplicates(authors: list[tuple[int, str]], n: int, seed: int) -> None:
    items = [Item(Author(PeerId(str(a)), group), i) for i, (a, group) in enumerate(authors)]
    chosen = chosen_of(items, n, random.Random(seed))
    assert len(chosen) == len({i.n for i in chosen}) == min(n, len(items))


@pytest.mark.parametrize("n", [4, 256])
def test_choosing_among_ten_thousand_candidates_is_fast(n: int) -> None:
    items = crowd(" ".join(f"s{n}" for n in range(1000)), "44.1", each=10)
    assert len(chosen_of(items, n, random.Random(0))) == n


# The caps in batches, the pool and credit.


def scored(author: str, n: int, *, useful: bool = True, text: str | None = None) -> Scored:
    completions = tuple(Completion(f"{text or f'{author} {n}'} {k}", ended=True) for k in range(2))
    group = {"sybil": "rack", "friend": f"home {author}"}.get(author.split()[0], "")
    return Scored(
        Rollout(TaskRef("bf", n), completions, PeerId(author), group=group),
        "question",
        (0.0, 1.0 if useful else 0.0),
        1,
    )


def test_a_batch_has_few_rollouts_of_a_crowd_and_none_without_advantage() -> None:
    rng = random.Random(0)
    pool = (
        [scored(f"sybil {n}", n) for n in range(100)]
        + [scored(f"friend {n}", n) for n in range(6)]
        + [scored("bore", 1, useful=False)]
    )
    for _ in range(300):
        batch = SharingSampler(n_external=4)([], pool, rng)
        assert (
            len(batch) == 4
            and all(s.informative for s in batch)
            and sum(s.author.startswith("sybil") for s in batch) <= 1
        )


def test_with_one_specialty_all_places_are_filled_if_rollouts_are_available() -> None:
    pool = [scored("a" if n < 18 else "b", n) for n in range(20)]
    sharing = Sharing()
    replay = Replay(Pool(1), ReplaySchedule(), 8, lambda *_: (), 1)
    for varied, places in ((True, 6), (False, 8)):
        sampler = SharingSampler(sharing, 0, 8, varied=varied)
        for sample in (sampler, replace(replay, varied=varied)):
            assert len(sample([], pool, random.Random(1))) == places


def test_without_caps_the_choice_is_uniform() -> None:
    """As in the paper: with 18 rollouts of one author and 2 of another, a batch has the ratio 9 to 1."""
    pool = [scored("a" if n < 18 else "b", n) for n in range(20)]
    uncapped, rng = SharingSettings(caps="off"), random.Random(1)
    sample, choice = (
        SharingSampler(Sharing(uncapped), 0, 4),
        OfferChoice[Scored](uncapped, 4, lambda s: Author(s.author)),
    )
    replay = Replay(Pool(1), ReplaySchedule(), 4, lambda *_: (), 1, sharing=Sharing(uncapped))
    for draw in (
        lambda: sample([], pool, rng),
        lambda: replay([], pool, rng),
        lambda: (choice.begin({}), choice(pool, 4, rng))[1],
    ):
        drawn = [each.author for _ in range(1000) for each in draw()]
        assert len(drawn) == 4000 and drawn.count(PeerId("a")) == pytest.approx(3600, abs=100)


@pytest.mark.parametrize("odd", [{}, {PeerId("odd"): 0.9}])
def test_a_loud_author_counts_as_one_under_any_weights(odd: dict[PeerId, float]) -> None:
    """Weights differ if the gate rejects some of an author's text; the loud authors must not gain by that."""
    rng, tally = random.Random(0), Counter[str]()
    said = [("l", 40), ("m", 40), ("a", 2), ("b", 2), ("c", 2), ("odd", 2)]
    pool = [scored(author, n) for author, count in said for n in range(count)]
    sharing = Sharing(pass_rates=odd)
    for _ in range(1000):
        tally.update(s.author for s in SharingSampler(sharing, n_external=4)([], pool, rng))
    assert 0.30 < (tally["l"] + tally["m"]) / 4000 < 0.37  # two of six authors


def test_over_its_capacity_the_pool_drops_the_most_frequent_rollouts_of_a_crowd() -> None:
    pool = Pool(1, 100)
    pool.add(scored(f"friend {n}", n) for n in range(50))
    pool.add(scored(f"sybil {n}", n) for n in range(200))
    assert sum(s.author.startswith("friend") for s in pool) == 50 and len(pool) == 100


def test_an_author_earns_credit_for_useful_new_rollouts() -> None:
    mine, friends, copy = scored("me", 1), scored("friend", 2), scored("thief", 2, text="friend 2")
    turned = replace(copy, rollout=replace(copy.rollout, completions=copy.rollout.completions[::-1]))
    theirs = [
        friends,
        copy,
        scored("friend", 3),
        scored("bore", 4, useful=False),
        scored("thief", 1, text="me 1"),
        scored("thief", 5),
    ]
    assert useful(theirs, [mine]) == {"friend": 2, "thief": 1} and useful([turned], [friends]) == {}
    cut = replace(
        friends,
        rollout=replace(copy.rollout, completions=copy.rollout.completions[:1]),
        rewards=(1.0,),
        whole=(1.0, 0.0),
    )
    assert useful([cut], [friends]) == {}, "an answer copied from another node's rollout earned credit"
    assert useful([friends], [friends]) == {"friend": 1}  # its own rollout sent again is not a copy


def test_an_author_of_64_useless_rollouts_in_a_row_is_charged_once() -> None:
    known = UselessRollouts()

    def charged(author: str, count: int, earned: int = 0) -> list[PeerId]:
        earnings = {PeerId(author): earned} if earned else {}
        return known.charge([scored(author, n) for n in range(count)], earnings)

    assert [charged("a", n) for n in (63, 1, 63)] == [[], ["a"], []]
    assert charged("b", 1, earned=1) == [] == charged("b", 64, earned=1), "an author with credit was charged"
    assert charged("a", 1) == ["a"] and charged("a", 63) == []
    assert charged("a", 1, earned=1) == [] == charged("a", 63), "a useful rollout did not restart the count"
    assert charged("a", 130) == ["a"] * 3 and charged("a", 63) == ["a"]
