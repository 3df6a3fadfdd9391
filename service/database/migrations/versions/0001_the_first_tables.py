"""The first tables: a new database gets them from the code (service/database/engine.py), so nothing is left to do."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    pass
