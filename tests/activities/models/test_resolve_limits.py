"""What a model is not computed for, or hosts have no room for, is refused before a worker is asked for."""

import pytest
from safetensors.numpy import load_file
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.models.resolve import Resolve
from longshore.training import Dtype, Layout
from longshore.views import Devices
from shared.errors import InvalidInput
from shared.runs.start import ModelRequest
from shared.storage.host_states import write_offer
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


def test_weights_that_no_device_has_room_for_are_refused_with_both_numbers(config, model) -> None:
    host = HostContext(config)

    def resolve(dtype: Dtype | None, **degrees: int) -> None:
        request = ModelRequest(uri=str(model), tenant="default", dtype=dtype, layout=Layout(**degrees))
        ActivityEnvironment().run(Resolve(host).resolve_model, request)

    def offer(number: int, num_bytes: int) -> None:
        write_offer(host.store, config.shape, 8, Devices(number=number, num_bytes=num_bytes))

    resolve("float32")  # nobody has said what there is
    held = 4 * sum(tensor.size for tensor in load_file(model / "model.safetensors").values())
    offer(8, held)
    resolve("float32")
    offer(8, held - 1)
    with pytest.raises(InvalidInput) as refused:
        resolve("float32")
    assert str(refused.value) == (
        f"layout: a rank of single would hold {held / 1e9:.3g} GB of weights in float32, and the largest device of a "
        f"host of shape cpu has {(held - 1) / 1e9:.3g}: split it by tp, pp or ep, or say quantize_base"
    )
    resolve("bfloat16")
    resolve(None)
    resolve("float32", tp=2)
    offer(1, 2 * held - 1)  # a CPU's memory, which two replicas share
    with pytest.raises(InvalidInput, match="2 ranks of dp2 would hold"):
        resolve("float32", dp=2)
    resolve("float32", dp=2, nodes=2)
