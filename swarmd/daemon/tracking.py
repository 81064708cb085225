"""Experiment trackers: trackio and Weights & Biases, which share one interface.

They are off by default; each is an extra (`pip install 'swarmd[trackio]'`).

    python -m swarmd.daemon.tracking FOLDER PEER_ID TRACKER

For each tracker, a separate process follows metrics.jsonl and passes on the figures of every new round. So no
round waits for a tracker, and a slow or failing tracker does no harm: the file is the queue and keeps every
round. The process ends on SIGTERM, or when its parent has gone.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from p2p.identity import nickname
from p2p.types import PeerId
from swarmd.errors import CannotRecord, ConfigError, command_for
from swarmd.state.folder import METRICS_FILE
from swarmd.state.metrics import each_round, older, parsed, read_metrics
from swarmd.types import RoundLine

# Seconds between two reads of the file.
POLL_S = 1.0
# Extra arguments for each tracker, so that neither monitors this machine or the program.
TRACKERS: Mapping[str, Callable[[Any, Path, str], dict[str, Any]]] = {
    "trackio": lambda _, _folder, _peer: {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False},
    "wandb": lambda wandb, folder, peer: {
        "id": peer,
        "dir": str(folder),
        "settings": wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            host=nickname(PeerId(peer)),
        ),
    },
}


def check_installed(names: Sequence[str]) -> None:
    """Raise ConfigError if a tracker is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"metrics.report_to: {name} is not installed. Run: {command_for(name)}")


def figures_of(part: object, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in a line of metrics.jsonl by dotted key, such as "seconds.train"."""
    for key, value in msgspec.to_builtins(part).items():
        if isinstance(value, Mapping):
            yield from figures_of(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


class Follower:
    """Reads the lines that are added to a file.

    Each round is read once, even if its line is cut off and written again.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0  # offset in bytes up to which the file was read
        lines = read_metrics(path, 1)
        self._round = lines[-1].round if lines else 0

    def read(self) -> Iterator[RoundLine]:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._at:
                    # The file was truncated to drop rounds that a kill had lost, or it was set aside.
                    self._at = 0
                    yield from filter(self._is_new, each_round(older(self._path)))
                file.seek(self._at)
                for data in file:
                    if not data.endswith(b"\n"):
                        # The line is still being written.
                        return
                    self._at += len(data)
                    if (line := parsed(data)) is not None and self._is_new(line):
                        yield line
        except (OSError, CannotRecord):
            # The file does not exist yet, or is damaged; the node itself reports that.
            return

    def _is_new(self, line: RoundLine) -> bool:
        """Return whether the line's round is later than all before, and remember it."""
        before, self._round = self._round, max(self._round, line.round)
        return bool(self._round > before)


def follow(folder: Path, peer: str, name: str, going: Callable[[], bool]) -> None:
    """Pass new metrics to the tracker until `going` returns False, then the lines written by then."""
    place = folder / "tracking" / name
    place.mkdir(parents=True, exist_ok=True)
    follower, last = Follower(folder / METRICS_FILE), False
    # Import only the tracker. accelerate has such classes too, but importing them loads torch, which takes
    # 224 MB and 2.7 s for each tracker instead of 28 MB.
    tracker = import_module(name)
    tracker.init(
        project="swarmd",
        name=nickname(PeerId(peer)),
        resume="allow",
        config={"peer": peer},
        **TRACKERS[name](tracker, place, peer),
    )
    try:
        while not last:
            last = not going()
            for line in follower.read():
                tracker.log(dict(figures_of(line)), step=line.round)
            if not last:
                time.sleep(POLL_S)
    finally:
        tracker.finish()


def main() -> None:
    folder, peer, name = sys.argv[1:]
    parent, stopped = os.getppid(), list[int]()
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    # Ctrl-C is meant for the node, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow(Path(folder), peer, name, lambda: not stopped and os.getppid() == parent)


if __name__ == "__main__":
    main()
