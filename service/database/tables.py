"""The tables. Times are seconds since 1970. Rows with a record in the store can be rebuilt from it (rebuild.py)."""

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Float, Index, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Table(DeclarativeBase):
    """The parent of all rows."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        float: Float(53),
        int: BigInteger,
        dict[str, Any]: JSON,
        list[str]: JSON,
    }


class TenantRow(Table):
    """A tenant. `quotas` overrides the installation's own, field by field."""

    __tablename__ = "tenants"

    tenant: Mapped[str] = mapped_column(String(48), primary_key=True)
    title: Mapped[str] = mapped_column(String(128))
    quotas: Mapped[dict[str, Any]]
    created_at: Mapped[float]


class KeyRow(Table):
    """An API key: its hash, never itself. `last_used_at` is the table's own, and at most a minute old."""

    __tablename__ = "keys"

    key_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(48), index=True)
    title: Mapped[str] = mapped_column(String(128))
    prefix: Mapped[str] = mapped_column(String(32))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[list[str]]
    created_by: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]


class SignInRow(Table):
    """A browser that is signed in to the page: hashes of its token and key. There is no record of it in the store."""

    __tablename__ = "sessions"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]
    expires_at: Mapped[float] = mapped_column(index=True)


class FileRow(Table):
    """An uploaded file. `deleted_at`: since when its record, and its bytes if no other file has them, are deleted."""

    __tablename__ = "files"
    __table_args__ = (Index("files_by_time", "tenant", "created_at", "file_id"),)

    file_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(48), primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    purpose: Mapped[str] = mapped_column(String(64))
    size: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    uri: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float]
    deleted_at: Mapped[float | None]


class RunRow(Table):
    """A run. `record` and `status` are JSON of RunRecord and RunStatus; the other columns are for questions to them.

    A row is only changed if its state and updated_at are still those that were read (runs/rows.py).
    """

    __tablename__ = "runs"
    __table_args__ = (
        Index("runs_by_time", "tenant", "created_at", "run_id"),
        Index("runs_by_state", "tenant", "state", "created_at", "run_id"),
        Index("runs_open", "state", "run_id"),
        Index("runs_by_api", "tenant", "api", "created_at", "run_id"),
        Index("runs_by_end", "tenant", "ended_at", "gpu_seconds"),
    )

    run_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(48))
    owner: Mapped[str | None] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(8))
    name: Mapped[str | None] = mapped_column(String(64))
    api: Mapped[str] = mapped_column(String(16))
    schedule: Mapped[str | None] = mapped_column(String(128))
    model: Mapped[str] = mapped_column(Text)
    labels: Mapped[dict[str, Any]] = mapped_column("metadata")
    created_at: Mapped[float]
    state: Mapped[str] = mapped_column(String(16))
    phase: Mapped[str] = mapped_column(String(32))
    step: Mapped[int]
    num_steps: Mapped[int | None]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    gpu_seconds: Mapped[float]
    record: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(Text)
    updated_at: Mapped[float]


class RemovedRow(Table):
    """A run that was removed. Its GPU seconds count in its tenant's quota as if it were there."""

    __tablename__ = "removed_runs"
    __table_args__ = (Index("removed_by_end", "tenant", "ended_at"),)

    run_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(48))
    created_at: Mapped[float]
    ended_at: Mapped[float]
    gpu_seconds: Mapped[float]


class OutboxRow(Table):
    """A change of a run's state that webhooks have not been notified of yet.

    It is written with the change, and deleted when a workflow has taken it over.
    """

    __tablename__ = "outbox"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(48))
    type: Mapped[str] = mapped_column(String(64))
    run_id: Mapped[str] = mapped_column(String(64))
    payload: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(index=True)


class AuditRow(Table):
    """A request that changed something, or was refused: who, what, on which id, when, from where, and the answer."""

    __tablename__ = "audit"
    __table_args__ = (Index("audit_by_tenant", "tenant", "id"),)

    # SQLite counts up a column of exactly this type by itself.
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    time: Mapped[float] = mapped_column(index=True)
    tenant: Mapped[str | None] = mapped_column(String(48))
    key_id: Mapped[str | None] = mapped_column(String(64))
    method: Mapped[str] = mapped_column(String(16))
    path: Mapped[str] = mapped_column(Text)
    target: Mapped[str | None] = mapped_column(Text)
    status: Mapped[int] = mapped_column(Integer)
    address: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str] = mapped_column(String(64))
