"""Names: an attacker sends one small rollout set under each of 14,500 fresh keys. No rule is broken: what does it cost to show them?

The code is the real one: a daemon without its trainer, its inbox, its lists and its control socket. Beside the crowd an honest author sends
now and then, and its rollouts are of use.

`python -m tests.attacks.test_names` prints the figures.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from p2p.envelope import seal
from p2p.identity import Identity
from p2p.types import PeerId, Verdict
from swarmd import link
from swarmd.cli.view import PlainView
from swarmd.config.config import NodeConfig
from swarmd.daemon import control
from swarmd.daemon.daemon import Daemon
from swarmd.daemon.roster import KEPT
from swarmd.daemon.status import SHOWN
from swarmd.exchange import wire
from swarmd.types import Completion, Rollout, TaskRef

NAMES = 14_500
HONEST = Identity.from_seed(b"h" * 32)


@dataclass
class Result:
    let_in: int
    reply_bytes: int
    shown: int
    left_out: int
    honest_shown: bool
    kept: int  # authors that are remembered to be shown


class Crowd:
    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.sequence = daemon, itertools.count(1)
        self.let_in = 0

    def send(self, identity: Identity) -> None:
        set_of_one = wire.encode([Rollout(TaskRef("bf", 2), (Completion("1", True),), identity.peer_id)], 1, "tiny")
        frame = seal(identity, self.daemon.topic.swarm_id, next(self.sequence), time.time(), wire.KIND, set_of_one)
        self.let_in += self.daemon.member.deliver(frame, None) is Verdict.ACCEPT

    def come(self, names: Sequence[int]) -> None:
        for name in names:
            self.send(Identity.from_seed(name.to_bytes(32, "big")))
            if name % 100 == 0:
                self.send(HONEST)


def attack(names: int = NAMES) -> Result:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        config = NodeConfig.model_validate({"swarm": {"engine": "none"}})
        with (folder / "said").open("w") as said:
            daemon = Daemon(config, folder, PlainView(said))
            crowd = Crowd(daemon)
            crowd.send(HONEST)
            daemon._hear(link.Vouch(HONEST.peer_id, 1))  # as its trainer does
            crowd.come(range(1, names + 1))
            reply = trio.run(_asked, daemon, folder)
    shown = {PeerId(row["id"]) for row in reply["peers"]}
    kept = len(daemon.status.roster)
    result = Result(crowd.let_in, len(json.dumps(reply)), len(shown), reply["left_out"], HONEST.peer_id in shown, kept)
    print(
        f"\nnames: {names} authors with a frame each, {result.let_in} frames let in: `swarmd peers` answers "
        f"{result.reply_bytes / 1024:.0f} KiB, {result.shown} shown, {result.left_out} counted, {result.kept} kept, "
        f"the honest author shown: {result.honest_shown}"
    )
    return result


async def _asked(daemon: Daemon, folder: Path) -> dict[str, Any]:
    """What `swarmd peers` is told, over the socket."""
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(control.serve, folder, {"peers": daemon._on_peers}))
        reply = await trio.to_thread.run_sync(partial(control.call, folder, "peers"))
        nursery.cancel_scope.cancel()
    return reply


def test_a_crowd_of_names_costs_a_bounded_list_and_hides_nobody_useful() -> None:
    result = attack(4 * KEPT)
    assert result.let_in > 4 * KEPT  # it breaks no rule
    assert result.honest_shown and result.shown == SHOWN and result.left_out == KEPT - SHOWN
    assert result.reply_bytes < control.MAX_REPLY / 10 and result.kept == KEPT


def figures(argv: Sequence[str] | None = None) -> Mapping[str, object]:
    """Play the attack, print and return what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.test_names", description="play the attack and print its figures")
    parser.add_argument("--names", type=int, default=NAMES)
    result = attack(parser.parse_args(argv).names)
    return {
        "let_in": result.let_in,
        "reply_KiB": result.reply_bytes / 1024,
        "kept": result.kept,
        "honest_hidden": int(not result.honest_shown),
    }


if __name__ == "__main__":
    figures()
