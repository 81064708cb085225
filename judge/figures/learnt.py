"""Which nodes of the board say that they trained on whose rollouts. Nothing proves these counts. Pure.

Learners and teachers are chosen by rank, not by what is counted: keys and counts are free, ranks are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from judge.figures.leaderboard import Standing

# Learners, and teachers, at most.
MATRIX_PEERS = 30


@dataclass(frozen=True, slots=True)
class LearntMatrix:
    """Learners in rows, teachers in columns, each best first."""

    learners: Sequence[Standing]
    teachers: Sequence[Standing]
    told: Sequence[Mapping[str, int]]  # by each learner, rollouts of each author

    @property
    def counts(self) -> list[list[int]]:
        """Return of each learner the rollouts of each teacher, and last those of all other authors."""
        rows = [[told.get(teacher.record.peer, 0) for teacher in self.teachers] for told in self.told]
        return [[*row, sum(told.values()) - sum(row)] for row, told in zip(rows, self.told, strict=True)]
