"""Tensor parallelism by the plans that transformers has for its models, and adapters of linears that are split.

The embeddings stay whole on tensor-parallel ranks: the head takes log-probabilities of the whole vocabulary.

Shape suffixes: T tokens, I inputs and O outputs of a linear, R rank of an adapter.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.parallel_utils import _AllReduceBackward, _AllReduceForward
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from megatron_worker.fsdp.adapter import FsdpAdapter, add_low, counted_by
from megatron_worker.fsdp.ranks import Ranks, SplitByTp
from shared.errors import InvalidInput
from shared.families.tensor_slices import TensorSlice


def split_by_plan(causal_lm: Any, ranks: Ranks) -> dict[str, str]:
    """Split a model's linears as its plan says; one rank splits none. Returns the style of each module.

    Raises InvalidInput if shares would not be equal.
    """
    if ranks.tp_size == 1:
        return {}
    plan, _, _ = causal_lm._resolve_parallel_plans(DistributedConfig(tp_size=ranks.tp_size))
    plan = {name: s for name, s in plan.items() if not (s.startswith("embedding") or name.startswith("lm_head"))}
    apply_tensor_parallelism(causal_lm, ranks.mesh["tp"], plan)
    for name, parameter in causal_lm.named_parameters():
        split = split_dimension(parameter)
        if split is not None and (size := parameter.shape[split.dim]) % ranks.size:
            raise InvalidInput(f"tp * dp = {ranks.size} does not divide the {size} of {name} that are split", "layout")
    return plan


def split_dimension(parameter: nn.Parameter) -> Shard | None:
    """Return the dimension that tensor parallelism splits; None: none."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return next((Shard(each.dim % parameter.ndim) for each in placements if isinstance(each, Shard)), None)


def slice_of(name: str, parameter: nn.Parameter, split: Shard | None) -> TensorSlice:
    """Return how a sharded parameter lies on the ranks. `split`: what tensor parallelism had split."""
    shape = tuple(parameter.shape)
    if split is None:
        return TensorSlice(name, name, shape, 0, 0, shape[0])
    return SplitByTp(name, name, shape, split.dim, 0, shape[0])


def add_split_adapter(
    adapter: FsdpAdapter, linear: str, style: str | None, input_1TI: Tensor, output_1TO: Tensor, ranks: Ranks
) -> Tensor:
    """Add an adapter's output to that of a linear, which may be split over tensor-parallel ranks.

    Gradients of its factors are summed over all ranks. So a factor that every rank computes whole has a gradient on one
    of them only.
    """
    if linear not in adapter.scales:
        return output_1TO
    (a_RI, b_OR), x_TI = adapter.factors(linear), input_1TI[0]
    group, rank = ranks.mesh["tp"].get_group(), ranks.tp_rank
    match style:
        case "colwise":
            low_TR = F.linear(_AllReduceBackward.apply(x_TI, group), a_RI)
            b_OR = b_OR.chunk(ranks.tp_size)[rank]
        case "rowwise":
            low_TR = _AllReduceForward.apply(F.linear(x_TI, a_RI.chunk(ranks.tp_size, dim=1)[rank]), group)
            b_OR = counted_by(rank == 0, b_OR)
        case _:
            low_TR, b_OR = F.linear(x_TI, counted_by(rank == 0, a_RI)), counted_by(rank == 0, b_OR)
    return add_low(adapter, linear, low_TR, b_OR, output_1TO)
