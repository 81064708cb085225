"""What a node keeps of others for programs that have joined through it."""

import json

import pytest

from p2p.identity import Identity
from p2p.types import PeerId, ReceivedBody
from swarmd.config.config import NodeConfig
from swarmd.daemon.local_api import control
from swarmd.daemon.local_api.programs import KEPT_BYTES, Programs

OTHER = Identity.from_seed(b"\1" * 32).peer_id
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
