import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.admission.inbox import AdmissionLimits, Inbox
from p2p.admission.replay_log import MIN_JOURNAL_BYTES, RECORD_BYTES, ReplayLog
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.topic import Topic
from p2p.types import Envelope, Reason, Rejected

SWARM = Topic("main", "0123456789abcdef").swarm_id
ME, A, B = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
NOW = 1_700_000_000.0
BOOT = "this boot"


class Life:
    """An inbox with its file, from a start of the process to its end."""

    def __init__(self, path: Path, now: float, boot: str = BOOT, **limits: float) -> None:
        self.now = now
        self.file = ReplayLog(path, lambda: self.now, boot=boot)
        self.box = Inbox(
            ME.peer_id, SWARM, AdmissionLimits(**limits), memory=self.file.load(), note=self.file.note
        )  # type: ignore[arg-type]

    def hear(self, frame: bytes) -> Reason | None:
        outcome = self.box.receive(frame, self.now)
        return outcome.reason if isinstance(outcome, Rejected) else None

    def end(self) -> None:
        self.file.save(self.box.memory(), closed=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "seen"  # in a folder that is not there yet


def frame(author: Identity, sequence: int, at: float, body: bytes = b"body") -> bytes:
    return seal(author, SWARM, sequence, at, "rollouts", body)


def test_a_first_life_takes_nothing_that_was_sent_before_it(path: Path) -> None:
    life = Life(path, NOW)
    assert life.hear(frame(A, 1, NOW - 1)) is Reason.OLD and life.hear(frame(A, 2, NOW)) is None


@pytest.mark.parametrize("clean", [True, False])
def test_what_a_life_before_let_in_is_refused_and_the_rest_is_heard_at_once(path: Path, clean: bool) -> None:
    first = Life(path, NOW)
    sent = [frame(A, n, NOW + n / 2) for n in range(20)]
    assert all(first.hear(f) is None for f in sent)
    if clean:
        first.end()
    second = Life(path, NOW + 60)
    assert all(second.hear(f) is Reason.DUPLICATE for f in sent)
    assert second.hear(frame(A, 3, NOW + 59, b"another body")) is Reason.DUPLICATE  # the number was used
    assert second.hear(frame(B, 1, NOW + 1)) is None  # by a slow clock, or while we were away
    third = Life(path, NOW + 61)
    assert all(third.hear(f) is Reason.DUPLICATE for f in [*sent, frame(B, 1, NOW + 1)])


def test_a_power_cut_that_takes_the_journals_end_opens_no_door(path: Path) -> None:
    first, again = Life(path, NOW), path.with_name("again")
    # B's clock is fast
    sent = [frame(A, n, NOW + n * 0.1) for n in range(20)] + [frame(B, 1, NOW + 8), frame(B, 2, NOW + 9)]
    assert all(first.hear(f) is None for f in sent)
    # What fsync promised is there: the snapshot, and the records up to the last promise
    for kept in range(RECORD_BYTES * 24, -1, -RECORD_BYTES // 2):
        whole = path.read_bytes()
        promises = whole.rfind(bytes(32))
        shorter = max(len(whole) - RECORD_BYTES * 24 + kept, promises + RECORD_BYTES)
        for later in (1, 100, 299):
            again.write_bytes(whole[:shorter])
            life = Life(again, NOW + later, boot="the next boot")
            assert all(life.hear(f) in (Reason.DUPLICATE, Reason.OLD) for f in sent)


def test_after_a_power_cut_what_is_sent_from_the_promise_on_is_heard(path: Path) -> None:
    first = Life(path, NOW)
    first.now = NOW + 10
    assert first.hear(frame(A, 1, NOW + 20)) is None  # as far ahead as a clock may be
    second = Life(path, NOW + 90, boot="the next boot")
    assert second.hear(frame(B, 1, NOW + 70)) is Reason.OLD  # 60 s by our own clock, whatever A's says
    assert second.hear(frame(B, 2, NOW + 71)) is None


def test_where_the_system_does_not_tell_its_boots_only_a_clean_end_is_trusted(path: Path) -> None:
    first = Life(path, NOW, boot="")
    first.hear(frame(A, 1, NOW + 1))
    second = Life(path, NOW + 30, boot="")
    assert second.hear(frame(B, 1, NOW + 20)) is Reason.OLD
    second.end()
    assert Life(path, NOW + 80, boot="").hear(frame(B, 2, NOW + 70)) is None


@pytest.mark.parametrize(
    "damage", [lambda d: b"", lambda d: d[:20], lambda d: b"x" + d[1:], lambda d: d[:40] + b"\xff" + d[41:]]
)
def test_a_damaged_file_is_set_aside_and_the_next_life_is_strict(
    path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    first = Life(path, NOW)
    first.hear(frame(A, 1, NOW + 1))
    first.end()
    data = damage(path.read_bytes())
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        second = Life(path, NOW + 30)
    assert "damaged" in caplog.text and path.with_name("seen.corrupt").read_bytes() == data
    assert second.hear(frame(A, 1, NOW + 1)) is Reason.OLD and second.hear(frame(A, 2, NOW + 30)) is None


def test_damage_in_the_journal_makes_all_before_now_old(path: Path) -> None:
    first = Life(path, NOW)
    sent = [frame(A, n, NOW + n) for n in range(10)]
    for f in sent:
        assert first.hear(f) is None
    data = bytearray(path.read_bytes())
    for byte in (39, 44):  # in a sequence number and a time of sending
        data[-3 * RECORD_BYTES + byte] ^= 64
    path.write_bytes(data)
    second = Life(path, NOW + 30)
    assert all(second.hear(f) in (Reason.DUPLICATE, Reason.OLD) for f in sent)


def test_a_clock_that_was_set_back_does_not_keep_us_deaf(path: Path) -> None:
    Life(path, NOW + 7200).hear(frame(A, 1, NOW + 7200))
    assert Life(path, NOW).hear(frame(B, 1, NOW + 1)) is None


def test_the_file_is_small_private_and_written_anew_before_it_grows(path: Path) -> None:
    life = Life(path, NOW, frames_burst=10_000)
    for n in range(6000):
        life.now = NOW + n / 100
        assert life.hear(frame(A, n, life.now)) is None
        if life.file.due:
            life.file.save(life.box.memory())
        assert path.stat().st_size < MIN_JOURNAL_BYTES + 20_000
    assert path.stat().st_mode & 0o777 == 0o600
    life.end()
    assert path.stat().st_size < 2_000
    again = Life(path, NOW + 61)
    assert all(
        again.hear(frame(A, n, NOW + n / 100)) in (Reason.DUPLICATE, Reason.OLD) for n in range(0, 6000, 7)
    )


def test_what_is_noted_while_the_file_is_written_anew_is_in_it(path: Path) -> None:
    life = Life(path, NOW)
    sent = [frame(A, n, NOW) for n in range(3)]
    assert life.hear(sent[0]) is None
    life.file.begin()
    memory = life.box.memory()
    assert life.hear(sent[1]) is None
    life.file.save(memory)
    assert life.hear(sent[2]) is None
    again = Life(path, NOW + 1)
    assert [again.hear(f) for f in [*sent, frame(A, 3, NOW)]] == [Reason.DUPLICATE] * 3 + [None]


def test_what_cannot_be_written_is_not_half_there(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(path, NOW)
    assert life.file._journal is not None
    # As on a full disk, writing to it fails from now on
    os.dup2(os.open(os.devnull, os.O_RDONLY), life.file._journal)
    with caplog.at_level(logging.WARNING):
        assert life.hear(frame(A, 1, NOW + 1)) is None
    assert "after a restart" in caplog.text and not path.exists() and not life.file.due
    assert Life(path, NOW + 30).hear(frame(A, 1, NOW + 1)) is Reason.OLD
    life.now += 61
    assert life.file.due
    life.file.save(life.box.memory())
    assert path.exists() and not life.file.due


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(-250, 9), st.sampled_from(["", "kill", "end", "power"])),
        max_size=40,
    )
)
def test_no_frame_is_let_in_twice_whatever_the_clocks_and_the_restarts(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, int, str]]
) -> None:
    path = tmp_path_factory.mktemp("seen") / "seen"
    now, boot = NOW, 0
    life = Life(path, now)
    frames: list[bytes] = []
    admitted: set[bytes] = set()
    for n, (passed, skew, restart) in enumerate(events):
        now += passed
        life.now = now
        frames.append(frame(A if n % 2 else B, n, now + skew))
        for f in [frames[-1], *frames]:
            if isinstance(life.box.receive(f, now), Envelope):
                assert f not in admitted
                admitted.add(f)
        if restart:
            if restart == "end":
                life.end()
            boot += restart == "power"
            life = Life(path, now, boot=f"boot {boot}")
            for f in frames:
                if isinstance(life.box.receive(f, now), Envelope):
                    assert f not in admitted
                    admitted.add(f)
