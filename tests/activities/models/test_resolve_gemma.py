"""Gemma 4's experts beside MLPs: what is known of them before a worker is asked for."""

from longshore.layout import Layout
from shared.families import read_config
from shared.models.shape import shape_of
from tests.activities.models.resolving import refusal, resolve
from tests.megatron_worker.rows import distinct_model

EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}


def test_experts_beside_an_mlp(config, tmp_path) -> None:
    model = distinct_model(tmp_path / "model", "gemma4", config=EXPERTS)
    shape = resolve(config, model, Layout(ep=2, dp=2)).shape
    assert shape == shape_of(read_config(model))
    assert (shape.num_experts, shape.expert_ffn_size) == (4, 32)
    assert {"gate_proj", "q_proj"} <= set(shape.linears)
    assert "needs sp with tp" in refusal(config, model, Layout(tp=2))
