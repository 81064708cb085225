"""A node dials members in as many network groups as possible, regardless of inbound peers."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.netgroup import LOCAL, group_of
from p2p.peers.addressbook import AddressBook
from p2p.peers.outbound import (
    ALONE_S,
    DIALS_AT_ONCE,
    FEEL_EVERY_S,
    GROUPS,
    MAX_OUTBOUND,
    STRANGER_S,
    TARGET_MEMBERS,
    Outbound,
)
from p2p.types import PeerId
from tests.p2p.peers.test_addressbook import KEY, ME, NOW, at, dial, peer, pin, tried


class Play:
    """A node whose dials are all answered, except for dials to peers in `dead`."""

    def __init__(self, *known: str, seed: int = 0) -> None:
        """known: the addresses of peers 0, 1, 2, …"""
        self.book, self.rng, self.now = AddressBook(ME, KEY), random.Random(seed), NOW
        self.outbound = Outbound(self.book, NOW)
        self.inbound: set[PeerId] = set()
        self.dead: set[PeerId] = set()
        self.strangers: set[PeerId] = set()
        self.dialled: list[PeerId] = []
        for n, address in enumerate(known):
            self.book.add(peer(n), [address], NOW, source=f"{n}")

    @property
    def connected(self) -> set[PeerId]:
        return self.inbound | set(self.outbound.links)

    def answer(self, who: PeerId, addresses: list[str]) -> None:
        self.dialled.append(who)
        if who in self.dead:
            self.outbound.missed(who, self.now)
        else:
            self.outbound.reached(who, addresses[0], group_of(addresses[0]) or "", self.now)

    def tick(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            members = self.connected - self.strangers
            for who in self.outbound.prune(self.connected, members, self.now):
                self.outbound.links.pop(who)
            found = self.outbound.choose(self.connected, members, self.now, self.rng)
            assert len(found) <= DIALS_AT_ONCE
            for who, addresses in found:
                self.answer(who, addresses)
            feeler = self.outbound.feeler(self.connected, self.now, self.rng)
            if feeler is not None:
                self.answer(*feeler)
            assert len(self.outbound.links) <= MAX_OUTBOUND
            self.now += 1

    def groups(self) -> Counter[str]:
        return Counter(link.group for link in self.outbound.links.values())


def test_each_dialled_member_is_in_a_different_group() -> None:
    play = Play(*(at(n % 20, n) for n in range(60)))
    play.tick(30)
    assert len(play.groups()) == GROUPS and set(play.groups().values()) == {1}


def test_with_few_groups_enough_connected_members_are_sufficient() -> None:
    play = Play(*(f"/ip4/192.168.0.{n}/tcp/1" for n in range(30)))
    play.tick(30)
    assert play.groups() == {LOCAL: TARGET_MEMBERS}
    play.inbound = {peer(1000 + n) for n in range(TARGET_MEMBERS)}
    play.outbound.links.clear()
    play.tick(30)
    assert play.groups() == {LOCAL: 1}  # one dial, because this group has no connection yet


def test_dials_in_progress_count_as_connections() -> None:
    play = Play(*(at(n % 3, n) for n in range(60)))
    found = [one for _ in range(5) for one in play.outbound.choose((), (), NOW, play.rng)]
    assert len(found) == DIALS_AT_ONCE and len(dict(found)) == DIALS_AT_ONCE
    for who, _ in found:
        play.outbound.reached(who, "", "", NOW)
    assert not play.outbound.links and not play.outbound.dialling


def test_bootstrap_peers_are_asked_at_the_first_start_and_if_the_node_is_alone() -> None:
    for before in (False, True):
        play = Play(*map(at, range(60)))
        pin(play.book, peer(99), at(99))
        if before:
            for n in range(40):
                dial(play.book, peer(n))
        play.dead = {peer(n) for n in range(60)}
        play.tick()
        if before:
            assert peer(99) not in play.dialled
            play.tick(int(ALONE_S))
        assert peer(99) in play.dialled


def test_a_node_whose_clock_is_set_back_does_not_stay_alone() -> None:
    """Until it has a network and NTP, a machine's clock may be two hours ahead."""
    play = Play(*map(at, range(60)))
    pin(play.book, peer(99), at(99))
    for n in range(40):
        dial(play.book, peer(n))
    play.dead = {peer(n) for n in range(60)}
    play.tick()
    play.now -= 7200
    play.tick(1 + int(ALONE_S))
    assert peer(99) in play.dialled
    for now in (play.now + FEEL_EVERY_S, play.now - 7200):
        found = play.outbound.feeler(play.connected, now, play.rng)
        assert found is not None
        play.answer(*found)


def test_a_peer_of_another_swarm_is_disconnected() -> None:
    play = Play(*map(at, range(30)))
    play.strangers = {peer(n) for n in range(30) if n % 2}
    play.tick(int(8 * STRANGER_S))
    assert len(play.groups()) == GROUPS and not play.strangers & set(play.outbound.links)
    assert not any(who in play.book.known for who in play.strangers if who in play.dialled)


def test_strangers_never_exceed_the_outbound_limit() -> None:
    play = Play(*map(at, range(100)))
    play.strangers = {peer(n) for n in range(100)}
    play.tick(20)  # `tick` checks MAX_OUTBOUND
    assert len(play.outbound.links) == MAX_OUTBOUND


def test_a_bootstrap_peer_that_is_not_a_member_is_kept() -> None:
    play = Play()
    pin(play.book, peer(99), at(99))
    play.strangers = {peer(99)}
    play.tick(int(3 * STRANGER_S))
    assert peer(99) in play.outbound.links and play.dialled == [peer(99)]


def test_feelers_test_a_peer_and_disconnect() -> None:
    play = Play(*map(at, range(40)))
    play.tick(30)
    linked = set(play.outbound.links)
    assert tried(play.book) == GROUPS
    play.tick(int(10 * FEEL_EVERY_S))
    assert (
        set(play.outbound.links) - linked <= {play.dialled[-1]}
        and GROUPS + 8 <= tried(play.book) <= GROUPS + 11
    )


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 3)), min_size=1, max_size=80),
    st.sets(st.integers(0, 79)),
    st.sets(st.integers(0, 79)),
    st.integers(0, 150),
)
def test_every_live_group_gets_an_outbound_connection(
    known: list[tuple[int, int]], dead: set[int], strangers: set[int], crowd: int
) -> None:
    """The protection against eclipse attacks depends on this.

    For each group with a live member in the book, up to GROUPS groups, a member is dialled.
    """
    play = Play(*(at(group, n) for n, (group, _) in enumerate(known)))
    play.dead, play.strangers = {peer(n) for n in dead}, {peer(n) for n in strangers}
    play.inbound = {peer(1000 + n) for n in range(crowd)}
    live = {
        group_of(at(group))
        for n, (group, _) in enumerate(known)
        if n not in dead | strangers and peer(n) in play.book.known
    }
    play.tick(400)
    met = {link.group for link in play.outbound.links.values() if link.met}
    assert len(met) >= min(GROUPS, len(live))


@pytest.mark.parametrize("name", ["reached", "missed"])
def test_a_connected_peer_that_the_book_removed_causes_no_error(name: str) -> None:
    play = Play(at(1))
    ((who, addresses),) = play.outbound.choose((), (), NOW, play.rng)
    play.book.stranger(who, NOW)
    play.answer(who, addresses) if name == "reached" else play.outbound.missed(who, NOW)
    play.tick(40)
    assert who not in play.book.known
