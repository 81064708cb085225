"""Parts that tests and benchmarks share: peers as processes, hostile inputs, other packages' environments."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# On however busy a machine. A wait that takes as long has failed.
TIMEOUT_S = 240.0
