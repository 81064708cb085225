"""A hostile peer with many keys that offer blobs which they do not hold.

`python -m tests.attacks.offering`, a separate process, writes JSON lines.

--how deny: each key is a separate member that is connected to the victims and answers that it does not hold
the blob. gone: one connection carries the frames of all keys, and the authors cannot be asked. fresh: like
gone, with a new key for every offer.

Output: {"up": [], "id": its peer id}, {"offered": offers so far} every second.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from functools import partial

import trio

from p2p.envelope import seal
from p2p.identity import Identity
from p2p.member import Member
from p2p.topic import Topic
from swarmd.exchange import offers
from swarmd.tasks.curriculum import TINY_9
from testbed.probe import build_engine, lines, options, say
from tests.attacks.harness import declare
from tests.attacks.nodes import key_of

KEYS, IDS, RATE = 10, 44, 14.0  # keys; ids in an offer; offers a second by all keys together


def body(rng: random.Random, ids: int = IDS) -> bytes:
    """Return the body of an offer of this many rollouts that do not exist."""
    index = TINY_9.specialties.index("bf")
    items = [(index, rng.randrange(2**16), rng.randrange(500, 20_000), rng.randbytes(12)) for _ in range(ids)]
    return offers._body(1, items)


def keys(how: str, seed: int, count: int = KEYS) -> Iterator[Identity]:
    """Yield the signer of each offer in turn."""
    return map(
        partial(key_of, seed), itertools.count(1) if how == "fresh" else itertools.cycle(range(1, count + 1))
    )


async def run(given: argparse.Namespace) -> None:
    topic, rng, numbers = (
        Topic(given.swarm, given.digest),
        random.Random(given.seed),
        itertools.count(int(time.time() * 1000)),
    )

    def member(identity: Identity) -> Member:
        build = partial(build_engine, given, identity)
        # A member that ignores all frames.
        return Member(identity, topic, build, sequence=numbers, clock=time.time, admitted=lambda _: None)

    first = key_of(given.seed, 0)
    connected = [key_of(given.seed, n) for n in range(1, KEYS + 1)] if given.how == "deny" else [first]
    members = {who.peer_id: member(who) for who in connected}
    async with trio.open_nursery() as nursery:
        for each in members.values():
            await nursery.start(each.run)
        say(up=[], id=next(iter(members)))

        async def offer() -> None:
            begun, said = time.monotonic(), 0.0
            for n, who in enumerate(keys(given.how, given.seed)):
                via = members.get(who.peer_id) or members[first.peer_id]
                via.engine.publish(
                    seal(who, topic.swarm_id, next(numbers), time.time(), offers.KIND, body(rng, given.ids))
                )
                if time.monotonic() - said > 1:
                    said = time.monotonic()
                    say(
                        offered=n + 1,
                        cpu=time.process_time(),
                        peers=sorted({p.id for m in members.values() for p in m.peers()}),
                    )
                await trio.sleep(max(0.0, begun + n / given.rate - time.monotonic()))

        async for _ in lines():  # the first line starts the attack
            nursery.start_soon(offer)
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = options(
        "tests.attacks.offering", "offers blobs that it does not hold; give it only your own nodes"
    )
    defaults = {"how": "deny", "rate": RATE, "ids": IDS, "seed": 2}
    about = {"rate": "offers a second", "ids": "ids in each offer"}
    declare(parser, defaults, {"how": ["deny", "gone", "fresh"]}, about)
    given = parser.parse_args()
    given.engine = "libp2p"
    trio.run(run, given)


if __name__ == "__main__":
    main()
