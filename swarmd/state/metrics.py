"""metrics.jsonl: one line a round. What each field means, writing the file, and reading it."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from p2p import durable
from swarmd.errors import CannotRecord
from swarmd.types import RoundReport

_KINDS: Mapping[str, Any] = {"reward_mean": (int, float, type(None)), "tokens": dict, "judge": (dict, type(None))}  # of what is read again
_STAGES = ("generate", "score", "share", "collect", "train")


def metrics_line(
    report: RoundReport,
    *,
    time: float,
    peers: int,
    judge: Mapping[str, Any] | None,
    pool_external_share: float,
    checkpoint_seconds: float = 0.0,
    mu: float | None = None,
    gamma: float | None = None,
    workers: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One line of metrics.jsonl (docs/metrics.md).

    time: seconds since the epoch at the round's end. judge: `{"score", "n"}` as the judge last gave it, or None.
    checkpoint_seconds: what saves took out of the loop since the line before: the line's `seconds.checkpoint`.
    pool_external_share: of the pool, 0..1. mu: what generating a rollout cost over what training on one did; gamma: the round's cost over
    that of one that generates all it trains on. workers: how those beside the trainer stand. A figure that is not a finite number is
    written as null.
    """
    line = {
        "round": report.round,
        "time": time,
        "seconds": {**{stage: report.seconds.get(stage, 0.0) for stage in _STAGES}, "checkpoint": checkpoint_seconds},
        "tokens": {"generated": report.tokens_generated, "trained": report.update.tokens},
        "generated": report.generated,
        "local": report.local,
        "external": report.external,
        "pool": {"size": report.pool_size, "fresh": report.pool_fresh, "external_share": pool_external_share},
        "zero_advantage_dropped": report.zero_advantage_dropped,
        "rejected": dict(report.rejected),
        "gated": dict(report.gated),
        "gate_reported": dict(report.gate_reported),
        "reward_mean": report.reward_mean,
        "reward_sum": report.reward_sum,
        "loss": report.update.loss,
        "grad_norm": report.update.grad_norm,
        "entropy": report.update.entropy,
        "staleness": {"mean": report.staleness_mean, "max": report.staleness_max},
        "off_policy": {"mean": report.off_policy_mean, "max": report.off_policy_max},
        "replays_mean": report.replays_mean,
        "since_use_mean": report.since_use_mean,
        "clip_fraction": report.update.clip_fraction,
        "drift": report.update.drift,
        "kl": report.update.kl,
        "learning_rate": report.update.rate,
        "skipped": report.update.skipped,
        "updates": report.updates,
        "replay_resting": report.resting,
        "mu": mu,
        "gamma": gamma,
        "workers": dict(workers) if workers is not None else None,
        "peers": peers,
        "judge": dict(judge) if judge is not None else None,
    }
    finite: dict[str, Any] = _finite(line)
    return finite


class MetricsFile:
    """metrics.jsonl, open for appending. Every round stands in it at most once, whatever ended the runs before.

    resumed_round: the round of the checkpoint we go on from (0 for a fresh start). A torn last line is cut off, and lines of later
    rounds, whose work the checkpoint does not hold, are dropped: they will be played again. notes: what is missing. Raises CannotRecord.
    """

    def __init__(self, path: Path, resumed_round: int) -> None:
        self.path = path
        self.notes: list[str] = []  # what an operator should know
        lines = [line for line in read_metrics(path) if line["round"] <= resumed_round]
        if missing := resumed_round - len(lines):
            self.notes.append(f"{path.name} was damaged or cut: {missing} of the {resumed_round} rounds behind have no line there any more")
        try:
            kept = "".join(map(_text, lines)).encode()
            if not path.exists() or path.read_bytes() != kept:
                durable.replace(path, kept, 0o666)  # less the umask: others may read it
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise CannotRecord.to(path, error) from None

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line, in one call. Raises CannotRecord, with the file as it was before."""
        data = _text(line).encode()
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, data)
        except OSError as error:
            raise CannotRecord.to(self.path, error) from None
        if written < len(data):
            os.ftruncate(self._file, before)
            raise CannotRecord(f"{self.path}: the disk is full. Free some space and start the node again.")

    def sync(self) -> None:
        """Return when all lines are durable. Raises CannotRecord."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise CannotRecord.to(self.path, error) from None

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_metrics(path: Path) -> Sequence[dict[str, Any]]:
    """The lines of a metrics file in order of rounds, the last where a round stands there twice. Torn lines are left out.

    An absent file has no lines. Raises CannotRecord where there is something that cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CannotRecord(f"{path}: cannot be read: {error.strerror or error}. Move it away, or mend its permissions.") from None
    rounds = {line["round"]: line for line in _whole_lines(data)}
    return [rounds[number] for number in sorted(rounds)]


def _whole_lines(data: bytes) -> Iterator[dict[str, Any]]:
    for raw in data.split(b"\n")[:-1]:  # what follows the last newline is torn, or empty
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        ours = isinstance(line, dict) and type(line.get("round")) is int and line["round"] > 0
        if ours and all(isinstance(line[key], kinds) for key, kinds in _KINDS.items() if key in line):
            yield line


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
