"""Many nodes on one machine: experiments on what sharing is worth."""

from pathlib import Path
from typing import Final

EXPERIMENTS: Final = Path(__file__).parent / "experiments"  # the TOML files that come with swarmd
