"""Join a swarm from any program: `swarmd.join`. What `__all__` names stays as it is from version to version.

Nothing is loaded until it is used: every part of swarmd imports this, and the command line has to be quick to
where it takes Ctrl-C.
"""

# As type checkers read it, without an import of `typing`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from swarmd import errors
    from swarmd.library.joined_swarm import JoinedSwarm, ScoredGroup, join
    from swarmd.types import Completion, Task, TaskRef

__all__ = ["Completion", "JoinedSwarm", "ScoredGroup", "Task", "TaskRef", "errors", "join"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> "Any":
    if name not in __all__:
        raise AttributeError(f"module 'swarmd' has no attribute {name!r}")
    from importlib import import_module

    if name == "errors":
        return import_module("swarmd.errors")
    home = "types" if name in ("Completion", "Task", "TaskRef") else "library.joined_swarm"
    return getattr(import_module(f"swarmd.{home}"), name)
