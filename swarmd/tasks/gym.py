"""ReasoningGYM, imported without what its game of life alone needs: cellpylib, and with it matplotlib, take 0.7 s of every start.

In cellpylib's place stands a module that imports it when something of it is asked for.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class Deferred(ModuleType):
    """Stands for a module, and gives way to it at the first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by the import system; it is no use
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


sys.modules.setdefault("cellpylib", Deferred("cellpylib"))

import reasoning_gym  # noqa: E402
from reasoning_gym.arithmetic import basic_arithmetic  # noqa: E402

__all__ = ["basic_arithmetic", "reasoning_gym"]
