"""What the judge answers with in its protocol, for OpenAPI. docs/judge-protocol.md has the same in words."""

from pydantic import BaseModel


class QuestionReply(BaseModel):
    evaluation: str
    question: str
    seconds: float


class CommittedQuestion(QuestionReply):
    answers: int
    window: int
    commitment: str


class QuestionsReply(BaseModel):
    judge: str
    evaluations: list[CommittedQuestion]


class GradeReply(BaseModel):
    evaluation: str
    reward: float
    reason: str
    specialty: str
    answered: int
    total: float
    score: float
    n: int


class ReceiptReply(GradeReply):
    number: int
    low: float
    high: float
    rewards: list[float]
    reasons: list[str]
    receipt: str
    signature: str


class QueuedReply(BaseModel):
    verification: str
    state: str
    place: int | None


class RefusalReply(BaseModel):
    error: str
    remedy: str
