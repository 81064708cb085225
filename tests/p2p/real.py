"""Real engines and members on loopback, and functions that wait for their events."""

import itertools
import os
import random
import time
from typing import Any

from p2p.engines import engine
from p2p.identity import Identity
from p2p.topic import Topic
from p2p.types import Handlers, Verdict
from tests.doubles import TIMEOUT_S, ListeningMember, until

TOPIC = Topic("main", "0123456789abcdef")
SECONDS = TIMEOUT_S  # longest wait; a longer one is a failure
QUIET = Handlers(lambda frame, via: Verdict.ACCEPT, lambda peer, question: b"")


def real_engine(name: str, n: int, handlers: Handlers = QUIET, topic: Topic = TOPIC, **options: Any) -> Any:
    """Return an engine of this name, with the n-th key.

    options: override the defaults, which are a free loopback port, no bootstrap and no address book.
    """
    settings: dict[str, Any] = {
        "listen": ["/ip4/127.0.0.1/tcp/0"],
        "bootstrap": [],
        "addressbook": None,
        "clock": time.time,
    }
    return engine(name)(
        Identity(bytes([n]) * 32), topic, handlers, rng=random.Random(n), **settings | options
    )


def real_member(name: str, n: int, topic: Topic = TOPIC, **options: Any) -> ListeningMember:
    numbers = itertools.count(int(time.time() * 1000))
    return ListeningMember(
        Identity(bytes([n]) * 32),
        topic,
        lambda handlers: real_engine(name, n, handlers, topic, **options),
        sequence=numbers,
        clock=time.time,
    )


async def heard(sender: ListeningMember, receiver: ListeningMember) -> None:
    """Publish until the receiver has heard the sender."""
    receiver.received()

    def arrived() -> bool:
        sender.publish("rollouts", os.urandom(100))
        return bool(receiver.received())

    await until(arrived, SECONDS, every=0.2)
