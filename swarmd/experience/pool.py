"""The pool: scored rollouts of others that we may train on. Pure; the caller says which round it is."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from p2p.types import PeerId
from swarmd.types import Scored, TaskRef

CAPACITY = 1024  # rollouts; a swarm that publishes faster than this in max_age rounds loses its oldest here


class Pool:
    """First in, first out. One rollout per (author, task): a second one from the same author is the same experience again.

    A rollout that arrived in round r may be trained on in rounds r … r + max_age − 1. Fresh experience matters: a pool of four
    rounds lost half of what sharing gained (measured on the tiny model, docs/LOG.md).
    """

    def __init__(self, max_age: int, capacity: int = CAPACITY) -> None:
        self.max_age, self.capacity = max_age, capacity
        self._rollouts: OrderedDict[tuple[PeerId, TaskRef], Scored] = OrderedDict()
        self._uses: Counter[tuple[PeerId, TaskRef]] = Counter()

    def add(self, rollouts: Iterable[Scored]) -> int:
        """Take them in; returns how many were new. Over capacity the oldest go."""
        new = 0
        for scored in rollouts:
            key = (scored.rollout.author, scored.rollout.ref)
            if key not in self._rollouts:
                self._rollouts[key] = scored
                new += 1
        while len(self._rollouts) > self.capacity:
            key, _ = self._rollouts.popitem(last=False)
            del self._uses[key]
        return new

    def use(self, batch: Iterable[Scored]) -> Sequence[int]:
        """They are trained on once more; returns how often each had been before. What is not of this pool does not count."""
        before = []
        for scored in batch:
            key = (scored.rollout.author, scored.rollout.ref)
            if key in self._rollouts:
                before.append(self._uses[key])
                self._uses[key] += 1
        return before

    def forget(self, round_number: int) -> None:
        """Drop what is too old to be trained on in this round."""
        stale = [key for key, s in self._rollouts.items() if round_number - s.round >= self.max_age]
        for key in stale:
            del self._rollouts[key], self._uses[key]

    def __contains__(self, key: tuple[PeerId, TaskRef]) -> bool:
        return key in self._rollouts

    def __iter__(self) -> Iterator[Scored]:
        return iter(self._rollouts.values())

    def __len__(self) -> int:
        return len(self._rollouts)

    def snapshot(self) -> Sequence[Scored]:
        """Oldest first."""
        return tuple(self._rollouts.values())

    def uses(self) -> Sequence[int]:
        """How often each of `snapshot` was trained on."""
        return tuple(self._uses[key] for key in self._rollouts)

    def restore(self, rollouts: Sequence[Scored], uses: Sequence[int]) -> None:
        """What `snapshot` and `uses` gave."""
        self.add(rollouts)
        self._uses.update(dict(zip(self._rollouts, uses, strict=True)))
