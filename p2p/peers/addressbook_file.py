"""Keeps an address book on disk, as peers.json. A disk that fails is logged and stops nothing."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from p2p import durable
from p2p.peers.addressbook import MAX_FILE_BYTES, AddressBook

# The least time between two saves, and a second more for each SAVE_PEERS: a large book is some MB.
SAVE_EVERY_S, SAVE_PEERS = 5.0, 50

log = logging.getLogger(__name__)


class AddressBookFile:
    """The file of one book, which is read into it. A damaged one is set aside: peers can be found again.

    path: None keeps it nowhere. clock: seconds since the epoch.
    """

    def __init__(self, book: AddressBook, path: Path | None, clock: Callable[[], float]) -> None:
        # Whether it was told that the file cannot be written.
        self._book, self._path, self._told = book, path, False
        if path is not None:
            durable.load(
                path,
                # The clock may not be set yet, and a copied file may be of any date.
                lambda content: book.restore(content, max(path.stat().st_mtime, clock())),
                "peers are found anew",
                MAX_FILE_BYTES + 1,
            )

    def save(self) -> None:
        if (write := self._due()) is not None:
            write()

    async def save_regularly(self) -> None:
        """Save until cancelled."""
        while True:
            await trio.sleep(max(SAVE_EVERY_S, len(self._book) / SAVE_PEERS))
            if (write := self._due()) is not None:
                # In a thread, as the disk may be slow.
                await trio.to_thread.run_sync(write)

    def _due(self) -> Callable[[], None] | None:
        """Return what writes the book as it is now; None where nothing has changed."""
        if self._path is None or not self._book.changed:
            return None
        # What changes during the write is written the next time.
        self._book.changed = False
        return partial(self._write, self._path, self._book.dump())

    def _write(self, path: Path, content: bytes) -> None:
        try:
            durable.replace(path, content)
            self._told = False
        except OSError as error:
            # A full disk must not stop the network, nor fill the log every five seconds.
            self._book.changed = True
            level, self._told = logging.DEBUG if self._told else logging.WARNING, True
            log.log(level, "cannot write the address book %s: %s", path, error.strerror)
