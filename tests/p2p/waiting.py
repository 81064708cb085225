"""Waiting for what engines do in their own time."""

import os
from collections.abc import Callable
from typing import Any

import trio

from p2p.member import Member

SECONDS = 30.0  # a failure, not a measure


async def until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.02)


async def heard(sender: Member, receiver: Member) -> None:
    """The sender is heard, sooner or later."""
    receiver.received()
    with trio.fail_after(SECONDS):
        while not receiver.received():
            sender.publish("rollouts", os.urandom(100))
            await trio.sleep(0.2)
