"""Resolve a model: from what a user wrote to an artifact that hosts can stage, checked before any GPU is asked for."""

from functools import partial

from temporalio import activity

from activities.host_context import HostContext, beating
from activities.models.files import (
    HUB_PATTERNS,
    SMALL_FILES,
    check_chat_template,
    check_tokenizer,
    check_weights,
    read_shape,
    weight_files,
)
from activities.models.imports import check_began_with, import_files
from activities.sources.models import Location, locate
from shared.models.shape import ModelShape, check_layout
from shared.runs.start import ModelRequest, ResolvedModel


class ResolveModel:
    """The activity `resolve_model`."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="resolve_model")
    def resolve_model(self, request: ModelRequest) -> ResolvedModel:
        """Check a model and make an artifact of it.

        Raises:
            InvalidInput: names the file and the rule that it breaks, or which files changed since the run began.
            StoreUnavailable: S3 cannot be reached or refuses us.
        """
        with beating():
            check = partial(_check_small_files, request, self._host)
            location = locate(request.uri, request.tenant, self._host.settings, HUB_PATTERNS, check)
            shape = check(location)
            check_weights(location)
            names = [name for name in SMALL_FILES if name in location.files] + weight_files(location)
            model = import_files(location, names, self._host, request.tenant)
            if request.run_id is not None:
                check_began_with("model", model, request.uri, request.run_id, self._host)
            return ResolvedModel(model=model, shape=shape)


def _check_small_files(request: ModelRequest, host: HostContext, location: Location) -> ModelShape:
    """All that can be said against a model before its weights are here."""
    shape = read_shape(location)
    check_layout(request.layout, shape, request.engine)
    check_tokenizer(location, shape.vocab_size, host)
    check_chat_template(location)
    return shape
