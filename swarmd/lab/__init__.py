"""Many nodes on one machine: experiments that measure the benefit of sharing."""

from pathlib import Path
from typing import Final

EXPERIMENTS: Final = Path(__file__).parent / "experiments"  # the TOML files that come with swarmd
