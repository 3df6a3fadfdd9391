"""Models of transformers outside our families: the engine fsdp trains them with transformers' own code.

Only the sizes of a `config.json` are read, by their common names. The rest is found when the model is loaded
(megatron_worker/fsdp/probe.py).
"""

from typing import Any

from pydantic import Field

from shared.errors import InvalidInput
from shared.models.dense import DenseConfig

_READ = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "quantization_config"),
)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class GenericConfig(DenseConfig):
    """The sizes of a dense decoder."""

    intermediate_size: int = Field(default=0, ge=0)


def generic_settings(values: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the sizes in a `config.json`. Raises InvalidInput if the model is no dense decoder."""
    reason = None
    if any(values.get(name) for name in _NUM_EXPERTS):
        reason = "it has experts; the nearest is qwen3_moe"
    elif isinstance(values.get("text_config"), dict) or values.get("is_encoder_decoder"):
        reason = "it has other parts: take a folder of its decoder"
    elif missing := [name for name in _READ[:6] if name != "intermediate_size" and values.get(name) is None]:
        reason = f"its config.json has no {missing[0]}"
    if reason is not None:
        rule = "of families that are not known the engine fsdp takes dense decoders alone"
        raise InvalidInput(f"model_type {values['model_type']!r}: {rule}, and {reason}", place)
    return {name: values[name] for name in _READ if values.get(name) is not None}
