"""Inbound slots: a full node accepts newcomers, and a crowd displaces no other peers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.admission import inbound_slots
from p2p.admission.inbound_slots import SERVED_S, InboundSlots, one_too_many

NEWCOMER = "77.77.0.1"


def full(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> InboundSlots:
    """Return full slots: these hosts occupy them since time 0.0, as connections and peers of their names."""
    monkeypatch.setattr(inbound_slots, "MOST", len(hosts))
    found = InboundSlots()
    for host in hosts:
        assert found.take(host, host, 0.0) is None
        found.held[host].peer = host
    return found


def test_the_longest_connected_peer_is_replaced_by_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = full(monkeypatch, "11.1.0.1", "11.2.0.1", "11.3.0.1")
    assert found.take(NEWCOMER, NEWCOMER, SERVED_S) == NEWCOMER
    assert found.take(NEWCOMER, NEWCOMER, SERVED_S + 1) == "11.1.0.1"
    assert list(found.held) == ["11.2.0.1", "11.3.0.1", NEWCOMER]


def test_a_reservation_and_a_handshake_keep_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    found = full(monkeypatch, "11.1.0.1", "11.2.0.1", "11.3.0.1")
    found.reserved = lambda peer: peer == "11.1.0.1"
    found.held["11.2.0.1"].peer = None
    assert found.take(NEWCOMER, NEWCOMER, SERVED_S + 1) == "11.3.0.1"
    assert found.take("78.78.0.1", "78.78.0.1", SERVED_S + 1) == "78.78.0.1"


def test_a_machine_that_displaced_a_peer_cannot_displace_another_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = full(monkeypatch, "11.1.0.1", "11.1.0.2", "11.1.0.3")
    assert found.take("first", "11.1.0.4", SERVED_S + 1) == "11.1.0.1"
    assert found.take("second", "11.1.0.4", SERVED_S + 1) == "second"


def test_nodes_behind_one_router_take_turns_at_a_full_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 113th machine of a campus must not be rejected permanently."""
    found = full(monkeypatch, "11.1.0.1", "11.1.0.2", "11.1.0.3")
    assert found.take("one more", "11.1.0.2", SERVED_S + 1) == "11.1.0.2"


def test_the_largest_group_loses_its_youngest_to_a_smaller_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = full(monkeypatch, "11.1.0.1", "11.2.0.1", "11.1.0.2")
    assert found.take(NEWCOMER, NEWCOMER, 0.0) == "11.1.0.2"
    assert found.take("11.1.0.3", "11.1.0.3", 0.0) == "11.1.0.3"


def test_a_groups_largest_machine_loses_its_youngest_connection() -> None:
    held = {0: ("a", "a1"), 1: ("a", "a1"), 2: ("a", "a2"), 3: ("b", "b1"), 4: ("b", "b1")}
    assert [one_too_many(held, new) for new in (("a", "a3"), ("a", "a2"), ("a", "a1"))] == [1, None, None]
    # In a larger group, the largest machine loses its youngest connection.
    assert one_too_many(held, ("c", "c1")) == 1 and one_too_many(held, ("b", "b2")) == 4
    assert one_too_many({0: ("a", "a1"), 1: ("a", "a2")}, ("c", "c1")) == 1
    assert one_too_many({}, ("c", "c1")) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 9), st.floats(0, 2 * SERVED_S)), min_size=1, max_size=60
    )
)
def test_a_group_displaces_only_connections_of_larger_groups(
    arrivals: list[tuple[int, int, float]],
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(inbound_slots, "MOST", 6)
        found, now = InboundSlots(), 0.0
        for n, (group, machine, pause) in enumerate(arrivals):
            now += pause
            before = Counter(place.group for place in found.held.values())
            leaving = found.take(n, host := f"11.{group}.0.{machine}", now)
            if leaving == n:
                assert n not in found.held
                continue
            found.held[n].peer = host
            assert leaving not in found.held and len(found.held) <= 6
            if leaving is not None:
                after = Counter(place.group for place in found.held.values())
                assert all(
                    before[other] > before[f"11.{group}"] for other in before if after[other] < before[other]
                )
