"""The network's thread of a program that has joined a swarm: what a daemon runs, without a trainer."""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio
from msgspec import structs

from p2p.admission.fair_queue import FairQueue
from p2p.errors import StateUnwritable
from p2p.peers.introduction import TRAINING
from p2p.types import PeerId, Reason, ReceivedBody
from swarmd.config.config import NodeConfig
from swarmd.daemon.local_api import control
from swarmd.daemon.membership import run
from swarmd.daemon.sharing import Participant
from swarmd.errors import ConfigError
from swarmd.exchange.rollout_exchange import share
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.state.folder import StateFolder
from swarmd.state.status import NodeState, Status
from swarmd.types import Lead, Rollout

# Rollouts that wait to be sent; the oldest go.
MAX_HELD = 64
# The least time between two sendings: receivers drop what is over an author's quota.
MIN_GAP_S = 0.5
# What the engine gets at the end to send what was just handed to it.
LEAVE_S = 1.0
# How often to check whether what waits may be sent.
POLL_S = 0.1

log = logging.getLogger(__name__)


class Network:
    """A member of the swarm in a thread. The program's side is a `p2p.types.Transport`.

    changed: held while bodies are put and drained; notified of each. talk: gets events. stop: called by this
    thread when `swarmd stop` asks for it, or an error has ended it.
    """

    def __init__(
        self,
        config: NodeConfig,
        state: StateFolder,
        author: str,
        changed: threading.Condition,
        talk: Callable[[str], None],
        stop: Callable[[], None],
    ) -> None:
        """Build the member, without running it. Raises ConfigError where the configuration cannot be used."""
        if config.swarm.engine == "none":
            raise ConfigError('swarm.engine is "none": answers would reach nobody. Set it to "libp2p".')
        self._specialties, self._author, self._changed = curriculum_of(config).specialties, author, changed
        self._state, self._talk, self._stop = state, talk, stop
        self.waiting: deque[tuple[Rollout, int]] = deque(maxlen=MAX_HELD)
        self._bodies: FairQueue[ReceivedBody] = FairQueue()
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swarmd-network", daemon=True)
        self._swarm = Participant(config, state.path, self._put, lambda: TRAINING)
        self.peer_id, self._started_at = self._swarm.identity.peer_id, time.time()
        self._sent_at, self._leaving = -MIN_GAP_S, False
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()

    # The program's side.

    def start(self) -> None:
        """Start the thread; `ready` is set once other nodes can reach us, or `error` says why they cannot."""
        self._thread.start()

    @property
    def lives(self) -> bool:
        return self.error is None and self._thread.is_alive()

    def offer(self, rollout: Rollout, round_number: int) -> None:
        """Send it when somebody is there to receive it and the pace allows it."""
        self.waiting.append((rollout, round_number))

    @property
    def arrived(self) -> bool:
        """Whether `received` would return something. Hold `changed`."""
        return len(self._bodies) > 0

    def received(self) -> Sequence[ReceivedBody]:
        with self._changed:
            return self._bodies.drain()

    def refused(self) -> Mapping[Reason, int]:
        return {}  # the status has them

    def next_round(self, number: int, used: Sequence[tuple[PeerId, str]], lead: Lead) -> None:
        """Begin another round. used: author and specialty of what was trained on in the last one."""
        self._soon(self._next_round, number, used, lead)

    def publish(self, kind: str, body: bytes) -> None:
        self._soon(self._swarm.member.publish, kind, body)

    def hold(self, blob: bytes) -> None:
        self._soon(self._swarm.member.hold, blob)

    def report(self, author: PeerId, reason: Reason) -> None:
        self._soon(self._swarm.member.report, author, reason)

    def status(self) -> Status:
        """Return the status, made by the network's thread while there is one."""
        if self._token is not None:
            with contextlib.suppress(RuntimeError, trio.Cancelled):  # it has ended, or this is another trio
                return trio.from_thread.run_sync(self._status, trio_token=self._token)
        return self._status()

    def leave(self) -> None:
        """Give what waits a moment to be sent, and end the thread."""
        if self._thread.ident is None:
            return  # it was never started
        self._leaving = True
        self.ready.wait()  # before it there may be nothing to cancel, and the thread would go on
        if self.error is None:
            ends = LEAVE_S + (time.monotonic() if self.waiting else self._sent_at)
            self._thread.join(max(0.0, ends - time.monotonic()))
        self._soon(self._scope.cancel)
        self._thread.join()

    def _soon(self, what: Callable[..., object], *arguments: Any) -> None:
        """Have the network's thread do something, after all that it was told before."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(what, *arguments)

    # What runs in the thread of the network.

    def _run(self) -> None:
        try:
            run(self._run_member)
        except BaseException as error:
            self.error = error
            if self.ready.is_set():
                log.exception("the swarm was left")
                self._talk(f"the swarm was left: {error}")
                self._stop()
        finally:
            self.ready.set()

    async def _run_member(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        handlers: Mapping[str, control.Handler] = {
            "status": control.answering(self._status),
            "peers": control.answering(self._swarm.peers),
            "stop": self._on_stop,
        }
        self._swarm.gatherer.resume(1)
        with self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._swarm.run)
                await nursery.start(partial(control.serve, self._state.path, handlers))
                nursery.start_soon(self._send)
                self.ready.set()

    def _put(self, body: ReceivedBody) -> None:
        with self._changed:
            self._bodies.put(body)
            self._changed.notify_all()

    def _share(self) -> int:
        waiting = [self.waiting.popleft() for _ in range(len(self.waiting))]
        rollouts = [rollout for rollout, _ in waiting]
        return share(self._swarm.member, rollouts, waiting[-1][1], self._author, self._specialties)

    async def _send(self) -> None:
        """Send what waits together, when somebody is there to receive it and the pace allows it.

        A program that leaves does not wait for the pace.
        """
        while True:
            now = time.monotonic()
            gap = now >= self._sent_at + MIN_GAP_S
            if (
                self.waiting
                and self.present
                and (self._leaving or (gap and self._swarm.pacing.may_send(now)))
            ):
                try:
                    self._swarm.given.rollouts += self._share()
                except StateUnwritable as error:  # no sequence number can be reserved
                    self._talk(f"sharing is off for now: {error}")
                self._swarm.pacing.sent(now)
                self._sent_at = now
            await trio.sleep(POLL_S)

    @property
    def present(self) -> int:
        """Connected peers of our swarm."""
        return self._swarm.member.engine.present(self._swarm.topic)

    def _next_round(self, number: int, used: Sequence[tuple[PeerId, str]], lead: Lead) -> None:
        self._swarm.used(used)
        self._swarm.gatherer.next_round(number, lead)

    def _status(self) -> Status:
        shared = self._swarm.given.rollouts + len(self.waiting)
        waits = f", {len(self.waiting)} of them not sent yet" if self.waiting else ""
        return Status(
            **structs.asdict(self._swarm.status()),
            role="library",
            state=NodeState.JOINED if self.lives else NodeState.LEFT,
            cause=f"{shared} rollouts shared{waits}" if self.error is None else str(self.error),
            remedy="" if self.error is None else "join again; the program's own work goes on without it",
            pid=os.getpid(),
            state_dir=str(self._state.path),
            started_at=self._started_at,
            round=self._swarm.gatherer.round,
            shared=shared,
            waiting=len(self.waiting),
            present=self.present,
        )

    async def _on_stop(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._stop()
        return {"schema": 1, "stopping": True}
