"""What each tensor of a folder is: computed with, carried along, or named in a refusal."""

import pytest

from shared.errors import InvalidInput
from shared.families import read_model_config
from shared.families.model_slices import Stored, contents_of

MIXTURE = {
    **{"model_type": "qwen3_5_moe_text", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 6, "shared_expert_intermediate_size": 4, "linear_num_key_heads": 1},
    **{"linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4},
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT = {
    **{"model_type": "deepseek_v3", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2},
    **{"intermediate_size": 8, "num_attention_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_group": 1, "topk_group": 1},
    **{"routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "q_lora_rank": 4, "kv_lora_rank": 4},
    **{"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "num_nextn_predict_layers": 1},
}
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


def found_of(config) -> tuple[list, tuple, dict]:
    """Slices, what is carried, and the tensors of a folder in which all have their own names."""
    a = read_model_config(config, "config.json").architecture()
    slices = [*a.slices(1), *a.constants]
    return slices, a.carried, {s.name: Stored("BF16", s.shape) for s in slices}


def stacked(found) -> dict:
    """The same with the experts of layer 0 in stacks."""
    rest = {name: one for name, one in found.items() if not name.startswith("model.layers.0.mlp.experts.")}
    return rest | {GATE_UP: Stored("BF16", (3, 12, 16)), DOWN: Stored("BF16", (3, 16, 6))}


def refusal(config, found) -> str:
    slices, carried, _ = found_of(config)
    with pytest.raises(InvalidInput) as refused:
        contents_of(slices, carried, found, "folder")
    return refused.value.message


def test_experts_are_found_apart_and_in_stacks_layer_by_layer() -> None:
    slices, carried, found = found_of(MIXTURE)
    assert contents_of(slices, carried, found, "folder").parts == {}
    parts = contents_of(slices, carried, stacked(found), "folder").parts
    assert set(parts) == {name for name in found if name.startswith("model.layers.0.mlp.experts.")}
    up = parts["model.layers.0.mlp.experts.2.up_proj.weight"]
    assert (up.stack, up.expert, up.first_row, up.num_rows) == (GATE_UP, 2, 6, 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({GATE_UP: Stored("BF16", (4, 12, 16))}, f"tensor {GATE_UP} is (4, 12, 16), config.json says (3, 12, 16)"),
        ({GATE_UP: Stored("BF16", (2, 12, 16))}, f"tensor {GATE_UP} is (2, 12, 16), config.json says (3, 12, 16)"),
        ({GATE_UP: Stored("BF16", (3, 14, 16))}, f"tensor {GATE_UP} is (3, 14, 16), config.json says (3, 12, 16)"),
        ({GATE_UP: Stored("BF16", (3, 13, 16))}, "lack the tensor model.layers.0.mlp.experts.0.gate_proj.weight"),
        ({GATE_UP: Stored("BF16", (3, 16, 12))}, f"tensor {GATE_UP} is (3, 16, 12), config.json says (3, 12, 16)"),
        ({DOWN: Stored("BF16", (3, 6, 16))}, f"tensor {DOWN} is (3, 6, 16), config.json says (3, 16, 6)"),
        ({GATE_UP: Stored("F8_E4M3", (3, 12, 16))}, f"{GATE_UP}_scale_inv, have to be floats of (3, 1, 1): it is"),
        ({DOWN: None}, "lack the tensor model.layers.0.mlp.experts.0.down_proj.weight and 2 more"),
        (
            {"model.layers.0.mlp.experts.1.up_proj.weight": Stored("BF16", (6, 16))},  # which of the two holds?
            "lack the tensor model.layers.0.mlp.experts.0.gate_proj.weight and 4 more",
        ),
        ({"model.layers.1.mlp.experts.gate_up_proj": Stored("BF16", (3, 12, 16))}, "1 tensors are not of this family"),
        ({"model.layers.2.mlp.gate.weight": Stored("BF16", (3, 16))}, "the first is 'model.layers.2.mlp.gate.weight'"),
        ({"model.norm.weight": Stored("I8", (16,))}, "tensor model.norm.weight is I8"),
        ({"lm_head.weight": None}, "lack the tensor lm_head.weight; tie_word_embeddings is false in config.json"),
        ({"mtp.layers.0.mlp.experts.gate_up_proj": Stored("F8_E4M3", (3,)), "mtp.bounds": Stored("BF16", ())}, None),
        ({"model.rotary_emb.inv_freq": Stored("F32", (4,))}, None),
    ],
)
def test_every_tensor_is_used_carried_along_or_named(changes, words) -> None:
    slices, carried, found = found_of(MIXTURE)
    found = {name: one for name, one in (stacked(found) | changes).items() if one is not None}
    if words is None:
        contents_of(slices, carried, found, "folder")
    else:
        assert words in refusal(MIXTURE, found)


def test_a_layer_behind_the_others_is_carried_if_it_predicts_more_tokens() -> None:
    slices, carried, found = found_of(LATENT)
    behind = {"model.layers.2.self_attn.o_proj.weight": Stored("BF16", (16, 8))}
    assert "lack the tensor model.layers.2.eh_proj.weight" in refusal(LATENT, found | behind)
    behind["model.layers.2.eh_proj.weight"] = Stored("BF16", (16, 32))
    contents_of(slices, carried, found | behind, "folder")
    assert "2 tensors are not of this family" in refusal(LATENT | {"num_nextn_predict_layers": 0}, found | behind)


def test_an_output_layer_beside_tied_embeddings_has_to_equal_them() -> None:
    slices, carried, found = found_of(MIXTURE | {"tie_word_embeddings": True})
    assert contents_of(slices, carried, found, "folder").tied is None
    twice = found | {"lm_head.weight": found["model.embed_tokens.weight"]}
    assert contents_of(slices, carried, twice, "folder").tied == ("lm_head.weight", "model.embed_tokens.weight")


def test_fp8_is_read_with_its_scales_if_the_configuration_says_so() -> None:
    slices, carried, found = found_of(LATENT)
    name = "model.layers.1.self_attn.o_proj.weight"
    scales = f"{name}_scale_inv"
    codes = found | {name: Stored("F8_E4M3", found[name].shape), scales: Stored("F32", (1, 1))}
    behind = {f"model.layers.2.{end}": Stored("F8_E4M3", (16, 32)) for end in ("eh_proj.weight", "up_proj.weight")}
    contents_of(slices, carried, codes | behind, "folder")  # what is carried along stays as it is
    with pytest.raises(InvalidInput, match=f"tensor {name} is F8_E4M3; weights must be one of"):
        contents_of(slices, carried, codes, "folder", is_fp8=False)
    for changed, words in (
        ({scales: None}, f"{name} is FP8, and its scales, {scales}, have to be floats of (1, 1): it"),
        ({scales: Stored("F32", (2, 1))}, "have to be floats of (1, 1): it is F32 of (2, 1)"),
        ({scales: Stored("U8", (1, 1))}, "have to be floats of (1, 1): it is U8"),
        ({name: found[name]}, f"1 tensors are not of this family, the first is '{scales}'"),
        ({name: Stored("F8_E5M2", found[name].shape)}, f"tensor {name} is F8_E5M2; weights must be"),
    ):
        tensors = {each: stored for each, stored in (codes | changed).items() if stored is not None}
        assert words in refusal(LATENT, tensors), changed
