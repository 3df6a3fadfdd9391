"""Requests of Tinker's SDK in JSON. Unknown fields are refused, since they might change the request's meaning."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator

from longshore.fields import Frozen
from service.apis.tinker.records import Metadata, SessionRecord
from shared.chat.completions import MAX_TOP_LOGPROBS
from shared.errors import InvalidInput

Id = Annotated[str, Field(max_length=256)]
Path = Annotated[str, Field(max_length=1024)]
Number = Annotated[int, Field(ge=0, le=999_999)]
Seq = Annotated[int, Field(ge=1, le=9_000_000)]


class TinkerRequest(Frozen):
    type: str | None = None


class ClientConfigRequest(TinkerRequest):
    sdk_version: str = Field(default="", max_length=64)


class CreateSession(TinkerRequest):
    tags: tuple[Annotated[str, Field(max_length=256)], ...] = Field(default=(), max_length=64)
    user_metadata: Metadata | None = None
    sdk_version: str = Field(default="", max_length=64)
    project_id: str | None = Field(default=None, max_length=256)
    display_name: str | None = Field(default=None, max_length=512)


class OfSession(TinkerRequest):
    session_id: Id


class FinishReason(Frozen):
    type: Literal["success", "errored", "interrupted"]


class FinishSession(TinkerRequest):
    reason: FinishReason
    detail: str | None = Field(default=None, max_length=4096)


class LoraConfig(Frozen):
    rank: int = Field(ge=1, le=1024)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Frozen):
    type: str = "adamw"
    version: int | None = None

    @field_validator("type")
    @classmethod
    def _is_adamw(cls, value: str) -> str:
        if value != "adamw":
            raise ValueError(f"the optimizer {value[:60]} is not served here: adamw is")
        return value


class CreateModel(TinkerRequest):
    session_id: Id
    model_seq_id: Number
    base_model: str = Field(min_length=1, max_length=2048)
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class OfModel(TinkerRequest):
    model_id: Id


class AdamParams(Frozen):
    """Numbers that cannot be used are refused where they are read, so that the request's number is not missed."""

    type: str | None = None
    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(OfModel):
    seq_id: Seq
    adam_params: AdamParams | None = None
    optimizer_params: JsonValue = None


class SaveWeights(OfModel):
    seq_id: Seq
    path: str | None = Field(default=None, max_length=4096)
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(OfModel):
    seq_id: Seq
    path: str | None = Field(default=None, max_length=4096)
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None


class SaveExternal(OfModel):
    seq_id: Seq
    path: str = Field(max_length=4096)
    ttl_seconds: int | None = None
    age_encryption_recipients: tuple[str, ...] | None = None


class LoadWeights(TinkerRequest):
    """Load into a model (`model_id`, `seq_id`), or make a new one from weights (`session_id`, `model_seq_id`)."""

    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = Field(default=None, max_length=2048)
    user_metadata: Metadata | None = None
    path: Path
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class RetrieveFuture(TinkerRequest):
    request_id: str = Field(max_length=4096)
    allow_metadata_only: bool = False


class CreateSampler(TinkerRequest):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = Field(default=None, max_length=2048)
    model_path: Path | None = None


class TokenChunk(Frozen):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]


class ModelInput(Frozen):
    chunks: tuple[TokenChunk, ...] = Field(min_length=1)

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(Frozen):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | tuple[str, ...] | tuple[int, ...] | None = None
    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_k: int = -1
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleRequest(TinkerRequest):
    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = Field(default=None, max_length=2048)
    model_path: Path | None = None
    sampling_session_id: Id | None = None
    seq_id: int | None = Field(default=None, ge=0, lt=2**63)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    record_stability_info: bool | None = None

    def check(self, records_nothing: bool = False) -> None:
        """Refuse fields that ask for something no sampler here returns. Raises InvalidInput.

        `records_nothing`: stable_reinforce has a substitute, which needs no record; the client's session said that.
        """
        if self.prompt_alt_tokens_k:
            raise InvalidInput("samplers here draw no tokens within the prompt: give 0", "prompt_alt_tokens_k")
        if self.target_prompt_logprobs is not None:
            raise InvalidInput("samplers here score the prompt's own tokens alone", "target_prompt_logprobs")
        if self.record_stability_info and not records_nothing:
            raise InvalidInput(
                "nothing of the kind is recorded here: stable_reinforce is not served", "record_stability_info"
            )
        if not self.prompt.ids:
            raise InvalidInput("there is no token", "prompt")


class TinkerPath(TinkerRequest):
    tinker_path: Path


class SetTtl(TinkerRequest):
    ttl_seconds: int | None = None


class SetProject(TinkerRequest):
    project_id: str = Field(max_length=256)


class CancelFuture(TinkerRequest):
    request_id: str = Field(max_length=4096)


class SearchCursor(Frozen):
    last_created_at: str = Field(max_length=64)
    last_session_id: Id


class SearchSessions(TinkerRequest):
    session_id: Id | None = None
    project_ids: tuple[Id, ...] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict, max_length=64)
    display_name: str | None = Field(default=None, min_length=1, max_length=512)
    owner: JsonValue = None
    statuses: tuple[dict[str, JsonValue], ...] | None = Field(default=None, max_length=16)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None

    def matches(self, session: SessionRecord) -> bool:
        """Return True for a session that is looked for. All sessions of a tenant are their searcher's own."""
        name = (session.display_name or "").lower()
        named = [self.session_id == session.session_id] if self.session_id is not None else []
        if self.display_name is not None:
            named.append(all(word in name for word in self.display_name.lower().split()))
        metadata = session.user_metadata or {}
        return (
            (any(named) or not named)
            and (self.project_ids is None or session.project_id in self.project_ids)
            and all(metadata.get(key) == value for key, value in self.user_metadata.items())
            and (self.statuses is None or any(_has_status(session, each) for each in self.statuses))
        )


def _has_status(session: SessionRecord, wanted: dict[str, JsonValue]) -> bool:
    match wanted.get("type"):
        case "active":
            return session.finished is None
        case "client_finished":
            reasons = wanted.get("reasons")
            return session.finished is not None and (not isinstance(reasons, list) or session.finished in reasons)
        case _:
            return False
