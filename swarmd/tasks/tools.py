"""The curriculum tools-6: six environments in levels, easy enough for small models.

    calculator   arithmetic, with a tool that computes
    units        conversions, with a tool that looks up a factor
    facts        questions about people, with a tool that searches a list
    guess        a hidden number; the tool says whether it is larger or smaller
    grid         a walk to a goal around walls
    hanoi        a tower to move; ReasoningGYM's tower_of_hanoi, one move at a time

A text ends with one call, `<tool>…</tool>`, or with the answer, `<answer>…</answer>`; any other text ends
the episode without a reward. This file is a task plug-in like any other (docs/own-tasks.md): it runs in the
contained process, and its digest names the swarm.
"""

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

name = "tools-6"
version = "1"
limits = {"turns": 12}
LEVELS = 3

_END = re.compile(r"<(tool|answer)>([^<>]{1,64})</\1>\s*\Z")
_TERM = re.compile(r"\d{1,9}(\s*[-+*]\s*\d{1,9}){1,4}")
_ENDING = "End with <answer>…</answer>."


class Episode(NamedTuple):
    """call: replies to a call, and tells whether this ends the episode with a reward."""

    answer: str | None  # None: only calls lead to the end
    call: Callable[[str], tuple[str, bool]]
    solution: tuple[str, ...]  # texts of a right answer


def _looked_up(answer: str, call: Callable[[str], str], *calls: str) -> Episode:
    texts = (*(f"<tool>{each}</tool>" for each in calls), f"<answer>{answer}</answer>")
    return Episode(answer, lambda said: (call(said), False), texts)


def computed(said: str) -> str:
    """Return the value of sums, differences and products; a sentence if it is something else."""
    if not _TERM.fullmatch(said.strip()):
        return "write numbers with + - *"
    total, sign = 0, 1
    for part in re.split(r"([-+])", said):
        if part in ("+", "-"):
            sign = 1 if part == "+" else -1
            continue
        product = 1
        for factor in part.split("*"):
            product *= int(factor)
        total += sign * product
    return str(total)


def calculator(level: int, rng: Random) -> tuple[str, Episode]:
    terms = [rng.randrange(10, 10 ** (level + 1)) for _ in range(max(2, level))]
    said = "".join(f"{rng.choice('+-*')}{term}" for term in terms)[1:]
    question = f"What is {said}? A call such as <tool>31*12</tool> computes. {_ENDING}"
    return question, _looked_up(computed(said), computed, said)


UNITS: Mapping[str, tuple[str, int]] = {
    "feet": ("inches", 12),
    "yards": ("feet", 3),
    "pounds": ("ounces", 16),
    "weeks": ("days", 7),
    "days": ("hours", 24),
    "hours": ("minutes", 60),
    "kilometres": ("metres", 1000),
    "dozens": ("pieces", 12),
    "gallons": ("pints", 8),
}


def units(level: int, rng: Random) -> tuple[str, Episode]:
    unit = rng.choice(sorted(UNITS))
    smaller, factor = UNITS[unit]
    count = rng.randrange(2, 10**level)
    question = (
        f"How many {smaller} are {count} {unit}? A call such as <tool>miles</tool> looks a unit up. {_ENDING}"
    )

    def look_up(said: str) -> str:
        found = UNITS.get(said.strip().lower())
        return f"1 {said.strip().lower()} = {found[1]} {found[0]}" if found else "unknown unit"

    return question, _looked_up(str(count * factor), look_up, unit)


NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gil", "Hana", "Ian", "Judy", "Kim", "Leo")
CITIES = ("Oslo", "Lima", "Cairo", "Paris", "Delhi", "Quito", "Seoul", "Rome", "Perth", "Dakar")


def facts(level: int, rng: Random) -> tuple[str, Episode]:
    people = rng.sample(NAMES, 4 * level)
    # Each person knows the next one; the question follows `level` of these links.
    city = {person: rng.choice(CITIES) for person in people}
    knows = dict(zip(people, [*people[1:], people[0]], strict=True))
    path = [people[0]]
    while len(path) < level:
        path.append(knows[path[-1]])
    asked = "the friend of " * (level - 1) + path[0]
    question = f"In which city does {asked} live? A call such as <tool>Mia</tool> searches. {_ENDING}"

    def search(said: str) -> str:
        found = said.strip().capitalize()
        return f"{found} lives in {city[found]}, friend: {knows[found]}" if found in city else "nothing found"

    return question, _looked_up(city[path[-1]], search, *path)


def guess(level: int, rng: Random) -> tuple[str, Episode]:
    most = (10, 30, 100)[level - 1]
    hidden = rng.randrange(1, most + 1)
    question = f"Find the hidden number from 1 to {most}. A call such as <tool>5</tool> guesses."

    def compare(said: str) -> tuple[str, bool]:
        if not said.strip().isdecimal():
            return "write a number", False
        number = int(said)
        return ("larger" if number < hidden else "smaller"), number == hidden

    low, high, texts = 1, most, list[str]()
    while not texts or texts[-1] != f"<tool>{hidden}</tool>":
        middle = (low + high) // 2
        texts.append(f"<tool>{middle}</tool>")
        low, high = (middle + 1, high) if middle < hidden else (low, middle - 1)
    return question, Episode(None, compare, tuple(texts))


STEPS: Mapping[str, tuple[int, int]] = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


def grid(level: int, rng: Random) -> tuple[str, Episode]:
    size, at = level + 2, [0, 0]
    goal = (rng.randrange(1, size), rng.randrange(1, size))
    way = rng.sample(["right"] * goal[0] + ["down"] * goal[1], sum(goal))
    free, x, y = {(0, 0)}, 0, 0
    for step in way:
        x, y = x + STEPS[step][0], y + STEPS[step][1]
        free.add((x, y))
    walls = {(x, y) for x in range(size) for y in range(size) if (x, y) not in free and rng.random() < 0.3}
    rows = [
        "".join("#" if (x, y) in walls else "G" if (x, y) == goal else "." for x in range(size))
        for y in range(size)
    ]
    question = (
        "Walk from the top left to G; # is a wall.\n"
        + "\n".join(rows)
        + "\nA call such as <tool>left</tool> takes a"
        " step: up, down, left or right."
    )

    def move(said: str) -> tuple[str, bool]:
        dx, dy = STEPS.get(said.strip().lower(), (0, 0))
        x, y = at[0] + dx, at[1] + dy
        if (dx, dy) != (0, 0) and 0 <= x < size and 0 <= y < size and (x, y) not in walls:
            at[:] = x, y
        return f"row {at[1] + 1}, column {at[0] + 1}", (at[0], at[1]) == goal

    return question, Episode(None, move, tuple(f"<tool>{step}</tool>" for step in way))


def hanoi(level: int, rng: Random) -> tuple[str, Episode]:
    start, end = rng.sample("ABC", 2)
    pegs = {peg: list(range(level, 0, -1)) if peg == start else [] for peg in "ABC"}
    shown = "; ".join(f"{peg}: {' '.join(map(str, disks)) or 'empty'}" for peg, disks in pegs.items())
    question = (
        f"Move the tower from {start} to {end}, one top disk at a time, never onto a smaller disk.\n{shown}\n"
        "A call such as <tool>AB</tool> moves a disk from A to B."
    )

    def move(said: str) -> tuple[str, bool]:
        pair = said.strip().upper()
        source, target = (pegs.get(peg) for peg in pair) if len(pair) == 2 else (None, None)
        if source and target is not None and (not target or target[-1] > source[-1]):
            target.append(source.pop())
        shown = "; ".join(f"{peg}: {' '.join(map(str, disks)) or 'empty'}" for peg, disks in pegs.items())
        return shown, len(pegs[end]) == level

    def moves(disks: int, source: str, target: str) -> list[str]:
        if not disks:
            return []
        other = next(peg for peg in "ABC" if peg not in (source, target))
        return [*moves(disks - 1, source, other), source + target, *moves(disks - 1, other, target)]

    return question, Episode(None, move, tuple(f"<tool>{each}</tool>" for each in moves(level, start, end)))


MAKERS: Mapping[str, Callable[[int, Random], tuple[str, Episode]]] = {
    "calculator": calculator,
    "units": units,
    "facts": facts,
    "guess": guess,
    "grid": grid,
    "hanoi": hanoi,
}
specialties = [f"{subject}.{level}" for subject in MAKERS for level in range(1, LEVELS + 1)]
# No generated question uses these numbers and names.
examples = [
    (f"What is 7+8*2? A call such as <tool>31*12</tool> computes. {_ENDING}", "<tool>7+8*2</tool>"),
    ("23", "<answer>23</answer>"),
    (f"In which city does Zoe live? A call such as <tool>Mia</tool> searches. {_ENDING}", "<tool>Zoe</tool>"),
    ("Zoe lives in Bern, friend: Mia", "<answer>Bern</answer>"),
]


def reset(specialty: str, seed: int) -> tuple[str, Episode]:
    subject, _, level = specialty.partition(".")
    return MAKERS[subject](int(level), Random(f"{specialty} {seed}"))


def step(episode: Episode, text: str) -> tuple[str, float, bool]:
    end = _END.search(text)
    if end is None:
        return "", 0.0, True
    kind, said = end.groups()
    if kind == "answer":
        return "", float(said.strip().lower() == (episode.answer or "").lower()), True
    observation, done = episode.call(said)
    return observation, float(done), done


def solution(episode: Episode) -> tuple[str, ...]:
    return episode.solution
