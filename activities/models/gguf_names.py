"""GGUF's names for the parts of Llama, Qwen2 and Qwen3, as llama.cpp reads and writes them."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.models.dense import RopeConfig
from shared.models.merging import Floats

GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
"""The names of these architectures in GGUF files, and the `model_type` of their configs."""

_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_THEIRS = {theirs: ours for ours, theirs in {**_WHOLE, **_OF_LAYER}.items()}
PAIRED = ("attn_q", "attn_k")
"""Weights and biases whose rotated pairs Llama's files hold side by side."""


def gguf_name(name: str) -> str | None:
    """Return a tensor's name in GGUF files; None for one that they have none for."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{match[1]}.{_OF_LAYER[match[2]]}.{kind}" if match and match[2] in _OF_LAYER else None


def hugging_face_name(name: str) -> str | None:
    """Return the Hugging Face name of a tensor of a GGUF file; None for one that is not known."""
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    ours = _THEIRS.get(match[2] if match else stem)
    if ours is None or (match is not None) != (ours in _OF_LAYER):
        return None
    return f"model.layers.{match[1]}.{ours}.{kind}" if match else f"{ours}.{kind}"


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**_BYTES, "trim_offsets": False, "use_regex": False}]}


_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": {**_BYTES, "use_regex": True},
    "llama-bpe": _split_by(_SPLIT % "{1,3}"),
    "qwen2": _split_by(_SPLIT % ""),
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}],
    },
}
"""How a tokenizer of bytes cuts text, by llama.cpp's name (`tokenizer.ggml.pre`): as in a tokenizer.json."""


def pre_tokenizer_name(found: Any) -> str | None:
    """Return llama.cpp's name of a tokenizer.json's `pre_tokenizer`; None for one that it has none for."""
    return next((name for name, known in PRE_TOKENIZERS.items() if _plain(known) == _plain(found)), None)


def _plain(value: Any) -> Any:
    """Return a pre-tokenizer without settings that do not change its pieces."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if key != "trim_offsets"}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def rope_factors(rope: RopeConfig, head_size: int) -> Floats:
    """Return llama.cpp's divisor of each pair's frequency, for Llama 3's scaling."""
    assert rope.factor is not None and rope.original_max_position_embeddings is not None
    frequencies = (rope.rope_theta or 10_000.0) ** (-np.arange(0, head_size, 2) / head_size)
    turns = rope.original_max_position_embeddings * frequencies / (2 * np.pi)
    share = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 / ((1 - share) / rope.factor + share)).astype(np.float32)


def swapped(rows_OI: NDArray[Any], outer: int, head_size: int) -> NDArray[Any]:
    """Return the rows of whole heads, each a table of `outer` rows, with these tables transposed; for 0 as they are."""
    if not head_size:
        return rows_OI
    tables = rows_OI.reshape(-1, outer, head_size // outer, rows_OI.shape[-1]).swapaxes(1, 2)
    return np.ascontiguousarray(tables).reshape(rows_OI.shape)
