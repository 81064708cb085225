"""metrics.jsonl holds each round once, whatever ended the runs that wrote it; the log is JSON and rotates."""

import json
import logging
import math
import random
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from swarmd.errors import CannotRecord
from swarmd.state.logs import LOG_BYTES, set_up_logging
from swarmd.state.metrics import MetricsFile, NodeReport, Score, metrics_line, read_metrics, reference
from swarmd.types import RoundReport, UpdateReport


def report(number: int, loss: float = 0.5) -> RoundReport:
    return RoundReport(
        round=number,
        seconds={"generate": 1.5, "score": 0.1, "share": 0.01, "collect": 0.02, "train": 2.0},
        tokens_generated=512,
        update=UpdateReport(loss=loss, grad_norm=0.25, entropy=1.25, tokens=900),
        local=4,
        external=3,
        pool_size=17,
        pool_fresh=5,
        zero_advantage_dropped=2,
        rejected={"no such task in this curriculum": 1},
        reward_mean=0.25,
        reward_sum=8.0,
        staleness_mean=0.5,
        staleness_max=1,
        replays_mean=0.5,
        off_policy_mean=1.5,
        off_policy_max=3,
        generated=4,
        external_authors=(),
    )


def line(number: int, **more: Any) -> dict[str, Any]:
    return metrics_line(report(number), NodeReport(1_700_000_000.5, peers=2, judge=None, pool_external_share=0.75, **more))


def test_the_reference_of_every_field_is_the_one_in_the_documents() -> None:
    document = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert reference() in document, "write the table of `python -m swarmd.state.metrics` into docs/metrics.md"


def test_a_line_is_what_the_design_promises() -> None:
    assert line(7, checkpoint_seconds=0.3) == {
        "round": 7,
        "time": 1_700_000_000.5,
        "seconds": {"generate": 1.5, "score": 0.1, "share": 0.01, "collect": 0.02, "train": 2.0, "checkpoint": 0.3},
        "tokens": {"generated": 512, "trained": 900},
        "generated": 4,
        "local": 4,
        "external": 3,
        "pool": {"size": 17, "fresh": 5, "external_share": 0.75},
        "zero_advantage_dropped": 2,
        "rejected": {"no such task in this curriculum": 1},
        "gated": {},
        "gate_reported": {},
        "reward_mean": 0.25,
        "reward_sum": 8.0,
        "loss": 0.5,
        "grad_norm": 0.25,
        "entropy": 1.25,
        "staleness": {"mean": 0.5, "max": 1},
        "off_policy": {"mean": 1.5, "max": 3},
        "replays_mean": 0.5,
        "since_use_mean": None,
        "clip_fraction": 0.0,
        "drift": 0.0,
        "kl": None,
        "learning_rate": 0.0,
        "skipped": 0,
        "updates": 1,
        "replay_resting": 0,
        "mu": None,
        "gamma": None,
        "workers": None,
        "peers": 2,
        "judge": None,
    }


def test_figures_that_are_no_numbers_are_null(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m.jsonl", 0) as file:
        file.append(metrics_line(report(1, loss=math.nan), NodeReport(0.0, 0, Score(0.5, 10), 0.0)))
    (read,) = read_metrics(tmp_path / "m.jsonl")
    assert read["loss"] is None
    assert read["judge"] == {"score": 0.5, "n": 10}


def test_rounds_after_the_resumed_one_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as file:
        for number in range(1, 6):
            file.append(line(number))
    with MetricsFile(path, 3) as file:
        assert [entry["round"] for entry in read_metrics(path)] == [1, 2, 3]
        file.append(line(4))
    assert [entry["round"] for entry in read_metrics(path)] == [1, 2, 3, 4]
    with MetricsFile(path, 0):
        assert path.read_bytes() == b""


def test_a_file_torn_anywhere_keeps_its_whole_lines_and_each_round_once(tmp_path: Path) -> None:
    whole = "".join(json.dumps(line(number)) + "\n" for number in range(1, 5)).encode()
    rng = random.Random(4)
    before_newlines = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in before_newlines + [rng.randrange(len(whole) + 1) for _ in range(100)]:
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        with MetricsFile(path, 4) as file:
            file.append(line(complete + 1))
        assert [entry["round"] for entry in read_metrics(path)] == list(range(1, complete + 2))
        assert path.read_bytes().count(b"\n") == complete + 1


def test_rubbish_and_repeated_rounds_are_mended_on_opening(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round":1,"loss":1}\n\x00\x00\n[]\n{"round":"2"}\n{"round":1,"loss":2}\n{"round":true}\n')
    MetricsFile(path, 9).close()
    assert path.read_text() == '{"round":1,"loss":2}\n'
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_rounds_that_have_no_line_any_more_are_said(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(line(1)) + "\n" + json.dumps(line(2))[:-9])
    with MetricsFile(path, 2) as file:
        assert file.notes == ["metrics.jsonl was damaged or cut: 1 of the 2 rounds behind have no line there any more"]
    path.write_text("".join(json.dumps(line(number)) + "\n" for number in (1, 2, 3)))
    with MetricsFile(path, 2) as file:
        assert file.notes == []


ODD = ['{"round":1,"reward_mean":"x"}', '{"round":1,"tokens":3}', '{"round":0}', '{"round":1,"judge":[]}', "[" * 9**5]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_lines_that_nobody_wrote_are_no_lines(tmp_path: Path, odd: str) -> None:
    (tmp_path / "m.jsonl").write_text(odd + '\n{"round":2}\n')
    assert read_metrics(tmp_path / "m.jsonl") == [{"round": 2}]


def test_a_folder_in_its_place_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(CannotRecord, match=r"cannot be read: Is a directory\. Move it away"):
        read_metrics(tmp_path)


def test_a_full_disk_is_said_and_leaves_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.append(line(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
        with pytest.raises(CannotRecord, match="Free some space"):
            file.append(line(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    file.append(line(2))
    file.close()
    assert [entry["round"] for entry in read_metrics(path)] == [1, 2]
    with pytest.raises(CannotRecord, match="Move it away"):
        MetricsFile(tmp_path, 0)


def test_a_library_that_tells_every_request_is_not_logged(tmp_path: Path) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        set_up_logging(tmp_path / "swarmd.log", stderr=False)
        logging.getLogger("httpx2").info("HTTP Request: POST http://judge.example")
        logging.getLogger("httpcore2.connection").info("connect_tcp.started")
        logging.getLogger("httpx2").warning("kept")
        logging.getLogger("swarmd.daemon.daemon").info("kept too")
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:], root.level = handlers, level
    assert [json.loads(line)["event"] for line in (tmp_path / "swarmd.log").read_text().splitlines()] == ["kept", "kept too"]


def test_the_log_is_json_with_tracebacks_and_rotates(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import structlog

    path = tmp_path / "swarmd.log"
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        root.handlers = []
        set_up_logging(path, stderr=True)
        structlog.get_logger("p2p").info("peer connected", peer="12D3KooW")
        try:
            (tmp_path / "absent").stat()
        except OSError:
            logging.getLogger("libp2p").exception("could not %s", "dial")
        logging.getLogger("libp2p").debug("not written")
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        assert [(entry["event"], entry["level"], entry["logger"]) for entry in lines] == [
            ("peer connected", "info", "p2p"),
            ("could not dial", "error", "libp2p"),
        ]
        assert lines[0]["peer"] == "12D3KooW"
        assert "FileNotFoundError" in lines[1]["exception"]
        assert "peer connected" in capfd.readouterr().err
        for _ in range(3):
            logging.getLogger("x").info("a" * (LOG_BYTES // 2))
        assert path.stat().st_size < LOG_BYTES
        assert (tmp_path / "swarmd.log.1").exists()
        with pytest.raises(CannotRecord):
            set_up_logging(tmp_path, stderr=False)
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers, root.level = before, level
        structlog.reset_defaults()
