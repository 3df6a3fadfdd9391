"""Completions: the part of vLLM's OpenAI-compatible protocol that our samplers and their clients use.

Requests are strict: a field that a sampler would ignore is refused, unless its value changes nothing.
Answers may have unknown fields, because other servers send more than we need.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from longshore.fields import Frozen, Sha256
from shared.chat.structured_outputs import StructuredOutputs
from shared.field_rules import only

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


class SamplerRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(SamplerRequest):
    """Options of a stream of chunks: further contents besides the text."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class CompletionRequest(SamplerRequest):
    """`POST /v1/completions`. Sample j of each prompt uses the seed `seed + j`, as in vLLM."""

    model: str
    prompt: str | list[int] | list[str] | list[list[int]]
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    echo: bool | None = Field(default=None, description="begin with the prompt: its text, and its tokens' logprobs")
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
        default=None, description="vLLM's: tokens are named token_id:123 among the logprobs"
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

    return_routed_experts: bool = Field(default=False, description="of each choice, as `Choice` has them")


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
    `policy_versions`: the version of the policy that sampled each token, if our own sampler knows it.
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


class Usage(SamplerAnswer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionResponse(SamplerAnswer):
    """The answer to a CompletionRequest. The choices of prompt p have the indices `p * n` to `(p + 1) * n - 1`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    drawn_by: list[DrawnBy] | None = Field(default=None, description="of our own sampler; in their order of use")


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
