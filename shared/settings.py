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

from longshore.training import DtypeChoice
from shared.limits import (
    ClientSettings,
    PriceSettings,
    QuotaSettings,
    RateLimitSettings,
    RetentionSettings,
    TenantLimits,
)

FROM_FILE = "_file"
"""At the end of a variable's name: its value is the path of a file that holds the setting."""

KernelPolicy = Literal["auto", "strict", "torch"]
ExperimentalTransport = Literal["nixl", "mooncake"]


class S3Settings(BaseModel):
    """The address of S3. Credentials come from boto3's own chain (environment, profile, instance role)."""

    endpoint_url: str | None = None
    region: str | None = None
    ranges: int = Field(
        default=8, ge=1, le=32, description="ranges of 8 MiB of models and data that are fetched at a time"
    )


class DownloadSettings(BaseModel):
    """Limits of downloads from users' URIs, and the places that they may name."""

    max_bytes: int = Field(default=50 << 30, description="bytes transferred, before decompression")
    max_decompressed_bytes: int = Field(default=200 << 30)
    allow_private_addresses: bool = Field(default=False, description="http(s) to loopback and private networks")
    file_roots: tuple[Path, ...] = Field(
        default=(), description="folders whose data and models users may name by path or file:// URI"
    )
    timeout_s: float = Field(default=60.0, description="for a server that is silent or does not end its headers")
    slowest_bytes_per_s: int = Field(
        default=16 << 10, ge=1, description="slowest average rate that is accepted after `timeout_s`"
    )


class ServerKey(BaseModel):
    """A key for a teacher behind a URL. `tenants`: who may name it; all if empty."""

    url: str
    key: SecretStr
    tenants: tuple[str, ...] = ()


class GradingSettings(BaseModel):
    """Limits of graders, and the server of `score_model` graders."""

    python_time_s: float = Field(default=10.0, gt=0, description="seconds for one sample")
    python_memory_bytes: int = Field(default=1 << 30, ge=64 << 20)
    score_model_url: str | None = Field(default=None, description="for graders that name no base_url: https://host/v1")
    score_model_key: str | None = Field(default=None, description="sent to score_model_url, and nowhere else")
    server_keys: dict[str, ServerKey] = Field(default={}, description="keys by name, for runs' teacher_key")
    score_model_timeout_s: float = Field(default=120.0, gt=0)
    score_model_concurrency: int = Field(default=8, ge=1, le=64)


class ConfinedSettings(BaseModel):
    """Limits of the processes that work on users' data (activities/confined/calls.py)."""

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
    """The installation's own sampling server, if it has one, with vLLM's protocol; and vLLM on sampler hosts."""

    url: str | None = Field(default=None, description="such as http://host:8000, for runs that name no server")
    api_key: SecretStr | None = Field(default=None, description="sent to `url`, and nowhere else")
    vllm_command: str | None = Field(
        default=None,
        description="for sampler hosts and runs with `sampler: vllm`: vLLM's executable and options of `vllm serve`, "
        "such as /opt/vllm/bin/vllm --gpu-memory-utilization 0.8",
    )
    weights_address: OwnAddress | None = Field(
        default=None,
        description="for a sampler host: this machine's IP address for weights from trainers on other machines, on a "
        "network that is trusted to carry them unencrypted; if absent, they send none",
    )


class ServingSettings(BaseModel):
    """Leases of samplers that answer users' questions to published models."""

    idle_s: float = Field(default=300.0, gt=0, description="seconds without a question until a sampler is released")
    patience_s: float = Field(default=120.0, gt=0, description="seconds that a question waits for a sampler to start")
    share_s: float = Field(default=60.0, gt=0, description="seconds that a model keeps its sampler while others wait")
    max_model_len: int = Field(default=8192, ge=2, description="question and answer together, in tokens")
    slots: int = Field(default=16, ge=1, description="answers sampled at a time")
    answers_kept_s: float = Field(
        default=86_400.0,
        ge=0,
        description="seconds that token ids of chat answers are kept, to be trained on; 0: not at all",
    )
    weight_sync: bool = Field(
        default=True, description="sessions, and runs with a client's steps, send adapters to the sampler that answers"
    )
    answers_max_bytes: int = Field(
        default=1 << 30, ge=0, description="bytes of these per tenant; the oldest are deleted"
    )


class TinkerSettings(BaseModel):
    """Sessions of clients of Tinker, whose API has no fields for these."""

    models: dict[str, str] = Field(
        default_factory=dict,
        description="base models by the names that clients give, here and at /v1: folders, s3:// URIs or hub ids",
    )
    max_tokens: int = Field(default=4096, ge=2, description="limit of a training sequence, and of a micro-batch")
    dtype: DtypeChoice = Field(default="auto", description="precision of weights and activations")
    keep_states: int = Field(
        default=100, ge=1, le=1000, description="how many of a model's newest saved states are kept"
    )
    stable_reinforce: Literal["importance_sampling", "ppo", "cispo", "dro"] | None = Field(
        default=None,
        description="the loss computed, and named, for requests of stable_reinforce; none: they are refused",
    )


class WebhookSettings(BaseModel):
    """Delivery of webhooks, and the addresses that they may have."""

    allow_private_addresses: bool = Field(default=False, description="webhooks on loopback and private networks")
    timeout_s: float = Field(default=15.0, gt=0, description="for a silent receiver")
    first_retry_s: float = Field(
        default=5.0, gt=0, description="each further wait is four times as long, up to six hours"
    )


class MetricsSettings(BaseModel):
    """The address of a process's metrics for Prometheus, which need no key."""

    port: int | None = Field(
        default=None,
        ge=1,
        le=65532,
        description="none: no metrics. Under `longshore dev` the web service's port; hosts have the ports after it",
    )
    address: IPvAnyAddress = Field(default=IPv4Address("127.0.0.1"), description="an address of this machine")


def user_config_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "longshore" / "config.toml"


class Environment(EnvSettingsSource):
    """Settings of the environment; those without a variable of their own from the file that NAME_FILE names.

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
    confined: ConfinedSettings = ConfinedSettings()
    sampling: SamplingSettings = SamplingSettings()
    serving: ServingSettings = ServingSettings()
    tinker: TinkerSettings = TinkerSettings()
    webhooks: WebhookSettings = WebhookSettings()
    metrics: MetricsSettings = MetricsSettings()
    log_format: Literal["text", "json"] = Field(
        default="text", description="for service and hosts; json: lines of JSON"
    )

    temporal_address: str = "127.0.0.1:7233"
    temporal_namespace: str = "default"
    temporal_tls: bool = Field(default=False, description="TLS, by the system's authorities if no other is named")
    temporal_tls_ca: Path | None = Field(default=None, description="a PEM file: the authority of the server")
    temporal_tls_cert: Path | None = Field(default=None, description="a PEM file: our certificate, for mutual TLS")
    temporal_tls_key: Path | None = Field(default=None, description="a PEM file: the key of temporal_tls_cert")
    temporal_tls_name: str | None = Field(default=None, description="the server's name, if its address has another")
    temporal_api_key: SecretStr | None = Field(default=None, description="for a Temporal server that asks for one")
    seal_key: SecretStr | None = Field(
        default=None,
        description="for service and hosts: the key that encrypts all that they send through Temporal; `seal.key` of "
        "`root` if absent. Several are separated by blanks: the first encrypts, all decrypt",
    )
    temporal_ui: str | None = Field(default=None, description="the address of its web page, shown to users")
    temporal_codec: bool = Field(
        default=False, description="the service decrypts payloads for Temporal's page (`temporal_ui`) and command line"
    )
    control_queue: str = "control"
    build_id: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="for a control host: runs end on the build that they began on, while hosts of other builds run",
    )
    deployment: str | None = Field(
        default=None,
        description="Temporal's Worker Deployment, if another program makes builds current, such as Temporal's Worker "
        "Controller; if absent, `longshore builds use` does, and the first host does for its own",
    )

    api_url: str = "http://127.0.0.1:8484"
    api_key: str | None = Field(default=None, description="the client's key; the service keeps only a hash")
    api_key_sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="hash of such a key, for a service that must not have the key",
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
        default=30.0, ge=0, description="days that the scores of a session's results are kept after its end"
    )
    audit_days: float = Field(default=90.0, gt=0, description="days that entries of the service's audit log are kept")

    shape: str = Field(
        default="cpu", description="this host's shape: the lease queue is gpu-<shape> or sampler-<shape>"
    )
    dtype: DtypeChoice = Field(
        default="auto",
        description="for runs that name none; auto: bfloat16 if all GPU hosts of the shape report that it is fast",
    )
    max_ranks: int = Field(
        default=8, ge=1, le=4096, description="per worker: more are refused at submission, and by the host itself"
    )
    max_hosts: int | None = Field(
        default=None,
        ge=1,
        description="most GPU hosts of the shape at a time that reach each other: layouts of more nodes are refused at "
        "submission; if absent, the number is unknown, and such runs wait",
    )
    runs_per_worker: int = Field(default=8, ge=1, le=64, description="runs that may train on one worker at a time")
    sharing_window_s: float = Field(
        default=600.0, ge=0, description="seconds after a lease begins in which other runs may join its worker"
    )
    slot_bytes: int | None = Field(
        default=None,
        ge=1,
        description="bytes on each rank's device for adapters in training with gradients and optimizer state; if "
        "absent, on CUDA nine tenths of the device less the base model, on the CPU no limit",
    )
    worker_idle_s: float = Field(default=30.0, description="seconds that a worker without runs stays warm")
    warm_bytes: int | None = Field(
        default=None,
        ge=0,
        description="a GPU host's memory for idle workers besides the one in use; a quarter of all if absent",
    )
    cpu_threads: int = Field(default_factory=lambda: os.cpu_count() or 1, description="per worker, for all its ranks")
    kernels: KernelPolicy = Field(default="auto", description="for workers on CUDA; strict: an error, not a warning")
    experimental_transports: tuple[ExperimentalTransport, ...] = Field(
        default=(),
        description="for GPU and sampler hosts: weight sync by other projects' engines, whose ports let whoever "
        "reaches them read and change memory; a run may name one only if its hosts list it",
    )
    host_address: OwnAddress | None = Field(
        default=None,
        description="for a host: this machine's IP address for a web service on another machine, by mutual TLS; if "
        "absent, only a service on this machine reaches the host",
    )
    heartbeat_timeout_s: float = Field(
        default=10.0, description="a host that is silent for this long is considered dead"
    )
    cancel_grace_s: float = Field(
        default=60.0, description="seconds from a cancel to the end of the worker's processes"
    )
    drain_grace_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds that a stopping GPU host gives its jobs to save a checkpoint; 0: they end at once",
    )
    gather_patience_s: float = Field(
        default=600.0,
        gt=0,
        description="seconds that a run which needs several hosts keeps some while the others are not free",
    )
    drain_notice: Path | None = Field(
        default=None, description="for a host: once this file exists, such as a spot notice, it stops as on SIGTERM"
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
