"""Admission: the checks of every frame that arrives.

Pure; `now` is an argument. docs/admission.md has them as a table.

Checks run cheapest first: the connection's quota, size, form, version, swarm, our own echo, time, replay
(`p2p.admission.replays`), the named author's quota and score, and last the signature. An author is charged
only for frames that it signed, so nobody can use up another node's quota. A forged frame is charged to the
connection that brought it.
"""

from collections.abc import Callable

from p2p.admission.replays import NOBODY, Holder, Replays, Trace
from p2p.admission.reputation import Reputation
from p2p.envelope import MAX_FRAME_BYTES, Frame, check, parse
from p2p.identity import peer_id_of, public_key_of
from p2p.rate_limit import TokenBuckets
from p2p.types import Envelope, PeerId, Reason

# The quota of one author, rate and burst: frames, and bytes. A node sends one frame a round; tiny models play
# several rounds a second. A burst is shorter than the memory of an author's frames (`replays.FRAMES`). So a
# burst that arrives out of order loses no frame.
FRAMES_PER_S, FRAMES_AT_ONCE = 5.0, 60.0
BYTES_PER_S, BYTES_AT_ONCE = 512 * 1024.0, 8 * 1024 * 1024.0
# The quota of one connection, which brings frames of many authors.
VIA_FRAMES_PER_S, VIA_FRAMES_AT_ONCE = 200.0, 600.0
VIA_BYTES_PER_S, VIA_BYTES_AT_ONCE = 4 * 1024 * 1024.0, 32 * 1024 * 1024.0
# Authors that are remembered.
MAX_AUTHORS = 8_192


class Inbox:
    """The admission of one member to one swarm.

    Args:
        me: our peer id.
        swarm_id: 16 bytes (`Topic.swarm_id`).
        not_before: frames sent earlier are refused, so that a restart admits no replays. Seconds since the
            epoch.
        reputation: the scores of peers; None for new ones.
        group_of: returns a connection's network group, "" if it is unknown.
        note: called with every admitted frame, before `receive` returns.
        verify: `envelope.check`, or a cache of it if many members in one process receive the same frame.
    """

    def __init__(
        self,
        me: PeerId,
        swarm_id: bytes,
        *,
        not_before: float = 0.0,
        reputation: Reputation | None = None,
        group_of: Callable[[PeerId], str] = lambda _: "",
        note: Callable[[Trace], None] = lambda _: None,
        verify: Callable[[Frame, bytes], Envelope | Reason] = check,
    ) -> None:
        self._own_key = public_key_of(me)
        self.swarm_id = swarm_id
        self._reputation = reputation or Reputation()
        self._group_of, self._note, self._verify = group_of, note, verify
        self._replays = Replays(MAX_AUTHORS, not_before)
        # By the author's key.
        self._frames = TokenBuckets[bytes](FRAMES_PER_S, FRAMES_AT_ONCE, MAX_AUTHORS)
        self._bytes = TokenBuckets[bytes](BYTES_PER_S, BYTES_AT_ONCE, MAX_AUTHORS)
        # By connection.
        self._via_frames = TokenBuckets[PeerId](VIA_FRAMES_PER_S, VIA_FRAMES_AT_ONCE)
        self._via_bytes = TokenBuckets[PeerId](VIA_BYTES_PER_S, VIA_BYTES_AT_ONCE)

    def receive(self, frame: bytes, now: float, via: PeerId | None = None) -> Envelope | Reason:
        """Check a frame, and return its envelope or the reason to refuse it.

        now: seconds since the epoch. via: the peer that handed the frame over, None if unknown.
        """
        if via is None:
            # The engine does not know the connection: only the author can be charged.
            return self._admit(frame, now, NOBODY)
        frames, size = self._via_frames.of(via, now), self._via_bytes.of(via, now)
        # Frames over the limit are not charged, so the connection's frames count again once it slows down.
        if frames.refill(now) < 1 or size.refill(now) < len(frame):
            return Reason.FLOODING
        frames.spend(1)
        size.spend(len(frame))
        holder = Holder(self._group_of(via) or via, via)
        return Reason.SHUNNED if self._reputation.shunned(via, now) else self._admit(frame, now, holder)

    def charge(self, author: PeerId, frames: float, now: float) -> None:
        """Take `frames` off an author's quota, because one of its admitted frames proved bad.

        The quota falls to one burst below zero at most.
        """
        bucket = self._frames.of(public_key_of(author), now)
        bucket.refill(now)
        bucket.spend(frames)

    def _admit(self, frame: bytes, now: float, holder: Holder) -> Envelope | Reason:
        if len(frame) > MAX_FRAME_BYTES:
            return Reason.TOO_LARGE
        if isinstance(parsed := parse(frame, self.swarm_id), Reason):
            return parsed
        if parsed.author == self._own_key:
            return Reason.OWN_ECHO
        trace = Trace(parsed.author, parsed.sequence, parsed.sent_at_ms)
        if (reason := self._replays.refuses(trace, now)) is not None:
            return reason
        frames, size = self._frames.of(parsed.author, now), self._bytes.of(parsed.author, now)
        if frames.refill(now) < 1 or size.refill(now) < len(frame):
            return Reason.OVER_QUOTA
        if self._reputation.shunned(peer_id_of(parsed.author), now):
            return Reason.SHUNNED
        if isinstance(envelope := self._verify(parsed, frame), Envelope):
            frames.spend(1)
            size.spend(len(frame))
            self._replays.remember(trace, holder, now)
            self._note(trace)
        return envelope
