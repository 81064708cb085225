"""Bounded stores that are shared fairly: where one is full, whoever has most in it loses the oldest. Pure.

FairQueue and what waits for a neighbour (`p2p.engines.libp2p.rpcs`) count bytes, by `Turns`. The board of
offers and the pool count entries, by `Holders`.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

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


class Turns:
    """Items in a tree of who they came by, such as network group, connection and author.

    At each level all are served in turn, and whoever has most bytes loses the oldest. All paths have the same
    length.
    """

    def __init__(self) -> None:
        self._parts: OrderedDict[Hashable, Turns] = OrderedDict()  # the next one's turn comes first
        self._waiting: deque[tuple[Any, int]] = deque()  # those of one author with their bytes, oldest first
        self.frames = self.bytes = 0

    def put(self, by: Sequence[Hashable], item: Any, size: int) -> None:
        self.frames += 1
        self.bytes += size
        if by:
            self._parts.setdefault(by[0], Turns()).put(by[1:], item, size)
        else:
            self._waiting.append((item, size))

    def pop(self) -> tuple[Any, int]:
        """Remove the next one, and return it and its bytes. Raises StopIteration where there is none."""
        return self._remove(None if self._waiting else next(iter(self._parts)), Turns.pop)

    def drop(self) -> tuple[Any, int]:
        """Remove and return the oldest of whoever has most bytes. Raises ValueError where there is none."""
        key = max(self._parts, key=lambda part: self._parts[part].bytes) if not self._waiting else None
        return self._remove(key, Turns.drop)

    def _remove(self, key: Hashable, how: Callable[["Turns"], tuple[Any, int]]) -> tuple[Any, int]:
        item, size = self._waiting.popleft() if self._waiting else how(self._parts[key])
        if not self._waiting and key in self._parts:
            if self._parts[key].frames:
                self._parts.move_to_end(key)
            else:
                del self._parts[key]
        self.frames -= 1
        self.bytes -= size
        return item, size


# What waits at once. Each item counts with no less than an equal part of the bytes, so that neither many
# small ones nor a few large ones push out those of others.
MAX_FRAMES = 1024
MAX_BYTES = 32 * 1024 * 1024

W = TypeVar("W", bound=Envelope | ReceivedBody)


class FairQueue(Generic[W]):
    def __init__(self, frames: int = MAX_FRAMES, bytes_: int = MAX_BYTES) -> None:
        self._least, self._limit = bytes_ // frames, bytes_
        self._waiting, self._number = Turns(), 0

    def put(self, item: W) -> None:
        self._number += 1
        by = (item.group or item.author, item.author)
        self._waiting.put(by, (self._number, item), max(len(item.body), self._least))
        while self._waiting.bytes > self._limit:
            self._waiting.drop()

    def drain(self) -> Sequence[W]:
        """Take all items, oldest first."""
        items = dict(self._waiting.pop()[0] for _ in range(len(self)))
        return [items[number] for number in sorted(items)]

    def __len__(self) -> int:
        return self._waiting.frames
