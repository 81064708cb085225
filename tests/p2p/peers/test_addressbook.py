"""The address book: buckets, network groups and the file.

An attacker with many addresses of one network group can fill only a part of the book.
"""

import json
import os
import random
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.address import parse_endpoint
from p2p.identity import peer_id_of
from p2p.netgroup import LOCAL, NAME, group_of, group_of_host, only_here
from p2p.peers import addressbook_file
from p2p.peers.addressbook import (
    MAX_ADDRESSES,
    MAX_FILE_BYTES,
    MAX_PEERS,
    TOLD_AT_ONCE,
    AddressBook,
)
from p2p.peers.addressbook_file import AddressBookFile
from p2p.peers.buckets import LOCAL_REACH, NEW_REACH, SHARE, SIZE, Known
from p2p.types import PeerId
from tests.doubles import TIMEOUT_S, until

NOW = 1_700_000_000.0
DAY = 86_400.0
KEY = bytes(range(16))
ME = peer_id_of(b"\xff" * 32)


def peer(n: int) -> PeerId:
    return peer_id_of(n.to_bytes(32, "big"))


def tried(book: AddressBook) -> int:
    return sum(known.tried for known in book.known.values())


def at(group: int, host: int = 1) -> str:
    """Return an address in the network group with this number."""
    return f"/ip4/{11 + group // 256}.{group % 256}.{host // 256}.{host % 256}/tcp/4001"


def know(book: AddressBook, count: int) -> None:
    """Add peers, each in a different group, and each named by a different peer of yet another group."""
    for n in range(count):
        book.add(peer(n), [at(n)], NOW, source=f"{n}")


def dial(book: AddressBook, who: PeerId, now: float = NOW) -> None:
    """Record that the peer was reached, and that it is in the swarm."""
    book.succeeded(who, book.known[who].addresses[0], now)
    book.met(who, now)


def pin(book: AddressBook, who: PeerId, address: str) -> None:
    endpoint = parse_endpoint(address)
    assert endpoint is not None
    book.pin(who, endpoint)


@pytest.fixture
def book() -> AddressBook:
    return AddressBook(ME, KEY)


@pytest.mark.parametrize(
    "host, group",
    [
        ("203.0.113.7", "203.0"), ("203.0.200.1", "203.0"), ("203.1.113.7", "203.1"),
        ("2001:db8:1:2::3", "20010db8"),
        ("2001:db8:ffff::", "20010db8"), ("2001:db9::", "20010db9"), ("::ffff:203.0.113.7", "203.0"),
        ("2002:cb00:7107::1", "203.0"),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "192.0"), ("64:ff9b::203.0.113.7", "203.0"),
        ("::ffff:10.0.0.1", LOCAL),
        *((host, LOCAL) for host in ("127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.1.1")),
        *((host, LOCAL) for host in ("100.64.0.1", "169.254.0.1", "::1", "fd00::1")),
        ("fe80::1%eth0", LOCAL), ("172.32.0.1", "172.32"),
        *((host, None) for host in ("224.0.0.1", "255.255.255.255", "0.0.0.0", "::", "ff02::1", "x", "")),
    ],
)  # fmt: skip
def test_addresses_belong_to_their_network_groups(host: str, group: str | None) -> None:
    assert group_of_host(host) == group


def test_peer_addresses_belong_to_their_network_groups() -> None:
    assert (
        group_of("/ip4/203.0.113.7/tcp/1") == "203.0"
        and group_of("/dns4/example.org/tcp/1") == NAME
        and group_of("junk") is None
    )
    assert (
        only_here("/ip4/127.0.0.1/tcp/1")
        and only_here("/ip6/fe80::1/tcp/1")
        and not only_here("/ip4/10.0.0.1/tcp/1")
    )


def test_a_peer_that_stays_connected_is_not_treated_as_gone(book: AddressBook) -> None:
    know(book, 1)
    dial(book, peer(0))
    book.still_connected([peer(0), peer(1)], NOW + 40 * DAY)
    assert not book.known[peer(0)].terrible(NOW + 40 * DAY) and peer(1) not in book.known
    book.changed = False
    book.still_connected([peer(0)], NOW + 40 * DAY + 60)
    assert not book.changed, "the time was recorded more often than hourly"


def test_peers_of_one_group_can_add_addresses_to_only_a_part_of_the_book(book: AddressBook) -> None:
    for n in range(5000):
        book.add(peer(n), [at(n)], NOW, teller=peer(10_000 + n % 200), source="66.1")
    assert SIZE < len(book.known) <= NEW_REACH * SIZE


def test_addresses_of_one_group_have_few_places_whatever_the_source(book: AddressBook) -> None:
    for n in range(400):
        book.add(peer(n), [at(7, n)], NOW, source="66.1")
    assert len(book.known) == SHARE
    for n in range(400, 800):
        book.add(peer(n), [at(7, n)], NOW, source="66.2")
    assert SHARE < len(book.known) <= 2 * SHARE


def test_a_swarm_on_a_local_network_fits_into_the_book(book: AddressBook) -> None:
    for n in range(30):
        book.add(peer(n), [f"/ip4/192.168.1.{n}/tcp/4001"], NOW, source=LOCAL)
    assert len(book.known) == 30
    for n in range(30, 1000):
        book.add(peer(n), [f"/ip4/192.168.1.{n % 250}/tcp/{n}"], NOW, source=LOCAL)
    assert len(book.known) <= LOCAL_REACH * SIZE


def test_another_secret_key_gives_other_buckets() -> None:
    together = []
    for key in (KEY, KEY[::-1]):
        book = AddressBook(ME, key)
        for n in range(200):
            book.add(peer(n), [at(n)], NOW, source=f"{n}")
        assert len(book.known) == 200
        together.append({frozenset(bucket) for bucket in book._tables._buckets.values() if len(bucket) > 1})
    assert len(together[0]) > 30 and len(together[0] & together[1]) < 3


def test_addresses_from_a_peer_that_reports_too_many_are_ignored(book: AddressBook) -> None:
    def tell(start: int, now: float, teller: PeerId) -> int:
        before = len(book.known)
        for n in range(start, start + 500):
            book.add(
                peer(n), [at(n)], now, teller=teller, source=f"{n}"
            )  # from different sources, so that no bucket fills
        return len(book.known) - before

    told = [tell(0, NOW, peer(9000)), tell(500, NOW + 100, peer(9000)), tell(1000, NOW + 100, peer(9001))]
    assert told == [TOLD_AT_ONCE, 10, TOLD_AT_ONCE]
    assert tell(2000, NOW, peer(9001)) == 0  # a clock set back gives no tokens
    book.add(peer(0), [at(1)], NOW, teller=peer(9000))  # a known peer needs no token
    assert book.known[peer(0)].addresses == [at(0), at(1)]


def test_addresses_from_the_peer_itself_replace_those_from_other_peers(book: AddressBook) -> None:
    book.add(peer(1), [at(1)], NOW, teller=peer(9))
    for n in range(2, 30):
        book.add(peer(1), [at(n)], NOW, teller=peer(9))
    assert book.known[peer(1)].addresses == [at(n) for n in range(1, 1 + MAX_ADDRESSES)]
    book.add(peer(1), [at(50), at(51)], NOW, source=group_of(at(51)))
    assert book.known[peer(1)].addresses == [at(51), at(50)] and book.known[peer(1)].itself
    dial(book, peer(1))
    book.add(peer(1), [at(60)], NOW, teller=peer(9))
    assert book.known[peer(1)].addresses == [
        at(51),
        at(50),
    ]  # the peer answered, so addresses from other peers are ignored
    book.add(peer(1), [at(61)], NOW)
    assert book.known[peer(1)].addresses == [at(51), at(61)]  # the address that worked is kept


def test_private_addresses_from_distant_tellers_are_dropped(book: AddressBook) -> None:
    """Otherwise this node would look up such names, and dial its own loopback.

    Private networks come last, because they are rarely this node's network.
    """
    said = [
        "/ip4/127.0.0.1/tcp/1",
        "/ip4/192.168.0.9/tcp/1",
        at(3),
        "/dns4/example.org/tcp/1",
        "/ip4/224.0.0.1/tcp/1",
        "/ip6/fe80::1/tcp/1",
    ]
    book.add(peer(1), said, NOW, source=group_of(at(3)))
    assert book.known[peer(1)].addresses == [at(3), "/ip4/192.168.0.9/tcp/1"]
    book.add(peer(2), said, NOW, source=LOCAL)
    assert book.known[peer(2)].addresses == [
        "/ip4/127.0.0.1/tcp/1",
        "/ip4/192.168.0.9/tcp/1",
        "/ip6/fe80::1/tcp/1",
        at(3),
    ]
    book.succeeded(peer(2), at(3), NOW)
    assert book.known[peer(2)].addresses[:2] == [
        at(3),
        "/ip4/127.0.0.1/tcp/1",
    ]  # the address that worked comes first
    book.add(peer(3), said[3:5], NOW)
    book.add(ME, said, NOW)
    pin(book, ME, at(1))  # every node has the same bootstrap list, which includes itself
    assert peer(3) not in book.known and ME not in book.known


def test_candidates_are_drawn_by_group(book: AddressBook) -> None:
    for n in range(64):
        book.add(peer(n), [at(1, n)], NOW, source=f"{n}")
    for n in range(4):
        book.add(peer(100 + n), [at(2 + n)], NOW, source=f"{n}")
    for who in list(book.known):
        dial(book, who)
    first = Counter(
        group_of(book.candidates(NOW, random.Random(seed), count=1)[0][1][0]) for seed in range(300)
    )
    assert first[group_of(at(1))] < 120 and len(first) == 5
    others = {
        addresses[0] for _, addresses in book.candidates(NOW, random.Random(0), avoid={group_of(at(1)) or ""})
    }
    assert others == {at(2 + n) for n in range(4)}


def test_addresses_of_a_peer_are_dialled_one_group_at_a_time(book: AddressBook) -> None:
    book.add(peer(1), [at(1), at(2), at(1, 9)], NOW)
    assert book.candidates(NOW, random.Random(0)) == [(peer(1), [at(1), at(1, 9)])]
    assert book.candidates(NOW, random.Random(0), avoid={group_of(at(1)) or ""}) == [(peer(1), [at(2)])]
    book.failed(peer(1), NOW, [at(1), at(1, 9)])
    assert book.candidates(NOW + 2, random.Random(0)) == [(peer(1), [at(2)])]


def test_peers_that_were_reached_before_come_first(book: AddressBook) -> None:
    know(book, 40)
    for n in range(4):
        dial(book, peer(n))
    first = Counter(
        book.candidates(NOW, random.Random(seed), count=1)[0][0] in {peer(n) for n in range(4)}
        for seed in range(400)
    )
    assert first[True] > 350 and first[False] > 3
    everybody = [who for who, _ in book.candidates(NOW, random.Random(1))]
    assert len(everybody) == len(set(everybody)) == 40


def test_a_peer_that_dialled_us_does_not_count_as_reached(book: AddressBook) -> None:
    book.add(peer(1), [at(1)], NOW)
    book.succeeded(peer(1), None, NOW)
    assert tried(book) == 0
    dial(book, peer(1))
    assert tried(book) == 1


def test_candidates_are_due_and_in_seeded_order(book: AddressBook) -> None:
    for n in range(20):
        book.add(peer(n), [at(n)], NOW)
    orders = [[who for who, _ in book.candidates(NOW, random.Random(seed))] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2] and len(set(orders[2])) == 20
    book.failed(peer(0), NOW)
    assert [peer(0) in dict(book.candidates(NOW + late, random.Random(1))) for late in (0.9, 1.1)] == [
        False,
        True,
    ]
    assert peer(1) not in dict(book.candidates(NOW, random.Random(1), without={peer(1)}))


def test_a_clock_set_back_does_not_keep_peers_from_being_dialled(book: AddressBook) -> None:
    pin(book, peer(1), at(1))
    book.add(peer(2), [at(2)], NOW)
    for who in (peer(1), peer(2)):
        book.failed(who, NOW + 7200)
    assert dict(book.bootstraps(NOW)) and set(dict(book.candidates(NOW, random.Random(1)))) == {
        peer(1),
        peer(2),
    }


def test_an_id_of_another_key_type_does_not_break_the_file(book: AddressBook) -> None:
    book.add(peer(1), [at(1)], NOW)
    for name in (
        "5T",
        "16Uiu2HAmNLtLvEjYNQ1faAae5Uinin6jv7eGTPt5t7W3dp8u1ajT",
        "QmbxZcDMQKGaEGpCHYLyeARpzKnq88DDnPWZKk4BUjkH92",
    ):
        book.add(PeerId(name), [at(2)], NOW, teller=peer(1))
    again = AddressBook(ME, KEY)
    again.restore(book.dump(), NOW)
    assert peer(1) in again.known


def test_waits_grow_but_stay_short_for_recently_seen_peers(book: AddressBook) -> None:
    pin(book, peer(1), at(1))
    book.add(peer(2), [at(2)], NOW - 10_000)

    def waits(who: PeerId, start: float) -> list[float]:
        found = []
        for _ in range(12):
            book.failed(who, start)
            found.append(book.known[who].due(start) - start)
            start += found[-1]
        return found

    assert waits(peer(1), NOW) == [1, 2, 4] + [8] * 9  # short waits, because a bootstrap node may be starting
    assert waits(peer(2), NOW)[-1] == 300
    book.lost(peer(2), NOW)
    assert book.known[peer(2)].due(NOW) == 0 and waits(peer(2), NOW)[3:8] == [8] * 5


def test_peers_that_never_answer_are_removed_unless_the_node_was_offline(book: AddressBook) -> None:
    book.add(peer(1), [at(1)], NOW)
    book.add(peer(2), [at(2)], NOW)
    for hour in range(1, 30):  # no peer answers, so this node is offline
        book.failed(peer(1), NOW + 4000 * hour)
    assert peer(1) in book.known
    for hour in range(30, 33):
        for second in range(5):  # failures within seconds count as one
            book.succeeded(peer(2), at(2), NOW + 4000 * hour + second)
            book.failed(peer(1), NOW + 4000 * hour + second)
            assert peer(1) in book.known or hour == 32
    assert peer(1) not in book.known


def test_a_reached_peer_is_kept_through_a_week_of_failures(book: AddressBook) -> None:
    book.add(peer(1), [at(1)], NOW)
    book.add(peer(2), [at(2)], NOW)
    dial(book, peer(1))
    hours = 0
    while peer(1) in book.known:
        hours += 2
        book.succeeded(peer(2), at(2), NOW + 3600 * hours - 1)
        book.failed(peer(1), NOW + 3600 * hours)
    assert 7 * 24 < hours <= 7 * 24 + 4


def test_a_peer_reached_while_the_clock_was_far_ahead_is_not_kept_longer(
    book: AddressBook,
) -> None:
    """Otherwise the peer would keep its place and be dialled all the time until the clock catches up."""
    for n in (1, 2):
        book.add(peer(n), [at(n)], NOW + 3650 * DAY)
        dial(book, peer(n), NOW + 3650 * DAY)
    again = AddressBook(ME, KEY)
    again.restore(book.dump(), NOW)
    for hours in range(2, 8 * 24, 2):
        again.succeeded(peer(2), at(2), NOW + 3600 * hours - 1)
        again.failed(peer(1), NOW + 3600 * hours)
    assert peer(1) not in again.known and peer(2) in again.known


def test_new_entries_replace_old_entries(book: AddressBook) -> None:
    book.add(peer(1), [at(1)], NOW)
    assert book.candidates(NOW + 29 * DAY, random.Random(0)) and not book.candidates(
        NOW + 31 * DAY, random.Random(0)
    )
    for n in range(SHARE):
        book.add(peer(10 + n), [at(5, n)], NOW, source="66.1")
    book.add(peer(20), [at(5, 20)], NOW + DAY, source="66.1")
    assert peer(20) not in book.known
    book.add(peer(20), [at(5, 20)], NOW + 31 * DAY, source="66.1")
    assert peer(20) in book.known


def test_a_tried_peers_place_is_given_away_only_if_the_peer_is_gone(book: AddressBook) -> None:
    for n in range(SHARE + 1):
        book.add(peer(n), [at(1, n)], NOW + n, source=f"{n}")
        dial(book, peer(n), NOW + n)
    assert tried(book) == SHARE and not book.known[peer(SHARE)].tried
    for n in range(1, SHARE):
        dial(book, peer(n), NOW + 31 * DAY)
    dial(book, peer(SHARE), NOW + 31 * DAY)
    assert book.known[peer(SHARE)].tried and tried(book) == SHARE and peer(0) not in book.known


def test_gone_peers_of_a_group_do_not_keep_newcomers_out(book: AddressBook) -> None:
    """All machines of a campus have addresses in one group."""
    for n in range(2 * SHARE):
        book.add(peer(n), [at(5, n)], NOW, source="66.1")
        dial(book, peer(n))
    book.add(peer(99), [at(6)], NOW)
    for n in range(2 * SHARE):
        book.succeeded(peer(99), at(6), NOW + n)
        book.failed(peer(n), NOW + n)
    for n in range(100, 100 + 2 * SHARE):
        book.add(peer(n), [at(5, n)], NOW + 60, source="66.1")
        if peer(n) in book.known:
            dial(book, peer(n), NOW + 60)
    assert len(book.known) == 2 * SHARE + 1 and all(peer(n) not in book.known for n in range(2 * SHARE))


def test_a_feeler_dials_a_peer_that_was_never_reached(book: AddressBook) -> None:
    assert book.feeler(NOW, random.Random(0)) is None
    know(book, 10)
    for n in range(9):
        dial(book, peer(n))
    assert all(book.feeler(NOW, random.Random(seed)) == (peer(9), [at(9)]) for seed in range(20))
    assert book.feeler(NOW, random.Random(0), without={peer(9)}) is None


def test_half_of_the_unreached_candidates_are_peers_that_dialled_the_node(book: AddressBook) -> None:
    """One peer names addresses in a hundred groups; two other peers connect and state their addresses."""
    for n in range(30):
        book.add(peer(n), [at(n)], NOW, teller=peer(99), source="66.1")
    for n in (200, 201):
        book.add(peer(n), [at(n)], NOW, source=group_of(at(n)))
    drawn = Counter(
        found[0] in (peer(200), peer(201))
        for seed in range(400)
        if (found := book.feeler(NOW, random.Random(seed)))
    )
    assert 0.5 < drawn[True] / 400 < 0.85


def test_a_peer_of_another_swarm_is_removed_unless_the_operator_named_it(book: AddressBook) -> None:
    pin(book, peer(1), at(1))
    book.add(peer(2), [at(2)], NOW)
    for who in (peer(1), peer(2), peer(3)):
        book.stranger(who, NOW)
    assert (
        peer(1) in book.known
        and peer(2) not in book.known
        and not book.bootstraps(NOW + 5)
        and book.bootstraps(NOW + 10)
    )


Step = tuple[str, int, int, int, float]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["heard", "told", "dial", "inbound", "failed", "lost", "stranger", "pin"]),
        st.integers(0, 60), st.integers(0, 6), st.integers(0, 3), st.floats(0, 3 * DAY),
    ),
    max_size=150,
)  # fmt: skip


def play(book: AddressBook, steps: list[Step]) -> float:
    now = NOW
    for what, who, group, source, wait in steps:
        now += wait
        address, its = at(group, who), [f"{source}", LOCAL, None, group_of(at(group))][source]
        match what:
            case "heard":
                book.add(peer(who), [address, "/ip4/10.0.0.1/tcp/1"], now, source=its)
            case "told":
                book.add(peer(who), [address], now, teller=peer(1000 + source), source=its)
            case "dial" if peer(who) in book.known:
                dial(book, peer(who), now)
            case "inbound":
                book.succeeded(peer(who), None, now)
            case "failed":
                book.failed(peer(who), now, [address])
            case "lost":
                book.lost(peer(who), now)
            case "stranger":
                book.stranger(peer(who), now)
            case "pin" if who < 3:
                pin(book, peer(who), address)
    return now


@settings(derandomize=True, max_examples=150, deadline=None)
@given(STEPS)
def test_the_limits_hold_after_any_sequence_of_events(steps: list[Step]) -> None:
    book = AddressBook(ME, KEY)
    now = play(book, steps)
    everybody = book.candidates(now + 400, random.Random(0))
    assert len(everybody) == len(dict(everybody)) <= len(book.known) <= MAX_PEERS
    places: Counter[object] = Counter()
    alike: Counter[object] = Counter()
    for place, bucket in book._tables._buckets.items():
        places[place] += len(bucket)
        alike.update((place, group) for group in bucket.values() if group != LOCAL)
        assert all(
            book._tables._place[who] == place and who in book.known and not book.known[who].pinned
            for who in bucket
        )
        assert all(book.known[who].tried == (place[0] == "tried") for who in bucket)
    assert all(count <= SIZE for count in places.values()) and all(count <= SHARE for count in alike.values())
    assert sum(places.values()) == sum(
        not book.known[who].pinned for who in book.known
    )  # each peer has one place
    for who, addresses in everybody:
        assert (
            addresses
            and len({group_of(address) for address in addresses}) == 1
            and len(book.known[who].addresses) <= MAX_ADDRESSES
        )
    again = AddressBook(ME, bytes(16))
    again.restore(book.dump(), NOW)
    assert set(again.known) <= set(book.known)
    assert again._tables.key == KEY


def test_peers_are_restored_from_the_file(book: AddressBook, tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    for n in range(60):
        book.add(peer(n), [at(n), at(n, 9)], NOW + n, teller=peer(99), source=f"{n % 7}")
    for n in range(0, 40, 2):
        dial(book, peer(n), NOW + 100)
    assert book.changed
    AddressBookFile(book, path, lambda: NOW).save()
    again = AddressBook(ME, bytes(16))
    file = AddressBookFile(again, path, lambda: NOW)
    assert not again.changed and not book.changed and tried(again) == tried(book) == 20
    assert again._tables._place == book._tables._place and path.stat().st_mode & 0o777 == 0o600
    where, before = (
        [(of[p].addresses, of[p].proved) for p in map(peer, range(40))] for of in (again.known, book.known)
    )
    assert where == before and before[0][1] == at(0) and before[1][1] == ""
    again.changed = True
    file.save()
    assert json.loads(path.read_text())["key"] == KEY.hex() and not again.changed


@pytest.mark.parametrize("dated, now", [(315_532_800.0, NOW), (NOW, 0.0)])
def test_a_wrong_file_date_or_clock_loses_no_peer(
    book: AddressBook, tmp_path: Path, dated: float, now: float
) -> None:
    path = tmp_path / "peers.json"
    book.add(peer(1), [at(1)], NOW)
    AddressBookFile(book, path, lambda: NOW).save()
    os.utime(path, (dated, dated))
    AddressBookFile(again := AddressBook(ME, KEY), path, lambda: now)
    assert not again.known[peer(1)].terrible(NOW + DAY)


async def test_saving_blocks_no_other_task_and_loses_no_change(
    book: AddressBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told, go_on = tmp_path / "peers.json", threading.Event(), threading.Event()
    file, fsync = AddressBookFile(book, path, lambda: NOW), os.fsync

    def slow(descriptor: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        told.set()
        assert go_on.wait(TIMEOUT_S)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(addressbook_file, "SAVE_EVERY_S", 0.01)
    book.add(peer(1), [at(1)], NOW)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(file.save_regularly)
        await until(told.is_set)
        book.add(peer(2), [at(2)], NOW)
        go_on.set()
        await until(lambda: path.exists() and not book.changed)
        nursery.cancel_scope.cancel()
    assert set(json.loads(path.read_text())["peers"]) == {peer(1), peer(2)}


def test_an_unwritable_folder_is_reported_once(
    book: AddressBook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "peers"
    file = AddressBookFile(book, folder / "peers.json", lambda: NOW)

    def save() -> None:
        book.changed = True
        file.save()

    for _ in range(2):
        folder.write_text("no folder")
        save()
        save()
        folder.unlink()
        save()
        shutil.rmtree(folder)
    assert caplog.text.count("cannot write") == 2


def test_a_former_bootstrap_peer_is_an_ordinary_peer(book: AddressBook) -> None:
    """No peer has named it since the file was written, so its age is the file's."""
    pin(book, peer(1), at(1))
    again = AddressBook(ME, KEY)
    again.restore(book.dump(), NOW)
    assert again.candidates(NOW + DAY, random.Random(0)) == [(peer(1), [at(1)])] and not again.bootstraps(NOW)


ENTRY = {
    "addresses": [at(1)],
    "proved": "",
    "source": "",
    "itself": False,
    "tried": False,
    "heard": NOW,
    "last_success": 0,
    "misses": 0,
    "missed": 0,
}


def file(**change: Any) -> bytes:
    return json.dumps({"schema": 1, "key": KEY.hex(), "peers": {}} | change).encode()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"schema": 1, "peers": {}}', b'{"schema": 1}']
    + [file(**wrong) for wrong in ({"key": "00"}, {"key": "zz" * 16}, {"key": None})]
    + [file(schema=2)]
    + [file(peers=wrong) for wrong in ([ENTRY], {peer(1): 7}, {"x": ENTRY}, 1)]
    + [file(peers={peer(1): ENTRY | wrong}) for wrong in ({"heard": "x"}, {"heard": True}, {"heard": 1e300})]
    + [file(peers={peer(1): ENTRY | {"misses": wrong}}) for wrong in (None, -1)]
    + [file(peers={peer(1): ENTRY | {"last_success": wrong}}) for wrong in ("then", None)]
    + [file(peers={peer(1): ENTRY | {"addresses": wrong}}) for wrong in ("x", [7], None)],
)  # fmt: skip
def test_a_damaged_file_is_set_aside(
    book: AddressBook, content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    AddressBookFile(book, path, lambda: NOW)
    assert (
        len(book.known) == 0
        and not path.exists()
        and (tmp_path / "peers.json.corrupt").read_bytes() == content
    )
    assert "was damaged" in caplog.text and "peers must be found again" in caplog.text


def test_the_file_of_the_largest_book_can_be_read() -> None:
    long = [
        f"/ip6/ffff:ffff:ffff:ffff:ffff:ffff:ffff:{n:x}/tcp/65535"
        for n in range(0x1000, 0x1000 + MAX_ADDRESSES)
    ]
    peers = {
        peer(n): Known(
            long, [], long[0], "ffffffff", True, 1e9 + 1 / 3, 1e9 + 1 / 3, 0, 0, 10**6, 1e9 + 1 / 3, True
        )
        for n in range(MAX_PEERS)
    }
    book = AddressBook(ME, bytes(64))
    book.known = peers
    content = book.dump()
    assert len(content) < MAX_FILE_BYTES
    again = AddressBook(ME, KEY)
    again.restore(content, NOW)
    assert 0 < len(again.known) < MAX_PEERS  # not all, because the peers are of one group
