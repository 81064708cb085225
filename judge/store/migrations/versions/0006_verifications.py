"""Version 6: weights that peers upload, and what the judge found (judge/verified)."""

from alembic import op
from sqlalchemy import CheckConstraint, Column, Text

from judge.store.tables import NAME, NUMBER, REAL_NUMBER

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "verifications",
        Column("id", NAME, primary_key=True),
        Column("peer", NAME, nullable=False),
        Column("model", Text, nullable=False),
        Column("lora_rank", NUMBER),
        Column("digest", NAME, nullable=False),
        *(Column(name, NUMBER, nullable=False) for name in ("size", "answers", "sequence")),
        Column("at", REAL_NUMBER, nullable=False),
        Column("state", NAME, nullable=False),
        Column("tries", NUMBER, nullable=False),
        Column("ended", REAL_NUMBER),
        *(Column(name, Text) for name in ("error", "remedy", "receipt", "signature")),
        *(Column(name, NUMBER) for name in ("correct", "questions")),
        Column("found", Text),
        CheckConstraint("state IN ('queued', 'running', 'done', 'refused')"),
        CheckConstraint("(state = 'done') = (receipt IS NOT NULL AND found IS NOT NULL)"),
        sqlite_strict=True,
    )
    op.create_index("verifications_of_peer", "verifications", ["peer", "ended"])
