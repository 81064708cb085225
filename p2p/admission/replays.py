"""Replay protection: remembers the latest frames of each author.

Pure; `now` is an argument. Nothing is remembered over a restart; frames sent before the restart are refused
instead (`p2p.admission.seen_file`).

Theory of operation. A frame is identified by its author, sequence number and time of sending, all signed. The
last FRAMES frames of each author are remembered. Forgetting a frame raises a **horizon**, and a frame that
was sent at or before the horizon is refused as old. There are two kinds:

- The author's horizon rises if the author has more than FRAMES frames. So the times that one author chooses
  do not affect other authors.
- The horizon of the author's slot rises if the author is forgotten. A salted hash gives each author one of
  SLOTS slots, so nobody can choose a key that shares the slot of a victim. A slot's horizon is at most
  AHEAD_S ahead of now. So a crowd of authors delays a newcomer's first frame only by accident, and by AHEAD_S
  at most.

Memory is shared fairly between **holders**, the connections that bring authors, and between their network
groups. If it is full, the largest holder in the largest group loses the author that was silent for longest.
So a crowd pushes out its own authors. A forgotten author is remembered again from its next frame.
"""

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from mmap import mmap
from typing import NamedTuple

from p2p.types import PeerId, Reason

# Largest age of a frame, by its author's clock.
WINDOW_S = 300.0
# How far an author's clock may be ahead of our clock.
AHEAD_S = 10.0
# If `not_before` is further ahead of now, the clock was set back. After a mere restart it is at most
# `seen_file.PROMISE_S` ahead.
SET_BACK_S = 70.0
# Remembered frames of one author.
FRAMES = 64
# Horizons for forgotten authors. An attack of 1,500 new authors a second, whose clocks are AHEAD_S ahead,
# keeps 3 % of the slots ahead of now.
SLOTS = 1 << 19


class Holder(NamedTuple):
    """The connection that brought an author."""

    group: str  # network group of the connection
    via: PeerId  # the peer at the other end


NOBODY = Holder("", PeerId(""))  # the holder of authors whose connection is unknown


class Trace(NamedTuple):
    """The fields of an admitted frame that replay protection remembers."""

    author: bytes  # public key
    sequence: int
    sent_at: int  # ms


class _Author:
    __slots__ = ("holder", "horizon", "sent_at", "sequences")

    def __init__(self, holder: Holder, horizon: int) -> None:
        self.holder, self.horizon = holder, horizon
        # Parallel arrays with one entry for each frame, earliest first.
        self.sent_at, self.sequences = array("Q"), array("Q")

    @property
    def newest(self) -> int:
        return self.sent_at[-1] if self.sent_at else self.horizon

    def add(self, sequence: int, sent_at: int) -> None:
        place = bisect_left(self.sent_at, sent_at)
        self.sent_at.insert(place, sent_at)
        self.sequences.insert(place, sequence)
        self.forget(max(0, len(self.sent_at) - FRAMES))

    def forget(self, count: int) -> None:
        """Forget the `count` earliest frames and raise the horizon to the last of them."""
        if count:
            self.horizon = max(self.horizon, self.sent_at[count - 1])
            del self.sent_at[:count], self.sequences[:count]


class Replays:
    """Remembers the frames of at most `limit` authors.

    not_before: frames sent earlier are refused as old. Seconds since the epoch.
    """

    def __init__(self, limit: int, not_before: float = 0.0) -> None:
        self._limit = limit
        self._start = round(not_before * 1000)
        # Horizon of each slot, in ms. With mmap only the written pages take memory.
        self._horizons = memoryview(mmap(-1, 8 * SLOTS)).cast("Q")
        self._authors: dict[bytes, _Author] = {}
        self._held: dict[Holder, OrderedDict[bytes, _Author]] = {}  # the longest silent author first

    def refuses(self, trace: Trace, now: float) -> Reason | None:
        """Return STALE, OLD or DUPLICATE if this frame may not be admitted, else None."""
        key, sequence, sent_at = trace
        if not now - WINDOW_S <= sent_at / 1000 <= now + AHEAD_S:
            return Reason.STALE
        # The clock was set back: without this, all frames would be old until it caught up.
        if self._start > (now + SET_BACK_S) * 1000:
            self._start = int((now + AHEAD_S) * 1000)
        if (author := self._authors.get(key)) is not None and sequence in author.sequences:
            return Reason.DUPLICATE
        horizon = self._horizons[_slot(key)] if author is None else author.horizon
        return Reason.OLD if sent_at < self._start or sent_at <= horizon else None

    def remember(self, trace: Trace, holder: Holder, now: float) -> None:
        """Remember an admitted frame, for which `refuses` returned None."""
        if (author := self._authors.get(trace.author)) is None:
            author = self._place(trace.author, _Author(holder, self._horizons[_slot(trace.author)]))
        elif len(self._held.get(holder, ())) < len(self._held[author.holder]):
            # Move the author to this holder because it has fewer authors, so that a connection that was once
            # faster does not keep it.
            self._remove(trace.author)
            author.holder = holder
            self._place(trace.author, author)
        self._held[author.holder].move_to_end(trace.author)
        author.add(trace.sequence, trace.sent_at)
        expired = int((now - WINDOW_S) * 1000)
        author.forget(bisect_left(author.sent_at, expired))
        # All frames of these authors are too old to be admitted again.
        held = self._held[author.holder]
        while (first := next(iter(held.items())))[1].newest < expired:
            self._forget(first[0])
        if len(self._authors) > self._limit:
            groups = Counter[str]()  # number of authors by network group
            for its, authors in self._held.items():
                groups[its.group] += len(authors)
            most = max(self._held, key=lambda held: (groups[held.group], len(self._held[held])))
            self._forget(next(iter(self._held[most])))

    def _place(self, key: bytes, author: _Author) -> _Author:
        self._authors[key] = self._held.setdefault(author.holder, OrderedDict())[key] = author
        return author

    def _forget(self, key: bytes) -> None:
        """Forget an author and raise its slot's horizon, so that its frames so far are old."""
        slot = _slot(key)
        self._horizons[slot] = max(self._horizons[slot], self._remove(key).newest)

    def _remove(self, key: bytes) -> _Author:
        author = self._authors.pop(key)
        held = self._held[author.holder]
        del held[key]
        if not held:
            del self._held[author.holder]
        return author


def _slot(key: bytes) -> int:
    """Return the slot of an author. Python salts the hash, so an attacker cannot predict the slot."""
    return hash(key) % SLOTS
