"""The p2p engines by name: what moves frames. One is imported only when it is chosen: libp2p and hivemind cannot live in one process."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from p2p.errors import EngineMissing, NoSuchEngine
from p2p.types import P2pEngine

NETWORK_ENGINES = {
    "libp2p": "p2p.engines.libp2p.engine:Libp2pEngine",
    "hivemind": "swarmd_engine_hivemind.engine:HivemindEngine",
}
ENGINES = {**NETWORK_ENGINES, "memory": "p2p.engines.memory:MemoryEngine"}


@dataclass(frozen=True, slots=True)
class Choice:
    """A network engine, and why it was chosen, in words for the operator."""

    name: str
    why: str


def choose(wanted: str) -> Choice:
    """Choose the engine for "auto" or a name of ENGINES; import none. EngineMissing where hivemind is wanted and cannot run.

    "auto" is libp2p everywhere: p2pd is a program of 2023 that nobody maintains, and passes frames on before they are checked.
    """
    from swarmd_engine_hivemind.p2pd import missing

    if wanted == "auto":
        return Choice("libp2p", "the default")
    if wanted == "hivemind" and (reason := missing()) is not None:
        raise EngineMissing(f'{reason}; or set swarm.engine = "libp2p"')
    return Choice(wanted, "as configured")


def engine(name: str) -> Callable[..., P2pEngine]:
    """The class of an engine. Raises NoSuchEngine; ImportError where its library is not installed."""
    try:
        module, _, attribute = ENGINES[name].partition(":")
    except KeyError:
        raise NoSuchEngine(f"no p2p engine is called {name!r}; there are {', '.join(ENGINES)}") from None
    loaded: Callable[..., P2pEngine] = getattr(importlib.import_module(module), attribute)
    return loaded
