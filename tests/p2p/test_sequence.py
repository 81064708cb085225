import itertools
import os
from pathlib import Path

import pytest

from p2p.errors import StateUnwritable
from p2p.sequence import SequenceFile


def test_numbers_rise_and_continue_after_a_crash(tmp_path: Path) -> None:
    path, seen = tmp_path / "sequence", list[int]()
    for _ in range(20):  # each time as in a new process that is then killed
        seen += itertools.islice(SequenceFile(path, lambda: 0.0, block=7), 10)
    assert seen == sorted(set(seen))


def test_no_number_is_used_before_it_is_reserved_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "sequence"
    numbers = SequenceFile(path, lambda: 0.0, block=10)
    assert not path.exists()
    for number in itertools.islice(numbers, 35):
        assert number < int(path.read_text())


@pytest.mark.parametrize(
    "content", [b"", b"12", b"x\n", b"-5\n", b"9" * 30 + b"\n", "٣\n".encode(), b"1\n2\n"]
)
def test_a_damaged_file_is_set_aside_and_numbers_continue_from_the_clock(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sequence"
    path.write_bytes(content)
    assert next(SequenceFile(path, lambda: 1_700_000_000.0)) == 1_700_000_000_000
    assert path.with_name("sequence.corrupt").read_bytes() == content
    assert "damaged" in caplog.text


def test_after_the_loss_of_the_file_no_number_is_reused(tmp_path: Path) -> None:
    path, now = tmp_path / "sequence", 1000.0
    last = list(itertools.islice(SequenceFile(path, lambda: now), 5000))[-1]
    path.unlink()
    assert next(SequenceFile(path, lambda: now + 10)) > last


def test_a_full_disk_stops_publishing_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = SequenceFile(tmp_path / "sequence", lambda: 0.0, block=3)
    assert list(itertools.islice(numbers, 3)) == [0, 1, 2]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(StateUnwritable, match=r"No space left.*free space"):
            next(numbers)
    assert next(numbers) == 3 and next(SequenceFile(tmp_path / "sequence", lambda: 0.0)) == 6
