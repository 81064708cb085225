"""Bytes and messages that each node received, by kind."""

from array import array
from collections.abc import Sequence

KINDS = ("offers", "crowd", "questions", "control", "fetches", "connections")
WORK = ("messages", "parsed")  # messages read, of any kind; frames that the inbox looked into, each with one signature checked


class Ledger:
    """Bytes and counts per node since the last `clear`. Bytes are those of IP packets, as a home's line carries them."""

    def __init__(self) -> None:
        self.bytes = {kind: array("d") for kind in KINDS}
        self.work = {kind: array("d") for kind in WORK}
        self.copies = self.firsts = 0  # of messages: received in all, and for the first time

    def add(self) -> None:
        """One more node."""
        for column in (*self.bytes.values(), *self.work.values()):
            column.append(0.0)

    def clear(self) -> None:
        for column in (*self.bytes.values(), *self.work.values()):
            for i in range(len(column)):
                column[i] = 0.0
        self.copies = self.firsts = 0

    def total(self, kinds: Sequence[str] = KINDS) -> float:
        return sum(sum(self.bytes[kind]) for kind in kinds)

    def of(self, node: int) -> float:
        """Bytes that one node received."""
        return sum(self.bytes[kind][node] for kind in KINDS)
