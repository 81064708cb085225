"""What a node keeps of others for programs that have joined through it."""

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import swarmd
from p2p.identity import Identity
from p2p.types import PeerId, ReceivedBody
from swarmd.config.config import NodeConfig
from swarmd.daemon.library import node_network
from swarmd.daemon.local_api import control
from swarmd.daemon.local_api.programs import KEPT_BYTES, Programs
from swarmd.errors import Unreachable
from swarmd.exchange import wire
from swarmd.state.folder import StateFolder
from swarmd.testing import TIMEOUT_S
from swarmd.types import Completion, Lead, Rollout, TaskRef
from tests.processes import wait_until

OTHER = Identity(b"\1" * 32).peer_id
SLOW = b'{"operation": "received", "arguments": {"after": 0}}'


@pytest.mark.parametrize("size", [40, 400, 40_000])
async def test_a_program_that_was_slow_gets_the_newest_in_one_reply(size: int) -> None:
    """Or it could never go on: what does not fit a reply is refused, and it would ask for the same again."""
    programs = Programs(NodeConfig(), PeerId("me"), print, lambda shared, used: None)
    count = 2 * KEPT_BYTES // size
    for number in range(count):
        programs.put(ReceivedBody(OTHER, "203.0.113.0/24", "rollouts", number.to_bytes(size, "big")))
    reply = json.loads(await control.answer(SLOW, programs.handlers))
    assert reply["ok"], reply
    assert reply["result"]["number"] == count and len(reply["result"]["bodies"]) > 10


@pytest.mark.slow
def test_a_program_chooses_by_the_strategy_of_its_nodes_own_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def weights(candidates, lead):\n    return [1.0] * len(candidates)\n")
    settings = {"swarm": {"curriculum": "tiny-9"}, "sharing": {"take": str(tmp_path / "mine.py")}}
    programs = Programs(NodeConfig.model_validate(settings), PeerId("me"), print, lambda shared, used: None)
    runs, ends = threading.Event(), list[Callable[[], None]]()

    async def node() -> None:
        token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as scope:
            ends.append(lambda: token.run_sync_soon(scope.cancel))
            with StateFolder.open(tmp_path):
                async with trio.open_nursery() as nursery:
                    await nursery.start(partial(control.serve, tmp_path, programs.handlers))
                    runs.set()

    thread = threading.Thread(target=trio.run, args=(node,))
    thread.start()
    assert runs.wait(TIMEOUT_S)
    try:
        with swarmd.join(folder=tmp_path) as swarm:
            (task,) = swarm.tasks.draw()
            answers = (
                Completion(f"<answer>{swarm.tasks.truth(task)}</answer>", True),
                Completion("no", True),
            )
            body = wire.encode([Rollout(task.ref, answers, OTHER)], 1, "m")
            programs.put(ReceivedBody(OTHER, "", wire.KIND, body))
            (group,) = swarm.collect(1, wait=TIMEOUT_S)
            assert group.ref == task.ref
    finally:
        ends[0]()
        thread.join()


def test_what_a_node_that_restarts_could_not_be_told_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, absent = list[dict[str, Any]](), iter([True, False, True])

    def call(_folder: Path, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation == "share":
            if next(absent, False):
                raise Unreachable("the node is starting")
            told.append(arguments)
        return {"peer_id": OTHER, "number": 0, "bodies": []}

    monkeypatch.setattr(control, "call", call)
    monkeypatch.setattr(node_network, "EVERY_S", 0.01)
    config = NodeConfig.model_validate({"swarm": {"curriculum": "tiny-9"}})
    changed, ignored = threading.Condition(), lambda *_: None
    network = node_network.NodeNetwork(config, tmp_path, "a rule", changed, ignored, ignored)
    network.offer(Rollout(TaskRef("bf", 7), (Completion("<answer>x</answer>", True),), OTHER), 1)
    network.next_round(2, [(OTHER, "bf")], Lead())
    network.start()
    wait_until(lambda: network.error or any(shared["used"] for shared in told))
    network.leave()
    kinds = [shared["message"]["type"] for shared in told if shared["message"]]
    assert kinds == ["Hold", "Hold", "Publish"]
    assert [shared["rollouts"] for shared in told if shared["rollouts"]] == [1]
