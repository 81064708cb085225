"""A peer without a model: somebody else answers, it scores the answers and shares them, signed.

It is for people and for rules; loads no torch.

    with StateFolder.open(folder) as state, AnsweringPeer(config, state.path, "a rule") as peer:
        for task in peer.questions():
            peer.share(task, [peer.judge(task, "42")])

The network runs in a thread of its own, so that answering may take any time. Call everything from the thread
that opened it.
"""

import contextlib
import math
import os
import random
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import trio

from p2p.engines import choose
from p2p.identity import Identity, nickname
from p2p.peers.introduction import TRAINING
from p2p.types import Envelope, PeerRequest, Reason
from swarmd.config.config import NodeConfig
from swarmd.daemon.diagnosis.isolation_watch import IsolationWatch
from swarmd.daemon.local_api import control
from swarmd.daemon.local_api.roster import Roster
from swarmd.daemon.local_api.status import peers_document
from swarmd.daemon.membership import introduce, nearby, run, sharing_member, topic_of
from swarmd.errors import ConfigError
from swarmd.exchange import wire
from swarmd.exchange.acknowledgements import AcknowledgementCounter
from swarmd.exchange.rollout_exchange import share as share_rollouts
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.experience.strategies import SHARES
from swarmd.state.folder import IDENTITY_FILE
from swarmd.tasks.answers import GradeReason, extract
from swarmd.tasks.grading import solution
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import CurriculumTasks, open_tasks
from swarmd.types import Completion, Rollout, Scored, Task

# The least time between two rollouts: receivers drop what is over an author's quota.
MIN_GAP_S = 1.0
# Rollouts that wait for somebody to share them with; the oldest go.
MAX_HELD = 64
# What the engine gets at the end to send what was just handed to it.
LEAVE_S = 1.0
# How often to check whether a peer is there.
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer and what our own verifier says of it."""

    completion: Completion
    grade: GradeReason


class AnsweringPeer:
    """A member of the swarm for somebody who answers. Use as a context manager.

    SIGTERM and `swarmd stop` end the block by SystemExit, where it is the main thread's.
    """

    def __init__(
        self,
        config: NodeConfig,
        folder: Path,
        author: str,
        *,
        share: str = "right",
        talk: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Join the folder's identity to the swarm, without running yet.

        Args:
            author: what others are told in place of a model's name.
            share: a name in SHARES; by default right answers.
            talk: called with events.
            folder: an open state folder.

        Raises:
            ConfigError: the configuration cannot be used.
        """
        if config.swarm.engine == "none":
            raise ConfigError('swarm.engine is "none": answers would reach nobody. Set it to "auto".')
        self._config, self._folder, self._talk, self._share = config, folder, talk, SHARES[share]
        self._engine, curriculum = choose(config.swarm.engine), curriculum_of(config)
        self.identity, self._topic = (
            Identity.load_or_create(folder / IDENTITY_FILE),
            topic_of(config.swarm, curriculum),
        )
        self.member = sharing_member(
            self._engine, self.identity, self._topic, config.swarm, folder, self._on_envelope
        )
        self.given = self.member.answers[PeerRequest.USED] = AcknowledgementCounter()
        self._author, self._specialties = author, curriculum.specialties
        self._verifier = Verifier(curriculum)
        self.tasks = open_tasks(curriculum, self._verifier, config.tasks.specialties)
        self._rng = random.Random(secrets.randbits(64) if config.seed is None else config.seed)
        self._roster, self._started_at = Roster(), time.time()
        self._shared_at = -math.inf
        runs = introduce(self.member, curriculum, lambda: TRAINING)
        self._isolation = IsolationWatch(
            self.member, config.swarm, curriculum.name, self._roster, time.time, talk, runs
        )
        self._waiting: deque[tuple[Rollout, int]] = deque(maxlen=MAX_HELD)
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._begun, self._ready, self._scope = threading.Event(), threading.Event(), trio.CancelScope()
        self._error: BaseException | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._main = threading.current_thread() is threading.main_thread()
        self._handlers: list[tuple[int, Any]] = []  # of signals, to be put back

    # What who answers uses.

    def questions(self) -> Iterator[Task]:
        """Yield training questions of the curriculum, or of `tasks.specialties`, without end."""
        while True:
            yield from self.tasks.draw(1, self._rng)

    def judge(self, task: Task, text: str) -> Judged:
        """Score an answer. Text without <answer> tags is put between them."""
        completion = Completion(text if extract(text) is not None else f"<answer>{text}</answer>", ended=True)
        ((grade,),) = self._verifier.judge([(task.ref, [completion])])
        return Judged(completion, grade)

    def share(self, task: Task, answers: Sequence[Judged]) -> bool:
        """Share all answers to a question as one rollout. Waits for the pace.

        Returns False where nobody could learn from it.
        """
        rollout = Rollout(task.ref, tuple(answer.completion for answer in answers), self.identity.peer_id)
        if not self._share(
            Scored(rollout, task.question, tuple(answer.grade.reward for answer in answers), self.shared + 1)
        ):
            return False
        self._rest(max(MIN_GAP_S, self._config.round.pace))
        self._shared_at = time.monotonic()
        self.given.rollouts += 1
        self._waiting.append((rollout, self.shared))
        return True

    def truth(self, task: Task) -> str | None:
        """Return a right answer, or None for own tasks, which do not say what is right."""
        return solution(self.tasks, task) if isinstance(self.tasks, CurriculumTasks) else None

    @property
    def shared(self) -> int:
        """Rollouts shared, those that wait included."""
        return self.given.rollouts

    @property
    def waiting(self) -> int:
        """Rollouts that could not leave yet, as no peer of the swarm is connected."""
        return len(self._waiting)

    @property
    def present(self) -> int:
        """Connected peers of our swarm."""
        return self.member.engine.present(self._topic)

    # The network's thread.

    def __enter__(self) -> Self:
        """Start the verifier and the network thread, and return once others can reach us.

        Raises OperatorError where we cannot join.
        """
        self._verifier.__enter__()
        self._thread.start()
        if self._main:
            self._handlers = [
                (number, signal.signal(number, _leave)) for number in (signal.SIGTERM, signal.SIGHUP)
            ]
        try:
            self._ready.wait()
        except BaseException:
            self._close()
            raise
        if self._error is not None:
            self._close()
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._error is None:
            self._rest(LEAVE_S)
        self._close()
        if self._error is not None:
            raise self._error

    def _close(self) -> None:
        self._begun.wait()  # before it there is nothing to cancel, and its thread would go on
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)
        self._thread.join()
        self._verifier.close()
        for number, handler in self._handlers:
            signal.signal(number, handler)

    def _rest(self, seconds: float) -> None:
        """Sleep until `seconds` after the last rollout was shared."""
        time.sleep(max(0.0, self._shared_at + seconds - time.monotonic()))

    def _run(self) -> None:
        try:
            run(self._run_network)
        except BaseException as error:  # raised again in the thread of who answers
            self._error = error
            if self._ready.is_set():
                self._end()
        finally:
            self._begun.set()
            self._ready.set()

    async def _run_network(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._begun.set()
        handlers: Mapping[str, control.Handler] = {
            "status": self._on_status,
            "peers": self._on_peers,
            "stop": self._on_stop,
        }
        with self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.member.run)
                await nursery.start(partial(control.serve, self._folder, handlers))
                nursery.start_soon(self.member.dial_back.run)
                nursery.start_soon(self._isolation.run)
                nursery.start_soon(self._send)
                if self._config.swarm.mdns == "on":
                    nursery.start_soon(nearby(self.member).run)
                self._ready.set()

    async def _send(self) -> None:
        """Send finished answers once somebody is there to receive them: they took a person's time."""
        while True:
            while self._waiting and self.present:
                rollout, number = self._waiting[0]
                share_rollouts(self.member, [rollout], number, self._author, self._specialties)
                self._waiting.popleft()
            await trio.sleep(POLL_S)

    def _on_envelope(self, envelope: Envelope) -> None:
        """Count the authors of others' rollouts, which are not used otherwise."""
        modality = wire.modality_of(envelope.kind)
        if modality is not None:
            self._roster.heard(envelope.author, time.time())
        if modality not in (None, wire.TEXT):
            self.member.ignore(Reason.OTHER_MODALITY)

    async def _on_status(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "schema": 1,
            "role": "answering",
            "state": "answering",
            "cause": f"{self.shared} answered questions shared, {self.waiting} of them waiting for a peer",
            "remedy": "",
            "peer_id": self.identity.peer_id,
            "name": nickname(self.identity.peer_id),
            "swarm": {"name": self._topic.name, "digest": self._topic.digest, "topic": str(self._topic)},
            "engine": {"name": self._engine.name, "why": self._engine.why},
            "pid": os.getpid(),
            "state_dir": str(self._folder),
            "started_at": self._started_at,
            "shared": self.shared,
            "given": self.given.document(),
            "peers": len(self._roster.present(time.time())),
            "connected": len(self.member.peers()),
            "addresses": list(self.member.addresses()),
            "rejected": {reason.value: count for reason, count in self.member.rejected.items() if count},
            **self._isolation.document(),
            "last": None,
        }

    async def _on_peers(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return peers_document(self._roster, self.member.peers(), time.time())

    async def _on_stop(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._end()
        return {"schema": 1, "stopping": True}

    def _end(self) -> None:
        """End the block of whoever answers, wherever it waits."""
        if self._main:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGTERM)  # to that thread: it may be waiting for a line


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)
