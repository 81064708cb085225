"""The tables of the judge's database, alike on SQLite and PostgreSQL. judge/store/migrations makes them.

What counts has a number: graded answers, and questions that lapsed. `low` is the lower end of the score's
interval.
"""

import re
from typing import Any

from sqlalchemy import (
    REAL,
    BigInteger,
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
    """A stranger's text.

    PostgreSQL's text holds no NUL, so there it is written as `\\0`, and a backslash as two.
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


# SQLite's strict tables know few types; PostgreSQL's text is to be sorted byte by byte, as SQLite sorts it.
NUMBER = BigInteger().with_variant(Integer(), "sqlite")
REAL_NUMBER: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")
NAME = Text().with_variant(Text(collation="C"), "postgresql")

metadata = MetaData()


def _said() -> list[Column[Any]]:
    """Return the columns of what a peer says of itself (judge/types.py), but for round and model."""
    texts = [Column(name, AnyText) for name in ("name", "sharing", "strategy", "version", "hardware")]
    return [*texts, Column("local", NUMBER), Column("external", NUMBER)]


about = Table("about", metadata, Column("name", NAME), Column("value", Text))

peers = Table(
    "peers",
    metadata,
    Column("peer", NAME, primary_key=True),
    Column("model", AnyText),
    Column("first_seen", REAL_NUMBER),
    Column("last_seen", REAL_NUMBER),
    Column("sequence", NUMBER),
    Column("answered", NUMBER),
    Column("unanswered", NUMBER),
    Column("reward", REAL_NUMBER),
    Column("low", REAL_NUMBER),
    Column("window_number", NUMBER),  # the newest window that the peer was asked in
    Column("window_asked", NUMBER),  # how often it was asked there
    Column("recent_right", NUMBER),  # right ones of its newest questions
    Column("recent_n", NUMBER),  # number of these
    Column("nickname", NAME),
    Column("round", NUMBER),  # the newest round that it named
    Column("round_at", REAL_NUMBER),  # when it named that
    Column("pace", REAL_NUMBER),  # rounds an hour between the last two that it named
    *_said(),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("id", NAME, primary_key=True),
    Column("peer", NAME, ForeignKey(peers.c.peer)),
    Column("round", NUMBER),
    Column("model", AnyText),
    Column("specialty", NAME),
    Column("n", NUMBER),
    Column("asked_at", REAL_NUMBER),
    Column("state", NAME),
    Column("number", NUMBER),
    Column("reward", REAL_NUMBER),
    Column("reason", Text),
    Column("total", REAL_NUMBER),
    Column("seconds", REAL_NUMBER),
    Column("answer", AnyText),
    Column("ended", NUMBER),
    # Answers asked for; `answer`, `ended`, `reward` and `reason` are of the first.
    Column("answers", NUMBER),
    Column("correct", NUMBER),  # right ones of all of them
    Column("further", AnyText),  # the further answers, as JSON
    Column("window_number", NUMBER),
    Column("place", NUMBER),  # the question's place among the peer's in the window
    Column("answered_at", REAL_NUMBER),
    *_said(),
)

progress = Table(  # of a peer with a model, in normalised rounds: judge/figures/rounds.py
    "progress",
    metadata,
    Column("peer", NAME, primary_key=True),
    Column("model", AnyText, primary_key=True),
    Column("sharing", NAME),
    Column("bin", NUMBER),
    Column("answers", NUMBER),
    Column("reward", REAL_NUMBER),
    Column("earned", REAL_NUMBER),
    Column("counts", NUMBER),
)

arm_bins = Table(  # of all peers of a model that are in the swarm, or solo
    "arm_bins",
    metadata,
    Column("model", AnyText, primary_key=True),
    Column("sharing", NAME, primary_key=True),
    Column("bin", NUMBER, primary_key=True),
    Column("peers", NUMBER),
    Column("total", REAL_NUMBER),
    Column("squares", REAL_NUMBER),
)

arm_values = Table(  # each peer's value at a few of the bins, in the order in which they got there
    "arm_values",
    metadata,
    Column("model", AnyText, primary_key=True),
    Column("sharing", NAME, primary_key=True),
    Column("bin", NUMBER, primary_key=True),
    Column("place", NUMBER, primary_key=True),
    Column("value", REAL_NUMBER),
)

windows = Table(
    "windows",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    Column("curriculum", NAME),
    Column("opens", NUMBER),
    Column("closes", NUMBER),
    Column("questions", NUMBER),
    Column("seed", Text),
    Column("published", REAL_NUMBER),
    Column("opened", REAL_NUMBER),
    Column("revealed", REAL_NUMBER),
)

# Uploaded weights (judge/verified). `peer` need not have asked a question.
verifications = Table(
    "verifications",
    metadata,
    Column("id", NAME, primary_key=True),
    Column("peer", NAME),
    Column("model", AnyText),
    Column("lora_rank", NUMBER),  # null: all weights
    Column("digest", NAME),
    Column("size", NUMBER),
    Column("answers", NUMBER),  # answers to each question
    Column("sequence", NUMBER),
    Column("at", REAL_NUMBER),
    Column("state", NAME),  # queued, running, done, refused
    Column("tries", NUMBER),
    Column("ended", REAL_NUMBER),
    Column("error", Text),
    Column("remedy", Text),
    Column("receipt", Text),
    Column("signature", Text),
    Column("correct", NUMBER),
    Column("questions", NUMBER),
    Column("source", NAME),  # address on the hub; empty: uploaded
    Column("found", AnyText),  # each question and its greedy answer, as JSON
)

moderation = Table(
    "moderation",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    Column("at", REAL_NUMBER),
    Column("act", NAME),  # hide, ban, undo
    Column("peer", NAME),
    Column("why", AnyText),
)

listed = peers.c.answered >= LISTED_ANSWERS
Index("peers_board", peers.c.low.desc(), peers.c.peer, sqlite_where=listed, postgresql_where=listed)
Index("evaluations_asked", evaluations.c.asked_at)
