"""A hostile peer that answers slowly or never, and opens streams that it never finishes.

`python -m tests.attacks.stalling`, a separate process, reads and writes JSON lines.

It connects to its victims, subscribes to their swarm's topic, and answers each question in the way that was
ordered last. On another order it opens streams to the victims, finishes none of them, and counts those that
the victims end.

In:   {"answer": "never" or "dribble"}     for all later questions; dribble: an answer of 1,000 bytes, one
byte a second
      {"open": n, "how": "half" or "question", "seconds": s}     open n streams to each victim at once; half:
      send nothing; question: send the first bytes of a question, then one byte a second. All are dropped
      after s seconds.
Out:  {"up": [], "id": its peer id}, {"asked": questions received so far}, and after those s seconds
{"opened": streams, "ended": streams that a victim ended, "lost": connections that ended}
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import multiaddr
import trio
from libp2p.peer.peerinfo import info_from_p2p_addr

from p2p.engines.libp2p.pubsub import MESHSUB
from p2p.engines.libp2p.stack import make_host
from p2p.engines.libp2p.streams import GREETING, PROTOCOL
from p2p.identity import Identity
from p2p.topic import Topic
from testbed.probe import lines, options, say
from tests.attacks.nodes import subscribe, swallow

BYTE = 1.0  # seconds


class Stalling:
    def __init__(self, host: Any, victims: Sequence[Any]) -> None:
        self._host, self._victims = host, victims
        self._answer, self._asked = "never", 0

    async def obey(self, order: dict[str, Any]) -> None:
        if "answer" in order:
            self._answer = order["answer"]
            say(answers=self._answer)
            return
        opened, ended = 0, 0

        async def one(muxed: Any) -> None:
            nonlocal opened, ended
            try:
                stream = await muxed.open_stream()
                opened += 1
                if order["how"] == "question":
                    await stream.write(GREETING + (1000).to_bytes(4, "big"))
                    while True:
                        await trio.sleep(BYTE)
                        await stream.write(b"?")
                while await stream.read(1000):
                    pass
            except Exception:  # the victim ended the stream; each layer raises a different exception
                pass
            ended += 1

        connections = [connection.muxed_conn for connection in self._host.get_network().get_connections()]
        with trio.move_on_after(order["seconds"]):
            async with trio.open_nursery() as nursery:
                for muxed in connections:
                    muxed.stream_backlog_semaphore = trio.Semaphore(100_000)  # no limit
                    for _ in range(order["open"]):
                        nursery.start_soon(one, muxed)
                await trio.sleep_forever()
        say(opened=opened, ended=ended, lost=sum(muxed.event_closed.is_set() for muxed in connections))

    async def answer(self, stream: Any) -> None:
        """Answer as ordered, without reading the question."""
        self._asked += 1
        say(asked=self._asked)
        try:
            if self._answer == "dribble":
                await stream.write((1000).to_bytes(4, "big"))
                for _ in range(1000):
                    await trio.sleep(BYTE)
                    await stream.write(b"!")
            await trio.sleep_forever()
        except Exception:  # the victim hung up
            return

    async def greet(self, topic: Topic) -> None:
        for victim in self._victims:
            await subscribe(self._host, victim, topic)


async def run(given: argparse.Namespace) -> None:
    identity = Identity(given.seed.to_bytes(32, "big"))
    host = make_host(identity)
    hostile = Stalling(host, [info_from_p2p_addr(multiaddr.Multiaddr(victim)) for victim in given.bootstrap])
    host.set_stream_handler(MESHSUB[0], swallow)
    host.set_stream_handler(PROTOCOL, hostile.answer)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(host.run(listen_addrs=[]))
        await hostile.greet(Topic("probe", given.digest))
        say(up=[], id=identity.peer_id)
        nursery = await stack.enter_async_context(trio.open_nursery())
        async for line in lines():
            nursery.start_soon(hostile.obey, json.loads(line))
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = options("tests.attacks.stalling", "stalls nodes; give it only your own")
    parser.add_argument("--seed", type=int, default=2)
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
