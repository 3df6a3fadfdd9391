"""Settings of tenants' quotas, retention, prices and request limits."""

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator


def _no_truth(given: Any) -> Any:
    if isinstance(given, bool):
        raise ValueError("a number, and neither true nor false")
    return given


WorkerSharing = Literal["all", "tenant", "none"]


class QuotaSettings(BaseModel, extra="forbid"):
    """Default quotas, for tenants without their own; None: no limit."""

    _not_a_truth = field_validator("*", mode="before")(_no_truth)

    concurrent_runs: int | None = Field(
        default=None, ge=0, description="most runs that are accepted and have not ended"
    )
    gpu_hours: float | None = Field(default=None, ge=0, description="most GPU hours of the last 30 days' runs")
    spending: float | None = Field(
        default=None,
        ge=0,
        description="highest cost of the tenant's runs of the last 30 days, by `prices`; beyond it they are paused",
    )
    stored_bytes: int | None = Field(
        default=None,
        ge=0,
        description="most bytes of uploads, published versions, and the downloads and results of runs",
    )
    worker_sharing: WorkerSharing | None = Field(
        default=None,
        description="whose adapters may be trained on one worker: `tenant` (the default): this tenant's; `all`: those "
        "of all tenants with `all`; `none`: only one run's",
    )
    worker_weight: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="a tenant's weight, relative to others' (1), on shared workers and in queues for hosts",
    )


class ClientSettings(BaseModel):
    """Runs that wait for their clients: sessions, and RL runs whose groups a client sends."""

    idle_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds without work until such a run no longer counts in the quota `concurrent_runs`",
    )
    away_s: float = Field(
        default=3600.0,
        ge=0,
        description="seconds without work until such a run is paused; its next work resumes it. 0: never",
    )


class RetentionSettings(BaseModel):
    """Days until a control host deletes data of ended runs; None: never. Published versions are kept.

    Days count from the end of the run, or of the last run that used the data.
    """

    every_s: float = Field(
        default=3600.0, gt=0, description="seconds between two collections, which also measure the store"
    )
    checkpoints_days: float | None = Field(
        default=None, ge=0, description="checkpoints, except the newest `checkpoints_kept`"
    )
    checkpoints_kept: int = Field(
        default=1, ge=0, description="newest checkpoints kept of each run; 0: it can be neither resumed nor branched"
    )
    data_days: float | None = Field(
        default=None, ge=0, description="copies of datasets, and data made from them: tokens, plans, prompts"
    )
    samples_days: float | None = Field(default=None, ge=0, description="completions, grades and groups of RL runs")
    logs_days: float | None = Field(default=None, ge=0, description="events, output, all job files except one")
    sessions_days: float | None = Field(
        default=None, ge=0, description="commands and results of sessions, which cannot be resumed afterwards"
    )
    models_days: float | None = Field(
        default=None, ge=1, description="imported models that no published version, checkpoint or live run needs"
    )


class PriceSettings(BaseModel):
    """Prices to compute the costs of runs. Costs are shown if the price of a GPU hour is set."""

    gpu_hour: float | None = Field(
        default=None, ge=0, description="price of an hour of one worker rank, or of a sampler"
    )
    currency: str = Field(default="USD", pattern=r"^[A-Z]{3}$", description="currency of prices and spending limits")


class RateLimitSettings(BaseModel):
    """Requests of one API key to one service process, and tries to sign in on its page."""

    per_s: float = Field(default=100.0, gt=0, description="in the long run")
    burst: int = Field(default=500, ge=1, description="at once")
    sign_ins_per_min: float = Field(
        default=10.0, gt=0, description="in the long run, from one address, and with keys of one prefix"
    )
    sign_in_burst: int = Field(default=20, ge=1, description="at once")


class TenantLimits(BaseModel):
    """Limits of a tenant's simultaneous requests to a service process. Further ones wait, then are refused (429)."""

    checks: int = Field(default=4, ge=1, description="previews, validations and trials of graders")
    questions: int = Field(default=16, ge=1, description="to published models")
    bodies: int = Field(default=2, ge=1, description="request bodies of more than a few kB that are being read")
    patience_s: float = Field(default=10.0, ge=0, description="how long a further request waits")
