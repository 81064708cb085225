"""Examples of the judge's replies and of requests to it. docs/judge-protocol.md describes them in words.

Times are seconds since 1970 by the judge's clock, shares are in [0, 1].
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class Reply(NamedTuple):
    example: Mapping[str, Any]  # has every possible field
    fields: Mapping[str, str]  # meanings that a field's name does not show
    sometimes: Collection[str] = ()  # fields that are not in every reply


_PEER = "12D3KooWGrT5fM8cVnfZrT2W7VZSRwZ5eEnhYf3oWwJ9sXyLb2vQ"
_DIGEST = "5f1c0d9a7e3b2468"
_ID = "0f3a2b1c4d5e6f708192a3b4c5d6e7f8"
_AT = 1_795_000_000.0
_CURRICULUM = {"name": "tiny-9", "digest": _DIGEST}
_OF_QUESTIONS = "of the questions; the swarm's digest, in an invitation, is another"
_SIGNED = {"receipt": '{"schema":1,"judge":"12D3KooW…"}', "signature": "7c1e…"}
_SIGNED_FIELDS = {"receipt": "JSON text, signed letter for letter", "signature": "Ed25519, hexadecimal"}
_TALLY = {"score": 0.38, "low": 0.29, "high": 0.48, "right": 38.0, "n": 100}
_TALLY_FIELDS = {
    "low": "lower end of the 95 % interval of the score",
    "high": "upper end of it",
    "right": "sum of the rewards",
    "n": "how many questions the score is of",
}
_GIVEN = {"text": "<answer>1</answer>", "ended": True}
_SCORED = {**_GIVEN, "reason": "correct", "reward": 1.0}
_REWARD = "1: right, 0: wrong; own tasks may give any in between"
_WINDOW = {
    "number": 12, "opens": 1_795_000_000, "closes": 1_795_086_400, "questions": 1000, "commitment": "9b1d…",
    "published": _AT, "opened": _AT, "revealed": _AT, "seed": "41c0…",
}  # fmt: skip
_WINDOW_FIELDS = {"commitment": "SHA-256, hexadecimal", "seed": "null until it is revealed"}
_VERIFIED = {
    "tier": "verified", "verification": _ID, "peer": _PEER, "state": "done", "at": _AT, "model": "tiny",
    "lora_rank": 1, "weights": "ab12…", "bytes": 1_420_000, "answers": 1, "ended": _AT, **_TALLY,
}  # fmt: skip
_VERIFIED_FIELDS = {
    "weights": "SHA-256 of the file",
    "state": "queued, running, done or refused",
}
_PEER_EXAMPLE = {
    "peer": _PEER, "nickname": "brave-otter", "model": "tiny", "first_seen": _AT, "last_seen": _AT,
    "answered": 212, "unanswered": 3, "reward": 71.0, "curve": [[1, 0.0], [212, 71.0]], **_TALLY,
    "specialties": {"bf": {"score": 0.5, "low": 0.24, "high": 0.76, "right": 6, "n": 12}},
    "always": {"score": 0.33, "low": 0.24, "high": 0.44, "right": 71.0, "n": 215},
    "said": {"sharing": "swarm", "hardware": "cpu"}, "pass_at": {"1": {"score": 0.38, "n": 100}},
    "tier": "verified", "verified": _VERIFIED,
}  # fmt: skip
_PEER_FIELDS = {
    **_TALLY_FIELDS,
    **_VERIFIED_FIELDS,
    "unanswered": "questions not answered in time",
    "reward": "sum of the rewards since the beginning; of one question, its own",
    "curve": "questions, and rewards so far",
    "said": "of itself",
}

QUESTIONS_BODY = {
    "round": 530, "curriculum": _DIGEST, "asker": {"model": "tiny", "sharing": "swarm"}, "questions": 1,
}  # fmt: skip
ANSWERS_BODY = {"answers": [_GIVEN]}
REFUSAL = Reply({"error": "you ask too often", "remedy": "Ask again in 1 s; set judge.every higher."}, {})
QUESTIONS = Reply(
    {
        "judge": _PEER,
        "evaluations": [
            {
                "evaluation": _ID, "question": "Calculate 7 - 3 * 2.", "seconds": 120.0, "answers": 1,
                "window": 12, "commitment": "9b1d…",
            }
        ],
    },
    {"seconds": "left to answer", "answers": "wanted"},
)  # fmt: skip
GRADE = Reply(
    {
        "evaluation": _ID, "reward": 1.0, "reason": "correct", "specialty": "basic_arithmetic",
        "answered": 212, "total": 71.0, "score": 0.38, "n": 100, "number": 213, "low": 0.29, "high": 0.48,
        "rewards": [1.0], "reasons": ["correct"], **_SIGNED,
    },
    {
        **_TALLY_FIELDS,
        **_SIGNED_FIELDS,
        "reward": _REWARD,
        "answered": "questions since the beginning",
        "total": "sum of the rewards since the beginning",
    },
)  # fmt: skip
QUEUED = Reply({"verification": _ID, "state": "queued", "place": 1}, {})
JUDGE = Reply(
    {
        "schema": 1, "judge": _PEER, "curriculum": _CURRICULUM, "questions": 8, "answers": 16,
        "seconds": 120.0,
    },
    {
        "digest": _OF_QUESTIONS,
        "questions": "that may be asked for at once",
        "answers": "to each of them",
        "seconds": "to answer",
    },
)  # fmt: skip
LEADERBOARD = Reply(
    {
        "schema": 1, "curriculum": _CURRICULUM, "window": 100, "listed_answers": 10,
        "new_texts": {"basic_arithmetic": 0.97},
        "tiers": {"reported": "The node answered over the network. …"},
        "listed": 42, "unlisted": 3, "matching": 42, "answers": 81_204,
        "peers": [{"rank": 1, "rank_from": 1, "rank_to": 4, **_PEER_EXAMPLE}], "more_after": 40,
    },
    {
        **_PEER_FIELDS,
        "digest": _OF_QUESTIONS,
        "window": "the score is of the last so many questions",
        "listed_answers": "answers that a peer needs to be listed",
        "matching": "listed peers that the parameters ask for",
        "answers": "of all peers",
        "rank_from": "chance leaves open the ranks from here",
        "rank_to": "to here",
        "more_after": "the next page's `after`",
    },
)  # fmt: skip
PEER = Reply(
    {
        "schema": 1, **_PEER_EXAMPLE,
        "evaluations": [
            {
                "evaluation": _ID, "number": 212, "round": 530, "model": "tiny",
                "specialty": "basic_arithmetic", "n": 1_000_000_123, "asked_at": _AT, "seconds": 1.4,
                "answer": "<answer>1</answer>", "ended": True, "reward": 1.0, "reason": "correct",
                "total": 71.0, "answers": 2, "correct": 1, "further": [_SCORED], "name": "otter",
                "sharing": "swarm", "strategy": "uniform", "version": "0.1.0", "hardware": "cpu", "local": 4,
                "external": 4,
            }
        ],
        "more_before": 112,
    },
    {
        **_PEER_FIELDS,
        "number": "among the peer's questions",
        "n": "questions; of one, its number: `swarmd task show` makes it again",
        "seconds": "until the answer",
        "ended": "false: it was cut off",
        "total": "right answers so far",
        "answers": "asked for",
        "more_before": "the next page's `before`",
    },
    {
        "further", "name", "sharing", "strategy", "version", "hardware", "local", "external",
    },
)  # fmt: skip
_ARM = {
    "round": [5, 10], "peers": [24, 22], "reward": [0.6, 1.9], "low": [0.5, 1.6], "high": [0.7, 2.2],
}  # fmt: skip
COMPARISON = Reply(
    {
        "schema": 1, "model": "tiny", "models": [{"model": "tiny", "swarm": 24, "solo": 21}],
        "level": 0.05, "fewest_peers": 6, "swarm": _ARM, "solo": _ARM,
        "anytime": {
            "verdict": "better", "p": 0.012,
            "horizons": [{"round": 160, "pairs": 18, "difference": 2.4, "evidence": 31.0}],
        },
    },
    {
        "swarm": "nodes that share",
        "round": "ends of the bins",
        "verdict": "better, worse or not known: the swarm",
    },
)  # fmt: skip
WINDOWS = Reply(
    {"schema": 1, "judge": _PEER, "curriculum": _DIGEST, "windows": [_WINDOW], "more_before": 3},
    {**_WINDOW_FIELDS, "curriculum": _OF_QUESTIONS},
)
EVALUATION = Reply(
    {"schema": 1, **_SIGNED, "answers": [_GIVEN], "window": _WINDOW}, {**_SIGNED_FIELDS, **_WINDOW_FIELDS}
)
HEALTH = Reply(
    {"status": "ok", "curriculum": _DIGEST, "scorer": "sapo-9", "open": 3, "scoring": 0},
    {
        "curriculum": _OF_QUESTIONS,
        "scorer": "curriculum by whose rules it scores",
        "open": "questions that wait for an answer",
        "scoring": "answers that wait for the verifier",
    },
)
VERIFIABLE = Reply(
    {
        "schema": 1, "judge": _PEER, "models": {"tiny": {"base": "0123456789abcdef", "tensors": 38}},
        "bytes": 100_000_000, "header": 262_144, "questions": 20,
    },
    {
        "base": "fingerprint of the base weights",
        "bytes": "of an upload, at most",
        "header": "bytes of the file's header, at most",
        "questions": "of each specialty",
    },
)  # fmt: skip
VERIFICATION = Reply(
    {
        "schema": 1, **_VERIFIED, "error": "the weights are damaged", "remedy": "Upload them again.",
        "place": 1, "specialties": {"bf": [6.0, 12]},
        "pass_at": {"1": 0.38}, **_SIGNED,
        "questions": [{**_SCORED, "specialty": "bf", "n": 1_000_000_123, "correct": 1}], "more_after": 100,
    },
    {
        **_TALLY_FIELDS,
        **_VERIFIED_FIELDS,
        **_SIGNED_FIELDS,
        "error": "of weights that were refused",
        "place": "in the queue",
        "specialties": "rewards, and questions",
        "reward": _REWARD,
    },
    {
        *_TALLY, *_SIGNED, "ended", "error", "remedy", "specialties", "pass_at",
        "questions", "more_after",
    },
)  # fmt: skip
