"""Connections into our shards: which peers are dialled, and which are hung up on."""

import itertools
import random
from collections.abc import Collection

from p2p.peers.shard_peers import (
    AGAIN,
    ANNOUNCE_EVERY,
    DIALS,
    EXTRA,
    IDLE,
    LOOK_LAST,
    NEIGHBOURS,
    SETTLED,
    TOLD,
    UNMET,
    VISITS,
    RequestConnections,
    ShardPeers,
)
from p2p.types import PeerId

PEERS = [PeerId(f"peer {n}") for n in range(200)]
RNG = random.Random(0)


def dial(neighbours: ShardPeers, there: Collection[PeerId], connected: Collection[PeerId], now: float, shard: int = 5) -> list[PeerId]:
    return neighbours.choose({shard: there}, connected, now, RNG)


def test_as_many_are_dialled_as_are_lacking_a_few_at_once_and_none_twice() -> None:
    neighbours = ShardPeers()
    neighbours.add(5, PEERS[:10])
    first = dial(neighbours, [], [], 0.0)
    assert len(first) == DIALS and not dial(neighbours, [], [], 1.0)
    for peer in first:
        neighbours.reached(peer, 1.0)
    (second,) = dial(neighbours, first, first, 2.0)
    assert second not in first
    neighbours.missed(second)
    (third,) = dial(neighbours, first, first, 3.0)
    assert third not in {*first, second}
    neighbours.reached(third, 3.0)
    assert not dial(neighbours, [*first, third], [*first, third], 4.0)
    assert len(first) + 1 == NEIGHBOURS


def test_who_did_not_answer_is_dialled_again_later() -> None:
    neighbours = ShardPeers()
    neighbours.add(5, PEERS[:1])
    assert dial(neighbours, [], [], 0.0) == PEERS[:1]
    neighbours.missed(PEERS[0])
    neighbours.add(5, PEERS[:1])  # being told again changes nothing
    assert not dial(neighbours, [], [], AGAIN - 1) and dial(neighbours, [], [], AGAIN) == PEERS[:1]


def test_who_is_connected_anyway_counts_and_is_not_dialled() -> None:
    neighbours = ShardPeers()
    neighbours.add(5, PEERS[:10])
    assert not dial(neighbours, PEERS[10 : 10 + NEIGHBOURS], PEERS[:20], 0.0)
    assert not dial(neighbours, [], PEERS[:10], 0.0)


def test_those_who_are_not_in_the_shard_are_hung_up_on_and_forgotten() -> None:
    neighbours = ShardPeers()
    neighbours.add(5, PEERS[:DIALS])
    liars = dial(neighbours, [], [], 0.0)
    for peer in liars:
        neighbours.reached(peer, 0.0)
    assert not neighbours.prune({5: []}, liars, UNMET)
    assert neighbours.prune({5: []}, liars, UNMET + 1) == liars
    neighbours.prune({5: []}, [], UNMET + 2)
    assert not dial(neighbours, [], [], 1000.0)


def test_no_more_than_a_few_connections_are_made_for_a_shard_whoever_tells_of_whom() -> None:
    neighbours, made = ShardPeers(), list[PeerId]()
    neighbours.add(5, PEERS)
    assert len(neighbours._told[5]) == TOLD
    for now in range(5):
        for peer in dial(neighbours, [], made, now):
            neighbours.reached(peer, now)
            made.append(peer)
    assert len(made) == EXTRA


def test_a_shard_that_is_left_ends_its_connections_but_those_of_use_elsewhere() -> None:
    neighbours = ShardPeers()
    neighbours.add(5, PEERS[:2])
    a, b = dial(neighbours, [], [], 0.0)
    for peer in (a, b):
        neighbours.reached(peer, 0.0)
    assert not neighbours.prune({5: [a, b], 7: [b]}, [a, b], 1.0)
    assert neighbours.prune({7: [b]}, [a, b], 2.0) == [a]
    assert not neighbours.prune({7: [b]}, [b], 3.0)
    assert neighbours.prune({}, [b], 4.0) == [b]


def test_the_dht_is_asked_while_members_are_lacking_ever_more_rarely() -> None:
    neighbours = ShardPeers()
    asked = [now for now in range(600) if any(look for _, look, _ in neighbours.searches_due({5: []}, now))]
    gaps = [late - early for early, late in itertools.pairwise(asked)]
    assert asked[0] == 0 and gaps[:4] == [2, 4, 8, 16] and max(gaps) == LOOK_LAST
    assert not any(look for now in range(600, 1000) for _, look, _ in neighbours.searches_due({5: PEERS[:NEIGHBOURS]}, now))


def test_who_passes_through_a_shard_leaves_no_record() -> None:
    neighbours = ShardPeers()
    full = PEERS[:NEIGHBOURS]
    for shard in range(1, 10):
        assert not any(announce for now in range(19) for _, _, announce in neighbours.searches_due({shard: full}, 100 * shard + now))
    announced = [now for now in range(4000) if neighbours.searches_due({20: full}, 10_000 + now)]
    assert announced == [SETTLED, SETTLED + ANNOUNCE_EVERY, SETTLED + 2 * ANNOUNCE_EVERY]


def test_connections_made_to_ask_end_when_they_are_idle_or_too_many() -> None:
    visits = RequestConnections()
    for n in range(VISITS + 3):
        visits.begin(PEERS[n], float(n))
    visits.used(PEERS[0], 90.0)
    visits.used(PEERS[150], 90.0)  # not made to ask
    assert set(visits.prune(PEERS, 50.0)) == set(PEERS[1:4])
    assert set(visits.prune(PEERS, 91.0)) == set(PEERS[4:31]) and IDLE == 60
    assert not visits.prune([], 1000.0) and not visits.prune(PEERS, 1000.0)  # gone by themselves
