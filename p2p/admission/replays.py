"""Replay protection: remembers which of each author's latest frames came.

Pure; `now` is an argument. A restart begins with nothing remembered: what was sent before is old then
(`p2p.admission.memory`).

Theory of operation. A frame is known by its author, its sequence number and its time of sending, all of them
signed. Of each author the last FRAMES sent are remembered. What is forgotten raises a **horizon**, and what
was sent up to it is old:

- an author's own horizon, where it has more than FRAMES. So the times that an author chooses count for nobody
  else;
- one for all authors that are not remembered, raised where an author is forgotten. It never passes
  REMEMBERED_S before now, as no author is forgotten whose newest frame is younger. Where there is no room, a
  new author is refused instead.

Room is shared by **holder**, the connection that brought an author, and by its network group: a group may
hold as many authors as are free for others (Choudhury and Hahne, 1998), and a connection as many as are then
free for others in its group. Where there are too few, the one that has been silent for longest is forgotten,
of the holder that has most, in the group that has most.
"""

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from typing import NamedTuple

from p2p.types import PeerId, Reason

# How much older than now a frame may be, by its author's clock.
WINDOW_S = 300.0
# How far an author's clock may be ahead of ours.
AHEAD_S = 10.0
# An author is remembered at least so long, however many there are.
REMEMBERED_S = 60.0
# Frames of one author that are remembered.
FRAMES = 64


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
    """Remembers the frames of at most `limit` authors."""

    def __init__(self, limit: int, not_before: float = 0.0) -> None:
        """Remember nobody yet.

        not_before: seconds since the epoch; what was sent earlier is old.
        """
        self._limit = limit
        self._start, self._horizon = round(not_before * 1000), 0
        self._authors: dict[bytes, _Author] = {}
        self._held: dict[Holder, OrderedDict[bytes, _Author]] = {}  # by holder; longest silent first
        self._groups: Counter[str] = Counter()  # authors that each network group holds

    def refuses(self, trace: Trace, holder: Holder, now: float) -> Reason | None:
        """Return why this frame may not be admitted: STALE, OLD, DUPLICATE or CROWDED."""
        key, sequence, sent_at = trace
        if not now - WINDOW_S <= sent_at / 1000 <= now + AHEAD_S:
            return Reason.STALE
        # The clock was set back, and all frames would be old until it caught up.
        if self._start > (now + REMEMBERED_S + AHEAD_S) * 1000:
            self._start = int((now + AHEAD_S) * 1000)
        author = self._authors.get(key)
        if author is not None and sequence in author.sequences:
            return Reason.DUPLICATE
        if sent_at < self._start or sent_at <= (self._horizon if author is None else author.horizon):
            return Reason.OLD
        return None if author is not None or self._has_room(holder, now) else Reason.CROWDED

    def remember(self, trace: Trace, holder: Holder, now: float) -> None:
        """Remember an admitted frame; `refuses` found nothing against it."""
        author = self._authors.get(trace.author)
        if author is None:
            author = self._place(trace.author, _Author(holder, self._horizon))
        elif len(self._held.get(holder, ())) < len(self._held[author.holder]):
            # A connection that was only faster once does not hold the author.
            self._forget(trace.author)
            author.holder = holder
            self._place(trace.author, author)
        self._held[author.holder].move_to_end(trace.author)
        author.add(trace.sequence, trace.sent_at)
        expired = int((now - WINDOW_S) * 1000)
        author.forget(bisect_left(author.sent_at, expired))
        self._expire(author.holder, expired)

    def _has_room(self, holder: Holder, now: float) -> bool:
        """Return whether there is room for another author, forgetting those that may be forgotten."""
        while True:
            free, ours, its = (
                self._limit - len(self._authors),
                self._groups[holder.group],
                len(self._held.get(holder, ())),
            )
            if free > (0 if holder is NOBODY else ours if ours == its else ours + its):
                return True
            most = max(self._held, key=lambda held: (self._groups[held.group], len(self._held[held])))
            key, silent = next(iter(self._held[most].items()))
            if silent.newest >= (now - REMEMBERED_S) * 1000:
                return False
            self._horizon = max(self._horizon, silent.newest)
            self._forget(key)

    def _expire(self, holder: Holder, expired: int) -> None:
        """Forget authors of whom nothing can be let in again, in the order in which they fell silent."""
        held = self._held[holder]
        while (first := next(iter(held.items())))[1].newest < expired:
            self._horizon = max(self._horizon, first[1].newest)
            self._forget(first[0])

    def _place(self, key: bytes, author: _Author) -> _Author:
        self._authors[key] = self._held.setdefault(author.holder, OrderedDict())[key] = author
        self._groups[author.holder.group] += 1
        return author

    def _forget(self, key: bytes) -> None:
        author = self._authors.pop(key)
        held = self._held[author.holder]
        del held[key]
        self._groups[author.holder.group] -= 1
        if not self._groups[author.holder.group]:
            del self._groups[author.holder.group]
        if not held:
            del self._held[author.holder]
