"""Version 2: peers are ranked by the lower end of the score's interval, worked out when it changes."""

from alembic import op
from sqlalchemy import Column, text

from judge.figures.anytime import always
from judge.store.tables import REAL_NUMBER

revision = "0002"
down_revision = "0001"

RECENT = text("SELECT reward FROM evaluations WHERE peer = :peer AND number IS NOT NULL ORDER BY number DESC LIMIT 100")


def upgrade() -> None:
    op.add_column("peers", Column("low", REAL_NUMBER, nullable=False, server_default="0"))
    op.execute("DROP INDEX IF EXISTS peers_seen")
    op.execute("CREATE INDEX peers_board ON peers (low DESC, peer) WHERE answered >= 10")
    database = op.get_bind()
    for (peer,) in database.execute(text("SELECT peer FROM peers")).all():
        rewards = [reward for (reward,) in database.execute(RECENT, {"peer": peer})]
        low = always(sum(reward >= 1 for reward in rewards), len(rewards)).low
        database.execute(text("UPDATE peers SET low = :low WHERE peer = :peer"), {"low": low, "peer": peer})
    if database.dialect.name == "sqlite":
        op.execute("PRAGMA user_version=2")  # what a judge of before Alembic looks at
