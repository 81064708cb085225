"""The trainer's end of its link with the daemon."""

import contextlib
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from p2p.admission.fair_queue import FairQueue
from p2p.types import PeerId
from swarmd import link
from swarmd.exchange.events import Deliver, Share, Useless
from swarmd.state.status import NodeState
from swarmd.types import Rollout


class RoundCut(Exception):
    """The node stops at once, and the current round is not finished."""


class TrainerLink:
    """The trainer's end: the `Swarm` of the round, and the daemon's requests to the loop.

    Two threads move the bytes.
    """

    def __init__(self, sock: socket.socket, on_eof: Callable[[], None]) -> None:
        self._socket, self._on_eof = sock, on_eof
        self._outbox, self._written = link.MessageQueue(), threading.Condition()
        self._arrived: FairQueue[Rollout] = FairQueue(link.MAX_WAITING_ROLLOUTS)
        self._changed = threading.Condition()
        self._start: link.StartTrainer | None = None
        self._questions: deque[link.JudgeQuestion] = deque(maxlen=1)
        self._refused: Counter[str] = Counter()  # rejected rollouts by reason, in operators' words
        self._closing = self.stopping = self.hurried = False
        self.peers = 0
        self.compares = False  # whether a CompareRequest waits
        self.judged: link.JudgeScore | None = None
        self.pause: link.Pause | None = None
        self._on_rest: Callable[[bool], None] = lambda _: None
        # Called when a pause begins, to release memory that is not used meanwhile.
        self.give_back: Callable[[], None] = lambda: None
        self.rested = 0.0  # total seconds spent in `rest`

    def open(self) -> link.StartTrainer:
        """Start listening, and wait for the daemon's first message."""
        threading.Thread(target=self._read, name="link-read", daemon=True).start()
        self._writer = threading.Thread(target=self._write, name="link-write", daemon=True)
        self._writer.start()
        with self._changed:
            self._changed.wait_for(lambda: self._start is not None)
        assert self._start is not None
        return self._start

    # `protocols.Swarm`.

    def share(self, rollouts: Sequence[Rollout], round_number: int) -> None:
        if rollouts:
            self.tell(Share(tuple(rollouts), round_number))

    def collect(self) -> tuple[Sequence[Rollout], Mapping[str, int]]:
        with self._changed:
            refused, self._refused = self._refused, Counter()
            return self._arrived.drain(), refused

    def charge(self, authors: Iterable[PeerId]) -> None:
        if useless := tuple(authors):
            self.tell(Useless(useless))

    # Used by the trainer's loop.

    def tell(self, message: link.ToDaemon) -> None:
        with self._written:
            self._outbox.put(message)
            self._written.notify()

    def question(self) -> link.JudgeQuestion | None:
        """Return a judge's question that waits for an answer, or None."""
        with self._changed:
            return self._questions.popleft() if self._questions else None

    @property
    def waiting(self) -> int:
        """Return how many rollouts `collect` would return."""
        return len(self._arrived)

    def wait(self, seconds: float, *, rollouts: bool = False, questions: bool = True) -> None:
        """Wait until the time is over, or until an event needs the loop.

        These events are: a stop; with `questions`, a pause or a question; with `rollouts`, an external
        rollout.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.stopping
                    or (questions and (self.paused or self._questions or self.compares))
                    or (rollouts and self.waiting)
                ),
                seconds,
            )

    @property
    def paused(self) -> bool:
        return self.pause is not None and not self.pause.brief

    @property
    def must_rest(self) -> bool:
        return self.pause is not None and not self.stopping

    def rest_along(self, on_rest: Callable[[bool], None]) -> None:
        """Let workers pause together with the loop.

        on_rest: called at once, and later by the reading thread, with whether to pause.
        """
        with self._changed:
            # The lock is held, so that no change between the two steps is missed.
            self._on_rest = on_rest
            on_rest(self.must_rest)

    def rest(self) -> None:
        """Wait while the node is paused, or over its share of the CPU, unless it stops.

        Called by computing code between two steps. Raises RoundCut if the node stops at once.
        """
        if self.hurried:
            raise RoundCut
        if not self.must_rest:
            return
        begun, said = time.monotonic(), link.TrainerState(NodeState.TRAINING)
        with self._changed:
            while self.must_rest or said.state is NodeState.PAUSED:
                pause = self.pause if self.paused and not self.stopping else None
                now = (
                    link.TrainerState(NodeState.PAUSED, pause.cause, pause.remedy)
                    if pause
                    else link.TrainerState(NodeState.TRAINING)
                )
                if now != said:
                    self.tell(now)
                    said = now
                    if pause:
                        self.give_back()
                elif self.must_rest:
                    self._changed.wait()
            self.rested += time.monotonic() - begun

    def close(self, seconds: float = 5.0) -> None:
        """Write out queued messages, within `seconds`."""
        with self._written:
            self._closing = True
            self._written.notify()
        self._writer.join(seconds)
        with contextlib.suppress(OSError):  # the daemon's end is gone already
            # Wakes the reading thread; `close` alone would not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # The two threads.

    def _read(self) -> None:
        unpacker = link.Unpacker[link.ToTrainer](link.ToTrainer)
        with contextlib.suppress(OSError):
            # An OSError means that the daemon's end is gone, like end of file.
            while data := self._socket.recv(1 << 16):
                for message in unpacker.feed(data):
                    with self._changed:
                        self._handle(message)
                        self._changed.notify_all()
        if not self._closing:
            self._on_eof()

    def _handle(self, message: link.ToTrainer) -> None:
        match message:
            case Deliver(rollout):
                self._arrived.put(rollout, rollout.author, rollout.group, rollout.size)
            case link.SwarmNews(peers, refused):
                self.peers = peers
                self._refused.update(refused)
            case link.JudgeQuestion():
                self._questions.append(message)
            case link.CompareRequest():
                self.compares = True
            case link.JudgeScore():
                self.judged = message
            case link.Pause() | link.Resume():
                self.pause = message if isinstance(message, link.Pause) else None
            case link.Stop(now):
                self.stopping, self.hurried = True, self.hurried or now
            case link.StartTrainer():
                self._start = message
        if isinstance(message, link.Pause | link.Resume | link.Stop):
            self._on_rest(self.must_rest)

    def _write(self) -> None:
        while True:
            with self._written:
                self._written.wait_for(lambda: len(self._outbox) > 0 or self._closing, link.HEARTBEAT_S)
                message = self._outbox.pop()
            if message is None and self._closing:
                return
            try:
                self._socket.sendall(link.pack(message or link.Alive()))
            except OSError:
                # The reading thread also sees that the link has ended, and acts on it.
                return
