"""Own tasks for a swarm: sums and differences, written in words. docs/own-tasks.md explains each part.

    swarmd task show add 7 --curriculum docs/examples/word_sums.py
"""

import random

name = "word-sums"
version = "1"
specialties = ["add", "subtract"]
limits = {"seconds": 0.5, "longest_answer": 40}  # what is not named has a default

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def generate(specialty, seed):
    """The question, and what `score` needs to know. From the seed alone: every node makes the same question of it."""
    rng = random.Random(f"{specialty} {seed}")
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if specialty == "add":
        return f"What is {WORDS[a]} plus {WORDS[b]}? Answer with a number.", a + b
    return f"What is {WORDS[a]} minus {WORDS[b]}? Answer with a number.", a - b


def score(right, answer):
    """1 for the right number, 0 for everything else. `answer` may be any text."""
    return 1.0 if answer.strip() == str(right) else 0.0
