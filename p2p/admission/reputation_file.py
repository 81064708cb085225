"""The reputation's file: saved and loaded over restarts."""

import contextlib
import logging
from pathlib import Path
from zlib import crc32

from p2p import durable
from p2p.admission.reputation import Reputation

MAX_FILE = 8 * 1024 * 1024  # bytes; that of a full `Reputation` has a quarter of it
_CRC_BYTES = 4

log = logging.getLogger(__name__)


def load(path: Path, reputation: Reputation, now: float) -> None:
    """A damaged file is set aside, and all scores begin anew: hostile peers are found again."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE)
        if int.from_bytes(data[:_CRC_BYTES], "big") != crc32(data[_CRC_BYTES:]):
            raise ValueError("not what was written")  # noqa: TRY301
        reputation.load(data[_CRC_BYTES:], now)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):  # the folder is not writable: `save` says so
            aside = durable.set_aside(path)
            log.warning("%s was damaged (%s) and is now %s; all scores of peers begin anew", path, error, aside)


def save(path: Path, reputation: Reputation) -> None:
    data = reputation.dump()
    try:
        durable.replace(path, crc32(data).to_bytes(_CRC_BYTES, "big") + data)
    except OSError as error:
        log.warning("cannot write %s: %s; after a restart all scores of peers begin anew", path, error.strerror)
