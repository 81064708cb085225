"""The order in which peers are asked for a blob."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from p2p.blobs.blobs import HEARD_AUTHORS, MAX_HOLDERS, MAX_STRANGERS, Providers
from p2p.types import PeerId

PEERS = [PeerId(f"peer {n}") for n in range(100)]
A, B, C, D, E = PEERS[:5]


def after(heard: Sequence[PeerId]) -> Providers:
    holders = Providers()
    for author in heard:
        holders.note(author)
    return holders


def test_named_holders_come_first_then_connected_then_recent_strangers() -> None:
    holders = after([C, D, B, A, C])
    assert holders.likely([B], [E, B]) == [B, E, C, A, D]


def test_a_crowd_of_connected_leaves_room_for_strangers_and_strangers_for_them() -> None:
    found = after(PEERS[50:]).likely([A], PEERS[:50])
    assert found == [*PEERS[: MAX_HOLDERS - MAX_STRANGERS], *reversed(PEERS[-MAX_STRANGERS:])]
    assert after([A]).likely([], PEERS[:50]) == PEERS[:MAX_HOLDERS]  # nobody strange was heard


@given(
    st.lists(st.sampled_from(PEERS), max_size=300),
    st.lists(st.sampled_from(PEERS), max_size=2),
    st.lists(st.sampled_from(PEERS), unique=True),
)
def test_the_number_of_providers_is_bounded(
    heard: Sequence[PeerId], named: Sequence[PeerId], connected: Sequence[PeerId]
) -> None:
    found = after(heard).likely(named, connected)
    strange = [peer for peer in found if peer not in {*named, *connected}]
    assert len(found) == len(set(found)) <= MAX_HOLDERS
    assert set(named) <= set(found)
    assert len(strange) <= MAX_STRANGERS
    assert set(strange) <= set(list(dict.fromkeys(reversed(heard)))[:HEARD_AUTHORS])
