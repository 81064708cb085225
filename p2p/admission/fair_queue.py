"""A bounded queue with fair shares: if it is full, the largest owner loses its oldest entry. Pure.

All network groups have equal shares, and all authors within a group. So a flood of frames, or a crowd of keys
on few addresses, pushes out only its own entries. An author of unknown group counts as a separate group.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from p2p.types import PeerId

K = TypeVar("K")


class Turns:
    """A tree of queues, for example by network group, connection and author.

    At each level the children are served in turn, and the child with the most bytes loses its oldest item.
    All paths have the same length.
    """

    def __init__(self) -> None:
        self._parts: OrderedDict[Hashable, Turns] = OrderedDict()  # children; the first is served next
        self._waiting: deque[tuple[Any, int]] = deque()  # in a leaf: items and their bytes, oldest first
        self.frames = self.bytes = 0

    def put(self, by: Sequence[Hashable], item: Any, size: int) -> None:
        self.frames += 1
        self.bytes += size
        if by:
            self._parts.setdefault(by[0], Turns()).put(by[1:], item, size)
        else:
            self._waiting.append((item, size))

    def pop(self) -> tuple[Any, int]:
        """Remove and return the next item and its bytes. Raises StopIteration if the tree is empty."""
        return self._remove(None if self._waiting else next(iter(self._parts)), Turns.pop)

    def drop(self) -> tuple[Any, int]:
        """Remove and return the largest owner's oldest item. Raises ValueError if the tree is empty."""
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


def fair_share(items: Iterable[tuple[K, str, PeerId]], count: int) -> set[K]:
    """Choose `count` items to keep, with fair shares; each author keeps its newest.

    items: (item, network group or "" if unknown, author), oldest first.
    """
    by_group = in_turn(in_turn([*items][::-1], lambda item: item[2]), lambda item: item[1] or item[2])
    return {item for item, *_ in by_group[:count]}


def in_turn(items: Iterable[K], owner: Callable[[K], Hashable]) -> list[K]:
    """Sort items in rounds: each owner's first item, then each owner's second, and so on. Stable."""
    had = Counter[Hashable]()

    def turn(item: K) -> int:
        had[owner(item)] += 1
        return had[owner(item)]

    return sorted(items, key=turn)


# Limits of the queue. An item counts as MAX_BYTES / MAX_FRAMES bytes at least, so that neither many small
# items nor a few large ones push out other authors' items.
MAX_FRAMES = 1024
MAX_BYTES = 32 * 1024 * 1024


class FairQueue(Generic[K]):
    def __init__(self, frames: int = MAX_FRAMES, bytes_: int = MAX_BYTES) -> None:
        self._least, self._limit = bytes_ // frames, bytes_
        self._waiting, self._number = Turns(), 0

    def put(self, item: K, author: PeerId, group: str, size: int) -> None:
        """Add an item of `size` bytes.

        group: the author's network group; "" if unknown.
        """
        self._number += 1
        self._waiting.put(
            (group or author, author),
            (self._number, item),
            max(size, self._least),
        )
        while self._waiting.bytes > self._limit:
            self._waiting.drop()

    def drain(self) -> Sequence[K]:
        """Take all items, oldest first."""
        items = dict(self._waiting.pop()[0] for _ in range(len(self)))
        return [items[number] for number in sorted(items)]

    def __len__(self) -> int:
        return self._waiting.frames
