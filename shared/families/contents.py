"""What each tensor of a model's folder is to its architecture: computed with, carried along, or a reason to refuse it.

The control plane asks this before a lease, a worker as it loads. It goes by names, shapes and types alone, which the
headers of files have. Published folders may hold the experts of a layer as one stack of [experts, rows, columns], with
gates above ups in it, where the table of slices has each expert's own tensors; and weights in MXFP4 as two tensors.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import InvalidInput
from shared.families.tensor_slices import TensorSlice
from shared.models.lora_modules import OUTPUT_WEIGHT
from shared.models.merging import FLOATS, Part, parts_of

BLOCKS, SCALES, BLOCK_BYTES = "_blocks", "_scales", 16
"""What the names of MXFP4's two tensors end with, and the bytes of a block."""
_IGNORED = "rotary_emb.inv_freq"  # a buffer that old checkpoints carry
_EMBEDDING = "embed_tokens.weight"
_LAYER_BEHIND = re.compile(r".*\.layers\.\d+\.")


class Stored(NamedTuple):
    """A tensor of a file: its type by safetensors' name, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Contents:
    """What was found of the slices in a folder.

    Attributes:
        parts: by the names of those that are in a stack. Others are there by their names.
        tied: the embedding that the output layer has to equal: the model ties them, and has a tensor for both.
    """

    parts: dict[str, Part]
    tied: str | None


def contents_of(
    slices: Sequence[TensorSlice], carried: Sequence[str], found: Mapping[str, Stored], place: str
) -> Contents:
    """Match a folder's tensors with those of an architecture.

    Args:
        slices: all that is computed with (`slices_of` and `constants_of`), for any number of ranks.
        carried: what the names of tensors begin with that belong to the model, and are not computed with.

    Raises:
        InvalidInput: a tensor is missing, unknown, of another shape, or of a type that is not computed with; names it.
    """
    found = _unpacked(found, place)
    parts, shapes = stacked(slices, found), {s.name: s.shape for s in slices if s.name in found}
    num_experts = 1 + max((s.expert for s in slices if s.expert is not None), default=-1)
    for s in slices:
        if part := parts.get(s.name):
            height = found[part.stack].shape[1] // part.num_rows * s.shape[0]
            shapes[part.stack] = num_experts, height, s.shape[1]
    for name, shape in shapes.items():
        if found[name].dtype not in FLOATS:
            problem = f"tensor {name} is {found[name].dtype}; weights must be one of {', '.join(FLOATS)}"
            raise InvalidInput(problem, place)
        if found[name].shape != shape:
            raise InvalidInput(f"tensor {name} is {found[name].shape}, config.json says {shape}", place)
    needed = [s.name for s in slices if s.name not in parts]
    needed += [  # a layer behind the others predicts more tokens, and says so
        f"{start}eh_proj.weight"
        for start in carried
        if _LAYER_BEHIND.fullmatch(start) and any(name.startswith(start) for name in found)
    ]
    if missing := [name for name in needed if name not in found]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        rule = "; tie_word_embeddings is false in config.json" if missing == [OUTPUT_WEIGHT] else ""
        raise InvalidInput(f"the weights lack the tensor {missing[0]}{more}{rule}", place)
    known = {*shapes, *(name for name in found if name.endswith(_IGNORED) or name.startswith(tuple(carried)))}
    embedding = next((s.name for s in slices if s.name.endswith(_EMBEDDING)), None)
    tied = embedding if OUTPUT_WEIGHT in found.keys() - known else None
    unknown = sorted(found.keys() - known - ({OUTPUT_WEIGHT} if tied else set()))
    if unknown:
        raise InvalidInput(f"{len(unknown)} tensors are not of this family, the first is {unknown[0]!r}", place)
    return Contents(parts, tied)


def stacked(slices: Sequence[TensorSlice], found: Mapping[str, Stored]) -> dict[str, Part]:
    """Return where tensors of experts are that a folder has in stacks, by their names.

    A stack beside tensors that are in it would say them twice: it counts as unknown.
    """
    parts: dict[str, Part] = {}
    if names := {s.name for s in slices if s.expert is not None}:
        for name, stored in found.items():
            own = [part for part in parts_of(name, stored.shape) if part.name in names]
            if not any(part.name in found for part in own):
                parts |= {part.name: part for part in own}
    return parts


def _unpacked(found: Mapping[str, Stored], place: str) -> Mapping[str, Stored]:
    """Return tensors as they are read: what two hold in MXFP4 is one, [experts, inputs, outputs], in bfloat16."""
    read = dict(found)
    for name in [name for name in found if name.endswith(BLOCKS)]:
        stem = name.removesuffix(BLOCKS)
        blocks, scales = read.pop(name), read.pop(stem + SCALES, None)
        if scales is None or len(blocks.shape) != 4 or blocks.shape != (*scales.shape, BLOCK_BYTES):
            rule = f"{stem + SCALES} of shape {scales and scales.shape} does not fit its blocks, {blocks.shape}"
            raise InvalidInput(rule, place)
        experts, outputs, num_blocks, num_bytes = blocks.shape
        read[stem] = Stored("BF16", (experts, num_blocks * num_bytes * 2, outputs))
    return read
