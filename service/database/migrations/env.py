"""Alembic's entry: every migration runs in the one transaction that engine.py has begun."""

from alembic import context

from service.database.engine import Table

context.configure(connection=context.config.attributes["connection"], target_metadata=Table.metadata)
context.run_migrations()
