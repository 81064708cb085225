"""Version 1: peers, and the questions they were asked."""

from alembic import op
from sqlalchemy import CheckConstraint, Column, ForeignKey, Index, Table, Text, text

from judge.store.tables import NAME, NUMBER, REAL_NUMBER

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table("about", Column("name", NAME, primary_key=True), Column("value", Text, nullable=False), sqlite_strict=True)
    op.create_table(
        "peers",
        Column("peer", NAME, primary_key=True),
        Column("model", Text, nullable=False),
        Column("first_seen", REAL_NUMBER, nullable=False),
        Column("last_seen", REAL_NUMBER, nullable=False),
        Column("sequence", NUMBER, nullable=False),
        *(Column(name, NUMBER, nullable=False, server_default="0") for name in ("answered", "unanswered")),
        Column("reward", REAL_NUMBER, nullable=False, server_default="0"),
        sqlite_strict=True,
    )
    evaluations: Table = op.create_table(
        "evaluations",
        Column("id", NAME, primary_key=True),
        Column("peer", NAME, ForeignKey("peers.peer"), nullable=False),
        Column("round", NUMBER, nullable=False),
        Column("model", Text, nullable=False),
        Column("specialty", NAME, nullable=False),
        Column("n", NUMBER, nullable=False),
        Column("asked_at", REAL_NUMBER, nullable=False),
        Column("state", NAME, nullable=False, server_default="open"),
        Column("number", NUMBER),
        Column("reward", REAL_NUMBER),
        Column("reason", Text),
        Column("total", REAL_NUMBER),
        Column("seconds", REAL_NUMBER),
        Column("answer", Text),
        Column("ended", NUMBER),
        CheckConstraint("state IN ('open', 'graded', 'unanswered', 'void')"),
        CheckConstraint("(state = 'graded') = (number IS NOT NULL AND reward IS NOT NULL AND answer IS NOT NULL)"),
        sqlite_strict=True,
    )
    numbered, still_open = text("number IS NOT NULL"), text("state = 'open'")
    graded = (evaluations.c.peer, evaluations.c.number)
    for index in (
        Index("evaluations_graded", *graded, unique=True, sqlite_where=numbered, postgresql_where=numbered),
        Index("evaluations_open", evaluations.c.state, sqlite_where=still_open, postgresql_where=still_open),
    ):
        index.create(op.get_bind())
