"""Keeps the CPU share, averaged over minutes. Pure."""

from typing import Final

# Seconds of unused share that may be saved up: after a pause the node must not run at full speed for long.
CREDIT_S: Final = 2.0
# Seconds of exceeded share that are remembered at most: a single step of a large model takes long.
DEBT_S: Final = 3600.0


class CpuShare:
    """Keeps the CPU share. cores: CPU seconds per second that all processes together may use."""

    def __init__(self, cores: float, now: float) -> None:
        self._cores, self._at, self._left = cores, now, 0.0

    def spent(self, cpu_seconds: float, now: float) -> bool:
        """Charge CPU seconds spent since the last call; return whether the node must rest now."""
        gained, self._at = max(0.0, now - self._at) * self._cores, now
        self._left = max(
            -DEBT_S * self._cores, min(CREDIT_S * self._cores, self._left + gained) - cpu_seconds
        )
        return self._left < 0
