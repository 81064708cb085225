"""Share caps: limit how much of a batch one network group or one author can fill. Pure.

The choice is uniform without replacement (SAPO section 5) or weighted: candidates are visited in a random
order, and a candidate that exceeds a cap waits.

- **Median.** A network group counts for no more than the median group, and an author for no more than the
  median author of its group: further candidates are visited last. So many peers in few groups count as few,
  and an author with many rollouts counts as one. Which candidates are "further" is drawn separately from the
  visiting order; otherwise the first candidate of a large author would come before the first of a small one.
- **Places.** One author gets at most twice an even share of the choice, and at most half of it; one network
  group a quarter. All authors of unknown group together get half. Rounded up.
- **Variety.** Of one author's rollouts of one specialty, no more than an even share is considered, rounded
  up. So two authors with many easy rollouts cannot fill the rest of the batch with them.

All caps except the last are soft: if the remaining candidates are too few, the caps are raised together, step
by step. So two nodes alone, or a swarm in one group, are not restricted. An author's age and past usefulness
play no role: anybody can send right answers, so only the number of an attacker's addresses limits it
(docs/admission.md).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import median_low
from typing import TypeVar

from swarmd.types import Author

# The caps, as shares of one choice.
AUTHOR_SHARE = 0.5
# Maximum number of places of one author, as a multiple of an even share.
EVEN_FACTOR = 2.0
GROUP_SHARE = 0.25
# Cap for all authors of unknown group together.
UNKNOWN_SHARE = 0.5

T = TypeVar("T")


AuthorOf = Callable[[T], Author | None]
KindOf = Callable[[T], Hashable]
# Sort key of the visiting order, smallest first. A random key differs at each call.
Order = Callable[[T], float]


def choose(
    candidates: Sequence[T],
    order: Order[T],
    n: int,
    author_of: AuthorOf[T],
    kind_of: KindOf[T] | None = None,
    *,
    in_all: int | None = None,
    had: Sequence[T] = (),
) -> list[T]:
    """Return the first candidates by `order` that the caps allow, at most `n`.

    Args:
        author_of: None for local rollouts, to which no cap applies.
        kind_of: the specialty; None: no variety cap.
        in_all: size of the whole choice, if it is made in several calls.
        had: candidates chosen in earlier calls.
    """
    if n <= 0:
        return []
    candidates = sorted(candidates, key=order)
    if kind_of is not None:
        candidates = _varied(candidates, in_all or n, author_of, kind_of, had)
    if len(candidates) <= n:
        # The caps would be raised until all of these fit.
        return list(candidates)
    authors = [author_of(candidate) for candidate in candidates]
    beyond = _beyond_the_middle(authors)
    visited = sorted(range(len(candidates)), key=lambda i: (*beyond[i], order(candidates[i])))
    room = _Room(in_all or n, authors, [author for author in map(author_of, had) if author is not None])
    chosen: list[int] = []
    while len(chosen) < n:
        waiting: list[int] = []
        for i in visited:
            (chosen if len(chosen) < n and room.reserve(authors[i]) else waiting).append(i)
        visited, room.raised = waiting, 1 + min(room.over(authors[i]) for i in waiting)
    return [candidates[i] for i in chosen]


def _varied(
    candidates: Sequence[T],
    n: int,
    author_of: AuthorOf[T],
    kind_of: KindOf[T],
    had: Sequence[T],
) -> Sequence[T]:
    """Keep the first candidates of each author and kind, no more than an even share of the choice."""
    owners = [
        (author.id, kind_of(each)) if (author := author_of(each)) is not None else None for each in candidates
    ]
    before = Counter[tuple[str, Hashable] | None](
        (author.id, kind_of(each)) for each in had if (author := author_of(each)) is not None
    )
    even = math.ceil(n / max(1, len({owner[0] for owner in [*owners, *before] if owner is not None})))
    kept = []
    for candidate, owner in zip(candidates, owners, strict=True):
        if owner is None or before[owner] < even:
            kept.append(candidate)
            before[owner] += 1
    return kept


class _Room:
    def __init__(self, n: int, authors: Iterable[Author | None], before: Sequence[Author]) -> None:
        others = {a for a in authors if a is not None} | set(before)
        many, groups = len({a.id for a in others}), len({a.group for a in others})
        self._each = math.ceil(min(AUTHOR_SHARE, EVEN_FACTOR / many) * n) if many > 1 else n
        self._group = math.ceil(GROUP_SHARE * n) if groups > 1 else n
        self._unknown = math.ceil(UNKNOWN_SHARE * n) if groups > 1 else n
        self._authors = Counter(a.id for a in before)
        self._groups = Counter(a.group for a in before)
        self.raised = 0

    def over(self, author: Author | None) -> int:
        """Return by how much the author or its group exceeds its cap; below 0 if there is room."""
        if author is None:
            return -1
        group = self._group if author.group else self._unknown
        return max(self._authors[author.id] - self._each, self._groups[author.group] - group)

    def reserve(self, author: Author | None) -> bool:
        if author is None:
            return True
        if self.over(author) >= self.raised:
            return False
        self._authors[author.id] += 1
        self._groups[author.group] += 1
        return True


def _beyond_the_middle(authors: Sequence[Author | None]) -> list[tuple[int, int]]:
    """Return each candidate's excess over the median group's count, and over its group's median author's.

    (0, 0): no excess. Sorted by these, the candidates with the least excess come first, one of each owner in
    turn, so an owner slightly above the median is not crowded out by owners far above it. An author of
    unknown group is a group by itself. Authors are compared only within their group, so many names in one
    group do not shrink the share of other groups.
    """
    groups: dict[str, list[tuple[int, Hashable]]] = defaultdict(list)
    for i, author in enumerate(authors):
        if author is not None:
            groups[author.group or author.id].append((i, author.id))
    of_groups = _above([(i, group) for group, own in groups.items() for i, _ in own])
    of_authors = {
        i: excess
        for own in groups.values()
        for i, excess in _above([(i, author) for i, author in own if i not in of_groups]).items()
    }
    return [(of_groups.get(i, 0), of_authors.get(i, 0)) for i in range(len(authors))]


def _above(candidates: Sequence[tuple[int, Hashable]]) -> dict[int, int]:
    """Return the candidates beyond the median owner's count, each with its excess (1, 2, …)."""
    owners: dict[Hashable, list[int]] = defaultdict(list)
    for i, owner in candidates:
        owners[owner].append(i)
    if len(owners) < 2:
        return {}
    middle = median_low(map(len, owners.values()))
    return {i: place for own in owners.values() for place, i in enumerate(own[middle:], 1)}
