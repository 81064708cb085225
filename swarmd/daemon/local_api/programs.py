"""Operations of the control API for programs that join the swarm through this node (`swarmd.join(folder=…)`).

A program gets what the node received of others, and hands over what the node is to share under its own key,
at its own pace. `swarmd.daemon.library.node_network` asks.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from p2p.types import PeerId, ReceivedBody
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.errors import SwarmdError

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
