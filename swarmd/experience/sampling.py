"""Sampling batches from the replay pool: uniformly, without repetition in a batch. Pure.

The replay paper found no clear difference between sampling methods. One exception here: authors whose text
rarely passes the gate are drawn less often. `swarmd.experience.strategies` makes the batches without replay.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmd.experience.batch import by_weight, kind
from swarmd.experience.caps import choose
from swarmd.experience.pool import Pool
from swarmd.experience.replay_schedule import ReplaySchedule
from swarmd.experience.strategies import TAKES, Sharing
from swarmd.types import Author, Completion, Scored


def shuffled(completions: Sequence[Completion], salt: str) -> tuple[Completion, ...]:
    """Shuffle completions so that each is equally likely to be first, whatever its text is.

    The order depends on the texts alone, not on the sender or the sender's order, so that the first few of a
    copy are the first few of the original (`usefulness.useful`).
    """
    copies: Counter[Completion] = Counter()

    def place(completion: Completion) -> bytes:
        copies[completion] += 1
        text = f"{salt} {copies[completion]} {completion.ended} {completion.text}"
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()

    return tuple(sorted(completions, key=place))


@dataclass
class Replay:
    """A `Sampler` that draws every batch from the pool, which already has this round's local rollouts.

    While the schedule rests, it returns the choice of `plain` among this round's local rollouts and the
    external ones at most `fresh` rounds old.
    """

    pool: Pool
    schedule: ReplaySchedule
    batch: int  # B: maximum number of rollouts of one update
    plain: Callable[[Sequence[Scored], Sequence[Scored], random.Random], Sequence[Scored]]
    fresh: int
    sharing: Sharing = field(default_factory=Sharing)
    varied: bool = True  # as in `OfferChoice`

    def __call__(
        self, local: Sequence[Scored], pool: Sequence[Scored], rng: random.Random
    ) -> Sequence[Scored]:
        if not self.schedule.resting:
            weighed = by_weight(pool, TAKES["uniform"], self.sharing.pass_rates, rng)
            return choose(*weighed, self.batch, self._author, kind if self.varied else None)
        own = {s.rollout.author for s in local}
        theirs = [s for s in pool if s.rollout.author not in own and self.pool.round - s.round <= self.fresh]
        return self.plain(local, theirs, rng)

    def _author(self, scored: Scored) -> Author | None:
        author, limits = scored.author, self.pool.limits
        own = limits is not None and author == limits.own
        return None if own or self.sharing.settings.caps == "off" else scored.rollout.origin
