"""Admission: the checks of every frame that arrives, and replay protection. Pure; `now` is an argument. As a table: docs/admission.md.

Checks run cheapest first: what the peer that handed it over may still send, size, form, version, swarm, our own echo, time window,
repetition, score and quota of the author it names, and last the signature. An author is charged only for what it really signed, so
nobody can use up another's quota. What nobody signed is charged to the connection it came by.

Replay protection: a frame's content id is remembered until its time of sending leaves the window, at most twice the window after it
came. Where memory runs out sooner, the frames that were sent first are forgotten, and from then on anything sent as early as they were
is stale. So a flood makes the window smaller, and never lets a frame in twice. `p2p.admission.replay_log` keeps this over restarts.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, Protocol

from p2p.envelope import MAX_FRAME, Frame, check, parse
from p2p.identity import peer_id_of, public_key_of
from p2p.rate_limit import TokenBucket
from p2p.types import Envelope, PeerId, Reason, Rejected, Verdict

_SEQUENCES = 1024  # of an author's latest sequence numbers that are remembered


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits of one node. A token bucket holds its burst when full."""

    max_frame: int = MAX_FRAME  # bytes
    window: float = 300.0  # seconds between an author's clock and ours, the time on the way included
    # Of one author.
    frames_per_second: float = 20.0
    frames_burst: float = 200.0
    bytes_per_second: float = 512 * 1024.0
    bytes_burst: float = 8 * 1024 * 1024.0
    # Of one connection, which brings frames of many authors.
    via_frames_per_second: float = 200.0
    via_frames_burst: float = 600.0
    via_bytes_per_second: float = 4 * 1024 * 1024.0
    via_bytes_burst: float = 32 * 1024 * 1024.0
    via_broken_per_second: float = 1.0
    via_broken_burst: float = 30.0
    # Of all newcomers together, once somebody is established.
    newcomers_per_second: float = 100.0
    newcomers_burst: float = 1000.0
    # Remembered at once.
    authors: int = 8_192
    frames: int = 65_536  # content ids
    vias: int = 1_024


class Opinion(Protocol):
    """Our opinion of peers: `p2p.admission.reputation.Reputation`."""

    def shunned(self, peer: PeerId, now: float) -> bool: ...

    def established(self, peer: PeerId, now: float) -> bool: ...


class Trace(NamedTuple):
    """What the replay log keeps of one admitted frame."""

    author: bytes  # its key
    sequence: int
    sent_at: int  # ms
    content_id: bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """The replay protection's state, which must outlive a restart."""

    horizon: int = 0  # ms; what was sent before is stale
    contents: Sequence[tuple[int, bytes]] = ()  # sent_at in ms, content id
    authors: Sequence[tuple[bytes, int, int]] = ()  # key, newest sequence number, and bit i: newest − i came; least recent first


def came(newest: int, seen: int, sequence: int) -> tuple[int, int]:
    """The newest sequence number and the bits of those that came, after one more."""
    ahead = sequence - newest
    if ahead > 0:
        return sequence, ((seen << ahead if ahead < _SEQUENCES else 0) | 1) & ((1 << _SEQUENCES) - 1)
    return newest, seen | (1 << -ahead if -ahead < _SEQUENCES else 0)


class _Author:
    """One author: its quota, and which of its latest sequence numbers came."""

    __slots__ = ("bytes", "frames", "newest", "seen")

    def __init__(self, limits: AdmissionLimits, now: float, newest: int = -1, seen: int = 0) -> None:
        self.frames = TokenBucket(limits.frames_per_second, limits.frames_burst, now)
        self.bytes = TokenBucket(limits.bytes_per_second, limits.bytes_burst, now)
        self.newest, self.seen = newest, seen

    def affords(self, size: int, now: float) -> bool:
        frames = self.frames.refill(now)
        return self.bytes.refill(now) >= size and frames >= 1

    def repeats(self, sequence: int) -> bool:
        """Whether this number came, among the latest. Older ones are known by content alone: otherwise a second node with the same key,
        which started later and so has larger numbers, would keep the first one out long after it is gone.
        """
        behind = self.newest - sequence
        return 0 <= behind < _SEQUENCES and bool(self.seen >> behind & 1)

    def remember(self, sequence: int) -> None:
        self.newest, self.seen = came(self.newest, self.seen, sequence)


class _Via:
    """The rate limit of one connection."""

    __slots__ = ("broken", "bytes", "frames")

    def __init__(self, limits: AdmissionLimits, now: float) -> None:
        self.frames = TokenBucket(limits.via_frames_per_second, limits.via_frames_burst, now)
        self.bytes = TokenBucket(limits.via_bytes_per_second, limits.via_bytes_burst, now)
        self.broken = TokenBucket(limits.via_broken_per_second, limits.via_broken_burst, now)

    def pays(self, size: int, now: float) -> bool:
        """Frames over the limit are not charged: the connection is used again as soon as it is slower."""
        if self.frames.refill(now) < 1 or self.bytes.refill(now) < size or self.broken.refill(now) < 1:
            return False
        self.frames.take(1)
        self.bytes.take(size)
        return True


class Inbox:
    """The admission of one member of one swarm.

    not_before: frames sent earlier are stale, so that a restart without `memory` admits no replays. note: called with every admitted
    frame, before `receive` returns. verify: `envelope.check`, or a cache of it where many members in one process receive one frame.
    """

    def __init__(
        self,
        me: PeerId,
        swarm_id: bytes,
        limits: AdmissionLimits | None = None,
        *,
        not_before: float = 0.0,
        memory: Memory | None = None,
        opinion: Opinion | None = None,
        note: Callable[[Trace], None] = lambda _: None,
        verify: Callable[[Frame, bytes], Envelope | Rejected] = check,
    ) -> None:
        self._own_key = public_key_of(me)
        self.swarm_id = swarm_id
        self.limits = limits or AdmissionLimits()
        self.counts: Counter[Reason] = Counter()
        self.admitted = 0
        self._opinion, self._note, self._verify = opinion, note, verify
        memory = memory or Memory()
        self._authors = OrderedDict(  # least recently admitted first
            (key, _Author(self.limits, 0.0, newest, seen)) for key, newest, seen in memory.authors
        )
        self._vias: OrderedDict[PeerId, _Via] = OrderedDict()  # least recently heard first
        self._newcomers = TokenBucket(self.limits.newcomers_per_second, self.limits.newcomers_burst, 0.0)
        self._oldest = list(memory.contents)  # heap of (sent_at in ms, content id), one for each in _seen
        heapq.heapify(self._oldest)
        self._seen = {content_id for _, content_id in self._oldest}
        self._start = max(memory.horizon, int(not_before * 1000))  # ms; what was sent before it is stale
        self._horizon = 0  # ms; the same, of what was forgotten since

    def receive(self, frame: bytes, now: float, via: PeerId | None = None, swarm_id: bytes | None = None) -> Envelope | Rejected:
        """The envelope, or why not. `now` in seconds since the epoch; via: the peer that handed it over, where that is known; swarm_id: of
        the shard that it came in, where that is not shard 0.
        """
        outcome = self._from(via, frame, now, swarm_id or self.swarm_id)
        if isinstance(outcome, Rejected):
            self.counts[outcome.reason] += 1
        else:
            self.admitted += 1
        return outcome

    def charge(self, author: PeerId, frames: float, now: float) -> None:
        """Take `frames` off an author's quota, as it sent an admitted frame that proved bad. Down to one burst below zero."""
        state = self._authors.get(public_key_of(author))
        if state is not None:
            state.frames.refill(now)
            state.frames.take(frames)

    def memory(self) -> Memory:
        """The state to give to this inbox after a restart."""
        authors = [(key, author.newest, author.seen) for key, author in self._authors.items()]
        return Memory(max(self._start, self._horizon), list(self._oldest), authors)

    def _from(self, via: PeerId | None, frame: bytes, now: float, swarm_id: bytes) -> Envelope | Rejected:
        if via is None:  # not known to the engine: only the author can be charged
            return self._admit(frame, now, swarm_id)
        purse = self._vias.get(via) or self._vias.setdefault(via, _Via(self.limits, now))
        self._vias.move_to_end(via)
        if len(self._vias) > self.limits.vias:
            self._vias.popitem(last=False)
        if not purse.pays(len(frame), now):
            return Rejected(Reason.FLOODING)
        if self._opinion is not None and self._opinion.shunned(via, now):
            return Rejected(Reason.SHUNNED)
        outcome = self._admit(frame, now, swarm_id)
        if isinstance(outcome, Rejected) and outcome.reason.verdict is Verdict.REJECT:
            purse.broken.take(1)
        return outcome

    def _admit(self, frame: bytes, now: float, swarm_id: bytes) -> Envelope | Rejected:
        if len(frame) > self.limits.max_frame:
            return Rejected(Reason.TOO_LARGE)
        parsed = parse(frame, swarm_id)
        if isinstance(parsed, Rejected):
            return parsed
        if parsed.author == self._own_key:
            return Rejected(Reason.OWN_ECHO)
        if self._start > (now + 2 * self.limits.window) * 1000:  # the clock was set back, and all frames would be stale until it caught up
            self._start = int(now * 1000)
        if abs(now - parsed.sent_at_ms / 1000) > self.limits.window or parsed.sent_at_ms < max(self._start, self._horizon):
            return Rejected(Reason.STALE)
        content_id = sha256(frame).digest()[:16]
        author = self._authors.get(parsed.author) or _Author(self.limits, now)
        if content_id in self._seen or author.repeats(parsed.sequence):
            return Rejected(Reason.DUPLICATE)
        if not author.affords(len(frame), now):
            return Rejected(Reason.OVER_QUOTA)
        newcomer = False
        if self._opinion is not None:
            name = peer_id_of(parsed.author)
            if self._opinion.shunned(name, now):
                return Rejected(Reason.SHUNNED)
            newcomer = not self._opinion.established(name, now)
            if newcomer and self._newcomers.refill(now) < 1:
                return Rejected(Reason.CROWDED)
        envelope = self._verify(parsed, frame)
        if isinstance(envelope, Envelope):
            if newcomer:
                self._newcomers.take(1)
            self._remember(parsed, author, content_id, len(frame), now)
        return envelope

    def _remember(self, parsed: Frame, author: _Author, content_id: bytes, size: int, now: float) -> None:
        author.frames.take(1)
        author.bytes.take(size)
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
        self._note(Trace(parsed.author, parsed.sequence, parsed.sent_at_ms, content_id))
