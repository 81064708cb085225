"""Signed receipts of grades, which anyone can check without the judge. Pure.

A receipt is a JSON text and the judge's Ed25519 signature of it in the domain RECEIPT. docs/judge-protocol.md
lists its fields.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from judge.types import GradedEvaluation
from p2p.identity import Identity
from swarmd.tasks.held_out import RECEIPT


def fields(graded: GradedEvaluation, curriculum: str) -> dict[str, Any]:
    """Return the fields of this evaluation's receipt."""
    return {
        **graded.attributes.said(),
        "evaluation": graded.id,
        "peer": graded.peer,
        "number": graded.number,
        "at": graded.at,
        "curriculum": curriculum,
        "specialty": graded.ref.specialty,
        "n": graded.ref.n,
        "window": graded.window.number,
        "place": graded.place,
        "commitment": graded.window.commitment,
        # The receipt holds the SHA-256 of each answer's text, not the text.
        "answers": [sha256(answer.text.encode()).hexdigest() for answer in graded.answers],
        "rewards": [score.reward for score in graded.scores],
        "reasons": [score.reason.value for score in graded.scores],
    }


def signed(judge: Identity, fields: Mapping[str, Any]) -> dict[str, str]:
    """Sign these fields; return the receipt and its signature as they are sent."""
    text = json.dumps({"schema": 1, "judge": judge.peer_id, **fields}, sort_keys=True, separators=(",", ":"))
    return {"receipt": text, "signature": judge.sign(RECEIPT, text.encode()).hex()}
