"""Join a swarm from any program: `swarmd.join`. The names in `__all__` are stable across versions.

Nothing is loaded before its first use: every module of swarmd imports this one, and the command line has to
reach its handling of Ctrl-C quickly.
"""

# Type checkers treat this as `typing.TYPE_CHECKING`, without an import of `typing`.
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
