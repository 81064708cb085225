"""Share caps: choose some of many so that one owner of many peers cannot fill the batch. Pure.

Theory of operation. The choice is SAPO's (section 5), uniform over rollouts without replacement, and as long as no cap binds the
result is exactly that choice, `rng` draws included. Candidates are visited in that random order; one that has no room under a cap is
skipped.

- Newcomers (`Author.established` is False) get a tenth together, hard: where it is less than one, one in some of the choices. Room
  that is left is left empty. Their places go to network groups in turn, in a group to authors in turn, so that a hundred in one
  data centre do not keep an honest newcomer out. While nobody has earned standing, everybody counts as established: a new swarm
  starts freely. (`p2p.admission.reputation` decides it; what is said of an author here is what the daemon says of each envelope.)
- One author gets half, one network group a quarter, rounded up, softly: where the others have too few to fill what was asked for,
  these caps are raised together, step by step. So two nodes alone, or a swarm in one group, are as free as without.
- A network group's count is capped at the median group's: its candidates beyond that come after all others. So many peers in few
  groups count as few.
- The local network has no such caps: nobody can cheaply buy places in it. Authors whose group is unknown get half together.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from statistics import median_low
from typing import Generic, TypeVar

from p2p.netgroup import LOCAL
from p2p.types import PeerId
from swarmd.types import Author

__all__ = ["OF_NEWCOMERS", "UNKNOWN", "Author", "Ration", "choose", "first"]

UNKNOWN = ""  # group of authors that we were never connected to

# Shares of one choice.
OF_NEWCOMERS = 0.10  # all together
OF_AUTHOR = 0.5
OF_GROUP = 0.25
OF_UNKNOWN = 0.5  # all authors together whose group is not known

T = TypeVar("T")


def choose(candidates: Sequence[T], n: int, author_of: Callable[[T], Author | None], rng: random.Random) -> list[T]:
    """At most `n` of them, uniformly among what the caps allow. Draws from `rng` only where there is something to decide.

    author_of: None for our own, which no cap concerns.
    """
    return _fill(candidates, n, author_of, rng, in_order=False)


def first(candidates: Sequence[T], n: int, author_of: Callable[[T], Author | None], rng: random.Random) -> list[T]:
    """`choose`, but the first that the caps allow: for candidates that are in a random order already."""
    return _fill(candidates, n, author_of, rng, in_order=True)


class Ration(Generic[T]):
    """A choice of `n` made in several calls, as candidates come in: each cap applies to all calls together."""

    def __init__(self, n: int, author_of: Callable[[T], Author | None], rng: random.Random) -> None:
        self._n, self._author_of, self._rng = n, author_of, rng
        self.begin()

    def begin(self) -> None:
        """Another choice begins."""
        self._had: list[Author] = []  # whose were chosen so far; no newcomers
        self._places = _rounded(OF_NEWCOMERS * self._n, self._rng)

    def __call__(self, candidates: Sequence[T], n: int, rng: random.Random, *, in_order: bool = False) -> list[T]:
        """At most `n` more. in_order: of candidates in a random order, the first that the caps allow (`first`)."""
        had = (self._n, self._had)
        chosen = _fill(candidates, n, self._author_of, rng, in_order=in_order, places=self._places, had=had)
        for author in map(self._author_of, chosen):
            if author is not None and author.established:
                self._had.append(author)
            elif author is not None:
                self._places -= 1
        return chosen


def _fill(
    candidates: Sequence[T], n: int, author_of: Callable[[T], Author | None], rng: random.Random,
    *, in_order: bool, places: int | None = None, had: tuple[int, Sequence[Author]] | None = None,
) -> list[T]:  # fmt: skip
    """places: for newcomers; None: their share of `n`.

    had: of a choice in several goes, how many it is of in all, and whose were chosen before."""
    if n <= 0 or not candidates:
        return []
    authors = [author_of(candidate) for candidate in candidates]
    new = {i for i, a in enumerate(authors) if a is not None and not a.established}
    if len(candidates) <= n and not new:
        return list(candidates)  # all caps but the newcomers' would be raised until these fit
    beyond = _beyond_the_middle(authors, new, rng, in_order=in_order)
    heard = sorted(set(range(len(candidates))) - set(beyond))
    order = chain(heard if in_order or len(heard) <= n else (heard[i] for i in _at_random(len(heard), n, rng)), beyond)
    in_all, before = had or (n, ())
    room = _Room(in_all, [a for i, a in enumerate(authors) if i not in new], before)
    if places is None:
        places = _rounded(OF_NEWCOMERS * n, rng) if new else 0
    in_turn = _in_turn(new, authors, rng)
    chosen: list[int] = []
    waiting: list[int] = []
    for i in order:
        if i in new:
            if places:
                places -= 1
                chosen.append(next(in_turn))
        elif room.take(authors[i]):
            chosen.append(i)
        else:
            waiting.append(i)
        if len(chosen) == n:
            break  # before the next is drawn
    while len(chosen) < n and waiting:
        room.raised = 1 + min(room.over(authors[i]) for i in waiting)
        still = []
        for i in waiting:
            if len(chosen) < n and room.take(authors[i]):
                chosen.append(i)
            else:
                still.append(i)
        waiting = still
    return [candidates[i] for i in chosen]


class _Room:
    """How much each author and each group has had of one choice."""

    def __init__(self, n: int, authors: Iterable[Author | None], before: Iterable[Author]) -> None:
        before = list(before)
        others = {a for a in authors if a is not None}
        many, groups = len({a.id for a in others}) > 1, len({a.group for a in others}) > 1
        self._each = math.ceil(OF_AUTHOR * n) if many else n
        self._group = math.ceil(OF_GROUP * n) if groups else n
        self._unknown = math.ceil(OF_UNKNOWN * n) if groups else n
        self._authors = Counter(a.id for a in before)
        self._groups = Counter(a.group for a in before)
        self.raised = 0

    def over(self, author: Author | None) -> int:
        """By how much its author or its group has more than its cap; below 0 where there is room."""
        if author is None:
            return -1
        group = self._unknown if author.group == UNKNOWN else self._group
        of_author = self._authors[author.id] - self._each
        return of_author if author.group == LOCAL else max(of_author, self._groups[author.group] - group)

    def take(self, author: Author | None) -> bool:
        if author is None:
            return True
        if self.over(author) >= self.raised:
            return False
        self._authors[author.id] += 1
        self._groups[author.group] += 1
        return True


def _beyond_the_middle(authors: Sequence[Author | None], new: set[int], rng: random.Random, *, in_order: bool) -> list[int]:
    """Candidates of network groups beyond the median group's count; which ones is drawn. Authors of unknown group count one by one."""
    voices: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, author in enumerate(authors):
        if author is not None and i not in new:
            voices[(author.group, author.id if author.group in (LOCAL, UNKNOWN) else "")].append(i)
    if len(voices) < 2:
        return []
    middle = median_low(map(len, voices.values()))
    loud = [own for (group, _), own in voices.items() if group not in (LOCAL, UNKNOWN) and len(own) > middle]
    beyond: list[int] = []
    for own in loud:
        heard = set(own[:middle] if in_order else rng.sample(own, middle))
        beyond += [i for i in own if i not in heard]
    return sorted(beyond) if in_order else rng.sample(beyond, len(beyond))


def _at_random(count: int, n: int, rng: random.Random) -> Iterator[int]:
    """All of range(count) in a random order; what is beyond the first `n` is drawn only when it is asked for."""
    begun = rng.sample(range(count), n)

    def rest() -> Iterator[int]:
        left = sorted(set(range(count)) - set(begun))
        yield from rng.sample(left, len(left))

    return chain(begun, rest())


def _rounded(share: float, rng: random.Random) -> int:
    """`share` on the mean: so a tenth of four is one in four of ten choices."""
    whole = math.floor(share)
    return whole + (share > whole and rng.random() < share - whole)


def _in_turn(new: Iterable[int], authors: Sequence[Author | None], rng: random.Random) -> Iterator[int]:
    """All of `new`, one of each group in turn, and in a group one of each author in turn; who comes first is drawn."""
    groups: dict[str, dict[PeerId, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i in rng.sample(ordered := sorted(new), len(ordered)):
        if (author := authors[i]) is not None:
            groups[author.group][author.id].append(i)
    yield from _turns([_turns(list(of_group.values())) for of_group in groups.values()], rng)


def _turns(queues: Iterable[Iterable[int]], rng: random.Random | None = None) -> Iterator[int]:
    """One of each in turn, until all are empty."""
    waiting = [iter(queue) for queue in queues]
    if rng is not None:
        rng.shuffle(waiting)  # a large group must not come first more often than a small one
    while waiting:
        for queue in list(waiting):
            item = next(queue, None)
            if item is None:
                waiting.remove(queue)
            else:
                yield item
