"""The embedded models: the folders of their weights.

This module does not import torch, so that the daemon and the command line can use it.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

WEIGHTS: Mapping[str, Path] = MappingProxyType(
    {name: Path(__file__).parent / "weights" / name for name in ("tiny", "tiny-latent")}
)
