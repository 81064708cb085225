"""Version 1: the tables as judge/store/tables.py has them.

The next version writes out here what this one made, before it changes a table.
"""

from alembic import op

from judge.store.tables import metadata

revision = "0001"
down_revision = None


def upgrade() -> None:
    metadata.create_all(op.get_bind(), checkfirst=False)
