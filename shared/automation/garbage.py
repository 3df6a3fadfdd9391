"""Requests and reports of garbage collection."""

from pydantic import Field

from longshore.fields import Frozen


class GarbageRequest(Frozen):
    """`is_dry`: only report what would be deleted."""

    is_dry: bool = True


class Freed(Frozen):
    """What was deleted, or would be, of one tenant and one kind. Data that several tenants share has no tenant here."""

    what: str = Field(description="checkpoints, data, samples, logs, sessions, models, or removed (removed runs)")
    tenant: str | None = None
    num_units: int = Field(description="runs, or artifacts that runs share")
    num_objects: int
    num_bytes: int


class GarbageReport(Frozen):
    """The report of a collection."""

    is_dry: bool
    began: float
    took_s: float
    num_runs: int = Field(description="recorded runs")
    num_going_on: int
    freed: tuple[Freed, ...] = ()
    num_withdrawn: int = Field(default=0, description="units kept because the second check found a run that uses them")
    measured: dict[str, dict[str, int]] = Field(
        default_factory=dict, description="measured bytes that count for each tenant's quota, by kind"
    )
