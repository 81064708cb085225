"""Share caps: choose some of many so that no owner of many peers, and no loud peer, fills the batch. Pure.

Theory of operation. The choice is SAPO's (section 5), uniform over rollouts without replacement, and as long
as no cap binds the result is exactly that choice, `rng` draws included. Candidates are visited in that random
order; one that has no room under a cap waits.

- **The middle.** A network group counts for no more than the median group, and in it an author for no more
  than its median author: their candidates beyond that come after all others. So many peers in few groups
  count as few, and a loud author counts as one.
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
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from statistics import median_low
from typing import Generic, TypeVar

from swarmd.types import Author

__all__ = ["UNKNOWN", "Author", "Quota", "choose"]

UNKNOWN = ""  # group of authors that we were never connected to

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


def choose(
    candidates: Sequence[T],
    n: int,
    author_of: AuthorOf[T],
    rng: random.Random,
    kind_of: KindOf[T] | None = None,
    *,
    in_order: bool = False,
    in_all: int | None = None,
    had: Sequence[T] = (),
) -> list[T]:
    """Return at most `n` of the candidates, uniformly among what the caps allow.

    Draws from `rng` only where there is something to decide.

    author_of: None for our own, which no cap concerns. kind_of: the specialty; None: variety does not matter.
    in_order: the candidates are in a random order already; take the first that the caps allow. in_all, had:
    for a choice in several calls (`Quota`), how many it is of in all, and what was chosen before.
    """
    if n <= 0:
        return []
    if kind_of is not None:
        candidates = _varied(candidates, in_all or n, author_of, kind_of, had, rng, in_order=in_order)
    if len(candidates) <= n:
        # All caps would be raised until these fit.
        return list(candidates)
    authors = [author_of(candidate) for candidate in candidates]
    beyond = _beyond_the_middle(authors, rng, in_order=in_order)
    heard = sorted(set(range(len(candidates))) - set(beyond))
    order = chain(
        heard if in_order or len(heard) <= n else (heard[i] for i in _at_random(len(heard), n, rng)), beyond
    )
    room = _Room(in_all or n, authors, [author for author in map(author_of, had) if author is not None])
    chosen: list[int] = []
    waiting: list[int] = []
    for i in order:
        (chosen if room.reserve(authors[i]) else waiting).append(i)
        if len(chosen) == n:
            # Stop before the next is drawn.
            break
    while len(chosen) < n and waiting:
        room.raised = 1 + min(room.over(authors[i]) for i in waiting)
        still: list[int] = []
        for i in waiting:
            (chosen if len(chosen) < n and room.reserve(authors[i]) else still).append(i)
        waiting = still
    return [candidates[i] for i in chosen]


class Quota(Generic[T]):
    """A choice of `n` made in several calls, as candidates come in; each cap applies to all together."""

    def __init__(self, n: int, author_of: AuthorOf[T], kind_of: KindOf[T] | None = None) -> None:
        self._n, self._author_of, self._kind_of = n, author_of, kind_of
        self.begin()

    def begin(self) -> None:
        """Begin another choice."""
        self._had: list[T] = []  # chosen so far

    def __call__(
        self, candidates: Sequence[T], n: int, rng: random.Random, *, in_order: bool = False
    ) -> list[T]:
        """Return at most `n` more.

        in_order: as of `choose`.
        """
        chosen = choose(
            candidates,
            n,
            self._author_of,
            rng,
            self._kind_of,
            in_order=in_order,
            in_all=self._n,
            had=self._had,
        )
        self._had += chosen
        return chosen


def _varied(
    candidates: Sequence[T],
    n: int,
    author_of: AuthorOf[T],
    kind_of: KindOf[T],
    had: Sequence[T],
    rng: random.Random,
    *,
    in_order: bool,
) -> Sequence[T]:
    """Keep of each author's candidates of one kind no more than an even share of the choice, drawn."""
    owners = [
        (author.id, kind_of(each)) if (author := author_of(each)) is not None else None for each in candidates
    ]
    before = Counter((author.id, kind_of(each)) for each in had if (author := author_of(each)) is not None)
    even = math.ceil(n / max(1, len({owner[0] for owner in [*owners, *before] if owner is not None})))
    count = before + Counter(owner for owner in owners if owner is not None)
    if max(count.values(), default=0) <= even:
        return candidates
    order = range(len(candidates)) if in_order else rng.sample(range(len(candidates)), len(candidates))
    kept = []
    for i in order:
        owner = owners[i]
        if owner is None or before[owner] < even:
            kept.append(i)
            if owner is not None:
                before[owner] += 1
    return [candidates[i] for i in (kept if in_order else sorted(kept))]


class _Room:
    """Counts how much of one choice each author and each group has had."""

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
        group = self._unknown if author.group == UNKNOWN else self._group
        return max(self._authors[author.id] - self._each, self._groups[author.group] - group)

    def reserve(self, author: Author | None) -> bool:
        if author is None:
            return True
        if self.over(author) >= self.raised:
            return False
        self._authors[author.id] += 1
        self._groups[author.group] += 1
        return True


def _beyond_the_middle(authors: Sequence[Author | None], rng: random.Random, *, in_order: bool) -> list[int]:
    """Return the candidates beyond the median group's count, and within a group beyond its median author's.

    They are in the order in which they may be taken. Which ones are beyond is drawn. First come those of
    whoever has least of them, one of each in turn, so that whoever has a few more than the middle is not
    crowded out by those who have many. Authors of unknown group are groups of their own. Authors are compared
    within their group alone, so that many names in one group make no other's share smaller.
    """
    groups: dict[str, list[tuple[int, Hashable]]] = defaultdict(list)
    for i, author in enumerate(authors):
        if author is not None:
            groups[author.group or author.id].append((i, author.id))
    of_groups = _above([(i, group) for group, own in groups.items() for i, _ in own], rng, in_order=in_order)
    of_authors: dict[int, int] = {}
    for own in groups.values():
        of_authors |= _above([(i, author) for i, author in own if i not in of_groups], rng, in_order=in_order)
    beyond = sorted(of_authors.keys() | of_groups.keys())
    if not in_order:
        rng.shuffle(beyond)
    return sorted(beyond, key=lambda i: (of_groups.get(i, 0), of_authors.get(i, 0)))


def _above(
    candidates: Sequence[tuple[int, Hashable]], rng: random.Random, *, in_order: bool
) -> dict[int, int]:
    """Return the candidates of each owner beyond the median owner's count, and by how many each is beyond."""
    owners: dict[Hashable, list[int]] = defaultdict(list)
    for i, owner in candidates:
        owners[owner].append(i)
    if len(owners) < 2:
        return {}
    middle = median_low(map(len, owners.values()))
    above: dict[int, int] = {}
    for own in owners.values():
        if len(own) > middle:
            if not in_order:
                rng.shuffle(own)
            above |= {i: place for place, i in enumerate(own[middle:], 1)}
    return above


def _at_random(count: int, n: int, rng: random.Random) -> Iterator[int]:
    """Yield all of range(count) in a random order.

    What is beyond the first `n` is drawn only when it is asked for.
    """
    begun = rng.sample(range(count), n)

    def rest() -> Iterator[int]:
        left = sorted(set(range(count)) - set(begun))
        yield from rng.sample(left, len(left))

    return chain(begun, rest())
