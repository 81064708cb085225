"""The replay pool: scored rollouts that may be trained on. Pure; the caller passes the round number.

It has two modes. Without replay it holds external rollouts only, and each is trained on once, like a round's
own rollouts (the paper's round). With replay (`PoolLimits.own` set) it holds the freshest N local and
external rollouts, and a rollout may be trained on several times.
"""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from p2p.admission.fair_queue import fair_share
from p2p.latest import Latest
from p2p.types import PeerId
from swarmd.types import Scored, TaskRef, Tokens

# If more rollouts than this arrive within max_age rounds, the oldest are dropped.
CAPACITY = 1024
# Maximum number of external rollouts that are remembered as already trained on.
MAX_USED = 4096

Key = tuple[PeerId, TaskRef]


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The limits of a pool with replay; shares are fractions of the capacity."""

    own: PeerId  # this node's peer id
    max_age: int  # maximum number of rounds that a local rollout is kept
    positive_bias: float = 0.0  # delta: share of the older rollouts with a right and a wrong completion
    # Share of all external rollouts together, so that they do not crowd out local ones.
    external_share: float = 1.0
    author_share: float = 1.0  # share of any one external author


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A rollout of the pool and its use so far."""

    scored: Scored
    uses: int = 0  # number of updates that trained on it
    last_use: int = 0  # the update (counted from 1) that trained on it last; 0: none
    since: int = 0  # updates made before it was generated or received


def heard_in(heard: int, round_number: int) -> int:
    """Return the round in which a rollout was received; this round if it is unknown (0) or in the future.

    A future round belongs to a run before a restart.
    """
    return min(heard or round_number, round_number)


def too_old(heard: int, round_number: int, max_age: int) -> bool:
    """Return whether a rollout received in round `heard` is too old to be trained on in `round_number`.

    max_age: `round.max_age`, in rounds.
    """
    return round_number - heard_in(heard, round_number) > max_age


class Pool:
    """First in, first out.

    It holds one rollout per (author, task): a second one from the same author is the same experience again.
    An external rollout that was received in round r may be trained on in rounds r … r + max_age. Fresh
    experience matters: a pool of four rounds lost half of the benefit of sharing (docs/papers.md). An
    external rollout that was trained on is not added again, until MAX_USED later ones were.
    """

    def __init__(
        self,
        max_age: int,
        capacity: int = CAPACITY,
        limits: PoolLimits | None = None,
    ) -> None:
        self.max_age, self.capacity, self.limits = max_age, capacity, limits
        self.updates = 0  # updates so far, the unit of `last_use`
        self.round, self.began = 0, 0  # this round, and the number of updates before it
        self._kept: OrderedDict[Key, PoolEntry] = OrderedDict()  # oldest first
        # Digests of the keys of external rollouts that were trained on, oldest first.
        self._used: Latest[bytes, None] = Latest(MAX_USED)
        # Round -> updates made before it, for the last rounds
        self.before: Latest[int, int] = Latest(max_age + 1)

    def add(self, rollouts: Iterable[Scored]) -> int:
        """Add external rollouts; return how many were new. Over a limit, the oldest are dropped.

        With replay, rollouts without advantage are not added: SAPO drops them from the choice (section 5),
        and here they would take places.
        """
        new = 0
        for scored in rollouts:
            if (key := key_of(scored)) not in self and (self.limits is None or scored.informative):
                self._kept[key] = PoolEntry(scored, since=self.before.get(scored.round, self.began))
                new += 1
        self._trim()
        return new

    def add_own(self, rollouts: Iterable[Scored]) -> None:
        """Add local rollouts, if replay is on.

        If a question was asked before, the new answers replace the earlier ones.
        """
        if self.limits is None:
            return
        for scored in rollouts:
            self._kept.pop(key_of(scored), None)
            self._kept[key_of(scored)] = PoolEntry(scored, since=self.began)
        self._trim()

    def drop(self, keys: Iterable[Key]) -> None:
        """Remove the rollouts of these keys."""
        for key in keys:
            self._kept.pop(key, None)

    def use(self, batch: Iterable[Scored]) -> Sequence[PoolEntry]:
        """Note that one more update trains on this batch; return the entries as they were before.

        Rollouts that are not in the pool are ignored.
        """
        self.updates += 1
        before = [self._kept[key] for scored in batch if (key := key_of(scored)) in self._kept]
        for kept in before:
            key = key_of(kept.scored)
            self._kept[key] = replace(kept, uses=kept.uses + 1, last_use=self.updates)
            if not self._ours(key):
                self._used[_digest(key)] = None
        return before

    def remember(
        self, batch: Sequence[Scored], logprobs: Callable[[Sequence[Scored]], Sequence[Tokens]]
    ) -> Sequence[Scored]:
        """Return the batch with tokens for every rollout: those without get log-probabilities of first use.

        The pool keeps these tokens too.
        """
        if not (unseen := [scored for scored in batch if scored.tokens is None]):
            return batch
        tokens = {key_of(s): t for s, t in zip(unseen, logprobs(unseen), strict=True)}
        for key in tokens.keys() & self._kept.keys():
            kept = self._kept[key]
            self._kept[key] = replace(kept, scored=replace(kept.scored, tokens=tokens[key]))
        return [replace(s, tokens=tokens[key_of(s)]) if s.tokens is None else s for s in batch]

    def forget(self, round_number: int) -> None:
        """Begin a round: drop the rollouts that are too old for it."""
        self.round, self.began = round_number, self.updates
        self.before[round_number] = self.updates
        for key, kept in list(self._kept.items()):
            limit = self.limits.max_age if self.limits is not None and self._ours(key) else self.max_age
            if too_old(kept.scored.round, round_number, limit):
                del self._kept[key]

    def _ours(self, key: Key) -> bool:
        return self.limits is not None and key[0] == self.limits.own

    def _trim(self) -> None:
        """With replay, keep the freshest (1 − delta)·N, and of the rest the freshest delta·N that teach.

        One pass from the freshest rollout does this; neither an author nor all external authors together
        exceed their share. A dropped rollout never returns, so walking at each arrival gives the same result
        as one walk over everything, apart from the shares.
        """
        if (limits := self.limits) is None:
            if len(self._kept) > self.capacity:
                # The owners with most rollouts lose the excess.
                held = ((key, kept.scored.rollout.group, key[0]) for key, kept in self._kept.items())
                self.drop(self._kept.keys() - fair_share(held, self.capacity))
            return
        older = math.floor(limits.positive_bias * self.capacity)
        fresh = self.capacity - older
        crowd, each = (
            math.floor(limits.external_share * self.capacity),
            max(1, math.floor(limits.author_share * self.capacity)),
        )
        authors: Counter[PeerId] = Counter()  # of others
        for key, kept in reversed(list(self._kept.items())):
            author, ours = key[0], key[0] == limits.own
            barred = not ours and (authors[author] >= each or crowd == 0)
            if not barred and fresh:
                fresh -= 1
            elif not barred and older and teaches(kept.scored):
                older -= 1
            else:
                del self._kept[key]
                continue
            if not ours:
                authors[author] += 1
                crowd -= 1

    def __contains__(self, key: Key) -> bool:
        """Return whether the rollout is in the pool, or was trained on and dropped."""
        return key in self._kept or _digest(key) in self._used

    def __iter__(self) -> Iterator[Scored]:
        return (kept.scored for kept in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def external_share(self) -> float:
        """The share of external rollouts in the pool; 0 for an empty pool."""
        others = (
            len(self) if self.limits is None else sum(author != self.limits.own for author, _ in self._kept)
        )
        return others / len(self) if len(self) else 0.0

    def kept(self) -> Sequence[PoolEntry]:
        """Return the entries, oldest first."""
        return tuple(self._kept.values())

    def snapshot(self) -> Sequence[Scored]:
        """Return the rollouts available for a batch, oldest first; without replay, only untrained ones."""
        return tuple(kept.scored for kept in self._kept.values() if self.limits is not None or not kept.uses)

    @property
    def used(self) -> Sequence[bytes]:
        """Return digests of external rollouts that were trained on, oldest first."""
        return tuple(self._used)

    def restore(
        self,
        kept: Iterable[PoolEntry],
        updates: int,
        used: Iterable[bytes],
        before: Mapping[int, int] | None = None,
    ) -> None:
        """Restore the values of `kept`, `updates`, `used` and `before`.

        Under stricter limits than at that time, some rollouts are dropped.
        """
        self.updates = updates
        self._used = Latest(MAX_USED, ((digest, None) for digest in used))
        self.before = Latest(self.max_age + 1, (before or {}).items())
        for each in kept:
            # Replay may have been switched off since the checkpoint.
            if self.limits is not None or each.scored.tokens is None:
                self._kept[key_of(each.scored)] = each
        self._trim()


def teaches(scored: Scored) -> bool:
    """Return whether there are right and wrong completions: a group that is all right has no gradient."""
    return scored.informative and any(reward > 0 for reward in scored.rewards)


def key_of(scored: Scored) -> Key:
    """Return the key of one experience: an author's rollout of a task."""
    return scored.rollout.author, scored.rollout.ref


def _digest(key: Key) -> bytes:
    author, ref = key
    return hashlib.blake2b(f"{author} {ref.specialty} {ref.n}".encode(), digest_size=8).digest()
