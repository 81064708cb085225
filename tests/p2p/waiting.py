"""Waiting for what engines do in their own time."""

import os

from p2p.member import Member
from swarmd.testing import until

SECONDS = 30.0  # a failure, not a measure


async def heard(sender: Member, receiver: Member) -> None:
    """The sender is heard, sooner or later."""
    receiver.received()

    def arrived() -> bool:
        sender.publish("rollouts", os.urandom(100))
        return bool(receiver.received())

    await until(arrived, SECONDS, every=0.2)
