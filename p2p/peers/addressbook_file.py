"""Keeps an address book on disk, as peers.json. Disk errors are logged and do not stop the node."""

import logging
from collections.abc import Callable
from pathlib import Path

import trio

from p2p import durable
from p2p.peers.addressbook import MAX_FILE_BYTES, AddressBook

# Seconds between two saves: SAVE_EVERY_S, or one second for each SAVE_PEERS peers if that is longer, because
# a large book has some MB.
SAVE_EVERY_S, SAVE_PEERS = 5.0, 50

log = logging.getLogger(__name__)


class AddressBookFile:
    """The file of one book. The constructor reads it into the book; a damaged file is set aside.

    path: None to keep no file. clock: returns seconds since the epoch.
    """

    def __init__(self, book: AddressBook, path: Path | None, clock: Callable[[], float]) -> None:
        # `_told`: whether the log has a warning that the file cannot be written.
        self._book, self._path, self._told = book, path, False
        if path is not None:
            durable.load(
                path,
                # The later of two times, because the clock may not be set yet, and a copied file may have any
                # date.
                lambda content: book.restore(content, max(path.stat().st_mtime, clock())),
                "peers must be found again",
                MAX_FILE_BYTES + 1,
            )

    def save(self) -> None:
        if self._path is not None and self._book.changed:
            self._write(self._path, self._book.dump())

    async def save_regularly(self) -> None:
        """Save until cancelled."""
        while True:
            await trio.sleep(max(SAVE_EVERY_S, len(self._book.known) / SAVE_PEERS))
            if self._path is not None and self._book.changed:
                # In a thread, because the disk may be slow.
                await trio.to_thread.run_sync(self._write, self._path, self._book.dump())

    def _write(self, path: Path, content: bytes) -> None:
        try:
            durable.replace(path, content)
            self._told = False
        except OSError as error:
            # A full disk must not stop the network, nor add a line to the log every five seconds.
            self._book.changed = True
            level, self._told = logging.DEBUG if self._told else logging.WARNING, True
            log.log(level, "cannot write the address book %s: %s", path, error.strerror)
