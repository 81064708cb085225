"""Shards: everybody comes to the same number of them, each holds what the budget allows, and liars move it a bounded way."""

import random
from collections import Counter
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.shards import (
    ASK,
    BRIDGE,
    COMPANY,
    COUNTED,
    HELLO_EVERY,
    MAX_SHARDS,
    MAX_SIZE,
    PACE,
    PATIENCE,
    ROVE,
    TRUST,
    WINDOW,
    Hello,
    Shards,
    authors_of,
    decode_hello,
    encode_hello,
    shard_at,
    shards_of,
    share_of,
)
from p2p.types import PeerId

AUTHORS = 10.0
ROUND = 60.0
EVERY = 10.0  # seconds between two looks


class Swarm:
    """Nodes that publish once a round; everything published reaches at once whoever listens there, and hellos reach all."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.nodes: dict[PeerId, Shards] = {}
        self.publishes: dict[PeerId, float] = {}
        self.hellos = 0
        self.heard: Counter[PeerId] = Counter()  # sets, since the last `reset`
        self.on_zero = 0
        self.join(size)

    def join(self, count: int) -> list[PeerId]:
        new = [PeerId(f"node-{len(self.nodes) + i}") for i in range(count)]
        for name in new:
            self.nodes[name] = Shards(random.Random(self.rng.random()), self.now, authors=AUTHORS)
            self.publishes[name] = self.now + self.rng.uniform(0, ROUND)
        return new

    def leave(self, count: int) -> None:
        for name in self.rng.sample(sorted(self.nodes), count):
            del self.nodes[name], self.publishes[name]

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += EVERY
            places = {name: node.look(self.now, len(self.nodes) - 1) for name, node in self.nodes.items()}
            listeners: dict[int, list[PeerId]] = {0: list(self.nodes)}
            for name, place in places.items():
                for shard in place.listening:
                    listeners.setdefault(shard, []).append(name)
            for name, node in self.nodes.items():
                home = places[name].home
                if self.publishes[name] <= self.now and home is not None:
                    self.publishes[name] += ROUND
                    self.on_zero += home == 0
                    for other in listeners[home]:
                        if other != name:
                            self.nodes[other].heard(name, home, self.now)
                            self.heard[other] += 1
                for other in node.whom([other for other in self.nodes if other != name]):
                    node.answered(other, self.nodes[other].answer(self.now), self.now)
                body = node.hello_due(self.now)
                if body is not None:
                    self.hellos += 1
                    self.tell(name, body)

    def tell(self, author: PeerId, body: bytes) -> None:
        hello = decode_hello(body)
        assert hello is not None
        for name, node in self.nodes.items():
            if name != author:
                node.told(author, hello, self.now)

    def reset(self) -> None:
        self.heard.clear()
        self.hellos = 0
        self.on_zero = 0

    def counts(self) -> Counter[int]:
        return Counter(node.shards for node in self.nodes.values())


@given(st.integers(1, MAX_SIZE), st.integers(1, MAX_SHARDS))
@settings(derandomize=True, max_examples=100)
def test_a_hello_is_what_it_was(size: int, shards: int) -> None:
    assert decode_hello(encode_hello(Hello(size, shards))) == Hello(size, shards)


@given(st.binary(max_size=24))
@settings(derandomize=True, max_examples=300)
def test_any_bytes_are_no_hello_or_are_spelled_as_we_spell_it(body: bytes) -> None:
    hello = decode_hello(body)
    assert hello is None or encode_hello(hello) == body


@pytest.mark.parametrize(
    "body",
    ["", "93010001", "9301cc0501", "93020501", "9301050100", "94010501c0", "93010500", "9301ff01", "9301ce0098968101", "930101cd8001"],
    ids=["empty", "size 0", "long integer", "version 2", "trailing", "four", "no shards", "negative", "too large", "too many shards"],
)
def test_what_is_no_hello(body: str) -> None:
    assert decode_hello(bytes.fromhex(body)) is None


def test_the_golden_hello() -> None:
    assert encode_hello(Hello(1000, 94)).hex() == "9301cd03e85e"


@given(st.floats(0, 1, exclude_max=True), st.integers(1, MAX_SHARDS))
@settings(derandomize=True, max_examples=300)
def test_a_shard_has_its_share_of_the_numbers_and_its_own_name(number: float, shards: int) -> None:
    shard = shard_at(number, shards)
    assert shard == 0 if shards == 1 else shards <= shard < 2 * shards
    if shard:
        level = shard.bit_length() - 1
        assert int(number * 2**level) == shard - 2**level
        assert share_of(shard) == 0.5**level


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 8, 100])
def test_all_shards_together_are_everything(shards: int) -> None:
    found = {shard_at(i / 4096, shards) for i in range(4096)}
    assert len(found) == shards
    assert sum(map(share_of, found)) == 1


def test_one_shard_more_moves_the_members_of_one() -> None:
    numbers = [i / 5000 for i in range(5000)]
    for shards in range(2, 70):
        moved = {shard_at(x, shards) for x in numbers if shard_at(x, shards) != shard_at(x, shards + 1)}
        assert len(moved) == 1


def test_the_number_of_shards_follows_the_size() -> None:
    assert [shards_of(size, AUTHORS) for size in (1, 25, 25.5, 40, 300)] == [1, 1, 3, 4, 29]
    found = [shards_of(size, AUTHORS) for size in range(1, 20_000, 7)]
    assert found == sorted(found)
    for size, shards in zip(range(1, 20_000, 7), found, strict=True):
        assert shards == 1 or 0.8 <= size / AUTHORS / shards <= 1.25
    assert shards_of(MAX_SIZE, 1.0) == MAX_SHARDS


def test_the_budget_says_how_many_authors_a_shard_has() -> None:
    assert authors_of(80_000, 600, 5, 1000) == 10
    assert authors_of(1, 600, 5) == 1


@pytest.mark.parametrize("size", [1, 2, 10, 24])
def test_a_small_swarm_is_one_shard(size: int) -> None:
    swarm = Swarm(size)
    swarm.run(600)
    assert set(swarm.counts()) == {1}
    assert all(node.look(swarm.now).home == 0 and not node.look(swarm.now).listening for node in swarm.nodes.values())


@pytest.mark.parametrize("size", [50, pytest.param(200, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.slow)])
def test_everybody_comes_to_the_same_number_of_shards_and_hears_what_the_budget_allows(size: int) -> None:
    swarm = Swarm(size)
    swarm.run(1800)
    shards, agreed = swarm.counts().most_common(1)[0]
    assert agreed >= 0.9 * size
    assert 0.65 <= shards / (size / AUTHORS) <= 1.35
    swarm.reset()
    swarm.run(10 * ROUND)
    assert mean(swarm.heard[name] / 10 for name in swarm.nodes) == pytest.approx(2 * AUTHORS, rel=0.5)
    assert swarm.on_zero <= 0.005 * 10 * size
    assert 0.4 <= swarm.hellos / (10 * ROUND / HELLO_EVERY) <= 2


def test_a_swarm_that_grows_and_shrinks_is_followed() -> None:
    swarm = Swarm(10)
    for _ in range(10):
        swarm.run(120)
        swarm.join(29)
    swarm.run(1200)
    assert mean(node.shards for node in swarm.nodes.values()) == pytest.approx(30, rel=0.3)
    for _ in range(10):
        swarm.leave(29)
        swarm.run(180)
    swarm.run(1200)
    assert set(swarm.counts()) == {1}


def test_a_newcomer_to_a_large_swarm_publishes_nothing_until_it_has_heard_a_hello() -> None:
    node = Shards(random.Random(1), 0.0, authors=AUTHORS)
    assert node.look(0.0, company=0).home == 0  # alone, as far as it can see
    assert node.look(3.0, company=COMPANY).home is None
    node.told(PeerId("a"), Hello(1000, 100), 4.0)
    placed = node.look(5.0, company=COMPANY)
    assert placed.home is not None
    assert placed.home >= 64
    assert len(placed.listening) == 2
    assert placed.home in placed.listening


def test_a_newcomer_that_hears_nobody_or_a_few_on_shard_0_takes_the_swarm_for_small() -> None:
    waiting = Shards(random.Random(1), 0.0)
    assert waiting.look(PATIENCE[0] - 1, company=COMPANY).home is None
    assert waiting.look(PATIENCE[1], company=COMPANY).home == 0
    hearing = Shards(random.Random(1), 0.0)
    for name in "abc":
        assert hearing.look(1.0, company=COMPANY).home is None
        hearing.heard(PeerId(name), 0, 1.0)
    assert hearing.look(1.0, company=COMPANY).home == 0


def test_a_newcomer_asks_and_believes_who_knows() -> None:
    there, newcomer = Shards(random.Random(1), 0.0, authors=AUTHORS), Shards(random.Random(2), 0.0, authors=AUTHORS)
    assert there.answer(0.0) == b""
    there.told(PeerId("a"), Hello(1000, 100), 1.0)
    there.look(1.0, company=COMPANY)
    assert not there.whom([PeerId("newcomer")])
    assert newcomer.whom([PeerId("there")]) == ["there"]
    assert len(set(newcomer.whom([PeerId(f"{i}") for i in range(20)]))) == ASK
    newcomer.answered(PeerId("there"), there.answer(2.0), 2.0)
    assert newcomer.look(2.0, company=COMPANY).home not in (None, 0)
    assert newcomer.shards == there.shards == 100


def test_where_all_have_just_come_nobody_waits() -> None:
    newcomer = Shards(random.Random(2), 0.0)
    for i in range(3):
        assert newcomer.look(1.0, company=COMPANY).home is None
        newcomer.answered(PeerId(f"{i}"), b"", 1.0)
    assert newcomer.look(1.0, company=COMPANY).home == 0


def test_the_rover_crosses_the_swarm_and_the_home_stays() -> None:
    node = Shards(random.Random(5), 0.0, authors=AUTHORS)
    homes, visited, moves, last = set(), set(), 0, None
    for now in range(0, 36_000, 20):
        node.told(PeerId(f"{now // 100 % 9}"), Hello(400, 40), float(now))
        placed = node.look(float(now), company=20)
        for i in range(10):
            node.heard(PeerId(f"neighbour-{i}"), placed.home or 0, float(now))
        if now > WINDOW:
            homes.add(placed.home)
            assert placed.home is not None
            (rover,) = placed.listening - {placed.home}
            visited.add(rover)
            moves += rover != last
            last = rover
    assert len(homes) == 1
    assert len(visited) > 30
    assert moves == pytest.approx(36_000 / ROVE, rel=0.2)


def test_who_moves_goes_on_listening_where_it_was() -> None:
    node = Shards(random.Random(5), 0.0, authors=AUTHORS)
    node.told(PeerId("a"), Hello(100, 10), 0.0)
    old = node.look(0.0, company=20)
    node.told(PeerId("a"), Hello(1000, 100), 10.0)
    new = node.look(10.0, company=20)
    assert new.home != old.home
    assert old.home in new.listening
    assert old.home not in node.look(10.0 + BRIDGE, company=20).listening


@pytest.mark.slow
@pytest.mark.parametrize("lie", [MAX_SIZE, 1])
def test_a_crowd_that_lies_wildly_moves_nothing(lie: int) -> None:
    ratios = lied_to(Hello(lie, MAX_SHARDS if lie > 1 else 1), 200)
    assert 0.6 <= mean(ratios) <= 1.4


def test_a_crowd_that_lies_cleverly_moves_the_shards_a_bounded_way() -> None:
    ratios = lied_to(Hello(230, 23), 200)  # within TRUST of the 100 that there are
    assert max(ratios) <= 1.25 * TRUST
    assert median(ratios) >= 1 / TRUST


def test_shards_change_by_a_factor_of_two_a_minute_at_most() -> None:
    node = Shards(random.Random(5), 0.0, authors=AUTHORS)
    node.told(PeerId("first"), Hello(100, 10), 0.0)
    home = node.look(0.0).home
    assert home is not None
    begun = node.shards
    for now in range(10, 240, 10):
        for i in range(round(100 * share_of(home))):
            node.heard(PeerId(f"neighbour-{i}"), home, float(now))
        node.look(float(now))
    for i in range(20):
        node.told(PeerId(f"liar-{i}"), Hello(280, 28), 240.0)
    for later in (240.0, 250.0, 299.0):
        node.look(later)
        assert begun < node.shards <= 2 * begun
    node.look(240.0 + PACE)
    assert node.shards > 2 * begun


@pytest.mark.slow
def test_liars_who_are_fewer_than_the_honest_hellos_move_little() -> None:
    ratios = lied_to(Hello(230, 23), 4)
    assert 0.7 <= mean(ratios) <= 1.6


def lied_to(lie: Hello, liars: int) -> list[float]:
    """What a grown swarm of 100 makes of it in ten minutes: each node's shards, over the mean before."""
    swarm = Swarm(100)
    swarm.run(1200)
    honest = mean(node.shards for node in swarm.nodes.values())
    for _ in range(10):
        for i in range(liars):
            swarm.tell(PeerId(f"liar-{i}"), encode_hello(lie))
        swarm.run(60)
    return [node.shards / honest for node in swarm.nodes.values()]


def test_what_it_remembers_is_bounded() -> None:
    node = Shards(random.Random(0), 0.0)
    for i in range(5000):
        node.heard(PeerId(f"a{i}"), 0, float(COUNTED))
        node.told(PeerId(f"a{i}"), Hello(5, 1), float(COUNTED))
    assert node.counted(COUNTED) <= 4097
    assert node.size(COUNTED) <= 4097


def test_the_same_seed_gives_the_same_swarm() -> None:
    first, second, other = Swarm(60, 7), Swarm(60, 7), Swarm(60, 8)
    for swarm in (first, second, other):
        swarm.run(900)
    assert first.heard == second.heard != other.heard
