"""Shards: everybody comes to about the same number of them, each holds what the budget allows, and crowds and liars move nobody."""

import random
from collections import Counter
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.netgroup import LOCAL
from p2p.shards.estimate import MAX_SHARDS, MAX_SIZE, Estimate, decode_estimate, encode_estimate
from p2p.shards.headcount import FAR, GROUP, Headcount, Met
from p2p.shards.shards import (
    ASK,
    BRIDGE,
    COMPANY,
    COUNTED,
    LISTENED,
    PACE,
    PATIENCE,
    ROVE,
    Placement,
    Shards,
    authors_of,
    shard_at,
    shards_of,
    share_of,
)
from p2p.types import PeerId

AUTHORS = 10.0
ROUND = 60.0
EVERY = 10.0  # seconds between two looks


class Swarm:
    """Nodes that publish once a round; everything published reaches at once whoever listens there. Each is connected to some others."""

    def __init__(self, size: int, seed: int = 0, company: int = 20) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.company = company
        self.nodes: dict[PeerId, Shards] = {}
        self.connected: dict[PeerId, dict[PeerId, str]] = {}
        self.useful: dict[PeerId, set[PeerId]] = {}  # who proved useful to whom
        self.publishes: dict[PeerId, float] = {}
        self.heard: Counter[PeerId] = Counter()  # sets, since the last `reset`
        self.on_zero = 0
        self.liars: dict[PeerId, bytes] = {}  # and what they answer
        self.join(size)

    def join(self, count: int) -> None:
        new = [PeerId(f"node-{len(self.connected) + i}") for i in range(count)]
        for name in new:
            self.nodes[name] = Shards(random.Random(self.rng.random()), self.now, authors=AUTHORS)
            self.publishes[name] = self.now + self.rng.uniform(0, ROUND)
            self.connected[name], self.useful[name] = {}, set()
        for name in new:
            for other in self.rng.sample(sorted(self.nodes), min(self.company // 2, len(self.nodes))):
                self.connect(name, other)

    def connect(self, name: PeerId, other: PeerId) -> None:
        if name != other:
            self.connected[name][other] = f"group of {other}"
            if other in self.nodes:
                self.connected[other][name] = f"group of {name}"

    def lie(self, count: int, answer: bytes) -> None:
        """Every node gets so many connections more, to liars, each in a network group of its own."""
        for number in range(count):
            liar = PeerId(f"liar-{number}")
            self.liars[liar] = answer
            for name in self.nodes:
                self.connect(name, liar)

    def leave(self, count: int) -> None:
        for name in self.rng.sample(sorted(self.nodes), count):
            del self.nodes[name], self.publishes[name]
            for other in self.connected.pop(name):
                if other in self.connected:
                    del self.connected[other][name]

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += EVERY
            places = {name: self.look(name, node) for name, node in self.nodes.items()}
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
                            self.hear(other, name, home)
                for peer in node.whom(self.now):
                    if peer not in self.liars and peer not in self.nodes:
                        continue  # it has left
                    if peer not in self.connected[name]:
                        node.met.look({**self.connected[name], peer: f"group of {peer}"}, self.now)
                    answer = self.liars[peer] if peer in self.liars else self.nodes[peer].answer(self.now)
                    node.answered(peer, answer, self.now)

    def look(self, name: PeerId, node: Shards) -> Placement:
        connected = self.connected[name]
        return node.look(self.now, dict(connected), self.useful[name] & connected.keys())

    def hear(self, name: PeerId, author: PeerId, shard: int) -> None:
        """One in ten sets is fetched from, and in half of them something is useful; who is fetched from is connected to for a while."""
        node = self.nodes[name]
        if self.rng.random() < 0.1:
            self.useful[name] |= {author} if self.rng.random() < 0.5 else set()
            node.met.look({**self.connected[name], author: f"group of {author}"}, self.now)
        node.heard(author, shard, self.now, proven=author in self.useful[name])
        self.heard[name] += 1

    def reset(self) -> None:
        self.heard.clear()
        self.on_zero = 0

    def counts(self) -> Counter[int]:
        return Counter(node.shards for node in self.nodes.values())


@given(st.integers(1, MAX_SIZE), st.integers(1, MAX_SHARDS))
@settings(derandomize=True, max_examples=100)
def test_an_estimate_is_what_it_was(size: int, shards: int) -> None:
    assert decode_estimate(encode_estimate(Estimate(size, shards))) == Estimate(size, shards)


@given(st.binary(max_size=24))
@settings(derandomize=True, max_examples=300)
def test_any_bytes_are_no_estimate_or_are_spelled_as_we_spell_it(body: bytes) -> None:
    estimate = decode_estimate(body)
    assert estimate is None or encode_estimate(estimate) == body


@pytest.mark.parametrize(
    "body",
    ["", "93010001", "9301cc0501", "93020501", "9301050100", "94010501c0", "93010500", "9301ff01", "9301ce0098968101", "930101cd8001"],
    ids=["empty", "size 0", "long integer", "version 2", "trailing", "four", "no shards", "negative", "too large", "too many shards"],
)
def test_what_is_no_estimate(body: str) -> None:
    assert decode_estimate(bytes.fromhex(body)) is None


def test_the_golden_estimate() -> None:
    assert encode_estimate(Estimate(1000, 94)).hex() == "9301cd03e85e"


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


@pytest.mark.parametrize("size", [1, 2, 10, 19])
def test_a_small_swarm_is_one_shard(size: int) -> None:
    swarm = Swarm(size)
    swarm.run(600)
    assert set(swarm.counts()) == {1}
    assert all(not node.look(swarm.now, swarm.connected[name]).listening for name, node in swarm.nodes.items())


def test_who_are_connected_to_all_others_share_one_shard() -> None:
    swarm = Swarm(40, company=100)
    swarm.run(1200)
    assert set(swarm.counts()) == {1}


@pytest.mark.slow
def test_everybody_comes_to_about_the_same_number_of_shards_and_hears_what_the_budget_allows() -> None:
    size = 100
    swarm = Swarm(size)
    swarm.run(1800)
    assert 0.65 <= mean(node.shards for node in swarm.nodes.values()) / (size / AUTHORS) <= 1.5
    swarm.reset()
    swarm.run(10 * ROUND)
    assert mean(swarm.heard[name] / 10 for name in swarm.nodes) == pytest.approx(2 * AUTHORS, rel=0.5)
    assert swarm.on_zero <= 0.01 * 10 * size


@pytest.mark.slow
def test_a_swarm_that_grows_and_shrinks_is_followed() -> None:
    swarm = Swarm(20, 4)
    for _ in range(5):
        swarm.run(120)
        swarm.join(16)
    swarm.run(1200)
    assert mean(node.shards for node in swarm.nodes.values()) == pytest.approx(10, rel=0.5)
    for _ in range(5):
        swarm.leave(17)
        swarm.run(180)
    swarm.run(1200)
    assert set(swarm.counts()) == {1}


def crowd_of(count: int) -> dict[PeerId, str]:
    return {PeerId(f"{i}"): f"group {i}" for i in range(count)}


def test_a_newcomer_to_a_large_swarm_goes_where_it_hears_somebody_and_publishes_nothing_before() -> None:
    node = Shards(random.Random(1), 0.0, authors=AUTHORS)
    assert node.look(0.0, {}).home == 0  # alone, as far as it can see
    connected = crowd_of(COMPANY)
    assert node.look(3.0, connected).home is None
    for peer in "12":
        node.answered(PeerId(peer), encode_estimate(Estimate(1000, 100)), 4.0)
    placed = node.look(5.0, connected)
    assert placed.home is None
    (ear,) = placed.listening
    assert ear >= 64
    node.heard(PeerId("2"), ear, 6.0, proven=False)
    assert node.look(10.0, connected).home == ear
    assert node.shards == 100


def test_a_newcomer_that_finds_nobody_takes_the_swarm_for_small() -> None:
    node, connected = Shards(random.Random(1), 0.0), crowd_of(COMPANY)
    assert node.look(PATIENCE[0] - 1, connected).home is None
    assert node.look(PATIENCE[1], connected).home == 0


def test_a_newcomer_asks_and_who_has_not_counted_does_not_answer() -> None:
    there = Shards(random.Random(1), 0.0, authors=AUTHORS, shards=100)
    home = there.look(0.0, crowd_of(20)).home
    assert home is not None
    for i in range(7):
        there.heard(PeerId(f"{i}"), home, COUNTED - 1, proven=False)
    assert there.answer(COUNTED - 1) == b""
    there.look(COUNTED, crowd_of(20))
    said = decode_estimate(there.answer(COUNTED))
    assert said is not None
    assert said.size >= 7 * 64
    assert said.shards == 100
    newcomer = Shards(random.Random(2), 0.0, authors=AUTHORS)
    newcomer.look(0.0, crowd_of(20))
    assert len(set(newcomer.whom(0.0))) == ASK


def test_where_all_have_just_come_nobody_waits() -> None:
    newcomer, connected = Shards(random.Random(2), 0.0), crowd_of(COMPANY)
    for i in range(3):
        assert newcomer.look(1.0, connected).home is None
        newcomer.answered(PeerId(f"{i}"), b"", 1.0)
    assert newcomer.look(1.0, connected).home == 0


def test_the_rover_crosses_the_swarm_and_the_home_stays() -> None:
    node, connected = Shards(random.Random(5), 0.0, authors=AUTHORS, shards=40), crowd_of(20)
    homes, visited, moves, last = set(), set(), 0, None
    for now in range(0, 36_000, 20):
        placed = node.look(float(now), connected)
        assert placed.home is not None
        for i in range(10):
            node.heard(PeerId(f"{i}"), placed.home, float(now), proven=False)
        for peer in node.whom(float(now)):
            node.answered(peer, encode_estimate(Estimate(400, 40)), float(now))
        homes.add(placed.home)
        (rover,) = placed.listening - {placed.home}
        visited.add(rover)
        moves += rover != last
        last = rover
    assert len(homes) == 1
    assert len(visited) > 30
    assert moves == pytest.approx(36_000 / ROVE, rel=0.2)


def grown(shards: int, number: int) -> tuple[Shards, int, float]:
    """A node that has counted `number` authors at home; its home, and what time it is."""
    node, connected = Shards(random.Random(5), 0.0, authors=AUTHORS, shards=shards), crowd_of(40)
    home = node.look(0.0, connected).home
    assert home is not None
    for now in range(10, 310, 10):
        for i in range(number):
            node.heard(PeerId(f"{i}"), home, float(now), proven=False)
        node.look(float(now), connected)
    return node, home, 300.0


def test_shards_change_by_a_factor_of_two_a_minute_at_most_and_who_moves_goes_on_listening_where_it_was() -> None:
    node = Shards(random.Random(5), 0.0, authors=AUTHORS, shards=10)
    home = node.look(0.0, crowd_of(60)).home
    assert home is not None
    seen = {10}
    for now in range(10, int(COUNTED + PACE), 10):
        for i in range(40):  # four times as many as there should be
            node.heard(PeerId(f"{i}"), home, float(now), proven=False)
        placed = node.look(float(now), crowd_of(60))
        seen.add(node.shards)
    assert seen == {10, 20}
    assert placed.home != home
    assert home in placed.listening
    assert home not in node.look(COUNTED + BRIDGE + 10, crowd_of(60)).listening


# Crowds and liars.


def test_who_was_never_met_nor_useful_is_not_counted() -> None:
    met, count = Met(), Headcount(0.0)
    met.look({PeerId("a"): "a"}, 0.0)
    for author in ("a", "b", "c"):
        count.heard(PeerId(author), 1.0, proven=author == "c")
    assert count.count(1.0, met) == 2
    assert count.proven(1.0) == count.apart(1.0, met.connected) == 1


def test_strangers_count_as_many_as_those_we_met_and_a_network_group_as_a_few() -> None:
    met, count = Met(), Headcount(0.0)
    for i in range(300):
        count.heard(PeerId(f"stranger {i}"), 1.0, proven=True)
    assert count.count(1.0, met) == FAR
    met.look({PeerId(f"met {i}"): f"{i}" for i in range(5)}, 1.0)
    for i in range(5):
        count.heard(PeerId(f"met {i}"), 1.0, proven=False)
    assert count.count(1.0, met) == 10
    met.look({PeerId(f"stranger {i}"): "1.2" for i in range(300)}, 1.0)
    assert count.count(1.0, met) == 5 + GROUP


def test_the_local_network_is_counted_whole() -> None:
    met, count = Met(), Headcount(0.0)
    met.look({PeerId(f"{i}"): LOCAL for i in range(30)}, 1.0)
    for i in range(30):
        count.heard(PeerId(f"{i}"), 1.0, proven=False)
    assert count.count(1.0, met) == 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed, liars, lie, most",
    [(0, 6, Estimate(300, 42), 1.5), (2, 60, Estimate(250, 25), 1.4), (0, 60, Estimate(120, 12), 1.4), (2, 60, Estimate(20, 1), 1.4)],
)
def test_liars_who_are_a_quarter_or_most_of_everybodys_connections_move_little(seed: int, liars: int, lie: Estimate, most: float) -> None:
    swarm = Swarm(60, seed)
    swarm.run(1200)
    before = mean(node.shards for node in swarm.nodes.values())
    swarm.lie(liars, encode_estimate(lie))
    swarm.run(900)
    assert 1 / 1.5 <= mean(node.shards for node in swarm.nodes.values()) / before <= most
    assert max(swarm.counts()) < 25


def test_an_author_that_publishes_in_two_shards_at_a_time_counts_in_none_unless_it_was_useful() -> None:
    node = Shards(random.Random(5), 0.0, authors=AUTHORS, shards=10)
    placed = node.look(0.0, crowd_of(40))
    (rover,) = placed.listening - {placed.home}
    assert placed.home

    def hear(place: int, *names: str, proven: bool = False) -> float:
        """How many authors count at home afterwards."""
        for name in names:
            node.heard(PeerId(name), place, 10.0, proven=proven)
        return (node.counted(10.0) - 1) * share_of(placed.home or 0)

    assert hear(placed.home, "0", "1", "2", "3", "4") == 5
    assert hear(rover, "0", "1", "5") == 3
    assert hear(placed.home, "0", proven=True) == 4


def test_votes_of_members_that_were_never_useful_do_not_choose_the_size() -> None:
    node, connected = Shards(random.Random(1), 0.0, authors=AUTHORS), crowd_of(12)
    for useful, size in ((["0", "1", "2"], 60), ([], 250)):
        node.look(0.0, connected, {PeerId(name) for name in useful})
        for i in range(12):
            said = Estimate(60, 6) if i < 3 else Estimate(250, 25)
            node.answered(PeerId(f"{i}"), encode_estimate(said), 1.0)
        assert node.size(1.0) == size


def test_a_stranger_heard_at_home_is_asked_once_and_counts_when_it_is_met() -> None:
    node, _, now = grown(10, 5)
    home, stranger = node.look(now, crowd_of(40)).home, PeerId("stranger")
    assert home is not None
    assert not node.heard(stranger, home, now, proven=False)
    asked = [peer for seconds in range(0, 60, 5) for peer in node.whom(now + seconds)]
    assert asked.count(stranger) == 1
    node.look(now, {stranger: "group s"})
    assert node.heard(stranger, home, now, proven=False)


def test_a_newcomer_that_hears_of_more_shards_does_not_go_by_the_first_who_says_one() -> None:
    node, connected = Shards(random.Random(1), 0.0, authors=AUTHORS), crowd_of(COMPANY)
    node.look(0.0, connected)
    for peer, size, shards in (("1", 14, 1), ("2", 15, 1), ("3", 300, 30)):
        node.answered(PeerId(peer), encode_estimate(Estimate(size, shards)), 1.0)
        assert node.look(1.0, connected).home is None


@pytest.mark.parametrize(
    ("friends_say", "on_zero", "left"),
    [(10, 20, False), (1, 9, False), (1, 10, True)],
    ids=["friends do not say so", "fewer are heard there than at home", "as many are heard there"],
)
def test_a_home_is_left_for_fewer_shards_on_the_word_of_useful_members_and_where_as_many_are_heard(
    friends_say: int, on_zero: int, left: bool
) -> None:
    node, home, now = grown(10, 10)
    friends = [PeerId(f"{i}") for i in range(3)]
    for i in range(40):
        shards = friends_say if i < 3 else 1
        node.answered(PeerId(f"{i}"), encode_estimate(Estimate(80 if shards == 10 else 20, shards)), now)
    for i in range(on_zero):
        node.heard(PeerId(f"{20 + i}"), 0, now, proven=False)
    assert node.look(now + 1, crowd_of(40), friends).home == (0 if left else home)


def test_who_is_on_shard_0_follows_useful_members_to_more_shards_against_most_votes() -> None:
    node, connected, now = Shards(random.Random(3), 0.0, authors=AUTHORS), crowd_of(20), 0.0
    friends = [PeerId(f"{i}") for i in range(5)]
    while now < 600:
        now += 10
        placed = node.look(now, connected, friends)
        for shard, names in ((0, "01"), *((shard, "5678") for shard in placed.listening)):
            for name in names:
                node.heard(PeerId(name), shard, now, proven=shard == 0)
        for i in range(20):
            node.answered(PeerId(f"{i}"), encode_estimate(Estimate(100, 10) if i < 5 else Estimate(20, 1)), now)
    assert node.shards == 10
    assert placed.home


def test_a_home_where_a_useful_member_is_heard_is_not_left_for_a_crowd_that_is_not_useful() -> None:
    node, now = Shards(random.Random(3), 0.0), 0.0
    crowd = {PeerId(f"liar {i}"): f"group {i}" for i in range(12)}
    connected = {PeerId("friend"): "group f", **crowd}
    while now < 1800:
        now += 5
        placed = node.look(now, connected)
        node.heard(PeerId("friend"), 0, now, proven=True)
        for shard in placed.listening:
            for liar in crowd:
                node.heard(liar, shard, now, proven=False)
        for peer in node.whom(now):
            node.answered(peer, encode_estimate(Estimate(300, 42)) if peer in crowd else b"", now)
        assert placed.home in (0, None) and (placed.home == 0 or now < max(PATIENCE) * 2)
    assert placed.home == 0


def test_who_was_led_away_is_back_within_minutes() -> None:
    """The first whom it meets is a liar that speaks where it led it; then he goes."""
    node, now = Shards(random.Random(3), 0.0), 0.0
    liar = {PeerId("liar"): "group l"}
    while node.shards == 1:
        now += 5
        for shard in node.look(now, liar).listening:
            node.heard(PeerId("liar"), shard, now, proven=False)
        for peer in node.whom(now):
            node.answered(peer, encode_estimate(Estimate(300, 42)), now)
    ended = now
    while node.look(now, {}).home != 0:
        now += 5
    assert now - ended <= 2 * COUNTED + LISTENED


def test_what_it_remembers_is_bounded() -> None:
    node = Shards(random.Random(0), 0.0)
    node.look(0.0, crowd_of(10_000))
    for i in range(10_000):
        node.heard(PeerId(f"{i}"), 0, float(COUNTED), proven=True)
        node.answered(PeerId(f"{i}"), encode_estimate(Estimate(5, 1)), float(COUNTED))
    assert node.counted(COUNTED) <= 4097


def test_the_same_seed_gives_the_same_swarm() -> None:
    first, second, other = Swarm(40, 7), Swarm(40, 7), Swarm(40, 8)
    for swarm in (first, second, other):
        swarm.run(300)
    assert first.heard == second.heard != other.heard
