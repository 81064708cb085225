"""What a peer says of itself when it asks. Signed with the request, kept with the question, and never proof of anything."""

import unicodedata
from dataclasses import dataclass, fields
from typing import Any

MARKS = 2  # accents on one letter, at most
MOST_LETTERS = 64  # of a peer's words, whatever NFKC makes of them


@dataclass(frozen=True, slots=True)
class Attributes:
    round: int  # the peer's own
    model: str
    name: str | None = None  # of the node, for people
    sharing: str | None = None  # "swarm" or "solo"
    local: int | None = None  # I, rollouts of its own in a batch
    external: int | None = None  # J, rollouts of others
    strategy: str | None = None  # how it samples and weighs them
    version: str | None = None  # of its program
    hardware: str | None = None  # "cpu", "cuda", "mps" or "other"

    def said(self) -> dict[str, Any]:
        """Those that it said."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}


NAMES = tuple(field.name for field in fields(Attributes))


def plain(text: str) -> str | None:
    """A peer's words as they are kept and shown: NFKC, spaces together, without control, direction and invisible characters. None: nothing
    is left. Whoever shows it still has to escape it."""
    kept: list[str] = []
    marks = 0
    for letter in unicodedata.normalize("NFKC", text):
        kind = unicodedata.category(letter)
        marks = marks + 1 if kind.startswith("M") else 0
        if kind[0] == "Z" or letter in "\t\n\r":
            kept.append(" ")
        elif kind[0] != "C" and marks <= MARKS:
            kept.append(letter)
    text = unicodedata.normalize("NFKC", " ".join("".join(kept).split()))
    return text[:MOST_LETTERS].rstrip() or None
