"""Keeps an address book on disk. A disk that fails is logged and stops nothing."""

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

import trio

from p2p.address import parse_bootstrap
from p2p.peers.addressbook import AddressBook
from p2p.types import PeerId

# The least time between two saves, and a second more for each SAVE_PEERS: a large book is some MB.
SAVE_EVERY_S, SAVE_PEERS = 5.0, 50

log = logging.getLogger(__name__)


def pinned_book(me: PeerId, bootstrap: Sequence[str]) -> AddressBook:
    """Make a new book, with a key of its own, that holds the operator's addresses. Raises BadAddress."""
    book = AddressBook(me, secrets.token_bytes(16))
    for text in bootstrap:
        book.pin(*parse_bootstrap(text))
    return book


class AddressBookSaver:
    """Loads and saves one book.

    path: the book's file; None: it is kept nowhere.
    """

    def __init__(self, book: AddressBook, path: Path | None) -> None:
        self._book, self._path = book, path
        self._loaded = False

    def load(self) -> None:
        """Load the file the first time this is called: an engine may run again."""
        if self._path is not None and not self._loaded:
            self._loaded = True
            try:
                self._book.load(self._path)
            except OSError as error:
                # Without the file peers are found as at a first start.
                log.warning("cannot read the address book %s: %s", self._path, error.strerror)

    def save(self) -> None:
        if self._path is not None and self._book.changed:
            try:
                self._book.save(self._path)
            except OSError as error:
                # A full disk must not stop the network.
                log.warning("cannot write the address book %s: %s", self._path, error.strerror)

    async def save_regularly(self) -> None:
        """Save until cancelled."""
        while True:
            await trio.sleep(max(SAVE_EVERY_S, len(self._book) / SAVE_PEERS))
            self.save()
