"""A dictionary of bounded size. If it is full, the entry that was set least recently is dropped. Pure."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """Holds at most `most` entries, so that a flood of keys cannot fill the memory. The newest is last."""

    def __init__(self, most: int, items: Iterable[tuple[K, V]] = ()) -> None:
        super().__init__()
        self._most = most
        self.update(items)

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
