"""A bounded, fair queue of admitted items. Pure.

Where it is full, it drops the oldest item of whoever has most waiting. The rest leave in the
order in which they came.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from p2p.types import Envelope, PeerId, ReceivedBody

H = TypeVar("H", bound=Hashable)
K = TypeVar("K", bound=Hashable)


class _Tally(Generic[H]):
    """Counts by holder. Finds the largest at once, however many there are."""

    def __init__(self) -> None:
        self._counts: dict[H, int] = {}
        self._by_count: dict[int, OrderedDict[H, None]] = {}
        self._most = 0

    def add(self, holder: H, change: int) -> None:
        """Change a holder's count by 1 or -1."""
        count = self._counts.pop(holder, 0)
        if count:
            self._by_count[count].pop(holder)
        if count + change:
            self._counts[holder] = count + change
            self._by_count.setdefault(count + change, OrderedDict())[holder] = None
        self._most = max(self._most, count + change)
        while self._most and not self._by_count.get(self._most):
            self._by_count.pop(self._most, None)
            self._most -= 1

    def most(self) -> H:
        return next(iter(self._by_count[self._most]))

    def __len__(self) -> int:
        return len(self._counts)


class Holders(Generic[K]):
    """The entries of a store by key, oldest first, and the holder of each; chooses what to drop.

    Dropped is the oldest entry of the author that holds most, in the network group that holds most. So a
    flood, or a crowd of names on few addresses, pushes out its own entries, and whoever holds little loses
    nothing. An author whose group is not known counts as a group of its own.
    """

    def __init__(self) -> None:
        self._owners: dict[K, tuple[str, PeerId]] = {}
        self._groups: _Tally[str] = _Tally()
        self._authors: dict[str, _Tally[PeerId]] = {}
        self._entries: dict[tuple[str, PeerId], OrderedDict[K, None]] = {}

    def add(self, key: K, author: PeerId, group: str) -> None:
        """Add an entry as the newest. group: "" where it is not known."""
        owner = (group or author, author)
        self._owners[key] = owner
        self._groups.add(owner[0], 1)
        self._authors.setdefault(owner[0], _Tally()).add(author, 1)
        self._entries.setdefault(owner, OrderedDict())[key] = None

    def remove(self, key: K) -> None:
        """Remove an entry. Raises KeyError where there is none."""
        owner = self._owners.pop(key)
        self._groups.add(owner[0], -1)
        self._authors[owner[0]].add(owner[1], -1)
        if not len(self._authors[owner[0]]):
            del self._authors[owner[0]]
        del self._entries[owner][key]
        if not self._entries[owner]:
            del self._entries[owner]

    def excess(self) -> K:
        """Return the key of the entry to drop first. Raises KeyError where there is none."""
        group = self._groups.most()
        return next(iter(self._entries[(group, self._authors[group].most())]))


MAX_FRAMES = 1024
MAX_BYTES = 32 * 1024 * 1024

W = TypeVar("W", bound=Envelope | ReceivedBody)


class FairQueue(Generic[W]):
    def __init__(self, frames: int = MAX_FRAMES, bytes_: int = MAX_BYTES) -> None:
        self._frames, self._limit = frames, bytes_
        self._holders: Holders[int] = Holders()
        self._waiting: OrderedDict[int, W] = OrderedDict()  # by number, oldest first
        self._number = 0
        self.bytes = 0

    def put(self, item: W) -> None:
        self._number += 1
        self._waiting[self._number] = item
        self._holders.add(self._number, item.author, item.group)
        self.bytes += len(item.body)
        while self._waiting and (len(self._waiting) > self._frames or self.bytes > self._limit):
            number = self._holders.excess()
            self._holders.remove(number)
            self.bytes -= len(self._waiting.pop(number).body)

    def drain(self) -> Sequence[W]:
        """Take all items, oldest first."""
        items = list(self._waiting.values())
        self._waiting.clear()
        self._holders = Holders()
        self.bytes = 0
        return items

    def __len__(self) -> int:
        return len(self._waiting)
