"""The open questions: drawn for one peer, answered once, by that peer, before the deadline. Pure: time and randomness are arguments.

Rules
1. A peer has at most one open question. Asking again returns the same one, so nobody can shop for an easy question,
   and a node whose connection broke gets its question back.
2. Taking a question to answer it closes it at once, before anything is scored: two answers that arrive together cannot both count.
3. What was closed is remembered for a while (bounded), so that a second or a late answer is told what happened.
"""

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from judge.refusals import ALREADY_ANSWERED, BUSY, NO_SUCH_QUESTION, OTHER_PEER, TOO_LATE, Refusal
from p2p.types import PeerId
from swarmd.tasks.source import Task

REMEMBERED_CLOSED = 10_000


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    id: str  # 32 hex digits, unguessable
    peer: PeerId
    task: Task
    asked: float  # monotonic seconds
    deadline: float  # monotonic seconds


class Sessions:
    def __init__(self, draw: Callable[[random.Random], Task], rng: random.Random, deadline: float, limit: int) -> None:
        """`draw`: a fresh held-out task; `rng`: unpredictable in production; `deadline`: seconds; `limit`: open questions of all peers."""
        self._draw, self._rng, self._deadline, self._limit = draw, rng, deadline, limit
        self._open: OrderedDict[str, OpenQuestion] = OrderedDict()  # in the order of their deadlines
        self._of_peer: dict[PeerId, str] = {}
        self._closed: OrderedDict[str, tuple[PeerId, Refusal]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, peer: PeerId, now: float) -> tuple[OpenQuestion, bool] | Refusal:
        """The peer's question, and whether it is a new one. Call `expire` first: what is open here counts as in time."""
        if peer in self._of_peer:
            return self._open[self._of_peer[peer]], False
        if len(self._open) >= self._limit:
            return BUSY
        question = OpenQuestion(f"{self._rng.getrandbits(128):032x}", peer, self._draw(self._rng), now, now + self._deadline)
        self._open[question.id] = question
        self._of_peer[peer] = question.id
        return question, True

    def take(self, id: str, peer: PeerId, now: float) -> OpenQuestion | Refusal:
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
            return TOO_LATE  # `expire` will close it, and say so to the store
        self._close(question, ALREADY_ANSWERED)
        return question

    def expire(self, now: float) -> list[OpenQuestion]:
        """Close what nobody answered in time, and return it to be recorded."""
        late = []
        while self._open and now > next(iter(self._open.values())).deadline:
            question = next(iter(self._open.values()))
            self._close(question, TOO_LATE)
            late.append(question)
        return late

    def withdraw(self, question: OpenQuestion) -> None:
        """Forget a question that was never handed out."""
        self._close(question, NO_SUCH_QUESTION)

    def _close(self, question: OpenQuestion, why: Refusal) -> None:
        del self._open[question.id]
        del self._of_peer[question.peer]
        self._closed[question.id] = (question.peer, why)
        while len(self._closed) > REMEMBERED_CLOSED:
            self._closed.popitem(last=False)
