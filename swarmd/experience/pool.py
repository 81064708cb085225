"""The replay pool: scored rollouts that we may train on. Pure; the caller says which round it is.

It has two uses. Without replay it holds others' rollouts only, each of which is trained on once, as a round's
own are (the paper's round). With replay (`PoolLimits.own` set) it holds the freshest N of our own and of
others', and a rollout may be trained on several times.
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

# A swarm that publishes more rollouts than this in max_age rounds loses its oldest here.
CAPACITY = 1024
# Rollouts of others that we remember having trained on.
MAX_USED = 4096

Key = tuple[PeerId, TaskRef]


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The limits of a pool with replay; shares are of the capacity."""

    own: PeerId  # our peer id
    max_age: int  # our own rollouts are kept so many rounds at most
    positive_bias: float = 0.0  # delta: share of the older ones with a correct completion
    # The share of all others together, so that they do not crowd out our own.
    external_share: float = 1.0
    author_share: float = 1.0  # share of any one other author


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A rollout of the pool and what was done with it."""

    scored: Scored
    uses: int = 0  # how often it was trained on
    last_use: int = 0  # the update (counted from 1) that trained on it last; 0: none
    since: int = 0  # updates made before it was generated or heard


def heard_in(heard: int, round_number: int) -> int:
    """Return the round in which something was heard; this one where that is unknown (0), or still to come.

    The latter are of a run before a restart.
    """
    return min(heard or round_number, round_number)


def too_old(heard: int, round_number: int, max_age: int) -> bool:
    """Return whether what was heard in one round may no longer be trained on in the other.

    max_age: `round.max_age`, in rounds.
    """
    return round_number - heard_in(heard, round_number) > max_age


class Pool:
    """First in, first out.

    It holds one rollout per (author, task): a second one from the same author is the same experience again. A
    rollout of others that was heard in round r may be trained on in rounds r … r + max_age. Fresh experience
    matters: a pool of four rounds lost half of what sharing gained (docs/papers.md).
    Others' rollouts that were trained on are not taken again, until MAX_USED others were.
    """

    def __init__(
        self,
        max_age: int,
        capacity: int = CAPACITY,
        limits: PoolLimits | None = None,
    ) -> None:
        self.max_age, self.capacity, self.limits = max_age, capacity, limits
        self.updates = 0  # updates so far, which `last_use` counts in
        self.round, self.began = 0, 0  # this round, and the updates before it
        self._kept: OrderedDict[Key, PoolEntry] = OrderedDict()  # oldest first
        # Digests of the keys of others' rollouts that were trained on, oldest first.
        self._used: Latest[bytes, None] = Latest(MAX_USED)
        # Round -> updates made before it, for the last rounds
        self.before: Latest[int, int] = Latest(max_age + 1)

    def add(self, rollouts: Iterable[Scored]) -> int:
        """Add others' rollouts; returns how many were new. Over a limit the oldest go.

        With replay, rollouts without advantage are not taken: SAPO drops them from the choice (section 5),
        and here they would cost room.
        """
        new = 0
        for scored in rollouts:
            key = key_of(scored)
            if key not in self and (self.limits is None or scored.informative):
                self._kept[key] = PoolEntry(scored, since=self.before.get(scored.round, self.began))
                new += 1
        self._trim()
        return new

    def add_own(self, rollouts: Iterable[Scored]) -> None:
        """Add our own rollouts, where replay is on.

        When we are asked the same again, the later answers replace the earlier.
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
        """Note that one more update trains on these; returns their entries as they were before.

        What is not of this pool does not count.
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
        """Return the batch with tokens for those that had none: log-probabilities of first use.

        The pool keeps them from then on, too.
        """
        unseen = [scored for scored in batch if scored.tokens is None]
        if not unseen:
            return batch
        tokens = {key_of(s): t for s, t in zip(unseen, logprobs(unseen), strict=True)}
        for key in tokens.keys() & self._kept.keys():
            kept = self._kept[key]
            self._kept[key] = replace(kept, scored=replace(kept.scored, tokens=tokens[key]))
        return [replace(s, tokens=tokens[key_of(s)]) if s.tokens is None else s for s in batch]

    def forget(self, round_number: int) -> None:
        """Begin a round: drop what is too old to be trained on in it."""
        self.round, self.began = round_number, self.updates
        self.before[round_number] = self.updates
        for key, kept in list(self._kept.items()):
            limit = self.limits.max_age if self.limits is not None and self._ours(key) else self.max_age
            if too_old(kept.scored.round, round_number, limit):
                del self._kept[key]

    def _ours(self, key: Key) -> bool:
        return self.limits is not None and key[0] == self.limits.own

    def _trim(self) -> None:
        """Keep, with replay, the freshest (1 − delta)·N, and the freshest delta·N that can still teach.

        One walk from the freshest does it, in which no author and not all others together get more than their
        share. What is dropped never returns, so walking at each arrival leaves what one walk over everything
        would, shares apart.
        """
        limits = self.limits
        if limits is None:
            if len(self._kept) > self.capacity:
                # What is over goes from whoever holds most.
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
        """Return whether the rollout is here, or was trained on and is gone."""
        return key in self._kept or _digest(key) in self._used

    def __iter__(self) -> Iterator[Scored]:
        return (kept.scored for kept in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def external_share(self) -> float:
        """The share of the pool's rollouts that are others'; 0 for an empty pool."""
        others = (
            len(self) if self.limits is None else sum(author != self.limits.own for author, _ in self._kept)
        )
        return others / len(self) if len(self) else 0.0

    def kept(self) -> Sequence[PoolEntry]:
        """Return the entries, oldest first."""
        return tuple(self._kept.values())

    def snapshot(self) -> Sequence[Scored]:
        """Return what a batch may be made of, oldest first; without replay, only what is yet untrained."""
        return tuple(kept.scored for kept in self._kept.values() if self.limits is not None or not kept.uses)

    @property
    def used(self) -> Sequence[bytes]:
        """Return digests of others' rollouts that were trained on, oldest first."""
        return tuple(self._used)

    def restore(
        self,
        kept: Iterable[PoolEntry],
        updates: int,
        used: Iterable[bytes],
        before: Mapping[int, int] | None = None,
    ) -> None:
        """Restore what `kept`, `updates`, `used` and `before` gave.

        Under stricter limits than then, less comes back.
        """
        self.updates = updates
        self._used = Latest(MAX_USED, ((digest, None) for digest in used))
        self.before = Latest(self.max_age + 1, (before or {}).items())
        for each in kept:
            # Replay may have been switched off since.
            if self.limits is not None or each.scored.tokens is None:
                self._kept[key_of(each.scored)] = each
        self._trim()


def teaches(scored: Scored) -> bool:
    """Return whether there are a right and a wrong completion: a group that is all right has no gradient."""
    return scored.informative and any(reward > 0 for reward in scored.rewards)


def key_of(scored: Scored) -> Key:
    """Return the key of one experience: an author's rollout of a task."""
    return scored.rollout.author, scored.rollout.ref


def _digest(key: Key) -> bytes:
    author, ref = key
    return hashlib.blake2b(f"{author} {ref.specialty} {ref.n}".encode(), digest_size=8).digest()
