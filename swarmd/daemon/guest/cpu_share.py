"""The CPU share: when the node must rest to stay within its part of the machine over minutes. Pure."""

from typing import Final

# Seconds' worth that may be saved up: after a pause it does not run at full speed for long
CREDIT: Final = 2.0
DEBT: Final = 3600.0  # seconds' worth that are remembered: a single step of a large model takes long


class CpuShare:
    """cores: CPU seconds a second, of all processes together."""

    def __init__(self, cores: float, now: float) -> None:
        self._cores, self._at, self._left = cores, now, 0.0

    def spent(self, cpu_seconds: float, now: float) -> bool:
        """Charge CPU seconds spent since the last call; return whether the node must rest now."""
        gained, self._at = max(0.0, now - self._at) * self._cores, now
        self._left = max(-DEBT * self._cores, min(CREDIT * self._cores, self._left + gained) - cpu_seconds)
        return self._left < 0
