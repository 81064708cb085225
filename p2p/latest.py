"""A dictionary of bounded size, which forgets what was set least recently. Pure."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """Holds at most `most` entries: a flood of names fills no memory. The one set last is at the end."""

    def __init__(self, most: int, items: Iterable[tuple[K, V]] = ()) -> None:
        super().__init__()
        self._most = most
        self.update(items)

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
