"""Version 10: weights that are named on a hub (judge/verified/hub.py)."""

from alembic import op
from sqlalchemy import Column

from judge.store.tables import NAME

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("verifications", Column("source", NAME, nullable=False, server_default=""))
    if op.get_bind().dialect.name == "sqlite":
        op.execute("PRAGMA user_version=10")  # a judge of before Alembic refuses it
