"""A program's way into the swarm through a running node: what `network.py` is for one with a key of its own.

`Programs` is the node's side, operations of its control API: a program gets what the node received of others,
and hands over what the node is to share under its own key, at its own pace. `NodeNetwork` is the program's: a
thread asks twice a second. The node chooses and fetches, by the pace of its own rounds; this program scores
what came itself.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from p2p.types import PeerId, Reason, ReceivedBody
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.library.network import MAX_HELD, ProgramNetwork
from swarmd.daemon.local_api import control
from swarmd.errors import SwarmdError, Unreachable
from swarmd.exchange.rollout_exchange import share
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.types import Lead, Rollout

# What is kept of others for programs: less than a reply may have, as base64.
KEPT_BYTES = 2 * 1024 * 1024
# What a body's author, group and kind take beside it.
ABOUT_BYTES = 256


class Shared(msgspec.Struct, frozen=True):
    """What a program hands over: a blob or a body to send, or how much it shared and whose it used."""

    message: link.Publish | link.Hold | None = None
    rollouts: int = 0
    used: list[tuple[PeerId, str]] = []


class Programs:
    """Keeps the newest bodies of others, numbered: a program asks for those after the last that it has.

    tell: gets what is to be sent, as of the trainer. count: gets how many were shared, and whose were used.
    """

    def __init__(
        self,
        config: NodeConfig,
        peer_id: PeerId,
        tell: Callable[[link.ToDaemon], None],
        count: Callable[[int, Sequence[tuple[PeerId, str]]], None],
    ) -> None:
        self._config, self._peer_id, self._tell, self._count = config, peer_id, tell, count
        self._kept: deque[ReceivedBody] = deque()
        self._number, self._bytes = 0, 0
        self.handlers = {
            "settings": self._on_settings,
            "received": self._on_received,
            "share": self._on_share,
        }

    def put(self, received: ReceivedBody) -> None:
        self._kept.append(msgspec.structs.replace(received, heard=0))  # a program has rounds of its own
        self._number, self._bytes = self._number + 1, self._bytes + ABOUT_BYTES + len(received.body)
        while self._bytes > KEPT_BYTES:
            self._bytes -= ABOUT_BYTES + len(self._kept.popleft().body)

    async def _on_settings(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        found = {"config": self._config.model_dump_json(), "peer_id": self._peer_id, "number": self._number}
        return {"schema": 1, **found}

    async def _on_received(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        new = max(0, min(len(self._kept), self._number - int(arguments["after"])))
        bodies = list(self._kept)[len(self._kept) - new :]
        return {"schema": 1, "number": self._number, "bodies": msgspec.to_builtins(bodies)}

    async def _on_share(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            shared = msgspec.convert(arguments, Shared)
        except msgspec.ValidationError as error:
            raise SwarmdError(f"share: {error}.") from None
        if shared.message is not None:
            self._tell(shared.message)
        self._count(shared.rollouts, shared.used)
        return {"schema": 1}


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
        super().__init__(changed, "swarmd-node", self._run)
        self._folder, self._author, self._talk, self._stop = folder, author, talk, stop
        self._specialties = curriculum_of(config).specialties
        found = control.call(folder, "settings")
        self.peer_id, self._number = PeerId(found["peer_id"]), int(found["number"])
        self._waiting: deque[tuple[Rollout, int]] = deque(maxlen=MAX_HELD)
        self._used: deque[tuple[PeerId, str]] = deque(maxlen=1024)
        self._leaving = threading.Event()

    def start(self) -> None:
        self._thread.start()
        self.ready.set()

    def offer(self, rollout: Rollout, round_number: int) -> None:
        self._waiting.append((rollout, round_number))

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
        if waiting := [self._waiting.popleft() for _ in range(len(self._waiting))]:
            # Always as offers: those of one time are sent together with the node's own, at its pace.
            rollouts = [rollout for rollout, _ in waiting]
            count = share(self, rollouts, waiting[-1][1], self._author, self._specialties, whole=0)
            self._hand_over(Shared(rollouts=count))
        if used := [self._used.popleft() for _ in range(len(self._used))]:
            self._hand_over(Shared(used=used))
        found = control.call(self._folder, "received", after=self._number)
        self._number = int(found["number"])
        for body in msgspec.convert(found["bodies"], list[ReceivedBody]):
            self._put(body)

    def _hand_over(self, shared: Shared) -> None:
        control.call(self._folder, "share", **msgspec.to_builtins(shared))
