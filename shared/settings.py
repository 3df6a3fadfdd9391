"""Settings: flag > environment (`LONGSHORE_*`) > ./longshore.toml > ~/.config/longshore/config.toml > default.

Read once, at an entry point, and passed on; nothing else reads the environment.
"""

import os
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, IPvAnyAddress, IPvAnyNetwork, SecretStr, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from longshore.accounts import QuotaSettings
from longshore.connection import user_config_path
from longshore.training import DtypeChoice

FROM_FILE = "_file"
"""At the end of a variable's name: its value is the path of a file that holds the setting."""

KernelPolicy = Literal["auto", "strict", "torch"]


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


class S3Settings(BaseModel):
    """The address of S3. Credentials come from boto3's own chain (environment, profile, instance role)."""

    endpoint_url: str | None = None
    region: str | None = None
    ranges: int = Field(default=8, ge=1, le=32, description="ranges of 8 MiB that are downloaded at a time")


class DownloadSettings(BaseModel):
    """Limits of downloads from users' URIs, and the places that they may name."""

    max_bytes: int = Field(default=50 << 30, description="bytes transferred, before decompression")
    max_decompressed_bytes: int = Field(default=200 << 30)
    allow_private_addresses: bool = Field(default=False, description="http(s) to loopback and private networks")
    file_roots: tuple[Path, ...] = Field(
        default=(), description="folders in which users' paths and file:// URIs may name data and models"
    )
    timeout_s: float = Field(
        default=60.0, description="seconds to wait for a server that is silent, or does not end its headers"
    )
    slowest_bytes_per_s: int = Field(
        default=16 << 10, ge=1, description="the slowest average download speed that is accepted after `timeout_s`"
    )


class ServerKey(BaseModel):
    """A key for a teacher behind a URL. `tenants`: those that may name it; all if empty."""

    url: str
    key: SecretStr
    tenants: tuple[str, ...] = ()


class GradingSettings(BaseModel):
    """Limits of graders, and the server of `score_model` graders."""

    python_time_s: float = Field(default=10.0, gt=0, description="seconds for one sample")
    python_memory_bytes: int = Field(default=1 << 30, ge=64 << 20)
    score_model_url: str | None = Field(
        default=None, description="URL for graders that name no base_url: https://host/v1"
    )
    score_model_key: str | None = Field(default=None, description="sent to score_model_url, and nowhere else")
    server_keys: dict[str, ServerKey] = Field(default={}, description="keys by name, for runs' teacher_key")
    score_model_timeout_s: float = Field(default=120.0, gt=0)
    score_model_concurrency: int = Field(default=8, ge=1, le=64)


class AgentSettings(BaseModel):
    """Limits of the boxes that agents of runs work in (activities/sandbox/box.py)."""

    programs: tuple[Path, ...] = Field(
        default=(), description="folders that agents see, read-only; the `bin` of each is on their PATH"
    )
    memory_bytes: int = Field(default=2 << 30, ge=64 << 20, description="of the processes of one agent")
    disk_bytes: int = Field(default=512 << 20, ge=16 << 20, description="of its files, which are in memory")
    processes: int = Field(default=256, ge=8, description="that it has at once, threads included")
    at_once: int = Field(default=8, ge=1, description="agents at once on a host; a run that has none gets one more")
    servers: dict[str, Annotated[str, Field(pattern=r"^(tcp://[^/\s]+:\d+|ipc://\S+)$")]] = Field(
        default={},
        description="addresses (tcp://127.0.0.1:5000) of env servers of verifiers, by the names that runs give in "
        "rollouts.agent.server",
    )
    server_wait_s: float = Field(
        default=600.0, gt=0, description="how long such a server may be away, and be silent beside an episode's time"
    )


class ConfinedSettings(BaseModel):
    """Limits of the processes that work on users' data (activities/sandbox/calls.py)."""

    memory_bytes: int = Field(default=4 << 30, ge=512 << 20)
    step_cpu_s: int = Field(default=300, ge=1, description="CPU seconds from one batch of rows to the next")
    silence_s: float = Field(default=1800.0, gt=0, description="seconds from one batch of rows to the next")
    file_bytes: int = Field(default=256 << 30, ge=1 << 20, description="largest file that such a process writes")
    at_once: int | None = Field(
        default=None, ge=2, description="such processes per host; if absent, as many as fit into its memory"
    )


def _one_address(address: IPvAnyAddress) -> IPvAnyAddress:
    if address.is_unspecified:
        raise ValueError("the address of one interface, and not of all")
    return address


OwnAddress = Annotated[IPvAnyAddress, AfterValidator(_one_address)]
"""An IP address of this machine."""


class SamplingSettings(BaseModel):
    """The installation's own sampler, a server with vLLM's protocol, if it has one; and vLLM on sampler hosts."""

    url: str | None = Field(default=None, description="URL http://host:8000 for runs that name no server")
    api_key: SecretStr | None = Field(default=None, description="sent to `url`, and nowhere else")
    vllm_command: str | None = Field(
        default=None,
        description="for a sampler host and runs with `sampler: vllm`: vLLM's executable and further "
        "options of `vllm serve`, such as /opt/vllm/bin/vllm --gpu-memory-utilization 0.8",
    )
    kept_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="for a sampler host: what its own sampler keeps of prompts, for those that go on",
    )
    weights_address: OwnAddress | None = Field(
        default=None,
        description="for a sampler host: this machine's IP address, to which trainers on other "
        "machines send weights unencrypted, over a network that you trust; if absent, "
        "they use the store",
    )


class ServingSettings(BaseModel):
    """Leases of samplers that answer users' questions to published models."""

    idle_s: float = Field(default=300.0, gt=0, description="time without a request after which a sampler is returned")
    patience_s: float = Field(default=120.0, gt=0, description="how long a request waits for a sampler to start")
    share_s: float = Field(
        default=60.0, gt=0, description="how long one model's users keep a sampler while others wait for it"
    )
    max_model_len: int = Field(default=8192, ge=2, description="question and answer together, in tokens")
    slots: int = Field(default=16, ge=1, description="answers that are sampled at a time")
    answers_kept_s: float = Field(
        default=86_400.0,
        ge=0,
        description="how long token ids of answers to chats are kept for training; 0: not at all",
    )
    weight_sync: bool = Field(
        default=True, description="sessions, and runs of a client's steps, send adapters to the sampler that answers"
    )
    answers_max_bytes: int = Field(
        default=1 << 30, ge=0, description="for these answers of one tenant; the oldest are deleted"
    )


class TinkerSettings(BaseModel):
    """Sessions of clients of Tinker, whose API has no fields for these."""

    models: dict[str, str] = Field(
        default_factory=dict,
        description="base models by the names that clients give, here and at /v1: folders, s3:// URIs or hub ids",
    )
    max_tokens: int = Field(default=4096, ge=2, description="longest trained sequence, and tokens of a micro-batch")
    dtype: DtypeChoice = Field(default="auto", description="precision of weights and activations")
    keep_states: int = Field(
        default=100, ge=1, le=1000, description="how many of the newest saved states of one model are kept"
    )


class WebhookSettings(BaseModel):
    """Delivery of webhooks, and the addresses that they may have."""

    allow_private_addresses: bool = Field(default=False, description="webhooks on loopback and private networks")
    timeout_s: float = Field(default=15.0, gt=0, description="seconds to wait for a receiver that is silent")
    first_retry_s: float = Field(default=5.0, gt=0, description="then four times as long each time, up to six hours")


class MetricsSettings(BaseModel):
    """The address at which a process serves its metrics to Prometheus, without a key."""

    port: int | None = Field(
        default=None,
        ge=1,
        le=65532,
        description="none: no metrics. Under `longshore dev` the web service's port; hosts use the ports after it",
    )
    address: IPvAnyAddress = Field(default=IPv4Address("127.0.0.1"), description="an address of this machine")


class Environment(EnvSettingsSource):
    """Settings from the environment. If NAME is not set, NAME_FILE may name a file with the value.

    Raises SettingsError: a file cannot be read.
    """

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls)
        given, prefix = self.env_vars, self.env_prefix.lower()
        named = (name for name in given if name.startswith(prefix) and name.endswith(FROM_FILE))
        files = {own: name for name in named if (own := name.removesuffix(FROM_FILE)) not in given}
        self.env_vars = {**given, **{own: _content(name, given[name] or "") for own, name in files.items()}}


def _content(name: str, path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name.upper()}: {path} cannot be read: {error}") from error


class Settings(BaseSettings):
    """Everything that is the same for all runs of one installation."""

    model_config = SettingsConfigDict(env_prefix="LONGSHORE_", env_nested_delimiter="__", extra="ignore")

    root: Path = Field(default=Path("~/.longshore"), description="local state of this machine")
    store_uri: str | None = Field(default=None, description="file:// or s3://; a folder of `root` if absent")
    s3: S3Settings = S3Settings()
    download: DownloadSettings = DownloadSettings()
    grading: GradingSettings = GradingSettings()
    agents: AgentSettings = AgentSettings()
    confined: ConfinedSettings = ConfinedSettings()
    sampling: SamplingSettings = SamplingSettings()
    serving: ServingSettings = ServingSettings()
    tinker: TinkerSettings = TinkerSettings()
    webhooks: WebhookSettings = WebhookSettings()
    metrics: MetricsSettings = MetricsSettings()
    log_format: Literal["text", "json"] = Field(
        default="text", description="log format of service and hosts; json: lines of JSON"
    )

    temporal_address: str = "127.0.0.1:7233"
    temporal_namespace: str = "default"
    temporal_tls: bool = Field(
        default=False, description="use TLS; the system's authorities are trusted if no other is named"
    )
    temporal_tls_ca: Path | None = Field(default=None, description="a PEM file: the authority of the server")
    temporal_tls_cert: Path | None = Field(
        default=None, description="a PEM file: the client's certificate, for mutual TLS"
    )
    temporal_tls_key: Path | None = Field(default=None, description="a PEM file: the key of temporal_tls_cert")
    temporal_tls_name: str | None = Field(
        default=None, description="the name in the server's certificate, if its address differs"
    )
    temporal_api_key: SecretStr | None = Field(
        default=None, description="API key, for a Temporal server that requires one"
    )
    seal_key: SecretStr | None = Field(
        default=None,
        description="of service and hosts, which encrypt all data that they send through Temporal with it; the file "
        "`seal.key` in `root` if absent. Separate several by blanks: the first encrypts, all of them decrypt",
    )
    temporal_ui: str | None = Field(default=None, description="the address of its web page, shown to users")
    temporal_codec: bool = Field(
        default=False, description="the service decrypts payloads for Temporal's page (`temporal_ui`) and command line"
    )
    control_queue: str = "control"
    build_id: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="for a control host: runs stay on the build on which they began while hosts of other builds run",
    )
    deployment: str | None = Field(
        default=None,
        description="the Temporal Worker Deployment, if another tool makes its builds current, such as Temporal's "
        "Worker Controller; if absent, `longshore builds use` does that, and the first host for its own build",
    )

    api_url: str = "http://127.0.0.1:8484"
    api_key: str | None = Field(default=None, description="the client's key; the service keeps only a hash")
    api_key_sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="the hash of such a key, for a service that must not hold the key",
    )
    database_url: SecretStr | None = Field(
        default=None, description="postgresql://…, only for the service; SQLite in `root` if absent"
    )
    quotas: QuotaSettings = QuotaSettings()
    clients: ClientSettings = ClientSettings()
    retention: RetentionSettings = RetentionSettings()
    prices: PriceSettings = PriceSettings()
    rate_limit: RateLimitSettings = RateLimitSettings()
    tenant_limits: TenantLimits = TenantLimits()
    trusted_proxies: tuple[IPvAnyNetwork, ...] = Field(
        default=(), description="addresses or networks whose X-Forwarded-For and X-Forwarded-Proto are believed"
    )
    session_results_days: float = Field(
        default=30.0, ge=0, description="how long the scores in a session's results are kept after its end"
    )
    audit_days: float = Field(default=90.0, gt=0, description="how long the service keeps entries of its audit log")

    shape: str = Field(
        default="cpu", description="this host's shape: the lease queue is gpu-<shape> or sampler-<shape>"
    )
    dtype: DtypeChoice = Field(
        default="auto",
        description="dtype of runs that set none; auto: bfloat16 if all GPU hosts of the shape have "
        "reported that it is fast",
    )
    max_ranks: int = Field(
        default=8,
        ge=1,
        le=4096,
        description="most ranks of one worker: runs with more are refused at submission, and by the host",
    )
    max_hosts: int | None = Field(
        default=None,
        ge=1,
        description="the most GPU hosts of the shape that can run at a time and reach each other: layouts of more "
        "nodes are refused at submission; if absent, such runs wait for hosts",
    )
    runs_per_worker: int = Field(default=8, ge=1, le=64, description="how many runs may train on one worker at once")
    sharing_window_s: float = Field(
        default=600.0, ge=0, description="how long after its lease began other runs may join a worker"
    )
    slot_bytes: int | None = Field(
        default=None,
        ge=1,
        description="on each rank's device, for adapters in training with their gradients and optimizer state; if "
        "absent, on CUDA nine tenths of the device minus the base model, on the CPU no limit",
    )
    worker_idle_s: float = Field(default=30.0, description="how long idle workers stay warm on a host that no run uses")
    warm_bytes: int | None = Field(
        default=None,
        ge=0,
        description="of a GPU host's memory, for idle workers besides the one in use; if absent, a quarter of it",
    )
    cpu_threads: int = Field(
        default_factory=lambda: os.cpu_count() or 1, description="CPU threads of a worker, for all its ranks"
    )
    kernels: KernelPolicy = Field(
        default="auto", description="of a worker on CUDA; strict: a missing kernel is an error, not a warning"
    )
    external_transport: bool = Field(
        default=False,
        description="for GPU and sampler hosts: whether runs may name the weight-sync backend `external`, which an "
        "installed package brings; its code then runs in workers and samplers",
    )
    host_address: OwnAddress | None = Field(
        default=None,
        description="of a host: this machine's IP address, at which web services of other machines reach it by mutual "
        "TLS; if absent, only web services of this machine reach it",
    )
    heartbeat_timeout_s: float = Field(
        default=10.0, description="a host that is silent for this long is considered dead"
    )
    cancel_grace_s: float = Field(default=60.0, description="time from a cancel to the end of the worker's processes")
    drain_grace_s: float = Field(
        default=60.0,
        ge=0,
        description="the time in which jobs save a checkpoint when their GPU host shuts down; 0: they end at once",
    )
    gather_patience_s: float = Field(
        default=600.0,
        gt=0,
        description="how long a run that needs several hosts holds some of them while it waits for the others",
    )
    separate_hosts: bool = Field(
        default=False,
        description="of `longshore dev`: a process for each role of a host, which takes twice the memory, not one for "
        "all of them",
    )
    drain_notice: Path | None = Field(
        default=None,
        description="for a host: it shuts down as on SIGTERM when this file appears, such as a spot notice",
    )
    warm_hosts: int = Field(default=0, ge=0, description="GPU hosts, and sampler hosts, that are kept without a lease")
    launch: str | None = Field(
        default=None, description="for a host: the name under which it was started (service/launching.py)"
    )

    wandb_mode: Literal["offline", "online", "disabled"] = "offline"
    wandb_project: str = "longshore"

    @field_validator("seal_key")
    @classmethod
    def _long_keys(cls, given: SecretStr | None) -> SecretStr | None:
        if given is not None and min(map(len, given.get_secret_value().split()), default=0) < 32:
            raise ValueError("a key has 32 characters or more; several are separated by blanks")
        return given

    @property
    def root_path(self) -> Path:
        return self.root.expanduser().resolve()

    @property
    def store(self) -> str:
        return self.store_uri or (self.root_path / "store").as_uri()

    @property
    def lease_queue(self) -> str:
        return f"gpu-{self.shape}"

    @property
    def sampler_queue(self) -> str:
        return f"sampler-{self.shape}"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        project = TomlConfigSettingsSource(settings_cls, Path("longshore.toml"))
        user = TomlConfigSettingsSource(settings_cls, user_config_path())
        return init_settings, Environment(settings_cls), project, user
