"""Rope scaling that depends on a sequence's length: runs with longer ones are refused before a worker is asked for."""

import pytest
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.models.resolve import Resolve
from shared.errors import InvalidInput
from shared.runs.models import ModelRequest
from tests.activities.models.resolving import edit

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": LONG, "max_position_embeddings": 4096, "original_max_position_embeddings": 128},
        {"rope_parameters": LONG | {"original_max_position_embeddings": 128}, "max_position_embeddings": 4096},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 128},
    ],
    ids=str,
)
def test_a_run_s_longest_sequence_is_one_that_is_computed(config, model, settings) -> None:
    edit(model / "config.json", **settings)

    def resolve(max_tokens: int | None) -> int | None:
        request = ModelRequest(uri=str(model), tenant="default", max_tokens=max_tokens)
        return ActivityEnvironment().run(Resolve(HostContext(config)).resolve_model, request).shape.max_positions

    assert resolve(128) == resolve(None) == 128
    with pytest.raises(InvalidInput, match=r"max_tokens=129: by its rope scaling .* sequences of up to 128"):
        resolve(129)
    edit(model / "config.json", rope_parameters=LONG | {"long_factor": LONG["short_factor"]})
    assert resolve(4096) is None  # one factor for all lengths
