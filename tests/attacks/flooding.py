"""A hostile peer with a valid key that floods its victims with messages.

`python -m tests.attacks.flooding`, a separate process, writes JSON lines.

It makes and signs GossipSub messages beforehand, and writes them straight into the victims' streams, without
the limits of the library. When a victim hangs up, it dials again at once, with the same key or a new one.

Output: {"ready": CPU seconds so far} when the messages are made; after each dial {"dialled": victim, "key":
n, "refused": whether the victim refused the connection, "messages": number written, "seconds": from the first
message until the victim hung up, null if it did not}; at the end {"done": CPU seconds of this process}.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import multiaddr
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils import encode_varint_prefixed

from p2p.engines.libp2p.pubsub import MESHSUB
from p2p.engines.libp2p.stack import make_host
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.topic import Topic
from testbed.probe import options, say
from tests.attacks.harness import REDIALS, declare
from tests.attacks.nodes import key_of, subscribe, swallow
from tests.doubles import TIMEOUT_S

KINDS = {
    "frames": "our own frames, new and well signed",
    "garbage": "bytes that are no frame, well signed for libp2p",
    "forged": "bytes that are no frame, and a signature that is none",
    "repeats": "one frame, again and again",
    "stale": "our own frames, an hour old",
    "elsewhere": "well signed, for a topic that nobody is in",
    "control": "no messages: gossip about messages that there are not",
}
BODY = 100  # bytes


def rpcs(kind: str, identity: Identity, topic: Topic, count: int, batch: int) -> list[bytes]:
    """Return the encoded RPCs for `count` messages, `batch` messages in each RPC."""
    me = ID.from_string(identity.peer_id).to_bytes()
    private = create_new_key_pair(identity.seed).private_key
    rng = random.Random(identity.seed)
    now = time.time() - (3600 if kind == "stale" else 0)
    name = str(topic) + "-elsewhere" if kind == "elsewhere" else str(topic)

    def message(n: int) -> Any:
        sealed = kind in ("frames", "repeats", "stale")
        data = (
            seal(identity, topic.swarm_id, int(now * 1000) + n, now, "probe", rng.randbytes(BODY))
            if sealed
            else rng.randbytes(2 * BODY)
        )
        made = rpc_pb2.Message(
            data=data, topicIDs=[name], from_id=me, seqno=(int(now * 1e9) + n).to_bytes(8, "big")
        )
        made.signature = (
            bytes(64) if kind == "forged" else private.sign(b"libp2p-pubsub:" + made.SerializeToString())
        )
        return made

    if kind == "control":
        gossip = rpc_pb2.ControlMessage(
            ihave=[rpc_pb2.ControlIHave(topicID=name, messageIDs=[rng.randbytes(46)]) for _ in range(batch)]
        )
        return [encode_varint_prefixed(rpc_pb2.RPC(control=gossip).SerializeToString())] * (count // batch)
    messages = [message(0)] * count if kind == "repeats" else [message(n) for n in range(count)]
    parts = (messages[at : at + batch] for at in range(0, count, batch))
    return [encode_varint_prefixed(rpc_pb2.RPC(publish=part).SerializeToString()) for part in parts]


class Flood:
    """One dial of a victim, and the flood over this connection.

    rate: the most messages a second; a victim that reads more slowly gets fewer.
    """

    def __init__(self, victim: str, topic: Topic, rate: float, batch: int) -> None:
        self._target = info_from_p2p_addr(multiaddr.Multiaddr(victim))
        self._topic, self._rate, self._batch = topic, rate, batch
        self.connected = False
        self.messages = 0  # number written
        self.cut: float | None = None  # seconds from the first message until the victim hung up

    async def run(self, identity: Identity, written: Iterator[bytes], seconds: float) -> None:
        host = make_host(identity)
        host.set_stream_handler(MESHSUB[0], swallow)
        with trio.move_on_after(seconds):
            async with host.run(listen_addrs=[]):
                try:
                    stream, ended = await subscribe(host, self._target, self._topic)
                except Exception:  # the victim refused; `connected` stays False
                    return
                self.connected, begun = True, time.monotonic()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, stream, written, begun)
                    await ended.wait()
                    self.cut = time.monotonic() - begun
                    nursery.cancel_scope.cancel()
                await host.get_network().close_sockets()

    async def _write(self, stream: Any, written: Iterator[bytes], begun: float) -> None:
        try:
            for rpc in written:
                await stream.write(rpc)
                self.messages += self._batch
                await trio.sleep(max(0.0, begun + self.messages / self._rate - time.monotonic()))
        except Exception:  # the victim hung up; each layer raises a different exception
            await trio.sleep_forever()


async def attack(victim: str, given: argparse.Namespace, written: list[bytes]) -> None:
    topic, until = Topic(given.swarm, given.digest), time.monotonic() + given.patience
    for dial in itertools.count():
        key = dial if given.redial == "fresh" else 0
        identity = key_of(given.seed, key)
        if key:
            written = rpcs(given.kind, identity, topic, 1000, given.batch)
        if (left := until - time.monotonic()) <= 0:
            return
        flood = Flood(victim, topic, given.rate, given.batch)
        await flood.run(identity, itertools.cycle(written), left)
        say(dialled=victim, key=key, refused=not flood.connected, messages=flood.messages, seconds=flood.cut)
        if given.redial == "none":
            return
        if not dial:
            until = time.monotonic() + given.seconds
        await trio.sleep(given.pause)


async def attack_all(given: argparse.Namespace) -> None:
    written = rpcs(
        given.kind, key_of(given.seed, 0), Topic(given.swarm, given.digest), given.messages, given.batch
    )
    say(ready=time.process_time())
    async with trio.open_nursery() as nursery:
        for victim in given.bootstrap:
            nursery.start_soon(attack, victim, given, written)
    say(done=time.process_time())


def main() -> None:
    parser = options("tests.attacks.flooding", "floods nodes with messages; give it only your own")
    defaults = {
        "kind": "frames",
        "rate": 10_000.0,
        "batch": 100,
        "messages": 10_000,
        "redial": "same",
        "pause": 0.2,
        "patience": TIMEOUT_S,
        "seconds": 10.0,
        "seed": 1,
    }
    about = {
        "kind": "; ".join(f"{kind}: {what}" for kind, what in KINDS.items()),
        "rate": "messages a second to each victim",
        "batch": "messages in one RPC",
        "messages": "different ones; then the first again",
        "redial": "dial again, with the same key or a new one",
        "pause": "seconds between the end of one connection and the next dial",
        "patience": "seconds of the first connection, unless it is hung up on",
        "seconds": "after it, in which it dials again",
    }
    declare(parser, defaults, {"kind": KINDS, "redial": REDIALS}, about)
    trio.run(attack_all, parser.parse_args())


if __name__ == "__main__":
    main()
