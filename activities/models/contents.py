"""What a model's weights hold: tensors of the sizes that its configuration says, of finite numbers."""

import re
from typing import cast, get_args

import numpy as np

from activities.models.files import Weights, tensor_bytes
from activities.sources.models import Location
from longshore.training import Linear
from shared.errors import InvalidInput
from shared.models.config import DenseConfig
from shared.models.merging import floats_of
from shared.models.shape import shape_of

# Families whose linears are named and sized as ModelShape.linear_size says.
_SIZED = ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen2", "llama", "mistral", "smollm3")
_OF_LAYER = re.compile(
    r"layers\.\d+\.(?:(?P<norm>input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)"
    r"|(?:self_attn|linear_attn|mlp(?:\.experts\.\d+|(?P<shared>\.shared_expert))?)\.(?P<linear>\w+))"
    r"\.(?P<part>weight|bias)"
)
_ROUTER = re.compile(r"\.(?:gate|router)\.(?:weight|bias|e_score_correction_bias)$")
_FLOATS = ("F32", "BF16", "F16")


def check_shapes(weights: Weights, config: DenseConfig, location: Location) -> None:
    """Raises InvalidInput for a tensor of another size than the configuration says; names both."""
    if config.model_type not in _SIZED:
        return
    for name, tensor in weights.tensors.items():
        expected = _expected(name, config)
        if expected is not None and tensor.shape != expected:
            rule = f"tensor {name} is {tensor.shape}, config.json says {expected}"
            raise InvalidInput(rule, location.place(weights.file_of[name]))


def _expected(name: str, config: DenseConfig) -> tuple[int, ...] | None:
    """Return a tensor's shape; None where it is not known."""
    if name in (f"{config.tensor_prefix}.embed_tokens.weight", "lm_head.weight"):
        return config.vocab_size, config.hidden_size
    if name == f"{config.tensor_prefix}.norm.weight":
        return (config.hidden_size,)
    match = _OF_LAYER.fullmatch(name.removeprefix(f"{config.tensor_prefix}."))
    if match is None:
        return None
    if match["norm"]:
        return (config.size_of_heads if "self_attn" in match["norm"] else config.hidden_size,)
    if match["linear"] not in get_args(Linear):
        return None
    in_size, out_size = shape_of(config).linear_size(cast(Linear, match["linear"]), match["shared"] is not None)
    if not in_size or not out_size:
        return None
    return (out_size, in_size) if match["part"] == "weight" else (out_size,)


def check_finite(weights: Weights, location: Location, *, all_of_them: bool) -> None:
    """Read all tensors, a few megabytes at a time, or those of a mixture's routers alone.

    Raises:
        InvalidInput: one holds a number that is not finite; names it.
    """
    for name, tensor in weights.tensors.items():
        if tensor.dtype not in _FLOATS or not (all_of_them or _ROUTER.search(name)):
            continue
        file = weights.file_of[name]
        for block in tensor_bytes(location, file, tensor):
            if not np.isfinite(floats_of(block, tensor.dtype, name)).all():
                raise InvalidInput(f"tensor {name} holds a number that is not finite", location.place(file))
