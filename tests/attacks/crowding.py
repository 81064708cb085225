"""A peer with many free keys and one connection to each node: `python -m tests.attacks.crowding`, a process of its own, JSON lines out.

It publishes one empty, well signed frame of an unknown kind after another, each under the next of its keys, and tells whoever asks that the
swarm has 300 members in 42 shards. Out: {"up": [addresses], "id": peer id}, {"sent": frames, "peers": connected} every five seconds.
"""

import argparse
import itertools
import random
import time

import trio

from benchmarks.probe import build_engine, options, say
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.shards.estimate import Estimate, encode_estimate
from p2p.topic import Topic
from p2p.types import Handlers, PeerId, PeerRequest, Verdict

KIND = "presence"  # that nobody knows
LIE = encode_estimate(Estimate(300, 42))
RATE = 10.0  # frames a second


def phantoms(keys: int, seed: int = 1) -> list[Identity]:
    rng = random.Random(seed)
    return [Identity.from_seed(rng.randbytes(32)) for _ in range(keys)]


def lie(peer: PeerId, question: bytes) -> bytes:
    return LIE if question == PeerRequest.SWARM_SIZE.message() else b""


async def attack(given: argparse.Namespace) -> None:
    topic, crowd = Topic(given.swarm, given.digest), itertools.cycle(phantoms(given.keys))
    him = build_engine(given, Identity.from_seed(b"phantom" + bytes(25)), Handlers(lambda *_: Verdict.IGNORE, lie))
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(him.run)
        say(up=list(addresses), id=him.me)
        begun = trio.current_time()
        for sent in itertools.count(1):
            now = time.time()
            him.publish(seal(next(crowd), topic.swarm_id, int(now * 1000) + sent, now, KIND, b""))
            if sent % int(5 * given.rate) == 0:
                say(sent=sent, peers=len(him.peers()))
            await trio.sleep_until(begun + sent / given.rate)


def main() -> None:
    parser = options("tests.attacks.crowding", "plays a crowd; give it only your own nodes")
    parser.add_argument("--keys", type=int, default=300)
    parser.add_argument("--rate", type=float, default=RATE, help="frames a second")
    trio.run(attack, parser.parse_args())


if __name__ == "__main__":
    main()
