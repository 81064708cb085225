"""A faulty task plug-in: each specialty misbehaves in a different way.

test_own_tasks.py loads it in the contained process.
"""

import os
import random
import socket
from pathlib import Path

name = "unruly"
limits = {"seconds": 0.5, "memory": 96 * 2**20, "longest_question": 100, "longest_answer": 50}
PID = os.getpid()
# Specialties whose score is not a number from 0 to 1
WRONG = ("none", "nan", "text", "two", "minus", "infinite")
# Specialties in which generate and score misbehave
FATAL = ("raises", "hangs", "eats", "exits", "dies", "touches", "dials", "imports")
# Specialties with invalid questions, and these questions
MADE = {"empty": ("", 0), "huge": ("x" * 101, 0), "odd": "no pair", "surrogate": ("\ud800", 0)}
specialties = ["fine", *WRONG, *FATAL, *MADE]


def generate(specialty, seed):
    """Return a valid question for seeds below 10, so that the plug-in is accepted; then misbehave."""
    if seed < 10:
        return f"{specialty} {seed} of {PID} {random.random()}", specialty
    if specialty in MADE:
        return MADE[specialty]
    misbehave(specialty)
    return f"{specialty} {seed} of {PID} {random.random()}", specialty


def score(facts, answer):
    # swarmd scores "" and "0" before it accepts the plug-in.
    if answer in ("good", "bad", "", "0"):
        return float(answer == "good")
    return misbehave(facts)


def misbehave(how):
    values = {
        "none": None,
        "nan": float("nan"),
        "text": "1.0",
        "two": 2,
        "minus": -1.0,
        "infinite": float("inf"),
    }
    if how in values:
        return values[how]
    if how == "raises":
        raise ValueError("no such luck \x1b[31m")
    if how == "hangs":
        while True:
            pass
    if how == "eats":
        return len([bytearray(2**20) for _ in range(2**10)])
    if how == "exits":
        raise SystemExit(3)
    if how == "dies":
        os._exit(1)
    if how == "touches":
        Path(__file__).with_suffix(".touched").touch()
    if how == "dials":
        socket.create_connection(("127.0.0.1", 1))
    if how == "imports":
        import ftplib  # noqa: F401
    return 1.0
