import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.admission.replays import AHEAD_S
from p2p.admission.seen_file import PROMISE_S, SeenFile
from p2p.engines.memory import MemorySwarm
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.types import PeerId, Reason, Verdict
from tests.doubles import NOW, TOPIC, Clock, memory_member

ME, A, B = (Identity(bytes([n]) * 32) for n in (1, 2, 3))


class Life:
    """One run of a member's process, with its files."""

    def __init__(self, folder: Path, now: float) -> None:
        self.clock = Clock(now)
        self.member = memory_member(MemorySwarm(), ME, self.clock, folder=folder)

    def hears(self, frame: bytes, via: PeerId | None = None) -> bool:
        return self.member.deliver(frame, via) is Verdict.ACCEPT

    def end(self) -> None:
        self.member._recall.close()


def frame(author: Identity, sequence: int, at: float) -> bytes:
    return seal(author, TOPIC.swarm_id, sequence, at, "rollouts", b"body")


def test_a_first_run_admits_nothing_sent_before_it(tmp_path: Path) -> None:
    life = Life(tmp_path, NOW)
    assert not life.hears(frame(A, 1, NOW - 1)) and life.hears(frame(A, 2, NOW))
    assert life.member.rejected == {Reason.OLD: 1}


@pytest.mark.parametrize("clean", [True, False])
def test_a_restarted_member_rejects_frames_that_it_admitted_before(tmp_path: Path, clean: bool) -> None:
    first = Life(tmp_path, NOW)
    sent = [frame(A, n, NOW + n / 2) for n in range(int(2 * AHEAD_S) + 1)]
    assert all(map(first.hears, reversed(sent)))
    if clean:
        first.end()
    second = Life(tmp_path, NOW + 1)
    assert not any(map(second.hears, sent))
    heard = NOW + (AHEAD_S if clean else PROMISE_S) + 0.01
    second.clock.now = heard
    assert not second.hears(frame(A, 100, heard - 0.02)) and second.hears(frame(B, 1, heard))


def test_a_member_restarted_after_a_pause_admits_frames_at_once(tmp_path: Path) -> None:
    Life(tmp_path, NOW).hears(frame(A, 1, NOW))
    now = NOW + PROMISE_S + 1
    assert Life(tmp_path, now).hears(frame(A, 2, now))


def test_a_clock_that_was_set_back_blocks_frames_only_for_seconds(tmp_path: Path) -> None:
    Life(tmp_path, NOW + 7200).hears(frame(A, 1, NOW + 7200))
    life = Life(tmp_path, NOW)
    assert not life.hears(frame(A, 2, NOW + AHEAD_S - 0.1))
    life.clock.now += AHEAD_S
    assert life.hears(frame(B, 1, life.clock.now))


def test_one_write_covers_many_frames_and_the_file_is_private(tmp_path: Path) -> None:
    life, path, contents = Life(tmp_path, NOW), tmp_path / "seen", set[bytes]()
    for n in range(240):
        life.clock.now = NOW + n / 4
        assert life.hears(frame(A, n, life.clock.now))
        contents.add(path.read_bytes())
    assert len(contents) == 60 / PROMISE_S and path.stat().st_mode & 0o777 == 0o600


def test_no_frame_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a checkpoint is written, a sync takes seconds, and no peer would be answered in that time."""
    life, synced = Life(tmp_path, NOW), list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    assert life.hears(frame(A, 1, NOW)) and not synced
    assert not Life(tmp_path, NOW).hears(frame(A, 1, NOW))


def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "seen").write_bytes(b"no number")
    life = Life(tmp_path, NOW)
    assert "was damaged" in caplog.text and (tmp_path / "seen.corrupt").exists()
    assert not life.hears(frame(A, 1, NOW - 1)) and life.hears(frame(A, 2, NOW))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_with_an_unwritable_folder_frames_are_still_admitted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path, NOW)
    tmp_path.chmod(0o500)
    with caplog.at_level(logging.WARNING):
        assert life.hears(frame(A, 1, NOW))
    tmp_path.chmod(0o700)
    assert "may be admitted twice" in caplog.text


def test_without_a_folder_nothing_is_stored() -> None:
    memory = SeenFile(None, Clock())
    memory.note(int(NOW * 1000))
    memory.close()
    assert memory.not_before == NOW


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(-250, 9), st.sampled_from(["", "kill", "end"])),
        max_size=40,
    )
)
def test_no_frame_is_admitted_twice_with_any_clocks_and_restarts(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("state")
    now = NOW
    life = Life(folder, now)
    frames: list[bytes] = []
    admitted: list[bytes] = []
    for n, (passed, skew, restart) in enumerate(events):
        now += passed
        life.clock.now = now
        frames.append(frame(A if n % 2 else B, n, now + skew))
        admitted += [one for one in [frames[-1], *frames] if life.hears(one)]
        if restart:
            if restart == "end":
                life.end()
            life = Life(folder, now)
            admitted += [one for one in frames if life.hears(one)]
    assert len(admitted) == len(set(admitted))
