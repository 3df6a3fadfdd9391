"""Resolve a model: from what a user wrote to an artifact that hosts can stage, checked before any GPU is asked for."""

from temporalio import activity

from activities.heartbeat import beating
from activities.import_files import import_files
from activities.model_files import (
    HUB_PATTERNS,
    SMALL_FILES,
    check_chat_template,
    check_tokenizer,
    check_weights,
    read_shape,
    weight_files,
)
from activities.model_location import locate
from shared.jobs import Artifact
from shared.layout import EngineName, Layout, ModelShape, check_layout
from shared.models import Frozen
from shared.settings import Settings


class ModelRequest(Frozen):
    """A model as a user names it, and the layout and engine that are to hold it."""

    uri: str
    layout: Layout = Layout()
    engine: EngineName = "megatron"


class ResolvedModel(Frozen):
    """The model's files: config, safetensors, tokenizer, chat template, generation config."""

    model: Artifact
    shape: ModelShape


class ResolveModel:
    """Finds and checks models."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @activity.defn(name="resolve_model")
    def resolve_model(self, request: ModelRequest) -> ResolvedModel:
        """Check a model and make an artifact of it.

        Raises:
            InvalidInput: names the file and the rule that it breaks.
            StoreUnavailable: S3 cannot be reached or refuses us.
        """
        with beating():
            location = locate(request.uri, self._settings, HUB_PATTERNS)
            shape = read_shape(location)
            check_layout(request.layout, shape, request.engine)
            check_tokenizer(location, shape.vocab_size)
            check_chat_template(location)
            check_weights(location)
            names = [name for name in SMALL_FILES if name in location.files] + weight_files(location)
            return ResolvedModel(model=import_files(location, names, self._settings), shape=shape)
