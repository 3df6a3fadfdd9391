"""Under every layout, samplers get every tensor to the bit, by its Hugging Face or PEFT name."""

import json

from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.weight_sync.sync_ranks import LAYOUTS


def test_samplers_get_the_weights_of_every_layout(model, tmp_path):
    models = {"dense": str(model), "experts": str(distinct_model(tmp_path / "experts", "qwen3_moe", False))}
    module = "tests.megatron_worker.weight_sync.sync_ranks"
    fork_ranks(module, str(tmp_path), json.dumps(models), num_ranks=2, timeout_s=500)
    expected = {
        f"{name}-{engine}-{layout.label}-{kind}"
        for name, layouts in LAYOUTS.items()
        for engine, layout in layouts
        for kind in ("full", "lora")
    }
    assert expected <= {path.name for path in tmp_path.iterdir()}
