"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.Column("tenant", sa.String(length=48), nullable=True),
        sa.Column("key_id", sa.String(length=64), nullable=True),
        sa.Column("method", sa.String(length=16), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=True),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("address", sa.String(length=64), nullable=True),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("audit_by_tenant", "audit", ["tenant", "id"], unique=False)
    op.create_index(op.f("ix_audit_time"), "audit", ["time"], unique=False)
    op.create_table(
        "documents",
        sa.Column("tenant", sa.String(length=48), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("key", sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), nullable=False),
        sa.Column("alias", sa.Text(), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("written_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "kind", "key"),
    )
    op.create_index("documents_by_age", "documents", ["kind", "written_at"], unique=False)
    op.create_index("documents_by_alias", "documents", ["tenant", "kind", "alias"], unique=True)
    op.create_index("documents_by_bytes", "documents", ["tenant", "num_bytes"], unique=False)
    op.create_table(
        "stored_bytes",
        sa.Column("tenant", sa.String(length=48), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("what", sa.String(length=64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("tenant", "owner", "what"),
    )
    op.create_table(
        "files",
        sa.Column("file_id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("purpose", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("state_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("file_id", "tenant"),
    )
    op.create_index("files_by_state", "files", ["state", "state_at"], unique=False)
    op.create_index("files_by_time", "files", ["tenant", "created_at", "file_id"], unique=False)
    op.create_index("files_by_uri", "files", ["tenant", "uri"], unique=False)
    op.create_table(
        "keys",
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=48), nullable=False),
        sa.Column("title", sa.String(length=128), nullable=False),
        sa.Column("prefix", sa.String(length=32), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_by", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=True),
        sa.Column("revoked_at", sa.Float(precision=53), nullable=True),
        sa.Column("last_used_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("key_id"),
        sa.UniqueConstraint("sha256"),
    )
    op.create_index(op.f("ix_keys_tenant"), "keys", ["tenant"], unique=False)
    op.create_table(
        "outbox",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=48), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_outbox_created_at"), "outbox", ["created_at"], unique=False)
    op.create_table(
        "removed_runs",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=48), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=False),
        sa.Column("gpu_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("stays_published", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_index("removed_by_end", "removed_runs", ["tenant", "ended_at"], unique=False)
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=48), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=True),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=True),
        sa.Column("api", sa.String(length=16), nullable=False),
        sa.Column("schedule", sa.String(length=128), nullable=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("phase", sa.String(length=32), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=True),
        sa.Column("started_at", sa.Float(precision=53), nullable=True),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.Column("gpu_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.Float(precision=53), nullable=False),
        sa.Column("recorded_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_index("runs_by_api", "runs", ["tenant", "api", "created_at", "run_id"], unique=False)
    op.create_index("runs_by_end", "runs", ["tenant", "ended_at", "gpu_seconds"], unique=False)
    op.create_index("runs_by_state", "runs", ["tenant", "state", "created_at", "run_id"], unique=False)
    op.create_index("runs_by_time", "runs", ["tenant", "created_at", "run_id"], unique=False)
    op.create_index("runs_open", "runs", ["state", "run_id"], unique=False)
    op.create_table(
        "sessions",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("key_sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("sha256"),
    )
    op.create_index(op.f("ix_sessions_expires_at"), "sessions", ["expires_at"], unique=False)
    op.create_table(
        "tenants",
        sa.Column("tenant", sa.String(length=48), nullable=False),
        sa.Column("title", sa.String(length=128), nullable=False),
        sa.Column("quotas", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("tenant"),
    )
    op.create_table(
        "units",
        sa.Column("unit", sa.String(length=128), nullable=False),
        sa.Column("claimed_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("unit"),
    )
    op.create_table(
        "uses",
        sa.Column("unit", sa.String(length=128), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("unit", "run_id"),
    )
    columns = (sa.column("quotas", sa.JSON()), *map(sa.column, ("tenant", "title", "created_at")))
    op.execute(sa.table("tenants", *columns).insert().values(tenant="default", title="", quotas={}, created_at=0.0))
