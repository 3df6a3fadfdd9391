"""The model of a run: as its user names it, and as it was found."""

from longshore.fields import Artifact, Frozen
from longshore.layout import EngineName, Layout
from longshore.training import Trainable
from shared.models.shape import ModelShape
from shared.runs.requests import RunId, Tenant


class ModelRequest(Frozen):
    """A model as a tenant's user names it, the layout and engine that are to hold it, and the longest sequence.

    `run_id`: the run that uses the model. Its later executions must find the same files as its first one. `trainable`:
    what it trains. `any_family`: also of families that the engine fsdp alone may train, as where nothing is trained.
    """

    uri: str
    tenant: Tenant
    run_id: RunId | None = None
    layout: Layout = Layout()
    engine: EngineName = "megatron"
    trainable: Trainable | None = None
    max_tokens: int | None = None
    any_family: bool = False


class ResolvedModel(Frozen):
    """The model's files: config, safetensors, tokenizer, chat template, generation config."""

    model: Artifact
    shape: ModelShape
