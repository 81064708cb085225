"""Parts that tests and benchmarks share: peers as processes, hostile inputs, other packages' environments."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Longest wait in seconds, even on a busy machine. A wait that takes longer has failed.
TIMEOUT_S = 240.0
