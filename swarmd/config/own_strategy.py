"""A strategy of one's own for `sharing.take`: a Python file, on one's own node or in an experiment.

def weights(candidates, lead):            # of the pool, and of what is on offer
    return [lead.of(each.ref.specialty) + 0.1 for each in candidates]

def keeps(scored):                        # optional: which of the pool may be drawn, its rewards known
    return any(scored.rewards)
"""

import runpy
from pathlib import Path

from swarmd.config.messages import nearest
from swarmd.errors import ConfigError
from swarmd.experience.strategies import TAKES, Take, informative


def take_name(text: str) -> str:
    """Return a name of TAKES, or a file's path made absolute. The file is not run."""
    if text.endswith(".py"):
        return str(Path(text).expanduser().absolute())
    if text not in TAKES:
        raise ValueError(f"no strategy has this name{nearest(text, TAKES)}")
    return text


def load_take(name: str) -> None:
    """Add the strategy of a file to TAKES, under its path. Raises ConfigError where the file is none."""
    if name in TAKES:
        return
    try:
        found = runpy.run_path(name)
        TAKES[name] = Take(found.get("keeps", informative), found["weights"])
    except Exception as error:
        raise ConfigError(
            f"sharing.take: {name} is no strategy: {type(error).__name__}: {error}. It defines"
            " `weights(candidates, lead)`; see docs/experiments.md."
        ) from error
