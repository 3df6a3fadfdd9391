"""Runs that were removed: their GPU seconds count in their tenants' quotas for thirty days."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "removed_runs",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(48), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("ended_at", sa.Float(53), nullable=False),
        sa.Column("gpu_seconds", sa.Float(53), nullable=False),
    )
    op.create_index("removed_by_end", "removed_runs", ["tenant", "ended_at"], unique=False)
