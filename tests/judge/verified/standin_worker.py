"""Stands in for judge/verified/worker.py in tests that need no model.

It sends the same messages; some model names make it fail in the way they say.
"""

import os
import re
import sys
import time
from fractions import Fraction

import msgspec

from judge.verified.messages import (
    AnswerRequest,
    DescribeRequest,
    GivenAnswer,
    GivenAnswers,
    ModelDescriptions,
    ModelTensors,
    WorkerRefusal,
)
from swarmd.tasks.sandbox import seccomp
from swarmd.tasks.sandbox.containment import contain

SHAPES = {"a.weight": (4, 3), "b.bias": (5,)}
ADAPTER = {"a.lora_A.default.weight": (1, 3), "a.lora_B.default.weight": (4, 1)}
MODELS = ("good", "tiny", "hangs", "eats", "dies", "talks", "lies", "babbles")
BASE = "0123456789abcdef"


def solved(question: str) -> GivenAnswer | None:
    """Return the right answer if the question is to simplify a fraction, so that some answers are right."""
    found = re.search(r"the fraction (\d+)/(\d+)", question)
    if found is None:
        return None
    fraction = Fraction(int(found[1]), int(found[2]))
    return GivenAnswer(f"<answer>{fraction.numerator}/{fraction.denominator}</answer>", True)


def main() -> None:
    seccomp.die_with_parent(int(sys.argv[1]))
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=DescribeRequest | AnswerRequest)
    if isinstance(request, DescribeRequest):
        tensors = ModelTensors(BASE, SHAPES, ADAPTER)
        strange = [name for name in request.models if name not in MODELS]
        reply = (
            WorkerRefusal(f"no {strange[0]}.")
            if strange
            else ModelDescriptions(True, dict.fromkeys(request.models, tensors))
        )
        sys.stdout.buffer.write(msgspec.json.encode(reply))
        return
    weights = os.read(int(sys.argv[2]), 10**6)
    contain(request.memory, request.cpu)
    if request.model == "hangs":
        time.sleep(600)
    if request.model == "eats":
        bytearray(request.memory * 2)
    if request.model == "dies":
        os.abort()
    while request.model == "talks":
        os.write(1, b"x" * 65_536)
    if request.model == "babbles":
        os.write(1, b'{"type": "answered", "answers": [[')
        return
    answer = GivenAnswer(f"<answer>{len(weights)}</answer>", True)
    rows = [[solved(question) or answer, *[answer] * (request.answers - 1)] for question in request.questions]
    os.write(1, msgspec.json.encode(GivenAnswers(rows[1:] if request.model == "lies" else rows)))


if __name__ == "__main__":
    main()
