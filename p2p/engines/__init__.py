"""What moves frames. An engine's module is imported only when it is chosen: libp2p and hivemind cannot live in one process."""

import importlib
from collections.abc import Callable

from p2p.errors import NoSuchEngine
from p2p.types import Engine

ENGINES = {
    "libp2p": "p2p.engines.libp2p:Libp2pEngine",
    "memory": "p2p.engines.memory:MemoryEngine",
}


def engine(name: str) -> Callable[..., Engine]:
    """The class of an engine. Raises NoSuchEngine; ImportError where its library is not installed."""
    try:
        module, _, attribute = ENGINES[name].partition(":")
    except KeyError:
        raise NoSuchEngine(f"no p2p engine is called {name!r}; there are {', '.join(ENGINES)}") from None
    loaded: Callable[..., Engine] = getattr(importlib.import_module(module), attribute)
    return loaded
