import random
from collections.abc import Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2p.admission import inbox as limits_of
from p2p.admission.inbox import Inbox
from p2p.admission.replays import AHEAD_S, FRAMES
from p2p.envelope import MAX_FRAME_BYTES, seal
from p2p.identity import Identity
from p2p.topic import Topic
from p2p.types import Envelope, PeerId, Reason, Verdict
from tests.doubles import NOW, TOPIC

SWARM = TOPIC.swarm_id
ME, A, B = (Identity(bytes([n]) * 32) for n in (1, 2, 3))


def inbox(not_before: float = 0.0, **limits: float) -> Inbox:
    """Make an inbox with other limits than the default, such as FRAMES_AT_ONCE."""
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(limits_of, name, limit)
        return Inbox(ME.peer_id, SWARM, not_before=not_before)


def frame(author: Identity, sequence: int, at: float = NOW, body: bytes = b"body") -> bytes:
    return seal(author, SWARM, sequence, at, "rollouts", body)


def forged(author: Identity, sequence: int, at: float = NOW) -> bytes:
    return frame(author, sequence, at)[:-64] + bytes(64)


def reason(outcome: Envelope | Reason) -> Reason | None:
    return outcome if isinstance(outcome, Reason) else None


def reasons(
    box: Inbox, frames: Iterable[bytes], now: float, via: PeerId | None = None
) -> list[Reason | None]:
    """Return the reason why each frame is rejected; None if it is admitted."""
    return [reason(box.receive(one, now, via)) for one in frames]


def test_each_rule_rejects_frames() -> None:
    box = inbox()
    assert box.receive(frame(A, 1), NOW) == Envelope(A.peer_id, 1, NOW, "rollouts", b"body")
    assert [reason(box.receive(frame(A, n, NOW + late), NOW)) for n, late in ((5, -299), (6, 9))] == [
        None,
        None,
    ]
    other_swarm = seal(A, Topic("other", "0").swarm_id, 2, NOW, "rollouts", b"")
    cases = {
        b"\x00" * (MAX_FRAME_BYTES + 1): Reason.TOO_LARGE,
        b"": Reason.MALFORMED,
        frame(A, 2).replace(b"swarmd\x01", b"swarmd\x02"): Reason.WRONG_VERSION,
        other_swarm: Reason.OTHER_SWARM,
        frame(ME, 2): Reason.OWN_ECHO,
        frame(A, 2, NOW - 301): Reason.STALE,
        frame(A, 2, NOW + 11): Reason.STALE,
        frame(A, 1): Reason.DUPLICATE,
        forged(A, 2): Reason.BAD_SIGNATURE,
    }
    for hostile, expected in cases.items():
        assert reason(box.receive(hostile, NOW)) is expected
    assert Reason.STALE.verdict is Verdict.IGNORE  # the forwarding peer is not to blame for a wrong clock


def test_frames_of_an_author_are_admitted_in_any_order_but_only_once() -> None:
    box, rng = inbox(), random.Random(0)
    frames = [frame(A, n, NOW + n / 10) for n in range(60)]
    for f in rng.sample(frames, 60):
        assert [reason(box.receive(f, NOW + 6)) for _ in range(2)] == [None, Reason.DUPLICATE]
    again = frame(A, 7, NOW + 6, b"another body")
    assert reason(box.receive(again, NOW + 6)) is Reason.DUPLICATE  # no sequence number is admitted twice


def test_a_frame_from_the_future_makes_only_frames_of_its_author_old() -> None:
    box = inbox(FRAMES_AT_ONCE=1000)
    assert all(reason(box.receive(frame(A, n, NOW + 10 - n / 1e3), NOW)) is None for n in range(FRAMES + 1))
    assert reason(box.receive(frame(A, 100, NOW), NOW)) is Reason.OLD and Reason.OLD.verdict is Verdict.IGNORE
    assert reason(box.receive(frame(B, 1, NOW - 299), NOW)) is None


def test_two_nodes_with_one_key_are_both_heard() -> None:
    """The numbers of the node that started later come from its clock, so they are larger."""
    box = inbox()
    assert reasons(box, [frame(A, n) for n in (10**12, 5, 10**12 + 1, 6)], NOW) == [None] * 4


def test_a_restart_admits_no_replays() -> None:
    old = [frame(A, n, NOW) for n in range(10)]
    box = inbox(not_before=NOW + 1)
    assert all(reason(box.receive(f, NOW + 2)) is Reason.OLD for f in old)
    assert reason(box.receive(frame(A, 11, NOW + 2), NOW + 2)) is None


def test_a_clock_that_was_ahead_at_the_start_does_not_reject_new_frames() -> None:
    box, later = inbox(not_before=NOW + 7200), NOW + AHEAD_S
    assert reasons(box, [frame(A, 1, NOW + 1)], NOW) == [Reason.OLD]
    assert reasons(box, [frame(A, 2, later), frame(A, 3, later - 1)], later) == [None, Reason.OLD]


def test_an_authors_quota_limits_frames_and_bytes() -> None:
    box = inbox(FRAMES_AT_ONCE=10, FRAMES_PER_S=2)
    # Another author is not affected.
    frames = [*(frame(A, n) for n in range(12)), frame(B, 1)]
    assert reasons(box, frames, NOW) == [None] * 10 + [Reason.OVER_QUOTA] * 2 + [None]
    later = [frame(A, 20 + n, NOW + 1) for n in range(3)]
    assert reasons(box, later, NOW + 1) == [None, None, Reason.OVER_QUOTA]
    box = inbox(BYTES_AT_ONCE=100_000, BYTES_PER_S=1000)
    large = [frame(A, n, body=bytes([n]) * 32_000) for n in range(5)]
    assert reasons(box, large, NOW) == [None] * 3 + [Reason.OVER_QUOTA] * 2
    assert Reason.OVER_QUOTA.verdict is Verdict.IGNORE


def test_each_connection_has_a_separate_quota() -> None:
    box, frames = inbox(FRAMES_AT_ONCE=10_000), [frame(A, n, NOW + n / 1e3) for n in range(700)]
    assert reasons(box, frames, NOW, B.peer_id) == [None] * 600 + [Reason.FLOODING] * 100
    assert reasons(inbox(FRAMES_AT_ONCE=10_000), frames, NOW) == [None] * 700, (
        "a frame of an unknown connection was rejected"
    )
    # Another peer may forward a frame that exceeded the quota of one peer.
    assert reasons(box, frames[600:601], NOW, ME.peer_id) + reasons(box, frames[601:602], NOW) == [None] * 2
    assert reasons(box, frames[602:605], NOW + 0.0125, B.peer_id) == [None, None, Reason.FLOODING]
    box = inbox(VIA_BYTES_AT_ONCE=100_000, VIA_BYTES_PER_S=1000)
    large = [frame(A, n, body=bytes([n]) * 32_000) for n in range(5)]
    assert reasons(box, large, NOW, B.peer_id) == [None] * 3 + [Reason.FLOODING] * 2
    assert Reason.FLOODING.verdict is Verdict.IGNORE


EVENTS = st.lists(st.tuples(st.integers(0, 39), st.integers(-400, 400), st.integers(0, 2)), max_size=80)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(EVENTS, st.integers(1, 3))
@example([(0, 0, 1), (19, 380, 1), (0, -380, 1)], 3)  # the author is forgotten, then the clock is set back
def test_no_frame_is_admitted_twice_in_any_order_with_any_clock(
    events: list[tuple[int, int, int]], authors: int
) -> None:
    """The memory is tiny, the node's clock jumps by minutes, and all frames are repeated after each step."""
    box = inbox(MAX_AUTHORS=authors, FRAMES_AT_ONCE=10_000, VIA_FRAMES_AT_ONCE=10**6)
    frames = [frame((A, B)[n % 2], n // 2, NOW + 20 * n) for n in range(40)]
    now, came = NOW, list[bytes]()
    for n, jump, via in events:
        now += jump
        for f in [frames[n], *frames[: n + 1]]:
            if isinstance(box.receive(f, now, (None, A.peer_id, B.peer_id)[via]), Envelope):
                came.append(f)
    assert len(came) == len(set(came))


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 200), st.integers(0, 300), st.booleans()), max_size=80)
)
def test_forged_frames_do_not_use_up_an_authors_quota(
    events: list[tuple[bool, int, int, bool]],
) -> None:
    """Forgeries with any numbers, over any connection, do not change which frames of A are admitted."""
    alone, attacked = (
        inbox(FRAMES_AT_ONCE=5, FRAMES_PER_S=2, BYTES_AT_ONCE=3000, BYTES_PER_S=900) for _ in range(2)
    )
    now = NOW
    for n, (is_forged, passed, size, by_connection) in enumerate(events):
        now += passed / 1000
        f = frame(A, n, now, bytes(size))
        if is_forged:
            hostile = forged(A, (n, 2**60)[size % 2], now)
            assert isinstance(attacked.receive(hostile, now, B.peer_id if by_connection else None), Reason)
        else:
            assert attacked.receive(f, now, A.peer_id) == alone.receive(f, now, A.peer_id)


def test_many_authors_do_not_increase_the_memory() -> None:
    box, rng = inbox(MAX_AUTHORS=50), random.Random(0)
    strangers = [Identity(rng.randbytes(32)) for _ in range(300)]
    frames = [frame(stranger, 1, NOW + n) for n, stranger in enumerate(strangers)]
    came = [f for n, f in enumerate(frames) if reason(box.receive(f, NOW + n, strangers[n].peer_id)) is None]
    assert len(came) > 200 and len(box._replays._authors) <= 50
    assert all(
        reason(box.receive(f, NOW + 300)) in (Reason.DUPLICATE, Reason.OLD, Reason.STALE) for f in came
    )


def test_the_longest_silent_author_is_forgotten_first() -> None:
    """The first author seen is not the longest silent one, so it is still remembered."""
    box, last = inbox(MAX_AUTHORS=2), [frame(B, 1, NOW + 1), frame(A, 2, NOW + 60)]
    assert reasons(box, [frame(A, 1), last[0]], NOW + 1) + reasons(box, last[1:], NOW + 60) == [None] * 3
    newcomer = frame(Identity(bytes(32)), 1, NOW + 70)
    assert reasons(box, [newcomer, *last], NOW + 70) == [None, Reason.OLD, Reason.DUPLICATE]


def test_a_crowd_of_authors_displaces_only_its_own_members() -> None:
    """A known author keeps its place while the crowd or the author itself is silent."""
    box, rng = inbox(MAX_AUTHORS=64), random.Random(0)
    crowd = [Identity(rng.randbytes(32)) for _ in range(900)]
    known, last = frame(A, 0), frame(B, 0, NOW + 1)
    assert reasons(box, [known], NOW, A.peer_id) == [None]
    # The crowd's frames come over one connection, then over five.
    for n, author in enumerate(crowd):
        via = ME.peer_id if n < 500 else crowd[n % 5].peer_id
        now = NOW + n / 10
        assert reason(box.receive(frame(author, 0, now), now, via)) is None
    # Forgotten authors are admitted again, but their earlier frames are too old.
    assert reasons(box, [frame(crowd[0], 0), frame(crowd[0], 1, NOW + 90)], NOW + 90) == [Reason.OLD, None]
    assert reasons(box, [known, last], NOW + 90, A.peer_id) == [Reason.DUPLICATE, None]
    assert len(box._replays._authors) == 64


def test_forged_frames_displace_no_author() -> None:
    box = inbox(MAX_AUTHORS=2)
    known = [frame(A, 1), frame(B, 1)]
    assert reasons(box, known, NOW) == [None] * 2
    for n in range(10):
        assert reason(box.receive(forged(Identity(bytes([50 + n]) * 32), 1), NOW)) is Reason.BAD_SIGNATURE
    assert reasons(box, known, NOW) == [Reason.DUPLICATE] * 2
