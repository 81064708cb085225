"""A node's pace is free among few nodes and fair among many.

A loud author or a crowd of fresh keys does not change it.
"""

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.types import PeerId
from swarmd.exchange.pacing import (
    AUTHOR_CAP,
    FEW_AUTHORS,
    FIRST_PACE,
    GROUP_CAP,
    LONG_S,
    SHORT_S,
    TARGET_PER_S,
    Heard,
    Pacing,
)

HOUR = 3600

# Maps a second to the attacker's frames in it: (author, network group).
Attack = Callable[[int], list[tuple[str, str]]]


class Swarm:
    """Nodes that hear each other at once, and have rollouts to send after each round of `seconds`."""

    def __init__(self, nodes: int, seconds: float = 30.0, seed: int = 0, start_within: float = 60.0) -> None:
        rng = random.Random(seed)
        self.seconds, self.now = seconds, 0
        self.heard = [Heard() for _ in range(nodes)]
        self.pacing = [Pacing(heard, random.Random(f"{seed} {n}")) for n, heard in enumerate(self.heard)]
        self.ready = [seconds + rng.uniform(0, start_within) for _ in range(nodes)]
        self.sent = Counter[int]()
        self.serving: list[set[str]] = [set() for _ in range(nodes)]  # authors that served each node
        self.offered: list[list[str]] = [[] for _ in range(nodes)]  # offers to each node since its last fetch

    def play(self, seconds: int, attack: Attack = lambda _: []) -> float:
        """Return the honest nodes' offers per second. Fetches from the attacker fail."""
        self.sent.clear()
        rng = random.Random(self.now)
        for _ in range(seconds):
            self.now += 1
            for n, pacing in enumerate(self.pacing):
                if self.ready[n] <= self.now and pacing.next_at(self.now) <= self.now:
                    pacing.sent(self.now)
                    self.ready[n] = self.now + self.seconds
                    self.sent[n] += 1
                    for other, heard in enumerate(self.heard):
                        if other != n:
                            heard.offer(PeerId(str(n)), "", self.now)
                            self.offered[other].append(str(n))
            for author, group in attack(self.now):
                for heard, offered in zip(self.heard, self.offered, strict=True):
                    heard.offer(PeerId(author), group, self.now)
                    offered.append(author)
            for n in range(len(self.heard)):
                if (self.now + n) % self.seconds == 0:
                    self._fetch(n, rng)
        return self.sent.total() / seconds

    def _fetch(self, n: int, rng: random.Random) -> None:
        """Fetch as `swarmd.exchange.serving` chooses: one fetch goes to authors that never served."""
        strangers = [author for author in self.offered[n] if author not in self.serving[n]]
        known = [author for author in self.offered[n] if author in self.serving[n]]
        for author in (
            *rng.sample(strangers, min(1, len(strangers))),
            *rng.sample(known, min(3, len(known))),
        ):
            served = author.isdigit()  # the author is an honest node
            self.heard[n].tried(PeerId(author), served=served)
            if served:
                self.serving[n].add(author)
        self.offered[n].clear()

    @property
    def fairness(self) -> float:
        """Return Jain's fairness index of the paces: 1 if all are equal."""
        paces = [min(pacing.pace, 1 / self.seconds) for pacing in self.pacing]
        return sum(paces) ** 2 / (len(paces) * sum(pace**2 for pace in paces))


def test_few_nodes_send_after_each_round() -> None:
    for nodes in (2, 8, FEW_AUTHORS):
        swarm = Swarm(nodes, seconds=5.0)
        swarm.play(2 * 65)
        assert swarm.play(300) == pytest.approx(nodes / 5, rel=0.02)
    assert TARGET_PER_S < 8 / 5  # although that exceeds the target


def test_many_nodes_share_the_target_equally() -> None:
    swarm = Swarm(60, start_within=1.0)
    swarm.play(600)
    assert 0.7 * TARGET_PER_S < swarm.play(1800) < 1.3 * TARGET_PER_S
    assert swarm.fairness > 0.8


def test_a_newcomer_to_a_busy_topic_starts_slowly_but_is_heard() -> None:
    swarm = Swarm(60, start_within=1.0)
    swarm.ready[0] = 1800
    swarm.play(1810)
    assert swarm.pacing[0].pace == FIRST_PACE * TARGET_PER_S and not swarm.sent[0]
    mean = sum(pacing.pace for pacing in swarm.pacing) / 60
    assert swarm.pacing[0].pace < mean / 2
    swarm.play(HOUR)
    assert 0 < swarm.sent[0] < 2 * mean * HOUR


def test_remaining_nodes_send_faster_after_most_have_left() -> None:
    swarm = Swarm(60, start_within=1.0)
    swarm.play(1800)
    swarm.ready[8:] = [math.inf] * 52
    swarm.play(900 + int(LONG_S))
    assert swarm.play(300) == pytest.approx(8 / 30, rel=0.1)


def test_a_node_with_little_to_send_does_not_speed_up_without_limit() -> None:
    heard, now = Heard(), 0.0
    pacing = Pacing(heard, random.Random(1))
    for now in range(0, HOUR, 4):
        heard.offer(PeerId(str(now)), "", now)
        if now % 1200 == 0:
            pacing.next_at(now)
    assert pacing.pace < TARGET_PER_S / 4


@pytest.mark.parametrize("group", ["", "11.0"])
def test_a_loud_author_slows_other_nodes_only_by_its_share(group: str) -> None:
    calm, loud = Swarm(40, start_within=1.0), Swarm(40, start_within=1.0)
    calm.play(1200)
    loud.play(1200, lambda _: [("loud", group)])
    before, beside = calm.play(1800), loud.play(1800, lambda _: [("loud", group)])
    assert beside > before * (1 - (1 + AUTHOR_CAP) / 40) * 0.9


@pytest.mark.parametrize("nodes, rate, keys", [(12, 14, 300), (40, 1, 300), (24, 14, 3000)])
def test_a_crowd_of_fresh_keys_that_serves_nothing_slows_no_node(nodes: int, rate: int, keys: int) -> None:
    """The crowd sends 5 or 70 times the target, for 15 minutes."""
    calm, beside = (Swarm(nodes, start_within=1.0) for _ in range(2))
    calm.play(1800)
    beside.play(1800)
    before = calm.play(900)
    assert (
        beside.play(900, lambda now: [(f"key {now * rate % keys + n}", "") for n in range(rate)])
        > 0.95 * before
    )


def test_authors_of_one_network_group_count_together_for_eight() -> None:
    heard = Heard()
    for n in range(300):
        heard.offer(PeerId(f"near {n}"), "11.0", 10.0)
    assert heard.rates(10.0)[0] == pytest.approx(GROUP_CAP * AUTHOR_CAP / SHORT_S)
    for n in range(20):
        heard.offer(PeerId(f"home {n}"), "", 10.0)
    assert heard.rates(10.0)[1] == pytest.approx((GROUP_CAP * AUTHOR_CAP + 20) / LONG_S)
    assert heard.authors(10.0 + LONG_S) == heard.rates(10.0 + SHORT_S)[0] == 0


def test_authors_that_served_count_fully_and_new_authors_by_the_share_that_serves() -> None:
    heard = Heard()
    heard.offer(PeerId("known"), "", 0.0)
    heard.tried(PeerId("known"), served=True)
    for n in range(200):
        heard.offer(PeerId(f"stranger {n}"), "", 0.0)
        heard.tried(PeerId(f"stranger {n}"), served=False)
    assert 1 < heard.authors(0.0) < 10
    heard.tried(PeerId("known"), served=False)
    assert heard.authors(0.0) < 10


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.floats(0, 50), st.booleans()), max_size=200)
)
def test_counted_rates_never_exceed_heard_rates(
    events: list[tuple[int, int, float, bool]],
) -> None:
    heard, now, times = Heard(), 0.0, []
    for author, group, gap, served in events:
        now += gap
        times.append(now)
        heard.offer(PeerId(str(author)), ("", "10.0", "11.0", "12.0")[group], now)
        heard.tried(PeerId(str(author)), served=served)
        for rate, seconds in zip(heard.rates(now), (SHORT_S, LONG_S), strict=True):
            assert 0 <= rate <= sum(then > now - seconds for then in times) / seconds + 1e-9
        assert 0 <= heard.authors(now) <= 6
