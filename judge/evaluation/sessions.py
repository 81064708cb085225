"""Open questions: each is drawn for one peer and answered once, by that peer, before the deadline.

Pure: time and randomness are arguments.

Rules
1. A peer has at most as many open questions as it asks for at once. Asking again returns the same ones: a
   peer cannot skip questions to find an easy one, and gets its questions back after a broken connection.
2. A question is closed when its answer arrives, before scoring: if two answers arrive together, only one
   counts.
3. Closed questions are remembered for a while (bounded), so that a second or late answer gets the right
   error.
4. Keys are free, so open questions are limited per network, more tightly for peers without a record. If all
   places are taken, a peer with a record displaces the newest question of a peer without one.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile

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

        Args:
            draw: draws the peer's next held-out task.
            rng: makes the ids; unpredictable in production.
            deadline: seconds.
            most: open questions of all peers.
            most_of_newcomers: open questions of one network's peers without a record.
            most_of_known: open questions of one network's peers with a record.
        """
        self._draw, self._rng, self._deadline, self._most = draw, rng, deadline, most
        self._most_of = {True: most_of_known, False: most_of_newcomers}
        self._open: OrderedDict[str, OpenQuestion] = OrderedDict()  # in the order of their deadlines
        self._newcomers: OrderedDict[str, None] = OrderedDict()  # questions of peers without a record
        self._held: Counter[tuple[str, bool]] = Counter()  # number of open questions, by network and record
        self._of_peer: dict[PeerId, list[str]] = {}
        self._turns: dict[str, tuple[str, ...]] = {}  # texts of open questions in environments
        self._closed: Latest[str, tuple[PeerId, Refusal]] = Latest(REMEMBERED_CLOSED)

    def __len__(self) -> int:
        return len(self._open)

    def of(self, peer: PeerId) -> list[OpenQuestion]:
        """Return the peer's open questions, oldest first."""
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
        """Open a new question for the peer, or return its oldest open one if it already has `most`.

        The second value is the question that was displaced; record it as void. Call `expire` first: every
        open question is treated as within its deadline.
        """
        if len(held := self.of(peer)) >= most:
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
        """Close the question as answered by `peer`, and return it for scoring."""
        if isinstance(question := self._open_to(id, peer, now), Refusal):
            return question
        if answers != question.answers:
            return Refusal(
                422,
                f"the question needs {question.answers} answers, not {answers}",
                "Send as many as you asked for.",
            )
        self._close(question, ALREADY_ANSWERED)
        return question

    def turn(self, id: str, peer: PeerId, now: float, texts: Sequence[str]) -> OpenQuestion | Refusal:
        """Note the peer's texts in an environment so far; return the question, which stays open.

        They must be those before and one more, so a peer cannot take a text back after it saw the reply. The
        same texts again are accepted: the reply may have been lost.
        """
        if isinstance(question := self._open_to(id, peer, now), Refusal):
            return question
        before = self._turns.get(id, ())
        if tuple(texts) != before and tuple(texts[:-1]) != before:
            return Refusal(409, "these are not the texts so far and one more", "Send all texts, unchanged.")
        self._turns[id] = tuple(texts)
        return question

    def _open_to(self, id: str, peer: PeerId, now: float) -> OpenQuestion | Refusal:
        if id in self._closed:
            asked_of, why = self._closed[id]
            return why if asked_of == peer else OTHER_PEER
        if (question := self._open.get(id)) is None:
            return NO_SUCH_QUESTION
        if question.peer != peer:
            return OTHER_PEER
        if now > question.deadline:
            # `expire` will close the question and record it.
            return TOO_LATE
        return question

    def expire(self, now: float) -> list[OpenQuestion]:
        """Close questions that were not answered in time; return them to be recorded."""
        late = list(takewhile(lambda question: now > question.deadline, self._open.values()))
        for question in late:
            self._close(question, TOO_LATE)
        return late

    def withdraw(self, question: OpenQuestion) -> None:
        """Forget a question that was never sent to its peer.

        It may already be closed, if it was displaced while it was being written.
        """
        if question.id in self._open:
            self._close(question, NO_SUCH_QUESTION)

    def give_up(self, question: OpenQuestion) -> None:
        """Mark the question as lost by the judge's fault; the peer is told so."""
        self._closed[question.id] = (question.peer, GIVEN_UP)

    def _close(self, question: OpenQuestion, why: Refusal) -> None:
        del self._open[question.id]
        self._of_peer[question.peer].remove(question.id)
        if not self._of_peer[question.peer]:
            del self._of_peer[question.peer]
        self._newcomers.pop(question.id, None)
        self._turns.pop(question.id, None)
        self._held[question.asker.room] -= 1
        if not self._held[question.asker.room]:
            del self._held[question.asker.room]
        self._closed[question.id] = (question.peer, why)


def claim(highest: Latest[PeerId, int], signed: Signed, floor: int, enough: int = -1) -> Refusal | None:
    """Consume a signed request's sequence number; return a Refusal if it, or a larger one, was used before.

    highest: the highest number of each peer that is in memory. floor: the highest in the store. enough: the
    refusal names a number above which the peer's next request is accepted, at least this one.
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
