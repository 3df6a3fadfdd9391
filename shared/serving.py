"""Types for questions to published models: the sampler, the request, the reply, and the workflow that leases it."""

from typing import Annotated, Literal

from pydantic import Field

from longshore.fields import Artifact, Fence, Frozen, Reason, added
from longshore.runs import FIRST_TENANT, RunId, Tenant
from longshore.training import Dtype, SamplerKind
from shared.chat.completions import CompletionRequest
from shared.chat.episodes import TurnPlace
from shared.chat.messages import ChatRequest
from shared.chat.streams import StreamStart
from shared.jobs.job import SamplerKey
from shared.runs.start import RunTiming
from shared.settings import Settings
from shared.storage.paths import content_key


class LeasedSampler(Frozen):
    """A sampler process that a run has leased. Only activities of the host that granted the lease can reach it."""

    kind: Literal["leased"] = "leased"
    run_id: RunId
    fence: Fence
    worker_id: str
    sampler: SamplerKind = "own"


class ServedSampler(Frozen):
    """A server that speaks vLLM's protocol: a user's own, or without a URL the installation's."""

    kind: Literal["served"] = "served"
    url: str | None = Field(default=None, max_length=2048)


SamplerPlace = Annotated[LeasedSampler | ServedSampler, Field(discriminator="kind")]


class CompleteRequest(Frozen):
    """A tenant's question to a published adapter (`adapter` on `model`) or, without `adapter`, to a published model.

    `base`: the model as its user named it, which is compared with the models that a server behind a URL lists. `name`
    and `version` are those of the published weights; version 0 is the untrained base model.
    """

    tenant: Tenant = FIRST_TENANT
    name: str | None = None
    version: int | None = None

    model: Artifact
    adapter: Artifact | None
    base: str
    place: SamplerPlace
    asked: ChatRequest | CompletionRequest
    stream: StreamStart | None = Field(default=None, description="of an answer that is streamed")
    turn: TurnPlace | None = added(None, description="the turn of an episode that this is")
    counts_only: bool = added(False, description="answer with the number of the prompt's tokens, and no choice")

    @property
    def tells_text(self) -> bool:
        """True if text is streamed while it is sampled. An answer with token ids comes at once, the prompt's first."""
        return self.stream is not None and not self.asked.return_token_ids


class QuestionFailure(Frozen):
    """Why a host cannot answer. `lost`: its sampler or the host itself shuts down; another one may answer."""

    kind: Literal["refused", "lost", "failed"]
    message: Reason
    place: str | None = None


class AnswerHead(Frozen):
    """The line before the bytes of an answer. Without a `failure` the answer follows: its JSON, or its events."""

    failure: QuestionFailure | None = None


LOST = b"\0"
"""In the middle of an answer's events: the sampler was lost, and the reason follows. No event contains this byte."""


def sampler_of_questions(settings: Settings, model: Artifact, dtype: Dtype) -> SamplerKey:
    """Return the key of the sampler that answers questions to a model, and to adapters on it."""
    serving = settings.serving
    return SamplerKey(
        model=model, dtype=dtype, threads=settings.cpu_threads, slots=serving.slots, max_model_len=serving.max_model_len
    )


def serving_id(settings: Settings, key: SamplerKey) -> str:
    """Return the id of the workflow that leases this sampler."""
    return f"serving-{content_key(key, settings.shape)}"


class ServingStart(Frozen):
    """The input of a serving workflow: the sampler to lease, and the shape of its host.

    `idle_s`: the sampler is given back after this many seconds without a question.
    """

    serving_id: RunId = Field(description="the workflow's own id")
    key: SamplerKey
    shape: str
    timing: RunTiming = RunTiming()
    idle_s: float = Field(gt=0)
    share_s: float = Field(default=60.0, gt=0, description="seconds that a sampler is kept while others wait for it")


class ServeRequest(Frozen):
    """Asks a serving workflow for its sampler. `patience_s`: seconds to wait until one is up."""

    patience_s: float = Field(gt=0)
