"""Log files: JSON lines in the state folder, readable lines on standard error.

Set up once in each process.
"""

import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from swarmd.errors import CannotRecord

LOG_BYTES = 5 * 1024 * 1024  # a log file's size before it is set aside
LOGS_KEPT = 3
CHATTY = ("httpx2", "httpcore2")  # they log every request: hundreds of lines an hour, where a judge is asked


def installed_version(package: str = "swarmd") -> str:
    """Return the version of an installed package, or "not installed" (also of swarmd in a bare checkout)."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def log_with(**fields: object) -> None:
    """Put these into every later log line of this thread, and of the tasks that it starts."""
    import structlog

    structlog.contextvars.bind_contextvars(**fields)


def set_up_logging(log_file: Path | None, *, stderr: bool, level: int = logging.INFO) -> None:
    """Send all logs, the libraries' and ours, to `log_file` as JSON lines and to stderr for people.

    log_file: rotated at 5 MiB, three kept; one process a file (rotation is not safe for two). None: no file.
    stderr: False while a live view owns the terminal. Called once, early in each process. Raises
    CannotRecord.
    """
    import structlog

    structlog.contextvars.clear_contextvars()
    stamp: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handlers: list[logging.Handler] = []
    if log_file is not None:
        try:
            handlers.append(
                RotatingFileHandler(log_file, maxBytes=LOG_BYTES, backupCount=LOGS_KEPT - 1, encoding="utf-8")
            )
        except OSError as error:
            raise CannotRecord.to(log_file, error) from None
        as_json = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        handlers[-1].setFormatter(
            structlog.stdlib.ProcessorFormatter(foreign_pre_chain=stamp, processors=_without_meta(as_json))
        )
    if stderr:
        handlers.append(logging.StreamHandler())
        colours = handlers[-1].stream.isatty() and not os.environ.get("NO_COLOR")  # type: ignore[attr-defined]
        for_people = [
            structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
        ]
        handlers[-1].setFormatter(
            structlog.stdlib.ProcessorFormatter(foreign_pre_chain=stamp, processors=_without_meta(for_people))
        )
    for library in CHATTY:
        logging.getLogger(library).setLevel(max(level, logging.WARNING))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers or [logging.NullHandler()]:
        root.addHandler(handler)
    root.setLevel(level)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *stamp,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _without_meta(last: list[Any]) -> list[Any]:
    import structlog

    return [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
