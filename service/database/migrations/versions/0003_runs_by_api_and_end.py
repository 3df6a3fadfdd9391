"""Indexes for listing the jobs of one API, and for summing the GPU seconds of thirty days, without a full scan."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_index("runs_by_api", "runs", ["tenant", "api", "created_at", "run_id"], unique=False)
    op.create_index("runs_by_end", "runs", ["tenant", "ended_at", "gpu_seconds"], unique=False)
