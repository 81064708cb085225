"""A judge's figures of swarm and solo nodes, recomputed as a reference for `judge.store.arms`."""

from collections import defaultdict
from collections.abc import Iterator
from math import fsum
from typing import Any

from sqlalchemy import Connection, Table, func, select

from judge.figures.rounds import HORIZONS, PeerProgress, advance
from judge.store.arms import columns_of
from judge.store.tables import arm_bins, arm_values, evaluations, progress


class Recount:
    """The figures of judge/store/arms.py, computed in memory from evaluations alone."""

    def __init__(self) -> None:
        self._progress: dict[tuple[str, str], PeerProgress] = {}
        # (time, value) pairs by model, sharing and bin
        self._values: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)

    def add(self, peer: str, model: str, sharing: str, round_number: int, reward: float, at: float) -> None:
        """Add an evaluation. A peer's evaluations must be added in the order in which the judge counted them.

        at: seconds since the epoch.
        """
        self._progress[peer, model], closed = advance(
            self._progress.get((peer, model)), sharing, round_number, reward
        )
        for bin, value in closed.items():
            self._values[model, sharing, bin].append((at, value))

    def rows(self) -> Iterator[tuple[Table, list[dict[str, Any]]]]:
        """Yield each table and its rows."""
        yield (
            progress,
            [
                {"peer": peer, "model": model, **columns_of(its)}
                for (peer, model), its in self._progress.items()
            ],
        )
        bins, placed = [], []
        for (model, sharing, bin), values in self._values.items():
            key, ordered = (
                {"model": model, "sharing": sharing, "bin": bin},
                [value for _, value in sorted(values)],
            )
            bins.append(
                {
                    **key,
                    "peers": len(ordered),
                    "total": fsum(ordered),
                    "squares": fsum(value**2 for value in ordered),
                }
            )
            if bin in HORIZONS:
                placed += [{**key, "place": place, "value": value} for place, value in enumerate(ordered, 1)]
        yield arm_bins, bins
        yield arm_values, placed


def recounted(db: Connection) -> Recount:
    """Recompute the figures from the stored evaluations.

    If two peers reached a step at the same moment, their order is unknown and may differ from the judge's.
    """
    c = evaluations.c
    at = c.asked_at + func.coalesce(c.seconds, 0.0)
    counting = select(c.peer, c.model, c.sharing, c.round, c.reward, at).where(
        c.number.is_not(None), c.sharing.is_not(None)
    )
    found = Recount()
    for row in db.execute(counting.order_by(c.peer, c.number)):
        found.add(*row)
    return found
