"""One node of `benchmarks.network.exchange`: shares and gathers rollouts as a daemon does.

It speaks JSON lines, as `testbed.probe` does. In:

    {"round": r, "at": seconds since the epoch, "rollouts": n, "bytes": b}
                                                share n rollouts of b bytes at that time, and begin a round
    {"list": any}                               list the blobs that this node holds
    {"fetch": id, "size": bytes, "author": peer id}     fetch this blob within ten seconds

Out:

    {"up": [addresses], "id": peer id}
    {"peers": [ids]}                            when the connected peers change
    {"held": r, "after": seconds, "bytes": content}
    {"listed": any, "blobs": {id: bytes}}
    {"fetched": id, "found": whether}
    {"first": seconds after the start}          when the first frame arrives
    {"cpu": seconds, "pids": [...]}             every half second
"""

import argparse
import contextlib
import itertools
import json
import random
import sys
import time
from functools import partial
from typing import Any

import psutil
import trio

from p2p.blobs.blobs import content_id
from p2p.identity import Identity
from p2p.member import Member
from p2p.topic import Topic
from p2p.types import Envelope, PeerId, PeerRequest, Unanswered
from swarmd.config.config import RoundConfig
from swarmd.exchange.driver import Driver
from swarmd.exchange.events import Deliver, RoundBegan, Share
from swarmd.exchange.exchange import Exchange
from swarmd.experience.strategies import SharingSettings
from swarmd.tasks.curriculum import SAPO_9
from swarmd.types import Completion, Rollout, TaskRef
from testbed import ROOT
from testbed.probe import build_engine, lines, options, say

COMPLETIONS = 8
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))


class Node:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._identity = Identity.load_or_create(arguments.folder / "key")
        self._rng = random.Random(self._identity.peer_id)
        self._text = "".join(path.read_text() for path in DOCUMENTS)
        self._numbers = itertools.count(self._rng.randrange(10**8))  # of tasks
        self._got, self._bytes, self._round, self._at = 0, 0, 0, 0.0
        self._up, self._heard = 0.0, False
        self.member = Member(
            self._identity,
            Topic(arguments.swarm, arguments.digest),
            partial(build_engine, arguments, self._identity),
            sequence=itertools.count(int(time.time() * 1000)),
            clock=time.time,
            admitted=self._on_admitted,
        )
        round = RoundConfig(external=arguments.wanted, max_age=1)
        exchange = Exchange(SAPO_9, round, SharingSettings(), "exchange", self._rng)
        self._driver = Driver(exchange, self._receive, lambda text: print(text, file=sys.stderr))

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(self.member.run)
            say(up=list(addresses), id=self._identity.peer_id)
            nursery.start_soon(self._tell)
            nursery.start_soon(self._driver.run, self.member)
            self._up = time.monotonic()
            async for line in lines():
                nursery.start_soon(self._obey, json.loads(line))
            nursery.cancel_scope.cancel()

    async def _obey(self, order: dict[str, Any]) -> None:
        if "list" in order:
            say(
                listed=order["list"],
                blobs={name.hex(): len(blob) for name, blob in self.member.blobs.held.items()},
            )
        elif "fetch" in order:
            say(fetched=order["fetch"], found=await self._fetch(order))
        else:
            await self._play(order)

    async def _play(self, order: dict[str, Any]) -> None:
        rollouts = [self._rollout(order["bytes"]) for _ in range(order["rollouts"])]
        await trio.sleep(max(0.0, order["at"] - 0.1 - time.time()))
        self._got, self._bytes, self._round, self._at = 0, 0, order["round"], order["at"]
        self._driver.put(RoundBegan(order["round"] + 1, {}))
        await trio.sleep(max(0.0, order["at"] - time.time()))
        self._driver.put(Share(tuple(rollouts), order["round"]))

    async def _fetch(self, order: dict[str, Any]) -> bool:
        """Ask the author for a blob, then each connected member; return whether the blob was found."""
        name = bytes.fromhex(order["fetch"])
        with trio.move_on_after(10):
            for holder in dict.fromkeys([order["author"], *(peer.id for peer in self.member.peers())]):
                with contextlib.suppress(Unanswered):
                    blob = await self.member.request(holder, PeerRequest.BLOBS.message(name), order["size"])
                    if content_id(blob) == name:
                        return True
        return False

    def _rollout(self, size: int) -> Rollout:
        """Make a rollout with a few lines of real text for each completion."""
        length = size // COMPLETIONS - 8  # less the wire format's overhead
        starts = [self._rng.randrange(len(self._text) - length) for _ in range(COMPLETIONS)]
        texts = [self._text[at : at + length] for at in starts]
        ref = TaskRef(self._rng.choice(SAPO_9.specialties), next(self._numbers))
        return Rollout(ref, tuple(Completion(text, True) for text in texts), self._identity.peer_id)

    def _on_admitted(self, envelope: Envelope) -> None:
        if self._up and not self._heard:
            self._heard = True
            say(first=time.monotonic() - self._up)
        self._driver.admitted(envelope)

    def _receive(self, delivered: Deliver) -> None:
        self._got += 1
        self._bytes += delivered.rollout.size
        if self._got == self._arguments.wanted:
            say(held=self._round, after=time.time() - self._at, bytes=self._bytes)

    async def _tell(self) -> None:
        peers: list[PeerId] = []
        me = psutil.Process()
        for turn in itertools.count():
            if turn % 10 == 0:  # rarely, because this reads the whole process table
                children = me.children(recursive=True)
            now = sorted(peer.id for peer in self.member.peers())
            if now != peers:
                say(peers=now)
                peers = now
            cpu = time.process_time()
            for child in children:
                with contextlib.suppress(psutil.Error):  # the child has ended
                    times = child.cpu_times()
                    cpu += times.user + times.system
            say(cpu=cpu, pids=[me.pid, *(child.pid for child in children)])
            await trio.sleep(0.5)


def main() -> None:
    parser = options("benchmarks.network.exchange_node", "one node of benchmarks.network.exchange")
    parser.set_defaults(swarm="exchange")
    parser.add_argument("--wanted", type=int, default=4, help="rollouts to gather each round")
    trio.run(Node(parser.parse_args()).run)


if __name__ == "__main__":
    main()
