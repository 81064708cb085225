"""The judge's log, on standard error: lines for people, or JSON lines for a collector."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from judge.errors import Refused
from swarmd.state.logs import json_lines

log = logging.getLogger("judge")


@contextmanager
def survived(work: str) -> Iterator[None]:
    """Log the failure of one step of an endless task, and continue. A Refused was logged at its raise."""
    try:
        yield
    except Refused:
        pass
    except Exception:
        log.exception("%s failed, and goes on", work)


def set_up_logging(*, as_json: bool) -> None:
    """Log warnings and errors of every library. Called once, early."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        json_lines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
