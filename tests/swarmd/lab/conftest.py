from collections.abc import Mapping, Sequence
from typing import Any


def but_for_cpu(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return a run's lines without the CPU time, which differs between runs."""
    return [{key: value for key, value in line.items() if key != "cpu"} for line in lines]
