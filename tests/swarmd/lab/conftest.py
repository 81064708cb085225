from collections.abc import Mapping, Sequence
from typing import Any


def but_for_cpu(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return a run's lines without the processor time, in which two runs differ."""
    return [{key: value for key, value in line.items() if key != "cpu"} for line in lines]
