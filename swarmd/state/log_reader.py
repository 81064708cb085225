"""Reads a log file as people read it: the last lines, and those that are added."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from swarmd.errors import ConfigError
from swarmd.terminal import printable

_TAIL = 1024 * 1024  # bytes that are looked at for the last lines
_POLL = 0.5  # seconds


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a log.

    Raises ConfigError where there is no such log.
    """
    with _opened(path) as file:
        return _tail(file, count)


def follow(path: Path, count: int, wait: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yield the last `count` lines of a log, then each new line for ever, across log rotation."""
    file = _opened(path)
    try:
        yield from _tail(file, count)
        rest = ""
        while True:
            while text := file.readline():
                rest += text
                if rest.endswith("\n"):
                    yield rest.rstrip("\n")
                    rest = ""
            if _is_another(path, file):
                file.close()
                file, rest = _opened(path), ""
            else:
                wait(_POLL)
    finally:
        file.close()


def for_people(line: str) -> str:
    """Format a JSON line of swarmd.log as time, level and event; return any other line as it is."""
    try:
        said = json.loads(line)
        stamp, level, event = (
            str(said["timestamp"])[:19].replace("T", " "),
            str(said["level"]),
            str(said["event"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return printable(line)
    trace = "".join(f"\n    {printable(part)}" for part in str(said.get("exception", "")).splitlines())
    return printable(f"{stamp} {level:<7} {event}") + trace


def _opened(path: Path) -> IO[str]:
    try:
        return path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. A node writes it; name another state folder with --state-dir."
        ) from None


def _tail(file: IO[str], count: int) -> list[str]:
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - _TAIL))
    lines = file.read().splitlines()
    return lines[-count:] if count else []


def _is_another(path: Path, file: IO[str]) -> bool:
    """Return whether the path is no longer the open file, or that was cut."""
    try:
        there, ours = path.stat(), os.fstat(file.fileno())
    except OSError:
        return False  # between the two steps of a rotation
    return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino) or ours.st_size < file.buffer.tell()  # type: ignore[attr-defined]
