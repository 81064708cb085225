"""Alembic's entry point: runs the migrations in the transaction that judge/store/database.py gives it."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
