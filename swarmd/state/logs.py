"""Log files: JSON lines in the state folder, readable lines on standard error; and reading them for people.

Set up once in each process.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from swarmd.errors import CannotRecord, ConfigError
from swarmd.terminal import printable

# Size at which a log file is rotated.
LOG_BYTES = 5 * 1024 * 1024


def installed_version(package: str = "swarmd") -> str:
    """Return the version of an installed package, or "not installed" (also of swarmd in a bare checkout)."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


class _LogFile(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Skip a line that cannot be written: a traceback for each would bury the node's own messages."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _NoMoreFiles(logging.Filter):
    """Logs failed accepts once a minute; trio logs them ten times a second, with a traceback."""

    _since = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created < self._since + 60:
            return False
        self._since, record.exc_info = record.created, None
        record.msg = (
            "new connections wait: accept returned %s (%s), tried again every %s s. Raise the limit of open"
            " files (`ulimit -n`), or close other programs."
        )
        return True


_no_more_files = _NoMoreFiles()


def log_with(**fields: object) -> None:
    """Add these values to every later log line of this thread and of the tasks that it starts."""
    import structlog

    structlog.contextvars.bind_contextvars(**fields)


def json_lines() -> logging.Formatter:
    """Return a formatter that writes each record as one JSON object, traceback included."""
    import structlog

    return _stamped(structlog.processors.format_exc_info, structlog.processors.JSONRenderer())


def _stamped(*last: Any) -> logging.Formatter:
    import structlog

    stamp: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    only_said = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=stamp, processors=[only_said, *last])


def set_up_logging(log_file: Path | None, *, stderr: bool) -> None:
    """Send all logs, including the libraries', to `log_file` as JSON lines and to stderr for people.

    Called once, early in each process. Raises CannotRecord.

    Args:
        log_file: rotated at 5 MiB, three kept; one process a file (rotation is not safe for two). None: no
            file.
        stderr: False while a live view owns the terminal.
    """
    import structlog

    structlog.contextvars.clear_contextvars()
    handlers: list[logging.Handler] = []
    if log_file is not None:
        try:
            handlers.append(_LogFile(log_file, maxBytes=LOG_BYTES, backupCount=2, encoding="utf-8"))
        except OSError as error:
            raise CannotRecord.to(log_file, error) from None
        handlers[-1].setFormatter(json_lines())
    if stderr:
        handlers.append(logging.StreamHandler())
        colours = handlers[-1].stream.isatty() and not os.environ.get("NO_COLOR")  # type: ignore[attr-defined]
        handlers[-1].setFormatter(
            _stamped(
                structlog.dev.ConsoleRenderer(
                    colors=colours, exception_formatter=structlog.dev.plain_traceback
                )
            )
        )
    # These libraries log every request to a judge: hundreds an hour.
    for library in ("httpx2", "httpcore2"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("trio.serve_listeners").addFilter(_no_more_files)
    logging.basicConfig(level=logging.INFO, handlers=handlers or [logging.NullHandler()], force=True)


def lines_of(path: Path, count: int, *, follow: bool = False) -> Iterator[str]:
    """Yield the last `count` lines of a log; with `follow` also each new line, without end, across rotations.

    Raises ConfigError if there is no such log.
    """
    try:
        path.open().close()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. A node writes it. Name another state folder with --state-dir."
        ) from None
    process = subprocess.Popen(
        ["tail", "-n", str(count), *(["-F"] if follow else []), "--", path],  # noqa: S607
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        errors="replace",
    )
    with process, contextlib.ExitStack() as stack:
        stack.callback(process.terminate)
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip("\n")


def for_people(line: str) -> str:
    """Format a JSON line of swarmd.log as local time, level and event; return any other line as it is."""
    try:
        said = json.loads(line)
        stamp, level, event = (
            f"{datetime.fromisoformat(said['timestamp']).astimezone():%Y-%m-%d %H:%M:%S}",
            str(said["level"]),
            str(said["event"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return printable(line)
    trace = "".join(f"\n    {printable(part)}" for part in str(said.get("exception", "")).splitlines())
    return printable(f"{stamp} {level:<7} {event}") + trace
