"""The judge's log, on standard error: lines for people, or JSON lines for a collector."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from judge.errors import Refused

log = logging.getLogger("judge")


@contextmanager
def survived(work: str) -> Iterator[None]:
    """Log what goes wrong in a step of an endless task, and go on. A Refused is in the log already."""
    try:
        yield
    except Refused:
        pass
    except Exception:
        log.exception("%s failed, and goes on", work)


def set_up_logging(*, as_json: bool) -> None:
    """Log warnings and worse, of every library. Called once, early."""
    # Imported here: it takes a while, and --help does not need it.
    import structlog

    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        stamp: list[Any] = [
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
        ]
        remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=stamp, processors=[remove, structlog.processors.JSONRenderer()]
            )
        )
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
