"""Pipeline stages: their layers, and the stage and ranks that hold a Hugging Face tensor."""

import dataclasses
from collections.abc import Sequence

from longshore.layout import Layout
from megatron_worker.megatron.parallel.mesh import Mesh
from shared.families.architecture import Architecture
from shared.families.tensor_slices import TensorSlice

LAYERS = "decoder.layers."


def layers_of(stage: int, num_stages: int, num_layers: int) -> range:
    """Return the layers of a stage: equal shares, or one layer more in the first stages."""
    share, rest = divmod(num_layers, num_stages)
    first = stage * share + min(stage, rest)
    return range(first, first + share + (stage < rest))


def placed(slices: Sequence[TensorSlice], architecture: Architecture, layout: Layout) -> list[TensorSlice]:
    """Return the slices with the stage and the expert-parallel rank that hold them."""
    of_layer = [stage for stage in range(layout.pp) for _ in layers_of(stage, layout.pp, architecture.num_layers)]
    per_rank = max(1, architecture.num_experts // layout.ep)

    def place(tensor_slice: TensorSlice) -> TensorSlice:
        if tensor_slice.parameter.startswith(LAYERS):
            stage = of_layer[int(tensor_slice.parameter.removeprefix(LAYERS).split(".")[0])]
        else:
            stage = 0 if tensor_slice.parameter.startswith("embedding.") else layout.pp - 1
        ep_rank = 0 if tensor_slice.expert is None else tensor_slice.expert // per_rank
        return dataclasses.replace(tensor_slice, stage=stage, ep_rank=ep_rank)

    return [place(tensor_slice) for tensor_slice in slices]


def holds(mesh: Mesh, tensor_slice: TensorSlice) -> bool:
    """Return True if this rank holds a part of the tensor."""
    return tensor_slice.stage == mesh.pp.rank and (tensor_slice.expert is None or tensor_slice.ep_rank == mesh.ep.rank)
