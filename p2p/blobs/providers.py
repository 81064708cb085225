"""Chooses whom to ask for a blob: named holders, connected peers, authors of recent frames. Pure.

In a swarm of more than about a dozen no node is connected to all others, so the only peer left that holds a
blob may be a stranger.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from p2p.types import PeerId

# Peers that are asked for one blob, at most; some may be gone.
MAX_HOLDERS = 32
# Of these, strangers: each has to be dialled first.
MAX_STRANGERS = 12
# Authors of recent frames that are remembered.
HEARD_AUTHORS = 64


class Providers:
    def __init__(self) -> None:
        self._heard: OrderedDict[PeerId, None] = OrderedDict()  # the latest last

    def note(self, author: PeerId) -> None:
        """Note an author of an admitted frame."""
        self._heard[author] = None
        self._heard.move_to_end(author)
        if len(self._heard) > HEARD_AUTHORS:
            self._heard.popitem(last=False)

    def likely(self, named: Iterable[PeerId], connected: Iterable[PeerId]) -> Sequence[PeerId]:
        """Return whom to ask, in order: the named, the connected, then strangers, latest heard first.

        They are at most MAX_HOLDERS, of which the last MAX_STRANGERS are strangers where there are so many.
        """
        near = list(dict.fromkeys([*named, *connected]))
        far = [peer for peer in reversed(self._heard) if peer not in set(near)][:MAX_STRANGERS]
        return [*near[: MAX_HOLDERS - len(far)], *far]
