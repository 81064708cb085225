"""Own tasks for a swarm: sums and differences. docs/own-tasks.md explains each part.

swarmd task show add 7 --curriculum docs/examples/sums.py
"""

import random

name = "sums"
version = "1"
specialties = ["add", "subtract"]
limits = {"seconds": 0.5, "longest_answer": 40}  # what is not named has a default


def generate(specialty, seed):
    """Return the question, and what `score` needs to know.

    Both depend on the seed alone, so every node asks the same question.
    """
    rng = random.Random(f"{specialty} {seed}")
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if specialty == "add":
        return f"Calculate {a} + {b}.", a + b
    return f"Calculate {a} - {b}.", a - b


def score(right, answer):
    """Return 1 for the right number, 0 for everything else. `answer` may be any text."""
    return 1.0 if answer.strip() == str(right) else 0.0
