"""metrics.jsonl, one line a round: what each field means, writing the file, and reading it."""

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from p2p import durable
from swarmd.errors import CannotRecord
from swarmd.types import Figure, RoundReport

# Nearly always a line has less.
_LONG_LINE_BYTES = 4096
# A file this large is set aside, in place of the one set aside before: some 140,000 rounds in both.
ROTATE_BYTES = 2**26


class _Line(msgspec.Struct):
    """What is read again of a line, which may be damaged."""

    round: Annotated[int, msgspec.Meta(gt=0)]
    reward_mean: float | None = None
    local: int | None = None
    external: int | None = None
    tokens: dict[str, int | None] = {}
    seconds: dict[str, float | None] = {}
    judge: dict[str, float | None] | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The judge's rating of the node."""

    score: Annotated[float, Figure("score", "pass@1", "0 to 1")]
    n: Annotated[int, Figure("n", "questions graded")]


@dataclass(frozen=True, slots=True)
class WorkersReport:
    """The state of the processes beside the trainer."""

    generators_alive: Annotated[int, Figure("generators.alive", "generators that can answer")]
    generators: Annotated[int, Figure("generators.of", "generators wanted")]
    generator_pids: Annotated[Sequence[int], Figure("generators.pids", "their processes")]
    trainers_alive: Annotated[int, Figure("trainers.alive", "trainers at work, rank 0 among them")]
    trainers: Annotated[int, Figure("trainers.of", "trainers wanted")]
    trainer_pids: Annotated[Sequence[int], Figure("trainers.pids", "their processes, without rank 0")]
    version: Annotated[
        int | None,
        Figure("version", "updates that led to the newest weights; `null`: none were handed out yet"),
    ]
    lag_mean: Annotated[
        float, Figure("lag.mean", "age of the weights that drew our own tokens trained on; mean", "updates")
    ]
    lag_max: Annotated[int, Figure("lag.max", "the same, largest", "updates")]
    tokens_per_second: Annotated[
        float | None, Figure("tokens_per_second", "tokens that all generators make", "1/s")
    ]
    in_flight: Annotated[int, Figure("questions.in_flight", "questions that generators have in hand")]
    waiting: Annotated[int, Figure("waiting", "finished rollouts that wait for a round")]
    overtaken: Annotated[int, Figure("overtaken", "finished rollouts dropped for fresher ones")]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The fields that the node adds to the line of a round."""

    time: Annotated[float, Figure("time", "end of the round", "seconds since 1970")]
    peers: Annotated[int, Figure("peers", "members heard lately")]
    judge: Annotated[
        Score | None,
        Figure("judge", "as the judge last gave it (docs/judge-protocol.md); `null`: not judged"),
    ]
    pool_external_share: Annotated[
        float, Figure("pool.external_share", "share of the pool that is others'", "0 to 1")
    ]
    checkpoint_seconds: Annotated[
        float,
        Figure("seconds.checkpoint", "what saves took out of the loop since the line before", "seconds"),
    ] = 0.0
    workers: Annotated[
        WorkersReport | None, Figure("workers", "processes beside the trainer; `null` without `[workers]`")
    ] = None


def metrics_line(report: RoundReport, node: NodeReport) -> dict[str, Any]:
    """Build one line of metrics.jsonl (docs/metrics.md).

    A figure that is not a finite number becomes null.
    """
    line: dict[str, Any] = {}
    for part in (report, report.update, node):
        _put(part, line)
    return line


def _put(report: Any, line: dict[str, Any]) -> dict[str, Any]:
    kind: type = type(report)
    for name, _, figure in described(kind):
        place, (*folders, last) = line, figure.at.split(".")
        for folder in folders:
            place = place.setdefault(folder, {})
        value = getattr(report, name)
        place[last] = _put(value, {}) if is_dataclass(value) else _plain(value)
    return line


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def described(report: type) -> Sequence[tuple[str, Any, Figure]]:
    """Name, type and description of each field of a report that stands in the line, in order."""
    return [
        (name, get_args(hint)[0], hint.__metadata__[0])
        for name, hint in get_type_hints(report, include_extras=True).items()
        if get_origin(hint) is Annotated
    ]


class MetricsFile:
    """metrics.jsonl, open for appending. Raises CannotRecord.

    A torn last line is cut off, and lines of later rounds, whose work the checkpoint does not hold: they will
    be played again. A line that a disk damaged stays where it is, and is left out by who reads. A file of
    `most` bytes is set aside as `older` names it, so that weeks of short rounds do not fill the disk.

    resumed_round: the round of the checkpoint we go on from (0 for a fresh start). notes: what is missing.
    """

    def __init__(self, path: Path, resumed_round: int, most: int = ROTATE_BYTES) -> None:
        self.path, self._most = path, most
        self.notes: list[str] = []  # notes for the operator
        try:
            self._open()
            aside, first, last = _cut(older(path), 0, resumed_round) if older(path).exists() else (0, 1, 0)
            lines, first_here, _ = _cut(path, last, resumed_round)
        except OSError as error:
            raise CannotRecord.to(path, error) from None
        # Rounds before the older file's first line were set aside twice.
        if missing := resumed_round + 1 - (first or first_here or 1) - aside - lines:
            self.notes.append(
                f"{path.name} was damaged or cut: {missing} of the {resumed_round} rounds behind have no line"
                " there any more"
            )

    def _open(self) -> None:
        # The umask applies: others may read it.
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        durable.sync(self.path.parent)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line, in one call. Raises CannotRecord, with the file as it was before."""
        data = json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            if (before := os.fstat(self._file).st_size) >= self._most:
                # Set the file aside and begin another.
                os.fsync(self._file)
                self.path.replace(older(self.path))
                os.close(self._file)
                self._open()
                before = 0
            written = os.write(self._file, data)
        except OSError as error:
            raise CannotRecord.to(self.path, error) from None
        if written < len(data):
            os.ftruncate(self._file, before)
            raise CannotRecord(f"{self.path}: the disk is full. Free some space.")

    def sync(self) -> None:
        """Return when all lines are durable. Raises CannotRecord."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise CannotRecord.to(self.path, error) from None

    def close(self) -> None:
        os.close(self._file)


def older(path: Path) -> Path:
    """Return the file that a metrics file's earlier lines were set aside in."""
    return path.with_name(f"{path.name}.1")


def read_metrics(path: Path, last: int | None = None) -> Sequence[dict[str, Any]]:
    """Return the lines of a metrics file, as `each_round` does.

    last: read only about so many lines, from the end of the file; weeks of rounds are gigabytes in memory.
    """
    return [*deque(each_round(path, tail=None if last is None else last * _LONG_LINE_BYTES), last)]


def each_round(path: Path, last: float = math.inf, tail: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of the rounds up to `last`, with one line at a time in memory.

    Torn lines are left out, and rounds that come again. An absent file has no lines. tail: of the end of all
    lines, only so many bytes. Raises CannotRecord where a file cannot be read.
    """
    before = 0
    try:
        with ExitStack() as stack:
            # The newer one is opened first: what is set aside meanwhile is read twice, and not left out.
            files = [stack.enter_context(each.open("rb")) for each in (path, older(path)) if each.exists()]
            sizes = [file.seek(0, os.SEEK_END) for file in files]
            skipped = 0 if tail is None else sum(sizes) - tail
            for file, size in zip(reversed(files), reversed(sizes), strict=True):
                file.seek(max(0, skipped))
                skipped -= size
                for raw in file:
                    line = parsed(raw)
                    if line is not None and before < line["round"] <= last:
                        before = line["round"]
                        yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise CannotRecord(
            f"{path}: cannot be read: {error.strerror or error}. Move it away, or mend its permissions."
        ) from None


def parsed(raw: bytes) -> dict[str, Any] | None:
    """Return a line of the file; None where it is not one that we wrote."""
    try:
        msgspec.json.decode(raw, type=_Line)
        # Stricter than `json`: no NaN, no infinity, which `append` and a browser refuse.
        line: dict[str, Any] = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return None
    return line


def _cut(path: Path, before: int, round_number: int) -> tuple[int, int, int]:
    """Cut off what comes after this round. Raises OSError.

    before: the last round of the file before it. Returns how many lines are left, and the first and the last
    round.
    """
    lines = first = size = 0
    with path.open("rb+") as file:
        # One line at a time is in memory.
        for raw in file:
            line = parsed(raw) if raw.endswith(b"\n") else None
            if line is not None and before < line["round"] <= round_number:
                before, lines, size = line["round"], lines + 1, file.tell()
                first = first or before
        file.truncate(size)
    return lines, first, before
