"""Node churn in experiments: which nodes leave and rejoin in each round.

Pure: one seed, one history, whatever the setting.
"""

import random
from collections.abc import Collection


class Absences:
    """Each node leaves with chance 1/present a round and comes back with chance 1/away.

    Never all of them are away at once.
    """

    def __init__(self, nodes: int, present: int, away: int, rng: random.Random) -> None:
        """Draw absences for `nodes` nodes.

        present, away: mean lengths in rounds; with present 0 nobody ever leaves.
        """
        self._nodes, self._present, self._away, self._rng = nodes, present, away, rng
        self._gone: frozenset[int] = frozenset()

    def next_round(self) -> Collection[int]:
        """Draw which nodes are away in the next round, and return their places."""
        if self._present:
            chances = [
                1 - 1 / self._away if place in self._gone else 1 / self._present
                for place in range(self._nodes)
            ]
            gone = frozenset(place for place, chance in enumerate(chances) if self._rng.random() < chance)
            self._gone = gone if len(gone) < self._nodes else self._gone
        return self._gone
