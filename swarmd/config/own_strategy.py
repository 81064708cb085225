"""User-defined strategies for `[sharing]` take and weigh: a Python file, for a node or in an experiment.

def weights(candidates, lead):            # take: a number from 0 for each candidate, in the pool or on offer
    return [max(0.0, lead.of(each.ref.specialty)) + 0.1 for each in candidates]

def keeps(scored):                        # take, optional: which rollouts of the pool may be drawn
    return any(scored.rewards)

def weigh(scored, advantages, success):   # weigh: the advantages of an external rollout; success: our own
    return [max(0.0, advantage) * (1 - success) for advantage in advantages]
"""

import math
import runpy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from swarmd.config.curriculum_name import absolute
from swarmd.config.messages import nearest
from swarmd.errors import ConfigError
from swarmd.experience.advantages import WEIGHS, Weighting
from swarmd.experience.strategies import TAKES, Candidate, SharingSettings, Take, informative
from swarmd.types import Lead, Scored


def strategy_name(names: Collection[str], text: str) -> str:
    """Return a name of the table, or a file's path made absolute. The file is not run."""
    if text.endswith(".py"):
        return absolute(text)
    if text not in names:
        raise ValueError(f"no strategy has this name{nearest(text, names)}")
    return text


def load_strategies(sharing: SharingSettings) -> None:
    """Add the strategies of files to TAKES and WEIGHS, under their paths.

    Raises ConfigError if a file defines no strategy; its functions raise ConfigError if they fail.
    """
    if sharing.take not in TAKES:
        TAKES[sharing.take] = _take(sharing.take)
    if sharing.weigh not in WEIGHS:
        WEIGHS[sharing.weigh] = _weighing(sharing.weigh)


def _take(name: str) -> Take:
    mistakes = partial(_its_mistakes, "take", name)
    with mistakes():
        found = runpy.run_path(name)
        kept, own = found.get("keeps", informative), found["weights"]

    def keeps(scored: Scored) -> bool:
        with mistakes():
            return bool(kept(scored))

    def weights(candidates: Sequence[Candidate], lead: Lead) -> Sequence[float]:
        with mistakes():
            return _numbers(own(candidates, lead), len(candidates), 0.0)

    return Take(keeps, weights)


def _weighing(name: str) -> Weighting:
    mistakes = partial(_its_mistakes, "weigh", name)
    with mistakes():
        own = runpy.run_path(name)["weigh"]

    def weigh(scored: Scored, advantages: Sequence[float], success: float) -> Sequence[float]:
        with mistakes():
            return _numbers(own(scored, advantages, success), len(advantages), -math.inf)

    return weigh


def _numbers(given: Sequence[float], count: int, least: float) -> Sequence[float]:
    numbers = [float(number) for number in given]
    if len(numbers) != count or not all(least <= number < math.inf for number in numbers):
        raise ValueError(f"{numbers[:8]} is not a number{' from 0' * (least == 0)} for each of {count}")
    return numbers


@contextmanager
def _its_mistakes(key: str, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        function = {"take": "weights(candidates, lead)", "weigh": "weigh(scored, advantages, success)"}[key]
        raise ConfigError(
            f"sharing.{key}: {name} cannot be used: {type(error).__name__}: {error}. Correct the file, which"
            f" has to define `{function}` (docs/experiments.md)."
        ) from error
