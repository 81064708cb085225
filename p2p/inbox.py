"""Admission: which frames are let in. Pure: `now` is an argument, nothing is read or written.

Rules go from cheap to dear: size, form, version, swarm, our own echo, time window, repetition, the author's quota, and last the
signature. What an author is charged for and remembered by is only what it really signed, so nobody can use up another's quota.

Why a frame is never let in twice, however much is thrown at us: its content id is remembered until its own time of sending leaves
the window, at most twice the window after it came. Where memory runs out sooner, the frames that were sent first are forgotten, and
from then on anything sent as early as they were is stale: under a flood the window shrinks, but it never opens.
"""

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass
from hashlib import sha256

from p2p.envelope import MAX_FRAME, Frame, check, parse
from p2p.identity import public_key_of
from p2p.types import Envelope, PeerId, Reason, Rejected

_SEQUENCES = 1024  # how far behind an author's newest frame an older one may arrive


@dataclass(frozen=True, slots=True)
class Limits:
    """What one node takes in. Rates are per author; a bucket holds its burst when full."""

    max_frame: int = MAX_FRAME  # bytes
    window: float = 300.0  # seconds that an author's clock may be off ours, or its frame be on its way
    frames_per_second: float = 20.0
    frames_burst: float = 200.0
    bytes_per_second: float = 512 * 1024.0
    bytes_burst: float = 8 * 1024 * 1024.0
    authors: int = 8_192  # remembered at once
    frames: int = 65_536  # content ids remembered at once


class _Author:
    """What is remembered of one author: its quota, and which of its latest sequence numbers came."""

    __slots__ = ("bytes_left", "frames_left", "newest", "refilled", "seen")

    def __init__(self, limits: Limits, now: float) -> None:
        self.frames_left = limits.frames_burst
        self.bytes_left = limits.bytes_burst
        self.refilled = now
        self.newest = -1
        self.seen = 0  # bit i: sequence number newest − i came

    def refill(self, limits: Limits, now: float) -> None:
        passed = max(0.0, now - self.refilled)
        self.frames_left = min(limits.frames_burst, self.frames_left + passed * limits.frames_per_second)
        self.bytes_left = min(limits.bytes_burst, self.bytes_left + passed * limits.bytes_per_second)
        self.refilled = now

    def repeats(self, sequence: int) -> bool:
        behind = self.newest - sequence
        return behind >= _SEQUENCES or (behind >= 0 and bool(self.seen >> behind & 1))

    def remember(self, sequence: int) -> None:
        ahead = sequence - self.newest
        if ahead > 0:
            kept = self.seen << ahead if ahead < _SEQUENCES else 0
            self.seen, self.newest = (kept | 1) & ((1 << _SEQUENCES) - 1), sequence
        else:
            self.seen |= 1 << -ahead


class Inbox:
    """The admission of one member of one swarm. `not_before`: frames sent earlier are stale, so a restart opens no door to replays."""

    def __init__(self, me: PeerId, swarm_id: bytes, limits: Limits | None = None, *, not_before: float = 0.0) -> None:
        self._own_key = public_key_of(me)
        self.swarm_id = swarm_id
        self.limits = limits or Limits()
        self.counts: Counter[Reason] = Counter()
        self.admitted = 0
        self._authors: OrderedDict[bytes, _Author] = OrderedDict()  # least recently admitted first
        self._seen: set[bytes] = set()
        self._oldest: list[tuple[int, bytes]] = []  # heap of (sent_at in ms, content id), one for each in _seen
        self._horizon = int(not_before * 1000)  # ms; what was sent before is stale

    def receive(self, frame: bytes, now: float) -> Envelope | Rejected:
        """The envelope, or why not. `now` in seconds since the epoch."""
        outcome = self._admit(frame, now)
        if isinstance(outcome, Rejected):
            self.counts[outcome.reason] += 1
        else:
            self.admitted += 1
        return outcome

    def charge(self, author: PeerId, frames: float, now: float) -> None:
        """Take `frames` off an author's quota, for what it sent was admitted and proved bad. Down to one burst below zero."""
        state = self._authors.get(public_key_of(author))
        if state is not None:
            state.refill(self.limits, now)
            state.frames_left = max(-self.limits.frames_burst, state.frames_left - frames)

    def _admit(self, frame: bytes, now: float) -> Envelope | Rejected:
        if len(frame) > self.limits.max_frame:
            return Rejected(Reason.TOO_LARGE)
        parsed = parse(frame, self.swarm_id)
        if isinstance(parsed, Rejected):
            return parsed
        if parsed.author == self._own_key:
            return Rejected(Reason.OWN_ECHO)
        if abs(now - parsed.sent_at_ms / 1000) > self.limits.window or parsed.sent_at_ms < self._horizon:
            return Rejected(Reason.STALE)
        content_id = sha256(frame).digest()[:16]
        author = self._authors.get(parsed.author) or _Author(self.limits, now)
        if content_id in self._seen or author.repeats(parsed.sequence):
            return Rejected(Reason.DUPLICATE)
        author.refill(self.limits, now)
        if author.frames_left < 1 or author.bytes_left < len(frame):
            return Rejected(Reason.OVER_QUOTA)
        envelope = check(parsed, frame)
        if isinstance(envelope, Envelope):
            self._remember(parsed, author, content_id, len(frame), now)
        return envelope

    def _remember(self, parsed: Frame, author: _Author, content_id: bytes, size: int, now: float) -> None:
        author.frames_left -= 1
        author.bytes_left -= size
        author.remember(parsed.sequence)
        self._authors[parsed.author] = author
        self._authors.move_to_end(parsed.author)
        while len(self._authors) > self.limits.authors:
            self._authors.popitem(last=False)  # what it sent is still known by content id
        self._seen.add(content_id)
        heapq.heappush(self._oldest, (parsed.sent_at_ms, content_id))
        expired = int((now - self.limits.window) * 1000)
        while self._oldest and (self._oldest[0][0] < expired or len(self._oldest) > self.limits.frames):
            sent_at_ms, forgotten = heapq.heappop(self._oldest)
            self._seen.discard(forgotten)
            self._horizon = max(self._horizon, sent_at_ms + 1)
