"""Open questions: each drawn for one peer, answered once, by that peer, before the deadline.

Pure: time and randomness are arguments.

Rules
1. A peer has as many open questions as it asked for at once. Asking again returns the same ones: nobody can
   shop for an easy question, and a node whose connection broke gets its questions back.
2. A question is closed when its answer arrives, before scoring: of two answers that arrive together only one
   counts.
3. Closed questions are remembered for a while (bounded), so that a second or late answer gets the right
   error.
4. Keys are free, so open questions are limited by network, and more tightly for peers without a record. If
   all places are taken, a peer with a record displaces the newest question of a peer without one.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable

from judge import config
from judge.errors import (
    ALREADY_ANSWERED,
    BUSY,
    CROWDED,
    DISPLACED,
    GIVEN_UP,
    NO_SUCH_QUESTION,
    OTHER_PEER,
    TOO_LATE,
    Refusal,
)
from judge.evaluation.questions import Drawn
from judge.types import UNNAMED, Attributes, OpenQuestion, Requester, Signed
from p2p.latest import Latest
from p2p.types import PeerId

REMEMBERED_CLOSED = 10_000


class Sessions:
    def __init__(
        self,
        draw: Callable[[PeerId], Drawn],
        rng: random.Random,
        deadline: float,
        most: int = config.OPEN_QUESTIONS,
        most_of_newcomers: int = config.NEWCOMERS_QUESTIONS,
        most_of_known: int = config.NETWORK_QUESTIONS,
    ) -> None:
        """Start without open questions.

        draw: draws the peer's next held-out task. rng: unpredictable in production. deadline: seconds. most:
        open questions of all; the other two of one network, of peers without a record and with one.
        """
        self._draw, self._rng, self._deadline, self._most = draw, rng, deadline, most
        self._most_of = {True: most_of_known, False: most_of_newcomers}
        self._open: OrderedDict[str, OpenQuestion] = OrderedDict()  # in the order of their deadlines
        self._newcomers: OrderedDict[str, None] = OrderedDict()  # questions of peers without a record
        self._held: Counter[tuple[str, bool]] = Counter()  # open questions
        self._of_peer: dict[PeerId, list[str]] = {}
        self._closed: Latest[str, tuple[PeerId, Refusal]] = Latest(REMEMBERED_CLOSED)

    def __len__(self) -> int:
        return len(self._open)

    def of(self, peer: PeerId) -> list[OpenQuestion]:
        """Return the peer's open questions, the oldest first."""
        return [self._open[id] for id in self._of_peer.get(peer, ())]

    def ask(
        self,
        peer: PeerId,
        asker: Requester,
        now: float,
        attributes: Attributes = UNNAMED,
        answers: int = 1,
        most: int = 1,
    ) -> tuple[OpenQuestion, OpenQuestion | None] | Refusal:
        """Open a new question for the peer, or return its oldest open one where it has `most`.

        With it comes the question that it displaced, to be recorded as void. Call `expire` first: open
        questions count as in time.
        """
        held = self.of(peer)
        if len(held) >= most:
            return held[0], None
        if self._held[asker.room] >= self._most_of[asker.record]:
            return CROWDED
        full = len(self._open) >= self._most
        if full and not (asker.record and self._newcomers):
            return BUSY
        drawn, displaced = self._draw(peer), None
        if full:
            displaced = self._open[next(reversed(self._newcomers))]
            self._close(displaced, DISPLACED)
        id, ends = f"{self._rng.getrandbits(128):032x}", now + self._deadline
        question = OpenQuestion(
            id, peer, drawn.task, now, ends, asker, drawn.window, drawn.place, attributes, answers
        )
        self._open[question.id] = question
        self._of_peer.setdefault(peer, []).append(question.id)
        self._held[asker.room] += 1
        if not asker.record:
            self._newcomers[question.id] = None
        return question, displaced

    def close(self, id: str, peer: PeerId, now: float, answers: int = 1) -> OpenQuestion | Refusal:
        """Close the question as answered by `peer`, and return it to be scored."""
        if id in self._closed:
            asked_of, why = self._closed[id]
            return why if asked_of == peer else OTHER_PEER
        question = self._open.get(id)
        if question is None:
            return NO_SUCH_QUESTION
        if question.peer != peer:
            return OTHER_PEER
        if now > question.deadline:
            # `expire` will close it and tell the store.
            return TOO_LATE
        if answers != question.answers:
            return Refusal(
                422,
                f"the question wants {question.answers} answers, not {answers}",
                "Send as many as you asked for.",
            )
        self._close(question, ALREADY_ANSWERED)
        return question

    def expire(self, now: float) -> list[OpenQuestion]:
        """Close questions that were not answered in time, and return them to be recorded."""
        late = []
        while self._open and now > next(iter(self._open.values())).deadline:
            question = next(iter(self._open.values()))
            self._close(question, TOO_LATE)
            late.append(question)
        return late

    def withdraw(self, question: OpenQuestion) -> None:
        """Forget a question that was never handed out.

        It may be closed already, displaced while it was being written.
        """
        if question.id in self._open:
            self._close(question, NO_SUCH_QUESTION)

    def give_up(self, question: OpenQuestion) -> None:
        """Close the question because its answer was lost by a fault of ours: the peer is told so."""
        self._closed[question.id] = (question.peer, GIVEN_UP)

    def _close(self, question: OpenQuestion, why: Refusal) -> None:
        del self._open[question.id]
        self._of_peer[question.peer].remove(question.id)
        if not self._of_peer[question.peer]:
            del self._of_peer[question.peer]
        self._newcomers.pop(question.id, None)
        self._held[question.asker.room] -= 1
        if not self._held[question.asker.room]:
            del self._held[question.asker.room]
        self._closed[question.id] = (question.peer, why)


def claim(highest: Latest[PeerId, int], signed: Signed, floor: int, enough: int = -1) -> Refusal | None:
    """Use a signed request's sequence number up; a Refusal where it, or a larger one, was used before.

    highest: by peer, as far as it is remembered. floor: the highest that the store remembers. enough: a
    number above which the next request is accepted, if that is more.
    """
    used = max(highest.get(signed.peer, -1), floor)
    if signed.sequence <= used:
        return Refusal(
            409,
            "this sequence number, or a larger one, was used before",
            "Sign again with a larger one: nobody can send a captured request twice.",
            extra=(("sequence", max(used, enough)),),
        )
    highest[signed.peer] = signed.sequence
    return None
