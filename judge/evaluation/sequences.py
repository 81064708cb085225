"""Replay protection: the sequence numbers of a peer's signed requests only rise. Pure."""

from collections import OrderedDict

from judge.errors import Refusal
from judge.types import Signed
from p2p.types import PeerId

REMEMBERED_SEQUENCES = 10_000


class Sequences:
    """The highest sequence number each peer has used.

    It is bounded; what is forgotten here is still in the store as `floor`.
    """

    def __init__(self, remembered: int = REMEMBERED_SEQUENCES) -> None:
        self._remembered = remembered
        self._highest: OrderedDict[PeerId, int] = OrderedDict()

    def knows(self, peer: PeerId) -> bool:
        return peer in self._highest

    def claim(self, signed: Signed, floor: int) -> Refusal | None:
        """Use the number up; a Refusal where it, or a larger one, was used before.

        floor: the highest the store remembers.
        """
        highest = max(self._highest.get(signed.peer, -1), floor)
        if signed.sequence <= highest:
            return Refusal(
                409,
                "this sequence number, or a larger one, was used before",
                "Sign again with a larger one: nobody can send a captured request twice.",
                extra=(("sequence", highest),),
            )
        self._highest[signed.peer] = signed.sequence
        self._highest.move_to_end(signed.peer)
        while len(self._highest) > self._remembered:
            self._highest.popitem(last=False)
        return None
