"""Tiny models laid out as published ones, by the facts in ../shared/layouts: names, types, switches, towers.

The names of tensors come from a layout's file, and so do the types and the shapes of what transformers' model has not.
Everything else is checked against that model: it has to find all of its tensors in the folder.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.tiny_model import CHAT_TEMPLATE, train_tokenizer
from tests.megatron_worker.rows import VOCAB_SIZE, make_distinct

LAYOUTS = Path(__file__).parents[3] / "shared" / "layouts"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3 in bfloat16": (
        "DeepSeek-V3",
        {"quantization_config": None, "seq_aux": True, "aux_loss_alpha": 0.001, "pretraining_tp": 1},
    ),
    "Qwen3.5-35B-A3B, re-saved": ("Qwen3.5-35B-A3B", {}),
    "Qwen3-Coder-30B-A3B": ("Qwen3-30B-A3B", {"use_qk_norm": True, "qkv_bias": False}),
    "Qwen3-0.6B": ("Qwen3-8B", {"tie_word_embeddings": True}),
}
"""Other models of a layout: their settings. What else differs is in `build`."""

# Sizes take the places of those that a layout has. Those of the first line are given where it has none, too.
_CORE = {
    **{"hidden_size": 64, "intermediate_size": 96, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
}
_SIZES = {
    **{"head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_experts": 4},
    **{"num_local_experts": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "experts_per_token": 2},
    **{"top_k_experts": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"qk_rope_head_dim": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "sliding_window": 8},
    **{"global_head_dim": 32, "num_global_key_value_heads": 2, "num_kv_shared_layers": 2, "moe_latent_size": 32},
    **{"hidden_size_per_layer_input": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16},
    **{"n_groups": 2, "moe_shared_expert_intermediate_size": 48, "query_pre_attn_scalar": 16},
}
_QWEN3_5 = {"num_hidden_layers": 4, "head_dim": 16, **{f"linear_{kind}_head_dim": 16 for kind in ("key", "value")}}
_QWEN3_5 |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_GEMMA4 = {
    **{"num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "model_type": "gemma4_text"},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_NEMOTRON = {
    **{"hybrid_override_pattern": "M*-E", "head_dim": 16, "num_hidden_layers": 4, "mamba_num_heads": 4, "n_groups": 2},
    **{"mamba_head_dim": 16, "ssm_state_size": 16, "n_routed_experts": 8, "moe_intermediate_size": 32},
    "moe_shared_expert_intermediate_size": 48,
}
# What a layout's file leaves out of the settings that its model is published with, in sizes of ours.
_GIVEN: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2},
    "GLM-4.7-Flash": {"num_key_value_heads": 4, "num_hidden_layers": 2, "n_group": 1, "topk_group": 1},
    "Qwen3.5-9B": _QWEN3_5,
    "Qwen3.5-35B-A3B": {"num_hidden_layers": 4},
    "Qwen3.6-35B-A3B": {"num_hidden_layers": 4},
    "gemma-3-1b-it": {"num_hidden_layers": 6},
    "gemma-3-4b-it": {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma-4-E2B": _GEMMA4 | {"vocab_size_per_layer_input": VOCAB_SIZE},
    "gemma-4-26B-A4B": _GEMMA4 | {"hidden_size_per_layer_input": 0},
    "gemma-4-31B": _GEMMA4,
    "Nemotron-3-Nano-30B-A3B": _NEMOTRON,
    "Nemotron-3-Super-120B": _NEMOTRON,
    "OLMo-3-7B": {"num_hidden_layers": 4, "rope_theta": 500000},
    "SmolLM3-3B": {"num_hidden_layers": 4},
    "Mistral-Small-3.2-24B": {"head_dim": 16},
    "gpt-oss-20b": {"intermediate_size": 64},
    "GLM-4.5-Air": {
        **{"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"head_dim": 16, "n_group": 1, "topk_group": 1, "attention_bias": True},
    },
}
_CLIPPED = {"use_clipped_linears": True}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "vision_config": {**_TOWER, "depth": 1, "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 64}
    },
    "gemma3": {
        "vision_config": {**_TOWER, "image_size": 32, "patch_size": 8, "vision_use_head": False},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "vision_config": {
            **_TOWER,
            **{"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 8},
        }
    },
    "mistral3": {"vision_config": {**_TOWER, "head_dim": 8, "image_size": 32, "patch_size": 8}},
}
_AUDIO = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4]},
    "output_proj_dims": 16,
}
_IN_TOWERS = ("vision_tower.", "multi_modal_projector.", "model.visual.", "model.vision_tower.", "model.audio_tower.")
_TIED = ("gemma", "SmolLM3")  # by default
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Published:
    """A tiny model as it is published, and the same for transformers: of weights that it reads as they are.

    `kind`: transformers' class of it.
    """

    folder: Path
    plain: Path
    kind: str


def build(folder: Path, name: str) -> Published:
    """Make the tiny model of a layout, or of one of VARIANTS."""
    file, changes = VARIANTS.get(name, (name, {}))
    layout = json.loads((LAYOUTS / f"{file}.json").read_text())
    config = _config(file, layout["config"], changes)
    published, plain, written = (folder / each for each in ("published", "plain", "written"))
    _write_small_files(published, config)
    kind = "AutoModelForImageTextToText" if "text_config" in config else "AutoModelForCausalLM"
    own = _of_transformers(published, plain, config, kind, written)
    tensors, text = dict[str, Tensor](), config.get("text_config", config)
    real = layout["config"].get("text_config", layout["config"]).get("num_hidden_layers")
    for entry in layout["tensors"]:
        for full_name in _names(entry, text, real, own):
            tensor = _value(full_name, entry, own, text)
            tensors[full_name] = tensor.to(torch.float32 if entry["dtype"].startswith("F32") else torch.bfloat16)
    if text.get("tie_word_embeddings", True):
        tensors.pop("lm_head.weight", None)
    if text.get("attention_k_eq_v"):  # whose layers of full attention have no values of their own, says a note
        tensors = {key: value for key, value in tensors.items() if "v_proj" not in key or key in own}
    if name == "Qwen3-0.6B":  # an equal output layer beside tied embeddings
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if name.endswith("re-saved"):
        tensors = _apart(tensors)
    if file == "gemma-3-4b-it":  # transformers no longer writes the middle of the tower's names
        old, new = "vision_tower.", "vision_tower.vision_model."
        tensors |= {key.replace(old, new): tensors.pop(key) for key in list(tensors) if key.startswith(old)}
        own = {key.replace(old, new): value for key, value in own.items()}
    if layout.get("note", "").startswith("refused"):  # such files do not list all
        tensors |= {key: value.bfloat16() for key, value in own.items() if key not in tensors}
    if file == "GLM-4.5-Air":  # of the layer that predicts more tokens its file lists the experts alone
        name_behind = f"model.layers.{text['num_hidden_layers']}.eh_proj.weight"
        tensors[name_behind] = _value(name_behind, {}, own, text).bfloat16()
    quantized = _quantized(tensors, config.get("quantization_config"))
    lacking = own.keys() - _apart(tensors).keys() - tensors.keys() - {"lm_head.weight"}
    assert not lacking, sorted(lacking)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(quantized, published / "model.safetensors", {"format": "pt"})
    return Published(published, plain, kind)


def _config(name: str, found: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a layout's settings in tiny sizes."""
    config = {key: _first_of(value) for key, value in found.items() if key != "note"}
    has_tower = "text_config" in config
    text = config.pop("text_config", config)
    known = {key: value for key, value in text.items() if value is None or key not in _SIZES or value in (0, 1)}
    text |= _CORE | {key: size for key, size in _SIZES.items() if key in text and key not in known}
    text |= {key: value for key, value in known.items() if value is None} | _GIVEN.get(name, {})
    if not name.startswith("gemma-3-4b"):  # which leaves it to its default
        text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", name.startswith(_TIED)))
    if has_tower:
        family = config.setdefault("model_type", "gemma4")
        text |= {"model_type": text.get("model_type", f"{family}_text"), "eos_token_id": 2, "pad_token_id": 0}
        config |= _TOWERS[family.removesuffix("_moe")] | {"text_config": text}
        if name == "gemma-4-E2B":
            config |= {"audio_config": _AUDIO | _CLIPPED, "vision_config": config["vision_config"] | _CLIPPED}
        if "tie_word_embeddings" in text:
            config["tie_word_embeddings"] = text["tie_word_embeddings"]
    config |= {"eos_token_id": 2, "pad_token_id": 0, **changes}
    return {key: value for key, value in config.items() if value is not None or key not in changes}


def _first_of(value: Any) -> Any:
    """Return a setting that a layout's file gives in words: the first one."""
    if isinstance(value, str) and (match := re.match(r"(?:default )?(true|false|\d+)\b(?![.\w])", value)):
        return json.loads(match[1])
    return value


def _write_small_files(folder: Path, config: Mapping[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = train_tokenizer(["hello there"], 290)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _of_transformers(
    published: Path, plain: Path, config: dict[str, Any], kind: str, written: Path
) -> dict[str, Tensor]:
    """Return the tensors of transformers' model of a config, as it writes them; writes small files to `plain`."""
    import transformers

    _write_small_files(plain, {key: value for key, value in config.items() if key != "quantization_config"})
    read = transformers.AutoConfig.from_pretrained(plain)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, kind).from_config(read, dtype=torch.float32)
    make_distinct(model, config["model_type"].removesuffix("_text"))
    model.save_pretrained(written)
    return load_file(written / "model.safetensors")


def _names(
    entry: dict[str, str], text: Mapping[str, Any], real: int | None, own: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yield the names of an entry of a layout, in the tiny model's numbers."""
    name, where = entry["name"], entry.get("layers", "")
    if name.startswith(_IN_TOWERS):  # the files have patterns, which transformers' names complete
        yield from (
            each
            for each in own
            if each.startswith(_IN_TOWERS) and each.startswith(re.split(r"[{*]", name.replace("vision_model.", ""))[0])
        )
        return
    if real is not None:
        name = re.sub(rf"\.layers\.{real}\.", f".layers.{text['num_hidden_layers']}.", name)
    choices = [
        part[1:-1].split("|") if part.startswith("{") else [part] for part in re.split(r"(\{[^{}]*\|[^{}]*\})", name)
    ]
    for parts in product(*choices):
        chosen = "".join(parts)
        for layer in _layers(where, text, real) if "{layer}" in chosen else [0]:
            for expert in range(_num_experts(text)) if "{expert}" in chosen else [0]:
                full = chosen.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                if "*" not in full:
                    yield full
                    continue
                block = "*E"[int(full.split(".")[2])]  # of a hybrid's layer of multi-token prediction
                at = text["hybrid_override_pattern"].index(block)
                alike = full.replace("mtp.layers", "backbone.layers").replace(full.split(".")[2], str(at), 1)
                for each in own:
                    if fnmatchcase(each, alike):
                        yield each.replace(f"backbone.layers.{at}.", ".".join(full.split(".")[:3]) + ".")


def _num_experts(text: Mapping[str, Any]) -> int:
    return next(text[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if text.get(key))


def _layers(where: str, text: Mapping[str, Any], real: int | None) -> list[int]:
    num, first = text["num_hidden_layers"], text.get("first_k_dense_replace", 0)
    if match := re.match(r"layer % 4 (!=|==) 3", where):
        return [layer for layer in range(num) if (layer % 4 == 3) == (match[1] == "==")]
    if where.startswith("layer <"):
        return list(range(first))
    if match := re.match(r"(\d+)\.\.(\d+)", where):
        return list(range(first if int(match[1]) else 0, num + (int(match[2]) == real)))
    if where in ("M", "*", "-", "E"):
        return [layer for layer, block in enumerate(text["hybrid_override_pattern"]) if block == where]
    if where.startswith("ALSO"):
        return list(range(num - text["num_kv_shared_layers"], num))
    assert where == "all", where
    return list(range(num))


def _value(name: str, entry: dict[str, str], own: Mapping[str, Tensor], text: Mapping[str, Any]) -> Tensor:
    """Return a tensor of transformers' model, or a stack of some; or numbers in the shape of a tensor like it."""
    name = name.removesuffix("_blocks").removesuffix("_scales")
    if name in own:
        return own[name]
    if stack := _STACK.fullmatch(name):
        parts = ("gate_proj", "up_proj") if stack[2] == "gate_up_proj" else ("down_proj",)
        start = stack[1]
        if not any(each.startswith(f"{start}.0.") for each in own):  # of a layer that predicts more tokens
            start = (
                next(each for each in own if ".experts.0." in each).split(".0.gate_proj")[0].split(".0.down_proj")[0]
            )
        experts = [[own[f"{start}.{e}.{part}.weight"] for part in parts] for e in range(_num_experts(text))]
        return torch.stack([torch.cat(each) for each in experts])
    hidden, shapes = text["hidden_size"], {"[H,2H]": 2, "[V,H]": 1}
    generator = torch.Generator().manual_seed(len(name))
    if (shape := entry.get("shape")) == "[H]" or (name.endswith("norm.weight") and ".self_attn." not in name):
        return 1 + 0.1 * torch.randn(hidden, generator=generator)
    if shape in shapes or name.endswith("eh_proj.weight"):
        rows = text["vocab_size"] if shape == "[V,H]" else hidden
        return torch.randn(rows, shapes.get(shape or "", 2) * hidden, generator=generator)
    ending = re.sub(r"^.*?layers\.\d+\.", "", name)
    like = [each for each in own if each.endswith(f".{ending}") and not each.startswith(_IN_TOWERS)]
    return torch.randn(own[like[-1]].shape, generator=generator)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with each expert's own in the place of stacks."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if (stack := _STACK.fullmatch(name)) is None or ".mlp." not in name:
            found[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if stack[2] == "gate_up_proj" else ("down_proj",)
        for expert, whole in enumerate(tensor):
            for part, one in zip(parts, whole.chunk(len(parts)), strict=True):
                found[f"{stack[1]}.{expert}.{part}.weight"] = one.clone()
    return found


def _quantized(tensors: dict[str, Tensor], how: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Return tensors as a published folder has them, and put what its numbers stand for into `tensors`."""
    if how is None:
        return tensors
    generator, found = torch.Generator().manual_seed(0), dict(tensors)
    for name, tensor in list(tensors.items()):
        if how["quant_method"] == "mxfp4" and name.endswith("_scales"):
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors

            stem = name.removesuffix("_scales")
            experts, inputs, outputs = tensor.shape
            shape = experts, outputs, inputs // 32, 16
            found[f"{stem}_blocks"] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            found[name] = torch.randint(120, 124, shape[:-1], generator=generator, dtype=torch.uint8)
            tensors[stem] = convert_moe_packed_tensors(found[f"{stem}_blocks"], found[name], dtype=torch.bfloat16)
            del tensors[name], tensors[f"{stem}_blocks"]
        is_linear = name.endswith("_proj.weight") or name.endswith("_proj_with_mqa.weight")
        if how["quant_method"] == "fp8" and is_linear and "eh_proj" not in name:
            scale = 0.25 + torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128), generator=generator)
            each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
            found[name] = (tensor.float() / each).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = scale
            tensors[name] = found[name].float() * each
    return found
