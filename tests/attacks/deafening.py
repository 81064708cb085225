"""A hostile peer that signs frames with many fresh keys and wrong clocks.

`python -m tests.attacks.deafening`, a separate process, writes JSON lines.

Every frame is signed correctly and within every limit of a connection. Each victim gets --rate frames a
second over --connections connections. The keys, --keys of them, sign in turn. The clock of each frame is
between 300 s behind and 300 s ahead, and each frame of a key has another clock.

Output: {"ready": true} when it is connected, {"written": messages so far to all victims} every second.
"""

import random
import time
from collections.abc import Iterator, Sequence
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
from tests.attacks.harness import declare
from tests.attacks.nodes import key_of, subscribe, swallow

KEYS, RATE, CONNECTIONS = 120, 1500.0, 15
SKEW = 300.0  # seconds
SPAN = 0.1  # seconds between two writes on a connection
BODY = 100  # bytes


def crowd(seed: int, keys: int = KEYS) -> list[Identity]:
    return [key_of(seed, 1000 + n) for n in range(keys)]


def skews(rng: random.Random, most: float = SKEW) -> Iterator[float]:
    """Yield the skew of each frame's clock, in seconds.

    Many frames come from almost the largest skew, so that they fill the victim's memory up to its horizon.
    """
    while True:
        yield (
            rng.choice((rng.uniform(-most, most), rng.uniform(most - 5, most - 1), rng.uniform(0.0, 9.0)))
            if most
            else 0.0
        )


def messages(who: Sequence[Identity], topic: Topic, rng: random.Random, most: float) -> Iterator[Any]:
    """Yield GossipSub messages with these keys' frames; each message is signed by the key of its frame."""
    signers = [
        (
            identity,
            create_new_key_pair(identity.seed).private_key,
            ID.from_string(identity.peer_id).to_bytes(),
        )
        for identity in who
    ]
    number = int(time.time() * 1000)
    for skew in skews(rng, most):
        identity, private, name = signers[number % len(signers)]
        number += 1
        data = seal(identity, topic.swarm_id, number, time.time() + skew, "probe", rng.randbytes(BODY))
        made = rpc_pb2.Message(
            from_id=name, data=data, topicIDs=[str(topic)], seqno=number.to_bytes(8, "big")
        )
        made.signature = private.sign(b"libp2p-pubsub:" + made.SerializeToString())
        yield made


async def connection(
    seed: int, number: int, victim: str, source: str, topic: Topic, parts: Any, task_status: Any
) -> None:
    host = make_host(key_of(seed, number))
    (tcp,) = host.get_network().transport_manager.get_transports()
    tcp.dial = lambda where: tcp.dial_with_source(where, (source, 0))
    host.set_stream_handler(MESHSUB[0], swallow)
    async with host.run(listen_addrs=[]):
        stream, _ = await subscribe(host, info_from_p2p_addr(multiaddr.Multiaddr(victim)), topic)
        task_status.started()
        try:
            async for part in parts:
                await stream.write(part)
        except Exception:  # the victim hung up; each layer raises a different exception
            return


async def run(given: Any) -> None:
    topic, rng = Topic(given.swarm, given.digest), random.Random(given.seed)
    async with trio.open_nursery() as nursery:
        lines = []
        for number, victim in enumerate(
            victim for victim in given.bootstrap for _ in range(given.connections)
        ):
            send, receive = trio.open_memory_channel[bytes](10)
            source = f"127.0.{1 + number}.1" if given.machines else "127.0.0.1"
            await nursery.start(
                lambda n, v, s, r, task_status: connection(given.seed, n, v, s, topic, r, task_status),
                number,
                victim,
                source,
                receive,
            )
            lines.append(send)
        say(ready=True)
        made, begun, written, said = (
            messages(crowd(given.seed, given.keys), topic, rng, given.skew),
            time.monotonic(),
            0,
            0,
        )
        for beat in range(int(given.seconds / SPAN)):
            for nth in range(given.connections):
                share = [next(made) for _ in range(round(given.rate * SPAN / given.connections))]
                part = encode_varint_prefixed(rpc_pb2.RPC(publish=share).SerializeToString())
                for line in lines[nth :: given.connections]:
                    try:
                        line.send_nowait(part)
                        written += len(share)
                    except (trio.WouldBlock, trio.BrokenResourceError):
                        # The victim reads more slowly, or has hung up.
                        continue
            if time.monotonic() - begun > said:
                said += 1
                say(written=written)
            await trio.sleep(max(0.0, begun + (beat + 1) * SPAN - time.monotonic()))
        say(done=written)
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = options("tests.attacks.deafening", "sends frames of wrong clocks; give it only your own nodes")
    defaults = {"keys": KEYS, "rate": RATE, "connections": CONNECTIONS, "skew": SKEW, "machines": False}
    about = {
        "rate": "frames a second to each victim",
        "connections": "number of connections to each victim",
        "skew": "largest error of a clock, in seconds; 0: all clocks are right",
        "machines": "each connection comes from a different loopback address",
    }
    declare(parser, defaults | {"seconds": 600.0, "seed": 1}, {}, about)
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
