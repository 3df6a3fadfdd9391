"""Requests to a sampler other than completions: vLLM's `GET /v1/models`, `POST /v1/load_lora_adapter` and
`POST /v1/unload_lora_adapter`, and those that only Longshore has: weights, sleep, memory, the ready file.
"""

from typing import Literal

from pydantic import Field

from longshore.fields import Frozen, Sha256
from shared.chat.completions import MAX_SAMPLES, SamplerAnswer, SamplerRequest


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

    Our own sampler adds the policy's version, if it is known, and the hash of the weights in memory.
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

    `caches`: keys and values of the sequences in progress.
    """

    asleep: Literal[0, 1, 2]
    weights: PartMemory
    adapters: PartMemory
    caches: PartMemory

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
