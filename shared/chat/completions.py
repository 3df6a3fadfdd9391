"""Completions: the part of vLLM's OpenAI-compatible protocol that our samplers and their clients use.

Requests are strict: a field that a sampler would ignore is refused, unless its value changes nothing.
Answers may have unknown fields, because other servers send more than we need.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from longshore.fields import Frozen, Sha256, only
from shared.field_rules import first_rule

# --- Structured outputs: an answer must be JSON, JSON of a schema, or tool calls ---
#
# Chat clients use OpenAI's fields (`response_format`, `tool_choice`); samplers get vLLM's (`structured_outputs`).
# Schemas are untrusted: their length and depth are bounded here, the resources to compile them by the sampler
# (megatron_worker/sampler/grammars).

MAX_SCHEMA_CHARACTERS = 64 << 10
MAX_SCHEMA_DEPTH = 64
MAX_TAGS = 128


class SamplerRequest(BaseModel):
    """A part of a request. Names and types are strict."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, serialize_by_alias=True)


def _bounded(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    level: list[JsonValue] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [item for part in level if isinstance(part, dict | list) for item in _items(part)]
    if level:
        raise ValueError(f"a schema may be nested {MAX_SCHEMA_DEPTH} deep")
    if (size := len(json.dumps(schema))) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"a schema may have {MAX_SCHEMA_CHARACTERS:,} characters, and this has {size:,}")
    return schema


def _items(part: dict[str, JsonValue] | list[JsonValue]) -> Iterable[JsonValue]:
    return part.values() if isinstance(part, dict) else part


Schema = Annotated[dict[str, JsonValue], AfterValidator(_bounded)]
"""A JSON Schema of bounded size and depth."""


class NamedSchema(SamplerRequest):
    """`strict` has no effect: an answer always follows the schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(SamplerRequest):
    """OpenAI's `response_format` for chats: `text`, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required with the type json_schema, and allowed with no other")
        return self

    @property
    def wanted(self) -> "StructuredOutputs | None":
        """The sampler's form of this; None for text."""
        match self.type, self.json_schema:
            case "json_schema", NamedSchema() as named:
                return StructuredOutputs(json=named.schema_)
            case "json_object", _:
                return StructuredOutputs(json_object=True)
        return None


class TagContent(SamplerRequest):
    type: Literal["json_schema"] = "json_schema"
    json_schema: Schema


class Tag(SamplerRequest):
    """JSON that follows a schema, between two texts."""

    type: Literal["tag"] = "tag"
    begin: str = Field(min_length=1, max_length=256)
    content: TagContent
    end: str = Field(min_length=1, max_length=256)


class Tags(SamplerRequest):
    """One of these tags, or one or more of them with the separator in between."""

    type: Literal["tags_with_separator"] = "tags_with_separator"
    tags: list[Tag] = Field(min_length=1, max_length=MAX_TAGS)
    separator: str = Field(default="\n", min_length=1, max_length=16)
    at_least_one: Literal[True] = True
    stop_after_first: bool = False


class StructuralTag(SamplerRequest):
    """The supported structural tags: an answer only consists of tags, like forced tool calls."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Tags


class StructuredOutputs(SamplerRequest):
    """vLLM's field of this name; exactly one of these is set. Its other kinds (regex, choice, grammar) are refused.

    `structural_tag` is a StructuralTag as JSON text.
    """

    json_: Schema | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    structural_tag: str | None = Field(default=None, max_length=MAX_SCHEMA_CHARACTERS)

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        if sum(each is not None for each in (self.json_, self.json_object, self.structural_tag)) != 1:
            raise ValueError("give one of json, json_object and structural_tag")
        if self.structural_tag is not None:
            try:
                self.tags()
            except ValidationError as error:
                raise ValueError(f"structural_tag: {first_rule(error)}") from None
        return self

    def tags(self) -> Tags:
        assert self.structural_tag is not None
        return StructuralTag.model_validate_json(self.structural_tag).format


MAX_SAMPLES = 1024
MAX_TOP_LOGPROBS = 20
TOKEN_ID = "token_id:"
"""What a token's name among logprobs begins with, where it is not its text."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


Only1 = Annotated[float | None, Field(ge=1, le=1), only(1, words="this is not applied here: leave it out, or give 1")]
"""A setting that clients know and samplers here do not apply: only the value that changes nothing."""

TopK = Annotated[int | None, Field(ge=-1, description="sample from this many of the likeliest tokens; -1 and 0: all")]
MinP = Annotated[float | None, Field(ge=0, le=1, description="smallest share of the likeliest token's probability")]
Penalty = Annotated[float | None, Field(ge=-2, le=2, allow_inf_nan=False)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None,
    Field(max_length=1024, description="added to the logits of tokens, by id"),
]


class Sampling(Frozen):
    """Sampling parameters of a completion. Temperature 0 takes the most likely token, the lowest id among equals.

    A completion ends after the first token of `stop_token_ids` or of the model's own end tokens (kept in the token
    ids, left out of the text), after the token that completes one of the `stop` strings (the text ends before the
    string), or after `max_tokens`.
    """

    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, description="sample from this many of the likeliest tokens; -1 and 0: all")
    max_tokens: int = Field(default=16, ge=1)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = Field(default=False, description="continue after the model's own end tokens")


class StreamOptions(SamplerRequest):
    """Options of a stream of chunks: further contents besides the text."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class CompletionRequest(SamplerRequest):
    """`POST /v1/completions`. Sample j of each prompt uses the seed `seed + j`, as in vLLM."""

    model: str
    prompt: str | list[int] | list[str] | list[list[int]]
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    echo: bool | None = Field(
        default=None, description="begin with the prompt: its text, and its tokens' log-probabilities"
    )
    max_tokens: int = Field(default=16, ge=0, description="0 is only allowed with echo: then the prompt is scored")
    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: str | list[str] | None = Field(default=None, max_length=64)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="logprobs of the prompt's tokens, with this many of the likeliest at each",
    )
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="vLLM's field: tokens are named token_id:123 among the logprobs"
    )
    stream: bool | None = Field(default=None, description="send the answer in chunks, as it is sampled")
    stream_options: StreamOptions | None = None
    top_k: TopK = None
    min_p: MinP = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: LogitBias = None
    structured_outputs: StructuredOutputs | None = None

    # vLLM's clients send these; only values that change nothing are accepted.
    suffix: None = None
    best_of: Literal[1] | None = None
    min_tokens: Literal[0] | None = None
    repetition_penalty: Only1 = None
    user: str | None = None

    @property
    def num_prompts(self) -> int:
        return sum(not isinstance(one, int) for one in self.prompt) or 1 if isinstance(self.prompt, list) else 1

    @property
    def most_tokens(self) -> int:
        """The most tokens that an answer can describe. A prompt has at most one per character or id."""
        num_prompt = len(self.prompt) + sum(len(one) for one in self.prompt if isinstance(one, list | str))
        return num_prompt * self.n + self.num_prompts * self.n * self.max_tokens

    @property
    def num_likely(self) -> int:
        """How many of the likeliest tokens are returned for each position."""
        return max(self.logprobs or 0, self.prompt_logprobs or 0)

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("stream_options needs stream: true")
        return value

    @field_validator("max_tokens")
    @classmethod
    def _draws_something(cls, value: int, info: ValidationInfo) -> int:
        if not value and not info.data.get("echo"):
            raise ValueError("0 tokens are drawn with echo: true alone")
        return value


class RoutedRequest(CompletionRequest):
    """A request to a run's own sampler, which also returns the experts that it used."""

    return_routed_experts: bool = Field(default=False, description="return the experts of each choice, as in `Choice`")


class SamplerAnswer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TokenLogprobs(SamplerAnswer):
    """Lists with one entry for each sampled token: its text, its logprob in nats, its offset in the text, and the
    logprobs of the likeliest tokens in its place.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class PromptLogprob(SamplerAnswer):
    """A prompt token's logprob in nats, at temperature 1; its rank: 1 for the likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class Choice(SamplerAnswer):
    """One sample. `finish_reason` is "stop", or "length" if it was cut off.

    `prompt_logprobs` has one entry for each prompt token: null for the first; for each other a mapping by token id that
    holds at least the token itself.
    `policy_versions`: the version of the policy that sampled each token, if a leased sampler knows it.
    `routed_experts`: the experts of each token of prompt and sample, except the last, as a base64-encoded `.npy` file:
    [tokens - 1, layers with experts, experts of a token]. vLLM's name and form.
    """

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    policy_versions: list[int | None] | None = None
    routed_experts: str | None = None


class DrawnBy(SamplerAnswer):
    """Weights that sampled a part of an answer: the policy's version, if it is known, and the hash of their bits."""

    policy_version: int | None = None
    weights_sha256: Sha256 | None = None

    def of_version(self, policy_version: int | None) -> "DrawnBy":
        """Return the same weights with another version number."""
        return self.model_copy(update={"policy_version": policy_version})


class PromptDetails(SamplerAnswer):
    """`cached_tokens`: of the prompt, those whose keys, values and states were kept from an earlier one."""

    cached_tokens: int | None = None


class Usage(SamplerAnswer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = Field(default=None, exclude_if=lambda details: details is None)


class CompletionResponse(SamplerAnswer):
    """The answer to a CompletionRequest. The choices of prompt p have the indices `p * n` to `(p + 1) * n - 1`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    drawn_by: list[DrawnBy] | None = Field(
        default=None, description="weights that a leased sampler used, in order of use"
    )


class CompletionChunk(SamplerAnswer):
    """An event of a stream: the new parts of choices. The last part of each choice has its finish_reason.

    If requested, `usage` comes in the last event, which has no choices.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ErrorDetail(SamplerAnswer):
    message: str
    type: str = "server_error"
    param: str | None = None
    code: int | str | None = None


class ErrorResponse(SamplerAnswer):
    error: ErrorDetail


# --- Requests to a sampler other than completions ---
# vLLM's `GET /v1/models`, `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, and those that only
# Longshore has: weights, sleep, memory, the ready file.


class LoadAdapterRequest(SamplerRequest):
    """A PEFT folder on the sampler's machine, and the name that requests use as `model`."""

    lora_name: str = Field(min_length=1, max_length=512)
    lora_path: str = Field(min_length=1)


class UnloadAdapterRequest(SamplerRequest):
    lora_name: str = Field(min_length=1)


class LoadWeightsRequest(SamplerRequest):
    """A Hugging Face folder on the sampler's machine, whose weights replace the model's, and their name.

    `again`: they are read even if they are served already. Only our own sampler and a leased vLLM accept this request;
    the latter always reads them.
    """

    name: str = Field(min_length=1, max_length=512)
    path: str = Field(min_length=1)
    again: bool = False


class NameWeightsRequest(SamplerRequest):
    """Names weights or an adapter that arrived by a weight sync; requests then use that name.

    `digest`: of the sync, or of the adapter's content (shared/models/peft.py).
    """

    name: str = Field(min_length=1, max_length=512)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class ScoreRequest(SamplerRequest):
    """`POST /v1/score`: conversations as token ids; a reward model returns its scalars at the last token of each.

    Only our own sampler takes it.
    """

    model: str
    prompts: list[list[int]] = Field(min_length=1, max_length=MAX_SAMPLES)


class UpdateWeightsRequest(SamplerRequest):
    """Replaces the policy version served as `name`; samples in progress continue with the new one.

    `path`: an adapter's folder (`lora`; null: the model without one) or a whole model's. A version that is not newer
    than the one served changes nothing. Only our own sampler takes it.
    """

    name: str = Field(min_length=1, max_length=512)
    version: int = Field(ge=0)
    lora: bool
    path: str | None = Field(default=None, min_length=1)


class SleepRequest(SamplerRequest):
    """`POST /v1/sleep`. Level 1 keeps the weights in the host's memory, unless that is the device; 2 drops them."""

    level: Literal[1, 2] = 1


class ModelCard(SamplerAnswer):
    """A model or adapter that a server lists. `root`: the path of its files; `parent`: an adapter's base model.

    A leased sampler adds the policy's version, if it is known, and our own the hash of the weights in memory.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "longshore"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    policy_version: int | None = None
    weights_sha256: Sha256 | None = None


class ScoreAnswer(SamplerAnswer):
    """The scalars of each conversation, in the order of the head's names; None for a scalar that is not finite.

    None for a conversation that is longer than the model's context.
    """

    scores: list[list[float | None] | None]


class ModelList(SamplerAnswer):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class PartMemory(SamplerAnswer):
    """Bytes of a part of a sampler, on its device and, separately, in the host's memory."""

    device: int = 0
    host: int = 0


class SamplerMemory(SamplerAnswer):
    """`GET /v1/memory` of our own sampler: its sleep level (0: awake), and the bytes of its parts.

    `caches`: keys, values and recurrent states of the sequences in progress, and those that are kept of prompts.
    `prompt_tokens_computed`, `prompt_tokens_reused`: tokens of all prompts that it read, and that it did not compute
    again as they were kept.
    """

    asleep: Literal[0, 1, 2]
    weights: PartMemory
    adapters: PartMemory
    caches: PartMemory
    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0

    @property
    def device_bytes(self) -> int:
        return self.weights.device + self.adapters.device + self.caches.device


class SamplerReady(Frozen):
    """The ready file, written when the sampler accepts requests. Only its owner can read it.

    `socket`: the path of the Unix socket that it listens on, if it does not listen at the address of `url`.
    `weights_address`: `host:port` for weights from trainers on other machines, if it takes any.
    """

    url: str
    socket: str | None = None
    api_key: str
    pid: int
    model: str
    weights_address: str | None = None
