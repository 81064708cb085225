"""The rules that bind a judge: seed commitments, the questions of a window, signed receipts. Pure.

All questions follow from one seed. The judge makes a random seed for each window of time and publishes the
seed's SHA-256 before the window opens. HMAC-SHA256 (RFC 2104) of the seed gives every question, and the
place in the set where each peer starts. After the window has closed, the judge publishes the seed, and anyone
can then regenerate the same questions. docs/judge-protocol.md describes the protocol.
"""

import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

from p2p.identity import verify
from swarmd.tasks.curriculum import HELD_OUT, HELD_OUT_END, Curriculum
from swarmd.tasks.own_tasks import NoQuestion
from swarmd.types import Task, TaskRef

SEED_BYTES = 32
# Domain separator of a receipt's signature.
RECEIPT = b"swarmd judge receipt v1"
# A specialty is given up if this many consecutive numbers name no task.
MAX_FAILURES = 16
# How many numbers are tried to find a held-out text. One text of sixteen is held out, so 512 tries fail once
# in 10^14 questions.
MAX_TRIES = 512


class Regenerating(Protocol):
    @property
    def curriculum(self) -> Curriculum: ...
    def task(self, ref: TaskRef) -> Task | None: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """The public terms of a window: everything except its seed."""

    curriculum: str  # the curriculum's digest
    number: int  # 1, 2, 3 …
    opens: int  # seconds since 1970
    closes: int
    questions: int


def commitment(terms: Terms, seed: bytes) -> str:
    """Return the SHA-256 of the terms and the seed.

    It commits the judge to both and reveals nothing about the seed, which has 256 random bits.
    """
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a window's seed has {SEED_BYTES} bytes, not {len(seed)}")
    parts = (terms.curriculum, terms.number, terms.opens, terms.closes, terms.questions, seed.hex())
    return sha256("\n".join(("swarmd judge window v1", *map(str, parts))).encode()).hexdigest()


def place_in_set(seed: bytes, peer: str, place: int, questions: int) -> int:
    """Return the index in the set of this peer's question number `place`, counted from 0.

    Each peer goes through the set cyclically from its own start.
    """
    return (_number(seed, f"peer {peer}") + place) % questions


def question(tasks: Regenerating, seed: bytes, index: int) -> Task:
    """Return the question at place `index` of the held-out set.

    Raises NoQuestion if its specialty generates none.
    """
    curriculum = tasks.curriculum
    specialties = curriculum.specialties
    specialty = specialties[_number(seed, f"specialty {index}") % len(specialties)]
    found, failures = None, 0
    for attempt in range(MAX_TRIES):
        task = tasks.task(
            TaskRef(
                specialty, HELD_OUT + _number(seed, f"question {index} {attempt}") % (HELD_OUT_END - HELD_OUT)
            )
        )
        if task is None:
            failures += 1
            if failures == MAX_FAILURES and found is None:
                break
        elif specialty not in curriculum.held_by_text or curriculum.holds_out(task):
            return task
        else:
            found = task
    if found is None:
        raise NoQuestion(
            f"{specialty} of {curriculum.name} makes no question: {MAX_FAILURES} tries failed. Fix its"
            " tasks, and start again."
        )
    return found


def _number(seed: bytes, purpose: str) -> int:
    """Derive 64 bits for a purpose.

    The bias of a remainder of these bits is below one in 10^9.
    """
    return int.from_bytes(hmac.digest(seed, purpose.encode(), "sha256")[:8], "big")


def checked_receipt(receipt: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a receipt's fields if the judge that it names has signed it, else None."""
    try:
        fields: Mapping[str, Any] = json.loads(receipt["receipt"])
        # Only one spelling of the signature is accepted.
        signature = receipt["signature"] if re.fullmatch("[0-9a-f]{128}", receipt["signature"]) else ""
        genuine = verify(fields["judge"], RECEIPT, receipt["receipt"].encode(), bytes.fromhex(signature))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return fields if genuine else None
