"""Share caps: choose some of many so that no owner of many peers, and no loud peer, fills the batch. Pure.

Theory of operation. The choice is SAPO's (section 5), uniform over rollouts without replacement, or one by
weight: candidates are visited in a random order; one that has no room under a cap waits.

- **The middle.** A network group counts for no more than the median group, and in it an author for no more
  than its median author: their candidates beyond that come after all others. So many peers in few groups
  count as few, and a loud author counts as one. Which are beyond is drawn apart from the order in which the
  rest is visited: the first of many would else stand before the first of few.
- **Places.** One author gets at most twice what each would get of an even choice, and at most half; one
  network group a quarter. Authors whose group is not known get half together. Rounded up.
- **Variety.** Of one author's rollouts of one specialty no more than an even share is considered at all,
  rounded up: so two loud authors of easy questions do not make the rest of the batch of them, either.

All caps but the last are soft: where the others have too few to fill what was asked for, they are raised
together, step by step. So two nodes alone, or a swarm in one group, are as free as without. Whether an author
is new, or was useful before, does not matter: anybody can send right answers, so what limits an attacker is
how many addresses it has (docs/admission.md).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import median_low
from typing import TypeVar

from swarmd.types import Author

# The caps, as shares of one choice.
AUTHOR_SHARE = 0.5
# Times what each author would get of an even choice.
EVEN_FACTOR = 2.0
GROUP_SHARE = 0.25
# All authors together whose group is not known.
UNKNOWN_SHARE = 0.5

T = TypeVar("T")


AuthorOf = Callable[[T], Author | None]
KindOf = Callable[[T], Hashable]
# Candidates are visited by it, least first. A random one is another each time that it is asked for.
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
    """Return the first of the candidates by `order` that the caps allow, at most `n`.

    author_of: None for our own, which no cap concerns. kind_of: the specialty; None: variety does not matter.
    in_all, had: for a choice in several calls, how many it is of in all, and what was chosen
    before.
    """
    if n <= 0:
        return []
    candidates = sorted(candidates, key=order)
    if kind_of is not None:
        candidates = _varied(candidates, in_all or n, author_of, kind_of, had)
    if len(candidates) <= n:
        # All caps would be raised until these fit.
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
    """Keep of each author's candidates of one kind the first, no more than an even share of the choice."""
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
        """Return by how much the author or its group is over its cap; below 0 where there is room."""
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
    """Return how far each candidate is beyond the median group's count, and its group's median author's.

    (0, 0): neither. Taken in the order of these, those of whoever has least beyond come first, one of each in
    turn, so that whoever has a few more than the middle is not crowded out by those who have many. Authors of
    unknown group are groups of their own. Authors are compared within their group alone, so that many names
    in one group make no other's share smaller.
    """
    groups: dict[str, list[tuple[int, Hashable]]] = defaultdict(list)
    for i, author in enumerate(authors):
        if author is not None:
            groups[author.group or author.id].append((i, author.id))
    of_groups = _above([(i, group) for group, own in groups.items() for i, _ in own])
    of_authors: dict[int, int] = {}
    for own in groups.values():
        of_authors |= _above([(i, author) for i, author in own if i not in of_groups])
    return [(of_groups.get(i, 0), of_authors.get(i, 0)) for i in range(len(authors))]


def _above(candidates: Sequence[tuple[int, Hashable]]) -> dict[int, int]:
    """Return the candidates of each owner beyond the median owner's count, and by how many each is beyond."""
    owners: dict[Hashable, list[int]] = defaultdict(list)
    for i, owner in candidates:
        owners[owner].append(i)
    if len(owners) < 2:
        return {}
    middle = median_low(map(len, owners.values()))
    above: dict[int, int] = {}
    for own in owners.values():
        above |= {i: place for place, i in enumerate(own[middle:], 1)}
    return above
