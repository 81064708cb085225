"""The embedded models: where their weights are.

It imports no torch, so that the daemon and the command line can ask.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

WEIGHTS: Mapping[str, Path] = MappingProxyType(
    {name: Path(__file__).parent / "weights" / name for name in ("tiny", "tiny-latent")}
)
