"""One upload of weights and its outcome. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from judge.figures.leaderboard import by_specialty, tally
from p2p.types import PeerId
from swarmd.tasks.answers import pass_at


@dataclass(frozen=True, slots=True)
class Upload:
    """Weights that a peer has uploaded."""

    id: str  # 32 hex digits, unguessable
    peer: PeerId
    model: str
    lora_rank: int | None  # None: all weights
    digest: str  # SHA-256
    size: int  # bytes
    answers: int  # answers to each question; the first is greedy, and counts


class VerifiedAnswer(NamedTuple):
    """A question of a verified evaluation; stored and sent as a list."""

    specialty: str
    n: int
    reward: float  # of the greedy answer
    correct: int  # number of right answers among all
    reason: str
    text: str  # of the greedy answer
    ended: bool


def described(upload: Upload, at: float) -> dict[str, Any]:
    """Return the fields of an upload that its JSON document and its receipt share.

    at: time of its arrival, or of the receipt.
    """
    return {
        "tier": "verified",
        "verification": upload.id,
        "peer": upload.peer,
        "at": at,
        "model": upload.model,
        "lora_rank": upload.lora_rank,
        "weights": upload.digest,
        "bytes": upload.size,
        "answers": upload.answers,
    }


def found(many: int, answers: Sequence[VerifiedAnswer]) -> Mapping[str, Any]:
    """Compute the figures of a receipt and of a page.

    They are the score by specialty, pass@k, and each question by its reference, so that anyone can ask it
    again. many: number of answers to each question.
    """
    specialties = by_specialty([(answer.specialty, answer.reward) for answer in answers])
    # The greedy answer is excluded from the samples.
    sampled = many - 1
    total = tally([(answer.specialty, answer.reward) for answer in answers])
    return {
        "right": total.right,
        "n": total.answers,
        "specialties": {name: [of.right, of.answers] for name, of in specialties.items()},
        "pass_at": {
            str(k): sum(pass_at(k, sampled, a.correct - (a.reward >= 1)) for a in answers) / len(answers)
            for k in (1, 2, 4, 8)
            if k <= sampled and answers
        },
        "questions": [[answer.specialty, answer.n, answer.reward, answer.correct] for answer in answers],
    }
