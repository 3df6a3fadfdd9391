"""Settings of tenants' quotas, retention, prices and request limits."""

from pydantic import BaseModel, Field


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
    burst: int = Field(default=4000, ge=1, description="at once")
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
