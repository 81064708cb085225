"""A program's way into the swarm through a running node: what `network.py` is for one with a key of its own.

A thread asks the node's control API twice a second (`local_api.programs`). The node chooses and fetches, by
the pace of its own rounds; this program scores what came itself.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from p2p.types import PeerId, Reason, ReceivedBody
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.library.network import ProgramNetwork, taken
from swarmd.daemon.local_api import control
from swarmd.daemon.local_api.programs import Shared
from swarmd.errors import SwarmdError, Unreachable
from swarmd.types import Lead

EVERY_S = 0.5

log = logging.getLogger(__name__)


def settings_of_node(folder: Path, *, patient: bool = False) -> NodeConfig | None:
    """Return the settings of the node that runs in this state folder; None where none does.

    patient: takes one that starts or stops for none: it may be the program's first rank. Else that raises
    Unreachable.
    """
    try:
        return NodeConfig.model_validate_json(control.call(folder, "settings")["config"])
    except Unreachable:
        if not patient:
            raise
        return None
    except SwarmdError:
        return None  # it may be a program's folder: who opens it says so


class NodeNetwork(ProgramNetwork):
    """What `Network` is, through the node that runs in this folder."""

    def __init__(
        self,
        config: NodeConfig,
        folder: Path,
        author: str,
        changed: threading.Condition,
        talk: Callable[[str], None],
        stop: Callable[[], None],
    ) -> None:
        super().__init__(config, author, changed, "swarmd-node", self._run)
        self._folder, self._talk, self._stop = folder, talk, stop
        self.ready.set()
        found = control.call(folder, "settings")
        self.peer_id, self._number = PeerId(found["peer_id"]), int(found["number"])
        self._used: deque[tuple[PeerId, str]] = deque(maxlen=1024)
        self._leaving = threading.Event()

    def next_round(self, number: int, used: Sequence[tuple[PeerId, str]], lead: Lead) -> None:  # noqa: ARG002
        self._used.extend(used)

    def publish(self, kind: str, body: bytes) -> None:
        self._hand_over(Shared(link.Publish(kind, body)))

    def hold(self, blob: bytes) -> None:
        self._hand_over(Shared(link.Hold(blob)))

    def report(self, author: PeerId, reason: Reason) -> None:
        """Do nothing: the node's trainer gets the same, and charges its author."""

    def status(self) -> dict[str, Any]:
        """Return the node's status document."""
        if self.lives:
            with contextlib.suppress(SwarmdError):
                return control.call(self._folder, "status")
        cause, remedy = str(self.error or "the program has left"), "start the node, and join again"
        return {"schema": 1, "role": "library", "state": "left", "cause": cause, "remedy": remedy}

    def leave(self) -> None:
        """Hand over what waits, and end the thread."""
        self._leaving.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._leaving.wait(EVERY_S):
                with contextlib.suppress(Unreachable):  # it is busy, or stops
                    self._exchange()
            self._exchange()
        except Exception as error:
            self.error = error
            log.warning("the node was left: %s", error)
            self._talk(f"the node was left: {error}")
            self._stop()

    def _exchange(self) -> None:
        # Always as offers: those of one time are sent together with the node's own, at its pace.
        if count := self._share(self, whole=0):
            self._hand_over(Shared(rollouts=count))
        with taken(self._used) as used:
            if used:
                self._hand_over(Shared(used=used))
        found = control.call(self._folder, "received", after=self._number)
        self._number = int(found["number"])
        for body in msgspec.convert(found["bodies"], list[ReceivedBody]):
            self._put(body)

    def _hand_over(self, shared: Shared) -> None:
        control.call(self._folder, "share", **msgspec.to_builtins(shared))
