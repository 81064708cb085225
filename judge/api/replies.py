"""The judge's replies, for OpenAPI and the page "API". docs/judge-protocol.md describes them in words.

Times are seconds since 1970 by the judge's clock, shares are in [0, 1]. A field without a value here is not
in every reply.
"""

from typing import Annotated, Any

from pydantic import BaseModel, Field

PEER = "12D3KooWGrT5fM8cVnfZrT2W7VZSRwZ5eEnhYf3oWwJ9sXyLb2vQ"
DIGEST = "5f1c0d9a7e3b2468"

Schema = Annotated[int, Field(description="version of this document's form", examples=[1])]
PeerName = Annotated[str, Field(examples=[PEER])]
Specialty = Annotated[str, Field(examples=["basic_arithmetic"])]
ModelName = Annotated[str, Field(examples=["tiny"])]
Id = Annotated[str, Field(examples=["0f3a2b1c4d5e6f708192a3b4c5d6e7f8"])]
Time = Annotated[float, Field(examples=[1795000000.0])]
Share = Annotated[float, Field(examples=[0.38])]
Low = Annotated[float, Field(description="lower end of the 95 % interval of the share", examples=[0.29])]
High = Annotated[float, Field(description="upper end of it", examples=[0.48])]
Right = Annotated[float, Field(description="sum of the rewards", examples=[38.0])]
Questions = Annotated[int, Field(description="how many questions the share is of", examples=[100])]
Reward = Annotated[
    float, Field(description="1: right, 0: wrong; own tasks may give any in between", examples=[1.0])
]
Reason = Annotated[str, Field(examples=["correct"])]
Signature = Annotated[str, Field(description="Ed25519, hexadecimal", examples=["7c1e…"])]
Receipt = Annotated[
    str,
    Field(description="JSON text, signed letter for letter", examples=['{"schema":1,"judge":"12D3KooW…"}']),
]
Digest = Annotated[
    str,
    Field(
        description="of the questions; the swarm's digest, in an invitation, is another", examples=[DIGEST]
    ),
]


class Document(BaseModel):
    schema_: Schema = Field(alias="schema")


class QuestionReply(BaseModel):
    evaluation: Id
    question: Annotated[str, Field(examples=["Calculate 7 - 3 * 2."])]
    seconds: Annotated[float, Field(description="left to answer", examples=[120.0])]
    answers: Annotated[int, Field(description="wanted", examples=[1])]
    window: Annotated[int, Field(examples=[12])]
    commitment: Annotated[str, Field(examples=["9b1d…"])]


class QuestionsReply(BaseModel):
    judge: PeerName
    evaluations: list[QuestionReply]


class GradeReply(BaseModel):
    evaluation: Id
    reward: Reward
    reason: Reason
    specialty: Specialty
    answered: Annotated[int, Field(description="questions since the beginning", examples=[212])]
    total: Annotated[float, Field(description="sum of the rewards since the beginning", examples=[71.0])]
    score: Share
    n: Questions
    number: Annotated[int, Field(examples=[213])]
    low: Low
    high: High
    rewards: list[Reward]
    reasons: list[Reason]
    receipt: Receipt
    signature: Signature


class QueuedReply(BaseModel):
    verification: Id
    state: Annotated[str, Field(examples=["queued"])]
    place: Annotated[int | None, Field(examples=[1])]


class RefusalReply(BaseModel):
    error: Annotated[str, Field(examples=["you ask too often"])]
    remedy: Annotated[str, Field(examples=["Ask again in 1 s; set judge.every higher."])]


class CurriculumReply(BaseModel):
    name: Annotated[str, Field(examples=["tiny-9"])]
    digest: Digest


class JudgeReply(Document):
    judge: PeerName
    curriculum: CurriculumReply
    questions: Annotated[int, Field(description="that may be asked for at once", examples=[8])]
    answers: Annotated[int, Field(description="to each of them", examples=[16])]
    seconds: Annotated[float, Field(description="to answer", examples=[120.0])]


class PassAtReply(BaseModel):
    score: Share
    n: Questions


class TallyReply(PassAtReply):
    low: Low
    high: High
    right: Right


class VerifiedScore(BaseModel):
    tier: Annotated[str, Field(examples=["verified"])]
    verification: Id
    peer: PeerName
    state: Annotated[str, Field(description="queued, running, done or refused", examples=["done"])]
    at: Time
    model: ModelName
    lora_rank: int | None
    weights: Annotated[str, Field(description="SHA-256 of the file", examples=["ab12…"])]
    bytes: Annotated[int, Field(examples=[1_420_000])]
    answers: Annotated[int, Field(examples=[1])]
    error: str | None = None
    remedy: str | None = None
    ended: Time | None = None
    score: Share | None = None
    low: Low | None = None
    high: High | None = None
    right: Right | None = None
    n: Questions | None = None
    benchmarks: Annotated[
        dict[str, tuple[float, int]] | None,
        Field(description="rewards and questions, in no score", examples=[{"gsm8k": [31.0, 50]}]),
    ] = None


class PeerFields(TallyReply):
    """A peer; its score is that of its last `window` questions."""

    peer: PeerName
    nickname: Annotated[str, Field(examples=["brave-otter"])]
    model: ModelName
    first_seen: Time
    last_seen: Time
    answered: Annotated[int, Field(examples=[212])]
    unanswered: Annotated[int, Field(description="questions not answered in time", examples=[3])]
    reward: Annotated[float, Field(description="sum of the rewards since the beginning", examples=[71.0])]
    curve: Annotated[
        list[tuple[int, float]],
        Field(description="questions, and rewards so far", examples=[[[1, 0.0], [212, 71.0]]]),
    ]
    specialties: Annotated[
        dict[str, TallyReply],
        Field(examples=[{"bf": {"score": 0.5, "low": 0.24, "high": 0.76, "right": 6, "n": 12}}]),
    ]
    always: TallyReply
    said: Annotated[
        dict[str, Any], Field(description="of itself", examples=[{"sharing": "swarm", "hardware": "cpu"}])
    ]
    pass_at: Annotated[dict[str, PassAtReply], Field(examples=[{"1": {"score": 0.38, "n": 100}}])]
    tier: Annotated[str, Field(examples=["reported"])]
    verified: VerifiedScore | None


class BoardPeerReply(PeerFields):
    rank: Annotated[int, Field(examples=[1])]
    rank_from: Annotated[int, Field(description="chance leaves open the ranks from here", examples=[1])]
    rank_to: Annotated[int, Field(description="to here", examples=[4])]


class LeaderboardReply(Document):
    curriculum: CurriculumReply
    window: Annotated[int, Field(description="the score is of the last so many questions", examples=[100])]
    listed_answers: Annotated[int, Field(description="answers that a peer needs to be listed", examples=[10])]
    new_texts: Annotated[dict[str, float] | None, Field(examples=[{"basic_arithmetic": 0.97}])]
    tiers: Annotated[dict[str, str], Field(examples=[{"reported": "The node answered over the network. …"}])]
    listed: Annotated[int, Field(examples=[42])]
    unlisted: Annotated[int, Field(examples=[3])]
    matching: Annotated[int, Field(description="listed peers that the parameters ask for", examples=[42])]
    answers: Annotated[int, Field(description="of all peers", examples=[81_204])]
    peers: list[BoardPeerReply]
    more_after: Annotated[int | None, Field(description="the next page's `after`", examples=[40])]


class AnswerTextReply(BaseModel):
    text: Annotated[str, Field(examples=["<answer>1</answer>"])]
    ended: bool


class FurtherReply(AnswerTextReply):
    reason: Reason
    reward: Reward


class HistoryReply(BaseModel):
    evaluation: Id
    number: Annotated[int, Field(description="among the peer's questions", examples=[212])]
    round: Annotated[int, Field(examples=[530])]
    model: ModelName
    specialty: Specialty
    n: Annotated[
        int,
        Field(
            description="the question's number: `swarmd task show` makes it again", examples=[1_000_000_123]
        ),
    ]
    asked_at: Time
    seconds: Annotated[float | None, Field(description="until the answer", examples=[1.4])]
    answer: Annotated[str | None, Field(examples=["<answer>1</answer>"])]
    ended: Annotated[bool | None, Field(description="false: it was cut off", examples=[True])]
    reward: Reward
    reason: Reason | None
    total: Annotated[float, Field(description="right answers so far", examples=[71.0])]
    answers: Annotated[int, Field(description="asked for", examples=[1])]
    correct: Annotated[int | None, Field(examples=[1])]
    further: list[FurtherReply] | None = None
    name: str | None = None
    sharing: str | None = None
    strategy: str | None = None
    version: str | None = None
    hardware: str | None = None
    local: int | None = None
    external: int | None = None


class PeerReply(PeerFields, Document):
    evaluations: list[HistoryReply]
    more_before: Annotated[int | None, Field(description="the next page's `before`", examples=[112])]


class ModelArmsReply(BaseModel):
    model: ModelName
    swarm: Annotated[int, Field(description="nodes that share", examples=[24])]
    solo: Annotated[int, Field(examples=[21])]


Rounds = Annotated[list[int], Field(description="ends of the bins", examples=[[5, 10]])]
Figures = Annotated[list[float | None], Field(examples=[[0.6, 1.9]])]
Levels = Annotated[list[float | None], Field(examples=[[0.41, 0.03]])]


class ArmReply(BaseModel):
    """Columns: one entry for each bin of rounds."""

    round: Rounds
    peers: Annotated[list[int], Field(examples=[[24, 22]])]
    reward: Figures
    low: Figures
    high: Figures


class TestsReply(BaseModel):
    """Columns: one entry for each bin that both sides have enough peers in."""

    round: Rounds
    difference: Figures
    low: Figures
    high: Figures
    p: Levels
    holm: Levels
    benjamini_hochberg: Levels


class SignificantFromReply(BaseModel):
    holm: Annotated[int | None, Field(examples=[120])]
    benjamini_hochberg: Annotated[int | None, Field(examples=[85])]


class HorizonReply(BaseModel):
    round: Annotated[int, Field(examples=[100])]
    pairs: Annotated[int, Field(examples=[18])]
    difference: Annotated[float | None, Field(examples=[2.4])]
    evidence: Annotated[float | None, Field(examples=[31.0])]


class AnytimeReply(BaseModel):
    verdict: Annotated[str, Field(description="better, worse or not known: the swarm", examples=["better"])]
    p: Annotated[float | None, Field(examples=[0.012])]
    horizons: list[HorizonReply]


class ComparisonReply(Document):
    model: Annotated[str | None, Field(examples=["tiny"])]
    models: list[ModelArmsReply]
    level: Annotated[float, Field(examples=[0.05])]
    fewest_peers: Annotated[int, Field(examples=[6])]
    swarm: ArmReply
    solo: ArmReply
    tests: TestsReply
    significant_from: SignificantFromReply
    anytime: AnytimeReply


class LearntPeerReply(BaseModel):
    rank: Annotated[int, Field(examples=[1])]
    peer: PeerName
    nickname: Annotated[str, Field(examples=["brave-otter"])]
    name: Annotated[str | None, Field(examples=["otter"])]


class LearnerReply(LearntPeerReply):
    learnt: Annotated[
        dict[str, int],
        Field(description="rollouts that it trained on, by teacher", examples=[{PEER: 15}]),
    ]
    others: Annotated[int, Field(description="rollouts of all other authors that it names", examples=[3])]


class LearntReply(Document):
    """Every count is the learner's own word."""

    learners: list[LearnerReply]
    teachers: list[LearntPeerReply]


class WindowReply(BaseModel):
    number: Annotated[int, Field(examples=[12])]
    opens: Annotated[int, Field(examples=[1_795_000_000])]
    closes: Annotated[int, Field(examples=[1_795_086_400])]
    questions: Annotated[int, Field(examples=[1000])]
    commitment: Annotated[str, Field(description="SHA-256, hexadecimal", examples=["9b1d…"])]
    published: Time
    opened: Time | None
    revealed: Time | None
    seed: Annotated[str | None, Field(description="null until it is revealed", examples=["41c0…"])]


class WindowsReply(Document):
    judge: PeerName
    curriculum: Digest
    windows: list[WindowReply]
    more_before: Annotated[int | None, Field(examples=[3])]


class EvaluationReply(Document):
    receipt: Receipt
    signature: Signature
    answers: list[AnswerTextReply]
    window: WindowReply | None


class HealthReply(BaseModel):
    status: Annotated[str, Field(examples=["ok"])]
    curriculum: Digest
    scorer: Annotated[str, Field(description="curriculum by whose rules it scores", examples=["sapo-9"])]
    open: Annotated[int, Field(description="questions that wait for an answer", examples=[3])]
    scoring: Annotated[int, Field(description="answers that wait for the verifier", examples=[0])]


class VerifiableModelReply(BaseModel):
    base: Annotated[str, Field(description="fingerprint of the base weights", examples=["0123456789abcdef"])]
    tensors: Annotated[int, Field(examples=[38])]


class VerifiableReply(Document):
    judge: PeerName
    models: Annotated[
        dict[str, VerifiableModelReply],
        Field(examples=[{"tiny": {"base": "0123456789abcdef", "tensors": 38}}]),
    ]
    hub: Annotated[str | None, Field(examples=["https://huggingface.co"])]
    bytes: Annotated[int, Field(description="of an upload, at most", examples=[100_000_000])]
    header: Annotated[int, Field(description="bytes of the file's header, at most", examples=[1_048_576])]
    questions: Annotated[int, Field(description="of each specialty", examples=[20])]


class VerifiedQuestionReply(FurtherReply):
    specialty: Specialty
    n: Annotated[int, Field(examples=[1_000_000_123])]
    correct: Annotated[int, Field(examples=[1])]


class VerificationReply(VerifiedScore, Document):
    place: Annotated[int | None, Field(description="in the queue", examples=[1])]
    source: Annotated[str | None, Field(description="where it was fetched from")] = None
    specialties: Annotated[
        dict[str, tuple[float, int]] | None, Field(description="rewards, and questions")
    ] = None
    pass_at: dict[str, float] | None = None
    receipt: Receipt | None = None
    signature: Signature | None = None
    questions: list[VerifiedQuestionReply] | None = None
    more_after: int | None = None
