"""A folder and a port that the code under test must not touch."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass
class Watched:
    folder: Path
    listener: socket.socket

    @property
    def path(self) -> str:
        return str(self.folder / "pwned")

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def touched(self) -> list[str]:
        """Return the names of created files, and "a connection" if one was opened."""
        found = [path.name for path in self.folder.iterdir()]
        with contextlib.suppress(BlockingIOError):
            self.listener.accept()
            found.append("a connection")
        return found


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Watched(folder, listener)


def cpu_seconds(pid: int | None) -> float:
    """Return the CPU seconds of a process and all its descendants, including those that ended."""
    return sum(sum(each.cpu_times()[:4]) for each in (psutil.Process(pid), *descendants(pid)))


def descendants(pid: int | None) -> list[psutil.Process]:
    assert pid is not None
    return list(psutil.Process(pid).children(recursive=True))
