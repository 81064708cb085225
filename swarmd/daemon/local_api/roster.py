"""Authors heard lately, for `swarmd status` and `swarmd peers`. Bounded; pure; `now` is an argument.

An author counts as **heard** until it has been silent for 2.5 times its usual gap between rollout sets or
offers, but at least a minute and at most an hour. So a dead node disappears within a minute or two, and a
slow one stays. A gap longer than usual changes the limit at once, a shorter one gradually. If many new names
arrive, they only displace each other: authors of useful rollouts are forgotten last.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2p.latest import Latest
from p2p.types import PeerId

MAX_AUTHORS = 1024
# An author is no longer heard after a silence of this many of its usual gaps.
GAPS = 2.5
# Seconds of silence after which an author is no longer heard: minimum, after its first frame, maximum.
MIN_SILENCE_S, FIRST_SILENCE_S, MAX_SILENCE_S = 60.0, 150.0, 3600.0
# The weight of the newest gap in the mean, if it is shorter than the mean.
_NEWEST_SHARE = 0.3


@dataclass(slots=True)
class AuthorRecord:
    """The record of one author."""

    last: float  # when the author was last heard
    quiet: float = FIRST_SILENCE_S  # seconds after which it is no longer heard
    frames: int = 0  # admitted frames
    rejected: int = 0  # admitted frames that the trainer found bad
    gone: bool = False  # whether it disconnected long ago and was not heard since
    # Rollouts that this node trained on, by specialty of our curriculum; so there are few keys.
    learnt: Counter[str] = field(default_factory=Counter)


class Roster:
    def __init__(self) -> None:
        # Authors of useful rollouts; the one heard last is at the end. All other authors share the rest.
        self._useful: Latest[PeerId, AuthorRecord] = Latest(MAX_AUTHORS * 3 // 4)
        self._others: OrderedDict[PeerId, AuthorRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._useful) + len(self._others)

    def get(self, peer: PeerId) -> AuthorRecord | None:
        return self._useful.get(peer) or self._others.get(peer)

    def heard(self, peer: PeerId, now: float) -> None:
        """Record that a rollout set or offer of this author was admitted."""
        if (author := self.get(peer)) is None:
            author = self._others[peer] = AuthorRecord(now)
        else:
            quiet = min(MAX_SILENCE_S, max(MIN_SILENCE_S, GAPS * (now - author.last)))
            author.quiet = max(quiet, author.quiet + _NEWEST_SHARE * (quiet - author.quiet))
            author.last, author.gone = now, False
            (self._useful if peer in self._useful else self._others).move_to_end(peer)
        author.frames += 1
        while len(self) > MAX_AUTHORS:
            self._others.popitem(last=False)

    def useful(self, peer: PeerId, specialty: str) -> None:
        """Record that the trainer trained on a rollout of this author."""
        if (known := self.get(peer)) is not None:
            known.learnt[specialty] += 1
        if (author := self._others.pop(peer, None)) is not None:
            self._useful[peer] = author

    def bad(self, peer: PeerId) -> None:
        """Record that the trainer refused a frame of this author."""
        if (author := self.get(peer)) is not None:
            author.rejected += 1

    def gone(self, peer: PeerId) -> None:
        """Record that an author has left: it is no longer heard, even if its rounds are long."""
        if (author := self.get(peer)) is not None:
            author.gone = True

    def present(self, now: float) -> Sequence[PeerId]:
        """Return the authors that are heard; first the authors of useful rollouts."""
        return [
            peer
            for peer, author in [*self._useful.items(), *self._others.items()]
            # abs(): if the clock is set back, all earlier frames count as old.
            if not author.gone and abs(now - author.last) <= author.quiet
        ]
