"""Files that are being deleted: a mark, since the store is never asked within a transaction."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("files", sa.Column("deleted_at", sa.Float(53), nullable=True))
