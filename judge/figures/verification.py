"""One upload of weights and its outcome. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from judge.figures.leaderboard import ScoreTally, by_specialty, tally
from p2p.types import PeerId
from swarmd.tasks.answers import pass_at

State = Literal["queued", "running", "done", "refused"]


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


@dataclass(frozen=True, slots=True)
class Verification:
    """An upload and its outcome so far."""

    upload: Upload
    state: State
    # Arrival time, in seconds since the epoch by the judge's clock.
    at: float
    ended: float | None = None
    error: str | None = None  # why it was refused
    remedy: str | None = None
    receipt: str | None = None  # set when it is done
    signature: str | None = None
    right: float = 0.0  # sum of the rewards
    questions: int = 0

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        upload = self.upload
        said: dict[str, Any] = {
            "tier": "verified",
            "verification": upload.id,
            "peer": upload.peer,
            "state": self.state,
            "at": self.at,
            "model": upload.model,
            "lora_rank": upload.lora_rank,
            "weights": upload.digest,
            "bytes": upload.size,
            "answers": upload.answers,
        }
        if self.state == "refused":
            said |= {"error": self.error, "remedy": self.remedy}
        if self.state == "done":
            score = ScoreTally(self.right, self.questions)
            said |= {
                "ended": self.ended,
                "score": score.share,
                "low": score.interval.low,
                "high": score.interval.high,
                "right": self.right,
                "n": self.questions,
            }
        return said


def found(upload: Upload, answers: Sequence[VerifiedAnswer]) -> Mapping[str, Any]:
    """Compute the figures of a receipt and of a page.

    They are the score by specialty, pass@k, and each question by its reference, so that anyone can ask it
    again.
    """
    specialties = by_specialty([(answer.specialty, answer.reward) for answer in answers])
    # The greedy answer is excluded from the samples.
    sampled = upload.answers - 1
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
