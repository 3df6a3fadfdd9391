"""Alembic's entry: every migration runs in the one transaction that migrate.py has begun."""

from alembic import context

from service.database.tables import Table

context.configure(connection=context.config.attributes["connection"], target_metadata=Table.metadata)
context.run_migrations()
