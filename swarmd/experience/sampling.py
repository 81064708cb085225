"""Which rollouts make the batch. Pure. To add a strategy, write a function of the `Sampler` shape and a line in SAMPLERS."""

import random
from collections.abc import Callable, Mapping, Sequence

from swarmd.types import Scored


def uniform(
    local: Sequence[Scored], pool: Sequence[Scored], rng: random.Random, *, n_local: int = 4, n_external: int = 4
) -> Sequence[Scored]:
    """SAPO's choice (section 5): I of our own, J of the others' after dropping those without advantage; uniform, without replacement.

    Fewer where there are fewer. Our own zero-advantage rollouts stay: they have no gradient, but they are part of the mean.
    `rng` is drawn from only where there is a choice to make, so J = 0 leaves it untouched.
    """
    mine = list(local) if len(local) <= n_local else rng.sample(list(local), n_local)
    useful = [s for s in pool if s.informative] if n_external else []
    theirs = useful if len(useful) <= n_external else rng.sample(useful, n_external)
    return [*mine, *theirs]


SAMPLERS: Mapping[str, Callable[..., Sequence[Scored]]] = {"uniform": uniform}
