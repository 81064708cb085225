"""The p2p engines by name. An engine moves frames between nodes, and is imported only if it is chosen.

`libp2p` is built in. Other packages can add engines by an entry point in the group `swarmd.p2p_engines`. It
names a callable that returns a `P2pEngine` and takes the arguments of
`p2p.engines.network_engine.NetworkEngine`, except `rate_limit` (for an example see `engines/hivemind/`).
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from p2p.errors import EngineMissing
from p2p.types import P2pEngine

GROUP: Final = "swarmd.p2p_engines"
BUILT_IN: Final = {
    "libp2p": EntryPoint("libp2p", "p2p.engines.libp2p.engine:Libp2pEngine", GROUP),
}


def offered() -> dict[str, EntryPoint]:
    """Return the entry points of all p2p engines, built in or from installed packages. Import none."""
    return {point.name: point for point in entry_points(group=GROUP)} | BUILT_IN


def engine(name: str) -> Callable[..., P2pEngine]:
    """Import a p2p engine and return its class, or another callable that makes one.

    Raises:
        EngineMissing: no engine has this name, or it cannot be imported.
    """
    points = BUILT_IN if name in BUILT_IN else offered()
    if name not in points:
        raise EngineMissing(
            f'unknown p2p engine {name!r} (known: {", ".join(points)}). Set swarm.engine to "libp2p",'
            ' or install its package (for "hivemind": swarmd-engine-hivemind).'
        )
    try:
        loaded: Callable[..., P2pEngine] = points[name].load()
    except (ImportError, AttributeError) as error:
        raise EngineMissing(
            f"the p2p engine {name!r} cannot be loaded ({type(error).__name__}: {error}). Reinstall its"
            " package" + ', or set swarm.engine to "libp2p"' * (name not in BUILT_IN)
        ) from error
    return loaded
