"""Errors that a judge's operator can act on, and refusals that its clients can act on.

Every refusal has one form: an HTTP status, the cause, and the remedy.
"""

from dataclasses import dataclass

from p2p.errors import OperatorError


class JudgeError(OperatorError):
    """The judge cannot run."""


class DatabaseInUse(JudgeError):
    """Another judge is using the database."""

    exit_code = 5


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    error: str
    remedy: str  # one sentence
    extra: tuple[tuple[str, int], ...] = ()  # further fields of the JSON answer
    retry_after: int | None = None  # seconds


class Refused(Exception):
    """Carries a Refusal out of a request handler."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.error)
        self.refusal = refusal


def too_often(error: str, again: str, wait: float) -> Refused:
    """Return a refusal (429) of a rate limit. again: the remedy, to which "in … s." is appended."""
    seconds = int(wait) + 1
    return Refused(Refusal(429, error, f"{again} in {seconds} s.", retry_after=seconds))


BAD_SIGNATURE = Refusal(
    401,
    "the signature does not match the request",
    "Sign it with the key of the peer id it names, as docs/judge-protocol.md says.",
)
AHEAD = Refusal(
    400,
    "the sequence number is more than an hour ahead of the judge's clock",
    "Let NTP set your clock: the number is the time in nanoseconds since 1970.",
)
NO_SUCH_QUESTION = Refusal(
    404, "no such question is open", "Ask for a new one; a restart of the judge forgets the open ones."
)
NO_SUCH_ANSWER = Refusal(
    404,
    "no answer with this id is stored",
    "A peer's page lists its evaluations.",
)
BANNED = Refusal(
    403, "this judge's operator has banned your key", "Ask the operator why, or use another judge."
)
OTHER_PEER = Refusal(
    403, "this question was asked of another peer", "Answer only questions that your own key asked for."
)
ALREADY_ANSWERED = Refusal(
    409, "this question has been answered", "Ask for a new one: a question is answered once."
)
TOO_LATE = Refusal(
    410,
    "the deadline of this question has passed; it counts as wrong",
    "Ask for a new one; for a slow node the judge's operator can raise --deadline.",
)
GIVEN_UP = Refusal(
    410,
    "the judge could not score or record the answer; the question does not count",
    "Ask for a new one.",
)
UNHEALTHY = Refusal(
    503,
    "the judge cannot write its database",
    "The judge's operator finds the cause in its log; usually the disk is full.",
)
BUSY = Refusal(503, "the judge is overloaded", "Ask again later.", retry_after=30)
STOPPING = Refusal(
    503, "the judge is stopping", "Send the request again when the judge is back.", retry_after=30
)
CROWDED = Refusal(
    429,
    "your network has too many unanswered questions",
    "Ask again when some are answered or expired; nodes with a record may have more.",
    retry_after=30,
)
NEWCOMERS_TOO_OFTEN = Refusal(
    429,
    "peers of your network that have no record ask too often",
    "Ask again later; nodes with a record are not limited.",
    retry_after=10,
)
DISPLACED = Refusal(
    503,
    "the judge dropped this question to make room for nodes with a record",
    "Ask again later; the question does not count.",
    retry_after=30,
)
DISK_LOW = Refusal(
    503,
    "the judge's disk is nearly full, so it takes no new nodes",
    "Ask again later, or use another judge; nodes with a record are still served.",
    retry_after=600,
)
TOO_LARGE = Refusal(
    413, "the request is too large", "Send a smaller one; an answer may have up to 16,384 characters."
)
TOO_SLOW = Refusal(408, "the request did not arrive in time", "Send it again.")
FAULT = Refusal(500, "internal error of the judge", "Ask again later, and tell the judge's operator.")
