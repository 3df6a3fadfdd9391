"""Samplers for questions: where one is, the question and its answer, and the workflow that keeps one leased."""

from typing import Annotated, Literal

from pydantic import Field

from shared.chat.completions import CompletionRequest, CompletionResponse
from shared.chat.messages import ChatCompletion, ChatRequest
from shared.contract import Artifact, Fence, Frozen
from shared.jobs.leases import SamplerKey
from shared.runs.requests import FIRST_TENANT, RunId, Tenant
from shared.runs.start import RunTiming


class LeasedSampler(Frozen):
    """The sampler of a lease: for the sampling activities of the host that granted it."""

    kind: Literal["leased"] = "leased"
    run_id: RunId
    fence: Fence
    worker_id: str


class ServedSampler(Frozen):
    """A server that speaks vLLM's protocol: a user's own, or without a URL the installation's."""

    kind: Literal["served"] = "served"
    url: str | None = Field(default=None, max_length=2048)


SamplerPlace = Annotated[LeasedSampler | ServedSampler, Field(discriminator="kind")]


class CompleteRequest(Frozen):
    """A tenant's question to what was published: `adapter` beside `model`, or the model alone where there is none.

    `base`: the model as its users named it, for a server behind a URL to be known by. `name` and `version`: of what was
    published; a version of 0 is the base model that nobody has trained yet.
    """

    tenant: Tenant = FIRST_TENANT
    name: str | None = None
    version: int | None = None

    model: Artifact
    adapter: Artifact | None
    base: str
    place: SamplerPlace
    asked: ChatRequest | CompletionRequest


class Completed(Frozen):
    """The answer, in the shape of the question."""

    answer: ChatCompletion | CompletionResponse


class CompletionStart(Frozen):
    """`queue`: of the hosts that reach the sampler."""

    request: CompleteRequest
    queue: str
    timing: RunTiming = RunTiming()


class ServingStart(Frozen):
    """The sampler to lease, and the shape of its host. `idle_s`: without a question, until it is given back."""

    serving_id: RunId = Field(description="the workflow's own id")
    key: SamplerKey
    shape: str
    timing: RunTiming = RunTiming()
    idle_s: float = Field(gt=0)
    share_s: float = Field(default=60.0, gt=0, description="that a sampler is kept while others wait for it")


class ServeRequest(Frozen):
    """Announces a question. `patience_s`: the time that it may wait for a sampler."""

    patience_s: float = Field(gt=0)
