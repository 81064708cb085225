"""User-defined strategies for `sharing.take`: a Python file, for a node or in an experiment.

def weights(candidates):                  # a number from 0 for each candidate of the pool or of the offers
    return [1.0 if each.ref.specialty == "bf" else 0.1 for each in candidates]

def keeps(scored):                        # optional: which rollouts of the pool may be drawn
    return any(scored.rewards)
"""

import math
import runpy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from swarmd.config.curriculum_name import absolute
from swarmd.config.messages import nearest
from swarmd.errors import ConfigError
from swarmd.experience.strategies import TAKES, Candidate, Take, informative
from swarmd.types import Scored


def take_name(text: str) -> str:
    """Return a name of TAKES, or a file's path made absolute. The file is not run."""
    if text.endswith(".py"):
        return absolute(text)
    if text not in TAKES:
        raise ValueError(f"no strategy has this name{nearest(text, TAKES)}")
    return text


def load_take(name: str) -> None:
    """Add the strategy of a file to TAKES, under its path.

    Raises ConfigError if the file defines no strategy; its functions raise ConfigError if they fail.
    """
    if name in TAKES:
        return
    with _its_mistakes(name):
        found = runpy.run_path(name)
        kept, own = found.get("keeps", informative), found["weights"]

    @_its_mistakes(name)
    def keeps(scored: Scored) -> bool:
        return bool(kept(scored))

    @_its_mistakes(name)
    def weights(candidates: Sequence[Candidate]) -> Sequence[float]:
        given = [float(weight) for weight in own(candidates)]
        if len(given) != len(candidates) or not all(0 <= weight < math.inf for weight in given):
            raise ValueError(f"{given[:8]} is not a number from 0 for each of {len(candidates)} candidates")
        return given

    TAKES[name] = Take(keeps, weights)


@contextmanager
def _its_mistakes(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"sharing.take: {name} cannot be used: {type(error).__name__}: {error}. Correct the file, which"
            " has to define `weights(candidates)` (docs/experiments.md)."
        ) from error
