"""Names: an attacker sends one small rollout set under each of 14,500 fresh keys.

The attacker breaks no rule; the test measures what it costs to display the authors.

The code is the product's: a daemon without a trainer, with its inbox, its lists and its control socket. An
honest author sends from time to time, too, and its rollouts are useful.
"""

import itertools
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from p2p.envelope import seal
from p2p.identity import Identity
from p2p.types import Verdict
from swarmd.cli.views.plain import PlainView
from swarmd.config.config import NodeConfig
from swarmd.daemon.daemon import Daemon
from swarmd.daemon.local_api import control
from swarmd.daemon.local_api.roster import MAX_AUTHORS
from swarmd.exchange import wire
from swarmd.state.folder import StateFolder
from swarmd.types import Completion, Rollout, TaskRef
from tests.attacks.harness import Attack, show

NAMES = 14_500
HONEST = Identity(b"h" * 32)


class Crowd:
    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.sequence = daemon, itertools.count(1)
        self.let_in = 0

    def send(self, identity: Identity) -> None:
        set_of_one = wire.encode(
            [Rollout(TaskRef("bf", 2), (Completion("1", True),), identity.peer_id)], 1, "tiny"
        )
        frame = seal(
            identity,
            self.daemon.sharing.topic.swarm_id,
            next(self.sequence),
            time.time(),
            wire.KIND,
            set_of_one,
        )
        self.let_in += self.daemon.member.deliver(frame, None) is Verdict.ACCEPT

    def come(self, names: Sequence[int]) -> None:
        for name in names:
            self.send(Identity(name.to_bytes(32, "big")))
            if name % 100 == 0:
                self.send(HONEST)


def attack(folder: Path, names: int = NAMES) -> dict[str, int]:
    with (folder / "said").open("w") as said:
        daemon = Daemon(NodeConfig.model_validate({"swarm": {"engine": "none"}}), folder, PlainView(said))
        crowd = Crowd(daemon)
        crowd.send(HONEST)
        daemon.sharing.roster.useful(HONEST.peer_id, "gcd")  # as the trainer would report it
        crowd.come(range(1, names + 1))
        reply = trio.run(_asked, daemon, folder)
    found = {
        "let_in": crowd.let_in,
        "reply_KiB": len(json.dumps(reply)) // 1024,
        "shown": len(reply["peers"]),
        "kept": len(daemon.sharing.roster),  # authors that the node remembers to show
        "honest_hidden": int(HONEST.peer_id not in {row["id"] for row in reply["peers"]}),
    }
    show(f"names, {names} authors with a frame each", found)
    return found


async def _asked(daemon: Daemon, folder: Path) -> dict[str, Any]:
    """Return the answer to `swarmd peers`, over the control socket."""
    with StateFolder.open(folder):
        async with trio.open_nursery() as nursery:
            await nursery.start(
                partial(control.serve, folder, {"peers": control.answering(daemon.sharing.peers)})
            )
            reply = await trio.to_thread.run_sync(partial(control.call, folder, "peers", dict))
            nursery.cancel_scope.cancel()
    return reply


def test_a_crowd_of_authors_gets_a_bounded_list_that_keeps_useful_authors(tmp_path: Path) -> None:
    found = attack(tmp_path, 4 * MAX_AUTHORS)
    assert found["let_in"] > 4 * MAX_AUTHORS  # because the attacker breaks no rule
    assert (found["honest_hidden"], found["shown"], found["kept"]) == (0, MAX_AUTHORS, MAX_AUTHORS)
    assert 1024 * found["reply_KiB"] < control.MAX_REPLY_BYTES / 10


ATTACK = Attack(attack, {"kept": 1024, "reply_KiB": 512, "honest_hidden": 0})
