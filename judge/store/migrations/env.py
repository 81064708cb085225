"""Alembic's entry point: runs the migrations in the connection and transaction that it is given
(judge/store/database.py).
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
