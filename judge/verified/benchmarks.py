"""Known benchmarks, which uploaded weights answer beside the held-out questions (--verified-benchmark).

A benchmark is a curriculum of own tasks (docs/own-tasks.md), as a file of GSM8K's or MATH-500's questions. A
contained process of its own scores the answers. It is in no score: anybody may have trained on it.
"""

import random
from collections.abc import Mapping, Sequence

from swarmd.tasks.answers import added
from swarmd.tasks.own import find_curriculum
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import open_tasks
from swarmd.types import Completion, Task

# Of each benchmark the sum of the rewards, and the number of questions.
BenchmarkFigures = Mapping[str, tuple[float, int]]


class Benchmarks:
    def __init__(self, names: Sequence[str], count: int) -> None:
        """Open benchmarks. count: questions of each, at most. Raises ConfigError."""
        self._count = count
        self._open = {found.name: (found, Verifier(found)) for found in map(find_curriculum, names)}

    def drawn(self, rng: random.Random) -> Sequence[tuple[str, Task]]:
        """Draw questions of each, none twice. Raises SwarmdError."""
        found: list[tuple[str, Task]] = []
        for name, (curriculum, verifier) in self._open.items():
            # With replacement: of a small file all are among so many, nearly always.
            tasks = open_tasks(curriculum, verifier).draw(8 * self._count, rng)
            once = {task.question: task for task in tasks}
            found += [(name, task) for task in list(once.values())[: self._count]]
        return found

    def scored(
        self, asked: Sequence[tuple[str, Task]], answers: Sequence[Sequence[Completion]]
    ) -> BenchmarkFigures:
        """Score the first answer to each question. Raises VerifierFailed."""
        found: dict[str, tuple[float, int]] = {}
        for (name, task), given in zip(asked, answers, strict=True):
            ((reward,),) = self._open[name][1].score([(task.ref, given[:1])])
            right, count = found.get(name, (0.0, 0))
            found[name] = added(right, reward), count + 1
        return found

    def close(self) -> None:
        for _, verifier in self._open.values():
            verifier.close()
