"""Pipeline stages: which layers each has, and which stage and which ranks hold a Hugging Face tensor's pieces."""

import dataclasses
from collections.abc import Sequence

from megatron_worker.families.architecture import Architecture
from megatron_worker.families.tensor_slices import TensorSlice
from megatron_worker.megatron.parallel.mesh import Mesh
from shared.jobs.layout import Layout

LAYERS = "decoder.layers."


def layers_of(stage: int, num_stages: int, num_layers: int) -> range:
    """As even as can be, the first stages having one more."""
    share, rest = divmod(num_layers, num_stages)
    first = stage * share + min(stage, rest)
    return range(first, first + share + (stage < rest))


def placed(pieces: Sequence[TensorSlice], architecture: Architecture, layout: Layout) -> list[TensorSlice]:
    """The same pieces with the stage and the expert-parallel rank that hold them."""
    of_layer = [stage for stage in range(layout.pp) for _ in layers_of(stage, layout.pp, architecture.num_layers)]
    per_rank = max(1, architecture.num_experts // layout.ep)

    def place(piece: TensorSlice) -> TensorSlice:
        if piece.parameter.startswith(LAYERS):
            stage = of_layer[int(piece.parameter.removeprefix(LAYERS).split(".")[0])]
        else:
            stage = 0 if piece.parameter.startswith("embedding.") else layout.pp - 1
        ep_rank = 0 if piece.expert is None else piece.expert // per_rank
        return dataclasses.replace(piece, stage=stage, ep_rank=ep_rank)

    return [place(piece) for piece in pieces]


def holds(mesh: Mesh, piece: TensorSlice) -> bool:
    """Whether this rank has a part of a layer's piece."""
    return piece.stage == mesh.pp.rank and (piece.expert is None or piece.ep_rank == mesh.ep.rank)
