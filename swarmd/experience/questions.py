"""Choice of this node's own questions, by `[tasks] draw`. Pure.

"uniform" is the paper's (SAPO section 5). The other rows choose half of the questions; the rest is uniform.
"""

import random
from collections.abc import Callable, Sequence

from swarmd.experience.pool import Pool
from swarmd.experience.strategies import Sharing, Success
from swarmd.tasks.curriculum import DrawnTasks
from swarmd.types import Task

Draw = Callable[[int, random.Random], Sequence[Task]]


def at_the_edge(tasks: DrawnTasks, success: Success, rng: random.Random) -> str:
    """Return the specialty whose success rate, drawn from its Beta estimate, is nearest to one half.

    Thompson sampling as in MoPPS (arXiv 2507.04632), by specialty instead of by question.
    """

    def distance(specialty: str) -> float:
        right, seen = success.right.get(specialty, 0.0), success.seen.get(specialty, 0.0)
        return abs(rng.betavariate(1 + right, 1 + seen - right) - 0.5)

    return min(tasks.staircase.asked, key=distance)


def edge(tasks: DrawnTasks, sharing: Sharing) -> Draw:
    def draw(count: int, rng: random.Random) -> Sequence[Task]:
        chosen = count // 2
        return [
            *tasks.draw(count - chosen, rng),
            *(tasks.draw_of(at_the_edge(tasks, sharing.success, rng), rng) for _ in range(chosen)),
        ]

    return draw


def swarm(tasks: DrawnTasks, pool: Pool, share: float) -> Draw:
    """Ask questions whose external group this node's verifier found informative; authors evenly."""
    asked: set[object] = set()

    def draw(count: int, rng: random.Random) -> Sequence[Task]:
        chosen: list[Task] = []
        for _ in range(round(count * share)):
            open_ = [s for s in pool if s.informative and s.ref not in asked]
            authors = sorted({s.author for s in open_})
            if not authors:
                break
            author = rng.choice(authors)
            ref = rng.choice([s.ref for s in open_ if s.author == author])
            asked.add(ref)
            if task := tasks.task(ref):
                chosen.append(task)
        return [*chosen, *tasks.draw(count - len(chosen), rng)]

    return draw
