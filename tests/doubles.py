"""Test doubles: a clock, members of a swarm in memory, and waiting for a condition.

Everything else in a test can be the real part: rounds, inbox, exchange and verifier.

    clock, swarm = Clock(), MemorySwarm()
    alice, bob = memory_member(swarm, 1, clock), memory_member(swarm, 2, clock)
    alice.publish("rollouts", b"hello")
    assert [envelope.body for envelope in bob.received()] == [b"hello"]
"""

import itertools
from collections.abc import Callable
from typing import Any

import trio

from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from p2p.member import QueuedMember
from p2p.topic import Topic
from p2p.types import Handlers, P2pEngine
from testbed import TIMEOUT_S as TIMEOUT_S

# When a test begins, in seconds since the epoch.
NOW = 1_700_000_000.0
TOPIC = Topic("test", "0123456789abcdef")


class Clock:
    """A clock that the test sets: `clock()` is `clock.now`, in seconds."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def identity(number: int) -> Identity:
    """Return an identity that is the same for the same number."""
    return Identity(number.to_bytes(32, "big"))


def memory_member(
    swarm: MemorySwarm,
    who: Identity | int,
    clock: Callable[[], float],
    *,
    topic: Topic = TOPIC,
    engine: Callable[[Handlers], P2pEngine] | None = None,
    **options: Any,
) -> QueuedMember:
    """Build a real member over the memory engine, a `Transport`.

    engine: used instead, if given. options: passed on to `Member`.
    """
    me = identity(who) if isinstance(who, int) else who
    options.setdefault("sequence", itertools.count(1))
    return QueuedMember(
        me, topic, engine or (lambda handlers: swarm.join(me.peer_id, handlers)), clock=clock, **options
    )


async def until(condition: Callable[[], Any], seconds: float = TIMEOUT_S, *, every: float = 0.02) -> Any:
    """Wait for what an engine or another task does in its own time (trio).

    Returns what the condition gave; raises trio.TooSlowError.
    """
    with trio.fail_after(seconds):
        while not (found := condition()):
            await trio.sleep(every)
    return found
