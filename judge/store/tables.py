"""The tables of the judge's database, the same on SQLite and PostgreSQL.

Evaluations that count have a `number`: graded answers, and questions that lapsed. `low` is the lower end of
the interval by which peers are ranked.
"""

import re
from typing import Any

from sqlalchemy import (
    REAL,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeEngine

from judge.figures.leaderboard import LISTED_ANSWERS

_ESCAPED = {"\\": "\\\\", "\0": "\\0"}
_MEANT = {escaped: letter for letter, escaped in _ESCAPED.items()}


class AnyText(TypeDecorator[str]):
    """A text that a peer chose.

    PostgreSQL's text cannot hold NUL, so there it is stored as `\\0`, and a backslash as two.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or dialect.name != "postgresql":
            return value
        return re.sub(r"[\\\0]", lambda found: _ESCAPED[found[0]], value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or dialect.name != "postgresql":
            return value
        return re.sub(r"\\[\\0]", lambda found: _MEANT[found[0]], value)


# SQLite's strict tables know few types; PostgreSQL's text has to be sorted byte by byte, as SQLite sorts it.
NUMBER = BigInteger().with_variant(Integer(), "sqlite")
REAL_NUMBER: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")
NAME = Text().with_variant(Text(collation="C"), "postgresql")

metadata = MetaData()


def _said() -> list[Column[Any]]:
    """Return the columns of the peer's stated attributes (judge/types.py), except round and model."""
    texts = [Column(name, AnyText) for name in ("name", "sharing", "strategy", "version", "hardware")]
    return [*texts, Column("local", NUMBER), Column("external", NUMBER)]


about = Table(
    "about",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_strict=True,
)

peers = Table(
    "peers",
    metadata,
    Column("peer", NAME, primary_key=True),
    Column("model", AnyText, nullable=False),
    Column("first_seen", REAL_NUMBER, nullable=False),
    Column("last_seen", REAL_NUMBER, nullable=False),
    Column("sequence", NUMBER, nullable=False),
    Column("answered", NUMBER, nullable=False),
    Column("unanswered", NUMBER, nullable=False),
    Column("reward", REAL_NUMBER, nullable=False),
    Column("low", REAL_NUMBER, nullable=False),
    Column("window_number", NUMBER),  # the newest window in which the peer was asked
    Column("window_asked", NUMBER, nullable=False),  # number of questions asked in that window
    Column("recent_right", REAL_NUMBER, nullable=False),  # sum of the rewards of its newest questions
    Column("recent_n", NUMBER, nullable=False),  # number of its newest questions
    Column("nickname", NAME, nullable=False),
    *_said(),
    sqlite_strict=True,
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("id", NAME, primary_key=True),
    Column("peer", NAME, ForeignKey(peers.c.peer), nullable=False),
    Column("round", NUMBER, nullable=False),
    Column("model", AnyText, nullable=False),
    Column("specialty", NAME, nullable=False),
    Column("n", NUMBER, nullable=False),
    Column("asked_at", REAL_NUMBER, nullable=False),
    Column("state", NAME, nullable=False),
    Column("number", NUMBER),
    Column("reward", REAL_NUMBER),
    Column("reason", Text),
    Column("total", REAL_NUMBER),
    Column("seconds", REAL_NUMBER),
    Column("answer", AnyText),
    Column("ended", NUMBER),
    # Number of answers asked for; `answer`, `ended`, `reward` and `reason` belong to the first one.
    Column("answers", NUMBER, nullable=False),
    Column("correct", NUMBER),  # number of right answers
    Column("further", AnyText),  # the answers after the first, as JSON
    Column("window_number", NUMBER),
    Column("place", NUMBER),  # the question's place in the peer's order of the window
    Column("answered_at", REAL_NUMBER),
    *_said(),
    CheckConstraint("state IN ('open', 'graded', 'unanswered', 'void')"),
    CheckConstraint(
        "(state = 'graded') = (number IS NOT NULL AND reward IS NOT NULL AND answer IS NOT NULL)"
    ),
    Index("evaluations_asked", "asked_at"),
    sqlite_strict=True,
)

progress = Table(  # a peer's progress with one model, in normalised rounds: judge/figures/rounds.py
    "progress",
    metadata,
    Column("peer", NAME, primary_key=True),
    Column("model", AnyText, primary_key=True),
    Column("sharing", NAME, nullable=False),
    Column("bin", NUMBER, nullable=False),
    Column("answers", NUMBER, nullable=False),
    Column("reward", REAL_NUMBER, nullable=False),
    Column("earned", REAL_NUMBER),
    Column("counts", NUMBER, nullable=False),
    CheckConstraint("sharing IN ('swarm', 'solo')"),
    sqlite_strict=True,
)

arm_bins = Table(  # sums over all peers of an arm: a model, in the swarm or solo
    "arm_bins",
    metadata,
    Column("model", AnyText, primary_key=True),
    Column("sharing", NAME, primary_key=True),
    Column("bin", NUMBER, primary_key=True),
    Column("peers", NUMBER, nullable=False),
    Column("total", REAL_NUMBER, nullable=False),
    Column("squares", REAL_NUMBER, nullable=False),
    sqlite_strict=True,
)

arm_values = Table(  # each peer's value at a few of the bins, in the order in which the peers reached them
    "arm_values",
    metadata,
    Column("model", AnyText, primary_key=True),
    Column("sharing", NAME, primary_key=True),
    Column("bin", NUMBER, primary_key=True),
    Column("place", NUMBER, primary_key=True),
    Column("value", REAL_NUMBER, nullable=False),
    sqlite_strict=True,
)

windows = Table(
    "windows",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    Column("curriculum", NAME, nullable=False),
    Column("opens", NUMBER, nullable=False),
    Column("closes", NUMBER, nullable=False),
    Column("questions", NUMBER, nullable=False),
    Column("seed", Text, nullable=False),
    Column("published", REAL_NUMBER, nullable=False),
    Column("opened", REAL_NUMBER),
    Column("revealed", REAL_NUMBER),
    sqlite_strict=True,
)

# Uploaded weights (judge/verified). The uploading peer may not be in the table `peers`.
verifications = Table(
    "verifications",
    metadata,
    Column("id", NAME, primary_key=True),
    Column("peer", NAME, nullable=False),
    Column("model", AnyText, nullable=False),
    Column("lora_rank", NUMBER),  # null: all weights
    Column("digest", NAME, nullable=False),
    Column("size", NUMBER, nullable=False),
    Column("answers", NUMBER, nullable=False),  # answers to each question
    Column("sequence", NUMBER, nullable=False),
    Column("at", REAL_NUMBER, nullable=False),
    Column("state", NAME, nullable=False),  # queued, running, done, refused
    Column("tries", NUMBER, nullable=False),
    Column("ended", REAL_NUMBER),
    Column("error", Text),
    Column("remedy", Text),
    Column("receipt", Text),
    Column("signature", Text),
    Column("correct", REAL_NUMBER),  # sum of the rewards
    Column("questions", NUMBER),
    Column("found", AnyText),  # each question with its greedy answer, as JSON
    CheckConstraint("state IN ('queued', 'running', 'done', 'refused')"),
    CheckConstraint("(state = 'done') = (receipt IS NOT NULL AND found IS NOT NULL)"),
    Index("verifications_of_peer", "peer", "ended"),
    sqlite_strict=True,
)

moderation = Table(
    "moderation",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    Column("at", REAL_NUMBER, nullable=False),
    Column("act", NAME, nullable=False),  # hide, ban, undo
    Column("peer", NAME, nullable=False),
    Column("why", AnyText, nullable=False),
    CheckConstraint("act IN ('hide', 'ban', 'undo')"),
    Index("moderation_of_peer", "peer", "number"),
    sqlite_strict=True,
)

listed = peers.c.answered >= LISTED_ANSWERS
_open = evaluations.c.state == "open"
_all = arm_bins.c.bin == 0
Index("peers_board", peers.c.low.desc(), peers.c.peer, sqlite_where=listed, postgresql_where=listed)
Index("evaluations_open", evaluations.c.state, sqlite_where=_open, postgresql_where=_open)
Index(
    "evaluations_of_peer",
    evaluations.c.peer,
    evaluations.c.number,
    unique=True,
)
Index("arm_bins_models", arm_bins.c.peers.desc(), arm_bins.c.model, sqlite_where=_all, postgresql_where=_all)
