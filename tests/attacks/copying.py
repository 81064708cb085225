"""A hostile peer that copies the offers of other nodes and signs the copies with its keys.

`python -m tests.attacks.copying`, a separate process, writes JSON lines: {"up": [], "id": its peer id},
{"copied": offers so far}. It begins to copy when it reads the first line of its input.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import trio

from p2p.envelope import seal
from p2p.identity import Identity
from p2p.member import Member
from p2p.topic import Topic
from p2p.types import Envelope, PeerId, PeerRequest, Unanswered
from swarmd.exchange import offers
from testbed.probe import build_engine, lines, options, say
from tests.attacks.harness import declare
from tests.attacks.nodes import key_of

# Ways to copy an offer: with all ids; with half of the ids; with half of the ids replaced by ids that nobody
# holds; with all ids, under another task number and size.
HOW = ("all", "some", "mixed", "changed")


def items_of(body: bytes) -> list[offers._Item]:
    """Return the items that an offer lists."""
    offer = offers._decoder.decode(body)
    ids = [offer.ids[at : at + 12] for at in range(0, len(offer.ids), 12)]
    return list(zip(offer.specialties, offer.ns, offer.sizes, ids, strict=True))


def altered(body: bytes, how: str, rng: random.Random) -> bytes:
    """Return the body of the thief's copy of an offer."""
    items = items_of(body)
    if how == "some":
        items = rng.sample(items, (len(items) + 1) // 2)
    elif how == "mixed":
        invented = [(index, n, size, rng.randbytes(12)) for index, n, size, _ in items[::2]]
        items = [*items[1::2], *invented]
    elif how == "changed":
        items = [(index, n + 1, max(1, size // 2), name) for index, n, size, name in items]
    return offers._body(1, items)


class Thief:
    """Signs copies of offers. keys: number of keys that copy each offer; 0: one new key for each offer."""

    def __init__(self, keys: int, how: str, swarm_id: bytes, seed: int) -> None:
        self._how, self._swarm_id, self._rng = how, swarm_id, random.Random(seed)
        self._numbers = itertools.count(1)
        self.signers: set[PeerId] = set()
        new = map(partial(key_of, seed), itertools.count(1))
        self._turns: Iterator[Sequence[Identity]] = (
            itertools.repeat([key_of(seed, n) for n in range(keys)]) if keys else ([who] for who in new)
        )

    def copies(self, body: bytes, now: float) -> list[bytes]:
        """Return the frames that copy this offer."""
        changed, who = altered(body, self._how, self._rng), next(self._turns)
        self.signers.update(each.peer_id for each in who)
        number = int(now * 1000) + next(self._numbers)
        return [seal(each, self._swarm_id, number, now, offers.KIND, changed) for each in who]


async def run(given: argparse.Namespace) -> None:
    me, topic, copied = key_of(given.seed, 0), Topic(given.swarm, given.digest), 0
    thief = Thief(given.keys, given.how, topic.swarm_id, given.seed)
    heard, hears = trio.open_memory_channel[Envelope](1000)
    began = False

    def admitted(envelope: Envelope) -> None:
        nonlocal copied
        # The thief's own offers may come back to it.
        if not began or envelope.kind != offers.KIND or envelope.author in thief.signers:
            return
        for frame in thief.copies(envelope.body, time.time()):
            member.engine.publish(frame)
        copied += 1
        say(copied=copied)
        heard.send_nowait(envelope)

    async def fetch() -> None:
        async for envelope in hears:
            for _, _, size, name in items_of(envelope.body):
                with trio.move_on_after(5):
                    with suppress(Unanswered):
                        question = PeerRequest.BLOBS.message(name)
                        member.blobs.put(await member.request(envelope.author, question, size))

    member = Member(
        me,
        topic,
        partial(build_engine, given, me),
        sequence=itertools.count(int(time.time() * 1000)),
        clock=time.time,
        admitted=admitted,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(member.run)
        say(up=[], id=me.peer_id)
        if given.serves:
            nursery.start_soon(fetch)
        async for _ in lines():  # the first line starts the copying
            began = True
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = options("tests.attacks.copying", "copies offers; give it only your own nodes")
    defaults = {"how": "all", "keys": 0, "serves": False, "seed": 2}
    about = {"keys": "number of keys that copy each offer; 0: one new key for each offer"}
    declare(parser, defaults, {"how": HOW}, about)
    given = parser.parse_args()
    given.engine = "libp2p"
    trio.run(run, given)


if __name__ == "__main__":
    main()
