"""Fetches blobs: asks the peers that may hold one, until one of them has it. Pure.

Theory of operation. A fetch asks one holder after another. The next one is asked after HEDGE_S, or at once if
the last one asked has answered without the blob. The first answer with the blob's id wins, and the other
questions are cancelled. A holder that was not reached is asked once more. Each question ends after
HOLDER_TIMEOUT_S, even if no answer ever comes, and so does each fetch. `p2p.blobs` defines the question.

A fetch is in one State; NEXT is the table of transitions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from p2p.blobs.blobs import MISSING, content_id
from p2p.types import PeerId, PeerRequest, Reason
from swarmd.exchange.events import Ask, Cancel, Output, Report
from swarmd.exchange.offers import Blob, Key, Offered

# Maximum number of peers that are asked for one blob; some of them may have left.
MAX_HOLDERS = 32
# Maximum number of open questions. Questions to peers that have left take long, and must not delay the other
# questions.
QUESTIONS_AT_ONCE = 64
# The delay until the next holder is asked as well.
HEDGE_S = 0.5
# The delay instead of HEDGE_S if the likeliest holder does not have the blob, because then few other peers
# have it.
HEDGE_MISSING_S = 0.05
# The time for one holder to answer.
HOLDER_TIMEOUT_S = 10.0
# The id of the answer of a holder that does not have the blob.
_MISSING_ID = content_id(MISSING)
# The delay until a holder that was not reached is asked once more, because it may be the only peer with the
# blob.
ASK_AGAIN_S = 1.0


class State(Enum):
    """The state of a fetch. The last four are final."""

    ON_TIME = "holds a place of the round, unless its author is on trial"
    LATE = "goes on, and its place is free for another author"
    DELIVERED = "the rollout was delivered"
    REFUSED = "the blob is not what was offered"
    MISSING = "no holder has it, or the time is over"
    DROPPED = "its round is over, or it would be too old"


# The events of a fetch.
Step = Enum("Step", "SLOW GOOD_BLOB BAD_BLOB NO_BLOB ROUND_OVER")
_ENDS = {
    Step.GOOD_BLOB: State.DELIVERED,
    Step.BAD_BLOB: State.REFUSED,
    Step.NO_BLOB: State.MISSING,
    Step.ROUND_OVER: State.DROPPED,
}
# Any other transition is a bug in this code and raises KeyError.
NEXT = {(state, step): end for state in (State.ON_TIME, State.LATE) for step, end in _ENDS.items()} | {
    (State.ON_TIME, Step.SLOW): State.LATE
}


class HolderReply(Enum):
    """A holder's reply to our question for one blob."""

    NOTHING = "nothing yet"  # the question was sent
    YES = "here it is"
    NO = "I have it not"
    FAILED = "could not be asked, or hung up"


@dataclass(slots=True)
class Asked:
    holder: PeerId
    ends: float
    again: bool  # whether this is the second question to the holder


@dataclass(slots=True, eq=False)
class Fetch:
    """The fetch of one chosen offer's blob.

    size: maximum bytes of the compressed blob. holders: peers that may have the blob, the likeliest first.
    Times are seconds of the caller's clock.
    """

    item: Offered
    size: int
    holders: Sequence[PeerId]
    since: float
    ends: float = math.inf
    state: State = State.ON_TIME
    next_at: float = -math.inf  # when the next holder is asked
    asked: int = 0  # holders asked so far
    open: dict[int, Asked] = field(default_factory=dict)  # by number
    again: dict[PeerId, float] = field(default_factory=dict)  # when a holder is asked once more
    replies: dict[PeerId, HolderReply] = field(default_factory=dict)

    def step(self, step: Step) -> None:
        self.state = NEXT[self.state, step]

    @property
    def hopeless(self) -> bool:
        """Whether the likeliest holder does not have the blob."""
        return self.replies.get(self.holders[0]) is HolderReply.NO

    def due(self, *, room: bool) -> float:
        """Return when the next question or timeout is due. room: whether another question may be asked."""
        asks = [*self.again.values(), *([self.next_at] if self.asked < len(self.holders) else [])]
        ends = [self.ends, *(question.ends for question in self.open.values())]
        return min([*ends, *asks] if room else ends)

    def settle(self, holder: PeerId, now: float) -> None:
        """Ask the next holder at once if this holder was the last one asked."""
        if holder == self.holders[self.asked - 1]:
            self.next_at = min(self.next_at, now)


class Fetcher:
    """Holds the running fetches. emit: called with each output, in order."""

    def __init__(self, emit: Callable[[Output], None]) -> None:
        self._emit = emit
        self.under_way: dict[Key, Fetch] = {}
        self.asked = 0  # the number of the last question
        self.received = 0  # bytes of answers

    @property
    def open(self) -> dict[int, Fetch]:
        """The fetches by the numbers of their open questions."""
        return {number: fetch for fetch in self.under_way.values() for number in fetch.open}

    def begin(self, fetch: Fetch) -> None:
        fetch.holders = list(dict.fromkeys(fetch.holders))[:MAX_HOLDERS]
        self.under_way[fetch.item.key] = fetch

    def end(self, fetch: Fetch) -> None:
        """End a fetch and its questions."""
        for number in list(fetch.open):
            self._cancel(fetch, number)
        del self.under_way[fetch.item.key]

    def answered(self, number: int, reply: Blob | None, now: float) -> tuple[Fetch, Blob] | None:
        """Take a holder's answer; return the fetch that it ends, and its blob.

        An answer whose question is over is ignored.
        """
        if (fetch := self.open.get(number)) is None:
            return None
        question = fetch.open.pop(number)
        holder = question.holder
        self.received += reply.size if reply else 0
        if reply is None:
            fetch.replies[holder] = HolderReply.FAILED
            if not question.again:
                fetch.again[holder] = now + ASK_AGAIN_S
        elif reply.id == fetch.item.id:
            fetch.replies[holder] = HolderReply.YES
            self.end(fetch)
            return fetch, reply
        elif reply.id == _MISSING_ID:
            fetch.replies[holder] = HolderReply.NO
            if fetch.hopeless and holder == fetch.holders[0]:
                # From here on, all other holders share one deadline.
                fetch.ends = min(fetch.ends, now + ASK_AGAIN_S)
        elif reply.size:
            self._emit(Report(holder, Reason.NOT_ASKED_FOR))
        fetch.settle(holder, now)
        return None

    def advance(self, now: float) -> Sequence[Fetch]:
        """Ask the holders that are due; return the fetches that ended without the blob."""
        # Handle timeouts and ended fetches first, because they make room for other fetches' questions.
        for fetch in self.under_way.values():
            for number in [number for number, question in fetch.open.items() if question.ends <= now]:
                fetch.settle(fetch.open[number].holder, now)
                self._cancel(fetch, number)
        ended = [
            fetch
            for fetch in self.under_way.values()
            # No holder is left to ask, and no question is open.
            if now >= fetch.ends or (fetch.asked == len(fetch.holders) and not fetch.open and not fetch.again)
        ]
        for fetch in ended:
            self.end(fetch)
        for fetch in self.under_way.values():
            self._ask_next(fetch, now)
        return ended

    @property
    def due(self) -> float:
        """Return the time of the next action of `advance`."""
        room = len(self.open) < QUESTIONS_AT_ONCE
        return min((fetch.due(room=room) for fetch in self.under_way.values()), default=math.inf)

    def _ask_next(self, fetch: Fetch, now: float) -> None:
        for holder in [holder for holder, at in fetch.again.items() if at <= now]:
            if len(self.open) < QUESTIONS_AT_ONCE:
                del fetch.again[holder]
                self._ask(fetch, holder, now, again=True)
        if fetch.asked < len(fetch.holders) and fetch.next_at <= now and len(self.open) < QUESTIONS_AT_ONCE:
            fetch.asked += 1
            self._ask(fetch, fetch.holders[fetch.asked - 1], now)
            fetch.next_at = now + (HEDGE_MISSING_S if fetch.hopeless else HEDGE_S)

    def _ask(self, fetch: Fetch, holder: PeerId, now: float, *, again: bool = False) -> None:
        self.asked, at = self.asked + 1, fetch.item.at if holder == fetch.item.author else ""
        fetch.open[self.asked] = Asked(holder, now + HOLDER_TIMEOUT_S, again)
        fetch.replies[holder] = HolderReply.NOTHING
        self._emit(Ask(self.asked, holder, PeerRequest.BLOBS.message(fetch.item.id), fetch.size, at))

    def _cancel(self, fetch: Fetch, number: int) -> None:
        del fetch.open[number]
        self._emit(Cancel(number))
