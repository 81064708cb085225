"""Join a swarm from any program: `swarmd.join`. What `__all__` names stays as it is from version to version.

Nothing is loaded until it is used, as every part of swarmd imports this.
"""

from typing import TYPE_CHECKING, Any

from swarmd import errors
from swarmd.types import Completion, Task, TaskRef

if TYPE_CHECKING:
    from swarmd.daemon.library.joined_swarm import JoinedSwarm, ScoredGroup, join

__all__ = ["Completion", "JoinedSwarm", "ScoredGroup", "Task", "TaskRef", "errors", "join"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'swarmd' has no attribute {name!r}")
    from swarmd.daemon.library import joined_swarm

    return getattr(joined_swarm, name)
