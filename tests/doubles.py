"""Test doubles: a clock, members of a swarm in memory, and waiting for a condition.

All other parts of a test can be real: rounds, inbox, exchange and verifier.

    clock, swarm = Clock(), MemorySwarm()
    alice, bob = memory_member(swarm, 1, clock), memory_member(swarm, 2, clock)
    alice.publish("rollouts", b"hello")
    assert [envelope.body for envelope in bob.received()] == [b"hello"]
"""

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import trio

from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from p2p.member import Member
from p2p.topic import Topic
from p2p.types import Envelope, Handlers, P2pEngine
from swarmd.config.config import NodeConfig
from swarmd.exchange import offers, wire
from swarmd.exchange.exchange import Exchange
from swarmd.exchange.virtual import VirtualNode
from swarmd.tasks.curriculum import TINY_9, Curriculum
from swarmd.types import Rollout
from testbed import TIMEOUT_S as TIMEOUT_S

# Time at the start of a test, in seconds since the epoch.
NOW = 1_700_000_000.0
TOPIC = Topic("test", "0123456789abcdef")


class Clock:
    """A clock that the test sets: `clock()` is `clock.now`, in seconds."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def identity(number: int) -> Identity:
    """Return an identity that depends only on the number."""
    return Identity(number.to_bytes(32, "big"))


class ListeningMember(Member):
    """A member that keeps admitted frames until `received` is called, unless `admitted` is given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._heard: list[Envelope] = []
        super().__init__(*args, **{"admitted": lambda envelope: self._heard.append(envelope), **options})

    def received(self) -> Sequence[Envelope]:
        heard, self._heard = self._heard, []
        return heard


def memory_member(
    swarm: MemorySwarm,
    who: Identity | int,
    clock: Callable[[], float],
    *,
    topic: Topic = TOPIC,
    engine: Callable[[Handlers], P2pEngine] | None = None,
    **options: Any,
) -> ListeningMember:
    """Build a real member over the memory engine.

    engine: used instead of the memory engine if given. options: passed to `Member`.
    """
    me = identity(who) if isinstance(who, int) else who
    options.setdefault("sequence", itertools.count(1))
    return ListeningMember(
        me, topic, engine or (lambda handlers: swarm.join(me.peer_id, handlers)), clock=clock, **options
    )


def memory_node(
    swarm: MemorySwarm,
    who: Identity | int,
    clock: Callable[[], float],
    *,
    curriculum: Curriculum = TINY_9,
    config: NodeConfig | None = None,
    model: str = "m",
    whole: int = offers.WHOLE_BYTES,
    node: Callable[..., VirtualNode] = VirtualNode,
    topic: Topic = TOPIC,
    engine: Callable[[Handlers], P2pEngine] | None = None,
) -> VirtualNode:
    """Build a node for a round; it exchanges rollouts over the memory engine."""
    settings, me = config or NodeConfig(), identity(who) if isinstance(who, int) else who
    exchange = Exchange(curriculum, settings.round, settings.sharing, model, random.Random(str(who)), whole)
    return node(exchange, me, topic, engine or partial(swarm.join, me.peer_id), clock)


def gossip(member: Member, rollouts: Sequence[Rollout], round_number: int = 1, model: str = "m") -> None:
    """Send a set of rollouts whole, ignoring its size and the pace."""
    member.publish(wire.KIND, wire.encode(rollouts, round_number, model))


def encoded(
    rollouts: Sequence[Rollout], round_number: int, model: str, specialties: Sequence[str]
) -> tuple[Sequence[bytes], list[bytes]]:
    """Return offers of the rollouts, and the named blobs. Rollouts too large for a blob are left out."""
    packed = [(r.ref, offers.packed_rollout(r, round_number, model)) for r in rollouts]
    blobs = [(ref, blob) for ref, blob in packed if blob is not None]
    return offers.encode(blobs, round_number, specialties), [blob.data for _, blob in blobs]


def offer(
    member: Member, rollouts: Sequence[Rollout], round_number: int = 1, curriculum: Curriculum = TINY_9
) -> None:
    """Offer rollouts at once, ignoring the pace."""
    bodies, blobs = encoded(rollouts, round_number, "m", curriculum.specialties)
    for blob in blobs:
        member.blobs.put(blob)
    for body in bodies:
        member.publish(offers.KIND, body)


async def until(condition: Callable[[], Any], seconds: float = TIMEOUT_S, *, every: float = 0.02) -> Any:
    """Wait for an engine or another task to reach a condition (trio).

    Returns the condition's value; raises trio.TooSlowError.
    """
    with trio.fail_after(seconds):
        while not (found := condition()):
            await trio.sleep(every)
    return found
