"""The pause that the user asked for, kept in the state folder so that it survives a restart.

It has an end or none.
"""

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec

from p2p import durable
from swarmd.daemon.guest.conditions import PauseCause, clock_words

log = logging.getLogger(__name__)

PAUSE_FILE: Final = "pause.json"
REMEDY: Final = "swarmd resume"


class _Asked(msgspec.Struct, frozen=True):
    # Seconds since the epoch; None: until `swarmd resume`.
    until: Annotated[float, msgspec.Meta(lt=2e11)] | None = None
    schema: int = 1


class UserPause:
    """The user's pause. clock: seconds since the epoch."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._asked = self._read()

    def begin(self, until: float | None) -> None:
        self._asked = _Asked(until)
        try:
            durable.replace(self._path, msgspec.json.encode(self._asked))
        except OSError as error:
            log.warning("%s cannot be written (%s): the pause ends with the node", self._path, error)

    def end(self) -> None:
        self._asked = None
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "%s cannot be removed: %s. The node will be paused again when it starts.", self._path, error
            )

    def now(self) -> PauseCause | None:
        """Return the pause that the user asked for, or None if there is none or it is over."""
        if self._asked is not None and self._asked.until is not None and self._asked.until <= self._clock():
            self.end()
        if self._asked is None:
            return None
        until = self._asked.until
        if until is None:
            return PauseCause("user", "you paused it", None, f"with {REMEDY}", REMEDY)
        words = clock_words(datetime.fromtimestamp(until), datetime.fromtimestamp(self._clock()))
        return PauseCause("user", "you paused it", until, f"at {words}", REMEDY)

    def _read(self) -> _Asked | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Asked)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s cannot be read (%s): the node is not paused", self._path, error)
            return None
