"""metrics.jsonl has one line per round, however earlier runs ended; the log is JSON and rotates."""

import contextlib
import errno
import json
import logging
import math
import random
import re
import resource
import runpy
import signal
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from msgspec import to_builtins

from swarmd.errors import CannotRecord
from swarmd.state.logs import LOG_BYTES, log_with, set_up_logging
from swarmd.state.metrics import (
    MetricsFile,
    each_round,
    read_metrics,
)
from swarmd.types import (
    STAGES,
    Ages,
    AnswerFigures,
    PoolFigures,
    RoundLine,
    Score,
    TokenCounts,
    WorkerCounts,
    WorkerFigures,
)
from tests import ROOT

REFERENCE = "\n".join(runpy.run_path(str(ROOT / "scripts" / "tables"))["metrics"]())


def line(number: int, **more: Any) -> RoundLine:
    return RoundLine(
        round=number,
        time=1_700_000_000.5,
        seconds=dict.fromkeys(STAGES, 0.5),
        tokens=TokenCounts(512, 900),
        local=4,
        external=3,
        pool=PoolFigures(17, 5, 0.75),
        rejected={"no such task in this curriculum": 1},
        answers=AnswerFigures(32, cut=0.25, in_form=0.5, length=16.0),
        reward_mean=0.25,
        peers=2,
        **more,
    )


def text(of: RoundLine) -> str:
    return msgspec.json.encode(of).decode()


def test_the_documentation_of_the_metrics_is_up_to_date() -> None:
    document = (ROOT / "docs" / "metrics.md").read_text()
    assert REFERENCE in document, "write the table of `scripts/tables metrics` into docs/metrics.md"


def test_a_metrics_line_has_exactly_the_documented_fields() -> None:
    none = WorkerCounts(0, 0, [])
    workers = WorkerFigures(none, none, 0, Ages(), 0.0, {"in_flight": 0}, 0, 0)
    whole = to_builtins(line(7, workers=workers, judge=Score(0.5, 10)))
    whole["seconds"]["checkpoint"] = 0.3

    def paths(part: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool]]:
        for key, value in part.items():
            inner = isinstance(value, dict) and key != "rejected" and bool(value)
            yield prefix + key, not inner
            yield from paths(value, f"{prefix}{key}.") if inner else ()

    documented, found = set(re.findall(r"^\| `([\w.]+)` ", REFERENCE, re.MULTILINE)), dict(paths(whole))
    assert {at for at, leaf in found.items() if leaf} <= documented <= set(found)


def test_nan_values_are_written_as_null(tmp_path: Path) -> None:
    with contextlib.closing(MetricsFile(tmp_path / "m.jsonl", 0)) as file:
        file.append(line(1, loss=math.nan, judge=Score(0.5, 10)))
    (read,) = read_metrics(tmp_path / "m.jsonl")
    assert (read.loss, read.judge) == (None, Score(0.5, 10))


def test_rounds_after_the_resumed_one_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with contextlib.closing(MetricsFile(path, 0)) as file:
        for number in range(1, 6):
            file.append(line(number))
    with contextlib.closing(MetricsFile(path, 3)) as file:
        assert [entry.round for entry in read_metrics(path)] == [1, 2, 3]
        file.append(line(4))
    assert [entry.round for entry in read_metrics(path)] == [1, 2, 3, 4]
    with contextlib.closing(MetricsFile(path, 0)):
        assert path.read_bytes() == b""


def rounds_in(path: Path, **limits: Any) -> list[int]:
    return [entry.round for entry in each_round(path, **limits)]


def test_old_lines_are_moved_and_dropped_so_that_the_files_stay_small(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    most = 10 * len(text(line(1)))
    with contextlib.closing(MetricsFile(path, 0, most)) as file:
        for number in range(1, 101):
            file.append(line(number))
            there = rounds_in(path)
            assert there == [*range(there[0], number + 1)], "a round is missing before the latest"
            assert number < 11 or len(there) > 10
    assert (
        len([*tmp_path.iterdir()]) >= 2
        and sum(each.stat().st_size for each in tmp_path.iterdir()) < 2.2 * most
    )
    newest = len(path.read_bytes().splitlines())
    assert [entry.round for entry in read_metrics(path, newest + 3)] == [*range(98 - newest, 101)]
    assert rounds_in(path, last=95)[-1] == 95

    for resumed in (100, 100 - newest, 95 - newest):
        with contextlib.closing(MetricsFile(path, resumed, most)) as file:
            assert file.notes == [], "dropped lines are reported as damage"
            assert rounds_in(path)[-1] == resumed
    with contextlib.closing(MetricsFile(path, 99, most)) as file:
        assert "of the 99 rounds behind have no line" in file.notes[0]
    with contextlib.closing(MetricsFile(path, 0, most)):
        assert rounds_in(path) == []


def test_a_truncated_file_keeps_its_complete_lines_and_each_round_once(tmp_path: Path) -> None:
    whole = "".join(text(line(number)) + "\n" for number in range(1, 5)).encode()
    rng = random.Random(4)
    before_newlines = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in before_newlines + [rng.randrange(len(whole) + 1) for _ in range(100)]:
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        with contextlib.closing(MetricsFile(path, 4)) as file:
            file.append(line(complete + 1))
        assert [entry.round for entry in read_metrics(path)] == list(range(1, complete + 2))
        assert path.read_bytes().count(b"\n") == complete + 1


RUBBISH = '{"round":1,"loss":1}\n\x00\x00\n[]\n{"round":"2"}\n{"round":1,"loss":2}\n{"round":true}\n'


@pytest.mark.parametrize(
    ("there", "resumed", "lost", "left"),
    [
        (RUBBISH, 9, 1, '{"round":1,"loss":1}\n'),
        (
            '{"round":1}\nrubbish\n{"round":2}\n{"round":3}\n{"round":4}\n',
            2,
            0,
            '{"round":1}\nrubbish\n{"round":2}\n',
        ),
    ],
)
def test_opening_drops_later_rounds_and_reading_skips_invalid_lines(
    tmp_path: Path, there: str, resumed: int, lost: int, left: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(there)
    with contextlib.closing(MetricsFile(path, resumed)) as file:
        assert len(file.notes) == lost
        file.append(line(resumed + 1))
    assert path.read_text() == f"{left}{text(line(resumed + 1))}\n"
    assert [entry.round for entry in read_metrics(path)] == [
        *range(1, left.count("round") + 1),
        resumed + 1,
    ]


def test_a_long_metrics_file_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(text(line(number)) + "\n" for number in range(1, 2001)))
    tracemalloc.start()
    try:
        with contextlib.closing(MetricsFile(path, 1990)) as file:
            assert not file.notes
        assert [entry.round for entry in read_metrics(path, 3)] == [1988, 1989, 1990]
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 10
    finally:
        tracemalloc.stop()
    assert len(read_metrics(path)) == len(read_metrics(path, 2000)) == 1990


def test_rounds_without_a_line_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text(line(1)) + "\n" + text(line(2))[:-9])
    with contextlib.closing(MetricsFile(path, 2)) as file:
        assert file.notes == [
            "metrics.jsonl was damaged or cut: 1 of the 2 rounds behind have no line there any more"
        ]
    path.write_text("".join(text(line(number)) + "\n" for number in (1, 2, 3)))
    with contextlib.closing(MetricsFile(path, 2)) as file:
        assert file.notes == []


ODD = [
    '{"round":1,"reward_mean":"x"}',
    '{"round":1,"tokens":3}',
    '{"round":0}',
    '{"round":1,"judge":[]}',
    '{"round":1,"seconds":3}',
    '{"round":1,"external":"x"}',
    '{"round":1,"local":[1]}',
    '{"round":1,"tokens":{"generated":"x"}}',
    '{"round":1,"seconds":{"train":true}}',
    '{"round":1,"loss":NaN}',
    '{"round":1,"loss":1e999}',
    "[" * 9**5,
]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_invalid_lines_are_ignored(tmp_path: Path, odd: str) -> None:
    (tmp_path / "m.jsonl").write_text(odd + '\n{"round":2}\n')
    assert read_metrics(tmp_path / "m.jsonl") == [RoundLine(round=2)]


def test_a_folder_in_place_of_the_metrics_file_gives_an_error_message(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "absent.jsonl") == []
    with pytest.raises(CannotRecord, match=r"cannot be read: Is a directory\. Move it away"):
        read_metrics(tmp_path)


def test_a_full_disk_is_reported_and_does_not_damage_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.append(line(1))
    with no_file_above(path.stat().st_size + 10), pytest.raises(CannotRecord, match="Free some space"):
        file.append(line(2))
    file.append(line(2))
    file.close()
    assert [entry.round for entry in read_metrics(path)] == [1, 2]
    with pytest.raises(CannotRecord, match="Is a directory"):
        MetricsFile(tmp_path, 0)


@contextlib.contextmanager
def no_file_above(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    """Return the path of a log file; during the test, there are no other log handlers."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []
    yield tmp_path / "swarmd.log"
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = before, level


def test_every_log_line_names_peer_engine_and_round_once_these_are_known(log_file: Path) -> None:
    set_up_logging(log_file, stderr=False)
    log_with(peer="12D3KooW", engine="libp2p")
    logging.getLogger("swarmd").info("before")
    log_with(round=3)
    logging.getLogger("library").warning("in a round")
    set_up_logging(None, stderr=False)  # as the next node in this process does
    before, within = (json.loads(text) for text in log_file.read_text().splitlines())
    assert (before["peer"], before["engine"], before.get("round")) == ("12D3KooW", "libp2p", None)
    assert (within["peer"], within["round"], within["event"]) == ("12D3KooW", 3, "in a round")


def test_the_log_is_json_with_tracebacks_and_rotates(
    log_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(log_file, stderr=True)
    logging.getLogger("p2p").info("peer connected", extra={"peer": "12D3KooW"})
    try:
        (tmp_path / "absent").stat()
    except OSError:
        logging.getLogger("library").exception("could not %s", "dial")
    logging.getLogger("library").debug("not written")
    # httpx2 logs these lines for each request, so they are dropped.
    logging.getLogger("httpx2").info("HTTP Request: POST http://judge.example")
    logging.getLogger("httpcore2.connection").info("connect_tcp.started")
    logging.getLogger("httpx2").warning("kept")
    lines = [json.loads(text) for text in log_file.read_text().splitlines()]
    assert [(entry["event"], entry["level"], entry["logger"]) for entry in lines] == [
        ("peer connected", "info", "p2p"),
        ("could not dial", "error", "library"),
        ("kept", "warning", "httpx2"),
    ]
    assert lines[0]["peer"] == "12D3KooW" and "FileNotFoundError" in lines[1]["exception"]
    assert "peer connected" in capfd.readouterr().err
    for _ in range(3):
        logging.getLogger("x").info("a" * (LOG_BYTES // 2))
    assert log_file.stat().st_size < LOG_BYTES and (tmp_path / "swarmd.log.1").exists()
    with pytest.raises(CannotRecord):
        set_up_logging(tmp_path, stderr=False)


class NoMoreFiles(trio.abc.Listener[trio.abc.Stream]):
    async def accept(self) -> trio.abc.Stream:
        raise OSError(errno.EMFILE, "Too many open files")

    async def aclose(self) -> None: ...


async def test_a_lack_of_file_descriptors_is_logged_once_with_the_remedy(
    log_file: Path, autojump_clock: trio.testing.MockClock
) -> None:
    set_up_logging(log_file, stderr=False)
    with trio.move_on_after(3):  # thirty failed calls
        await trio.serve_listeners(lambda _: trio.sleep(0), [NoMoreFiles()])
    (line,) = map(json.loads, log_file.read_text().splitlines())
    assert "EMFILE" in line["event"] and "ulimit -n" in line["event"] and "exception" not in line


def test_a_full_disk_while_logging_is_silent_but_a_wrong_log_call_is_not(
    log_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(log_file, stderr=False)
    with no_file_above(10):
        logging.getLogger("p2p").warning("cannot write the address book")
    assert capfd.readouterr().err == ""
    logging.getLogger("p2p").warning("there is room again")
    assert "there is room again" in log_file.read_text()
    logging.getLogger("p2p").warning("%d", "no number")
    assert "Logging error" in capfd.readouterr().err
