"""What a model's weights hold: tensors of the sizes that its configuration says, of finite numbers."""

import math
import re
from collections.abc import Iterable
from typing import cast

import numpy as np

from activities.models.files import Weights, tensor_bytes
from activities.sources.models import Location
from longshore.training import LINEARS, Linear
from shared.errors import InvalidInput
from shared.models.config import prefix_of
from shared.models.dense import DenseConfig
from shared.models.merging import FLOATS, FP8_SCALES, floats_of
from shared.models.shape import ModelShape, Of, shape_of

_OF_LAYER = re.compile(
    r"layers\.(?P<layer>\d+)\.(?:(?P<norm>\w*norm)|\w+\.(?P<head_norm>[qk]_norm)"
    r"|\w+(?:\.(?P<of>experts)\.\d+|\.(?P<shared>shared_experts?))?\.(?P<linear>\w+))\.(?P<part>weight|bias)"
)
_BLOCKS, _SCALES = "_blocks", ("_scales", FP8_SCALES)  # of weights in MXFP4; those of FP8 have scales
_ROUTER = re.compile(r"\.(?:gate|router)\.(?:weight|bias|e_score_correction_bias)$")


def check_shapes(weights: Weights, config: DenseConfig, location: Location) -> None:
    """Raises InvalidInput for a tensor of another size than the configuration says; names both.

    Looked at are embeddings, norms, and the linears whose sizes ModelShape knows; workers check all as they load them.
    """
    for name, expected in expected_shapes(weights.tensors, config).items():
        if expected is not None and (found := weights.tensors[name].shape) != expected:
            rule = f"tensor {name} is {found}, config.json says {expected}"
            raise InvalidInput(rule, location.place(weights.file_of[name]))


def expected_shapes(names: Iterable[str], config: DenseConfig) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of tensors as a configuration says; None where it is not known."""
    names = list(names)
    prefix, shape = prefix_of(config, names), shape_of(config)
    whole: dict[str, tuple[int, ...]] = {config.output_name: (config.vocab_size, config.hidden_size)}
    whole |= {f"{prefix}.{config.names.embedding}.weight": (config.vocab_size, config.hidden_size)}
    whole |= {f"{prefix}.{config.names.final_norm}.weight": (config.hidden_size,)}
    return {name: whole.get(name) or _of_layer(name.removeprefix(f"{prefix}."), shape, config) for name in names}


def _of_layer(name: str, shape: ModelShape, config: DenseConfig) -> tuple[int, ...] | None:
    """Return the shape of a tensor of a layer; None where it is not known."""
    match = _OF_LAYER.fullmatch(name)
    if match is None or (layer := int(match["layer"])) >= shape.num_layers:
        return None
    if match["norm"]:
        return (shape.hidden_size,)
    if match["head_norm"]:
        head_dim, num_kv_heads = config.heads_of(layer)
        num_heads = shape.num_heads if match["head_norm"] == "q_norm" else num_kv_heads
        return (head_dim * (num_heads if config.norms_all_heads else 1),)
    if match["linear"] not in LINEARS:
        return None
    of: Of = "experts" if match["of"] else "shared" if match["shared"] else ""
    in_size, out_size = shape.linear_size(cast(Linear, match["linear"]), of, layer)
    if not in_size or not out_size:
        return None
    return (out_size, in_size) if match["part"] == "weight" else (out_size,)


def check_finite(weights: Weights, location: Location, *, all_of_them: bool) -> None:
    """Read all tensors, a few megabytes at a time, or those of a mixture's routers alone.

    Raises InvalidInput: one holds a number that is not finite; names it.
    """
    for name, tensor in weights.tensors.items():
        if tensor.dtype not in FLOATS or not (all_of_them or _ROUTER.search(name)):
            continue
        file = weights.file_of[name]
        for block in tensor_bytes(location, file, tensor):
            if not np.isfinite(floats_of(block, tensor.dtype, name)).all():
                raise InvalidInput(f"tensor {name} holds a number that is not finite", location.place(file))


def computed_shapes(weights: Weights, config: DenseConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that are computed with, by name."""
    return {
        name: _read_as(name, tensor.shape)
        for name, tensor in weights.tensors.items()
        if not name.startswith(config.carried)
        and not (config.tie_word_embeddings and name == config.output_name)
        and not name.endswith(_SCALES)
    }


def _read_as(name: str, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of what is read of a tensor: a byte of MXFP4 has two numbers."""
    return (*dims[:2], 2 * math.prod(dims[2:])) if name.endswith(_BLOCKS) else dims
