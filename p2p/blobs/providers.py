"""Whom to ask for a blob: who is named with it, whom we are connected to, and whom we heard lately. Pure.

An offer is heard in its shard alone, so whoever chose from it is there and publishes there. Nobody is connected to all of them in a
swarm of more than about a dozen: the only one left who holds something may well be a stranger.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from p2p.types import PeerId

HOLDERS = 32  # asked for one blob at most, some of which may be gone
STRANGERS = 12  # of them, at most: each has to be dialled first
HEARD = 64  # authors that are remembered


class Providers:
    def __init__(self) -> None:
        self._heard: OrderedDict[PeerId, None] = OrderedDict()  # the latest last

    def note(self, author: PeerId) -> None:
        """A frame of its was let in, in one of our shards."""
        self._heard[author] = None
        self._heard.move_to_end(author)
        if len(self._heard) > HEARD:
            self._heard.popitem(last=False)

    def likely(self, named: Iterable[PeerId], connected: Iterable[PeerId], established: Callable[[PeerId], bool]) -> Sequence[PeerId]:
        """In the order in which to ask: the named, the connected, then strangers, those first who are no newcomers (a crowd of new names
        costs nothing) and then those heard last. HOLDERS at most, of whom the last STRANGERS are strangers if there are so many.
        """
        near = list(dict.fromkeys([*named, *connected]))
        far = [peer for peer in reversed(self._heard) if peer not in set(near)]
        far = sorted(far, key=established, reverse=True)[:STRANGERS]
        return [*near[: HOLDERS - len(far)], *far]
