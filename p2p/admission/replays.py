"""Replay protection: remembers which of each author's latest frames came.

Pure; `now` is an argument. A restart begins with nothing remembered: what was sent before is old then
(`p2p.admission.seen_file`).

Theory of operation. A frame is known by its author, its sequence number and its time of sending, all of them
signed. Of each author the last FRAMES sent are remembered. A forgotten frame raises a **horizon**, and frames
sent up to it are old:

- an author's own horizon, if it has more than FRAMES. So the times that an author chooses count for nobody
  else;
- the horizon of its slot, if the author is forgotten. Each author has one of SLOTS slots, and nobody can
  choose a key with the slot of another author. A slot is at most AHEAD_S ahead of now. So a crowd of authors
  delays the first frame of a newcomer by accident only, and by AHEAD_S at most.

Room is shared by **holder**, the connection that brought an author, and by its network group. If there is no
room, the author that has been silent for longest is forgotten, of the holder that has most, in the group that
has most. So a crowd forgets its own authors, and an author that is forgotten comes back with its next frame.
"""

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from mmap import mmap
from typing import NamedTuple

from p2p.types import PeerId, Reason

# How much older than now a frame may be, by its author's clock.
WINDOW_S = 300.0
# How far an author's clock may be ahead of ours.
AHEAD_S = 10.0
# A start that is further ahead of now says that the clock was set back: a restart is at most 30 s ahead.
SET_BACK_S = 70.0
# Frames of one author that are remembered.
FRAMES = 64
# Horizons of authors that are not remembered. A crowd of 1,500 new authors a second, with clocks that are
# AHEAD_S ahead, keeps 3 % of them ahead of now.
SLOTS = 1 << 19


class Holder(NamedTuple):
    """Who brought an author."""

    group: str  # of the connection
    via: PeerId  # the peer at the other end


NOBODY = Holder("", PeerId(""))  # the holder of authors of which no connection is known


class Trace(NamedTuple):
    """What replay protection keeps of one admitted frame."""

    author: bytes  # public key
    sequence: int
    sent_at: int  # ms


class _Author:
    __slots__ = ("holder", "horizon", "sent_at", "sequences")

    def __init__(self, holder: Holder, horizon: int) -> None:
        self.holder, self.horizon = holder, horizon
        # One entry for each frame, the earliest first.
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
        """Forget the frames that were sent first."""
        if count:
            self.horizon = max(self.horizon, self.sent_at[count - 1])
            del self.sent_at[:count], self.sequences[:count]


class Replays:
    """Remembers the frames of at most `limit` authors.

    not_before: seconds since the epoch; what was sent earlier is old.
    """

    def __init__(self, limit: int, not_before: float = 0.0) -> None:
        self._limit = limit
        self._start = round(not_before * 1000)
        # By slot. Only pages that are written take memory.
        self._horizons = memoryview(mmap(-1, 8 * SLOTS)).cast("Q")
        self._authors: dict[bytes, _Author] = {}
        self._held: dict[Holder, OrderedDict[bytes, _Author]] = {}  # by holder; longest silent first

    def refuses(self, trace: Trace, now: float) -> Reason | None:
        """Return why this frame may not be admitted: STALE, OLD or DUPLICATE."""
        key, sequence, sent_at = trace
        if not now - WINDOW_S <= sent_at / 1000 <= now + AHEAD_S:
            return Reason.STALE
        # The clock was set back, and all frames would be old until it caught up.
        if self._start > (now + SET_BACK_S) * 1000:
            self._start = int((now + AHEAD_S) * 1000)
        author = self._authors.get(key)
        if author is not None and sequence in author.sequences:
            return Reason.DUPLICATE
        horizon = self._horizons[_slot(key)] if author is None else author.horizon
        return Reason.OLD if sent_at < self._start or sent_at <= horizon else None

    def remember(self, trace: Trace, holder: Holder, now: float) -> None:
        """Remember an admitted frame; `refuses` found nothing against it."""
        author = self._authors.get(trace.author)
        if author is None:
            author = self._place(trace.author, _Author(holder, self._horizons[_slot(trace.author)]))
        elif len(self._held.get(holder, ())) < len(self._held[author.holder]):
            # A connection that was only faster once does not hold the author.
            self._remove(trace.author)
            author.holder = holder
            self._place(trace.author, author)
        self._held[author.holder].move_to_end(trace.author)
        author.add(trace.sequence, trace.sent_at)
        expired = int((now - WINDOW_S) * 1000)
        author.forget(bisect_left(author.sent_at, expired))
        # Of these nothing can be let in again.
        held = self._held[author.holder]
        while (first := next(iter(held.items())))[1].newest < expired:
            self._forget(first[0])
        if len(self._authors) > self._limit:
            groups = Counter[str]()  # authors that each network group holds
            for its, authors in self._held.items():
                groups[its.group] += len(authors)
            most = max(self._held, key=lambda held: (groups[held.group], len(self._held[held])))
            self._forget(next(iter(self._held[most])))

    def _place(self, key: bytes, author: _Author) -> _Author:
        self._authors[key] = self._held.setdefault(author.holder, OrderedDict())[key] = author
        return author

    def _forget(self, key: bytes) -> None:
        """Forget an author; its frames are old from now on."""
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
    """Return the slot of an author. Python salts the hash, so an attacker cannot know it."""
    return hash(key) % SLOTS
