"""The network thread of a program that has joined a swarm: a daemon's member, without a trainer."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import trio
from msgspec import structs

from p2p.admission.fair_queue import FairQueue
from p2p.peers.introduction import TRAINING
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.daemon.local_api import control
from swarmd.daemon.membership import run
from swarmd.daemon.sharing import Participant
from swarmd.errors import ConfigError
from swarmd.exchange.events import Deliver, Leave, RoundBegan, Share, Useless
from swarmd.state.folder import StateFolder
from swarmd.state.status import NodeState, Status
from swarmd.types import PassRates, Rollout

# Maximum number of groups that the program shared and that wait to be scored; the oldest are dropped.
MAX_HELD = 64
# Seconds that the engine gets at the end to send its last messages.
LEAVE_S = 1.0

log = logging.getLogger(__name__)


class Network:
    """A member of the swarm in a thread. The program's side is a `protocols.Swarm`.

    changed: held while rollouts are put and drained; notified of each new one. talk: called with events.
    stop: called by this thread after `swarmd stop`, or after an error has ended the thread.
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
        """Build the member, without running it. Raises ConfigError if the configuration cannot be used."""
        if config.swarm.engine == "none":
            raise ConfigError('swarm.engine is "none": answers would reach nobody. Set it to "libp2p".')
        self._changed, self.state, self._talk, self._stop = changed, state, talk, stop
        self._arrived: FairQueue[Rollout] = FairQueue()
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swarmd-network", daemon=True)
        self._swarm = Participant(config, state.path, author, self._put, lambda: TRAINING, talk)
        self.peer_id, self._started_at = self._swarm.identity.peer_id, time.time()
        self._shared_at = -LEAVE_S
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()

    # Methods for the program's threads.

    def start(self) -> None:
        """Start the thread; `ready` is set once other nodes can reach us, or `error` says why they cannot."""
        self._thread.start()

    @property
    def lives(self) -> bool:
        return self.error is None and self._thread.is_alive()

    @property
    def arrived(self) -> bool:
        """Whether `collect` would return a rollout. The caller holds `changed`."""
        return len(self._arrived) > 0

    def share(self, rollouts: Sequence[Rollout], round_number: int) -> None:
        self._shared_at = time.monotonic()
        self._soon(self._swarm.driver.put, Share(tuple(rollouts), round_number))

    def collect(self) -> tuple[Sequence[Rollout], Mapping[str, int]]:
        """Return the rollouts that have arrived. The counts of rejected frames are in the status."""
        with self._changed:
            return self._arrived.drain(), {}

    def charge(self, authors: Iterable[PeerId]) -> None:
        self._soon(self._swarm.driver.put, Useless(tuple(authors)))

    def next_round(self, number: int, used: Sequence[tuple[PeerId, str]], rates: PassRates) -> None:
        """Begin another round. used: author and specialty of each rollout of the last round's batch."""
        self._soon(self._swarm.used, used)
        self._soon(self._swarm.driver.put, RoundBegan(number, rates))

    def status(self) -> Status:
        """Return the status; the network thread makes it while that runs."""
        if self._token is not None:
            # Fails if trio has ended, or if this thread runs another trio.
            with contextlib.suppress(RuntimeError, trio.Cancelled):
                return trio.from_thread.run_sync(self._status, trio_token=self._token)
        return self._status()

    def leave(self) -> None:
        """Give waiting messages a moment to be sent, and end the thread."""
        if self._thread.ident is None:
            return  # the thread was never started
        self.ready.wait()  # an earlier cancel could find nothing to cancel, and the thread would go on
        if self.error is None and (
            self._swarm.exchange.waits or time.monotonic() < self._shared_at + LEAVE_S
        ):
            self._soon(self._swarm.driver.put, Leave())
            self._thread.join(LEAVE_S)
        self._soon(self._scope.cancel)
        self._thread.join()

    def _soon(self, what: Callable[..., object], *arguments: Any) -> None:
        """Run a function in the network thread, after all earlier ones."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(what, *arguments)

    # Methods that run in the network thread.

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
        self._swarm.driver.put(RoundBegan(1))
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._swarm.driver.run, self._swarm.member)
                await nursery.start(self._swarm.run)
                await nursery.start(partial(control.serve, self.state.path, handlers))
                self.ready.set()

    def _put(self, delivered: Deliver) -> None:
        rollout = delivered.rollout
        with self._changed:
            self._arrived.put(rollout, rollout.author, rollout.group, rollout.size)
            self._changed.notify_all()

    def _status(self) -> Status:
        exchange, swarm = self._swarm.exchange, self._swarm.status()
        waiting = len(exchange.unsent)
        cause = f"{swarm.shared.rollouts + waiting} rollouts shared"
        if waiting:
            cause += f", {waiting} of them not sent yet"
        return Status(
            **structs.asdict(swarm),
            role="library",
            state=NodeState.JOINED if self.lives else NodeState.LEFT,
            cause=cause if self.error is None else str(self.error),
            remedy="" if self.error is None else "join again; the program's own work goes on without it",
            pid=os.getpid(),
            state_dir=str(self.state.path),
            started_at=self._started_at,
            round=exchange.market.board.round,
            waiting=waiting,
            present=self._swarm.member.engine.present(self._swarm.topic),
        )

    async def _on_stop(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._stop()
        return {"schema": 1, "stopping": True}
