"""Where the FSDP engine puts adapters (lora.py): on linears, on experts, and on linears that ranks share."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.parallel_utils import _AllReduceBackward, _AllReduceForward
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from megatron_worker.families import sum_of_experts
from megatron_worker.fsdp.optimizer import Ranks, SplitByTp
from megatron_worker.head import scalar
from megatron_worker.lora import Adapter, LinearLora
from shared.errors import InvalidInput
from shared.families.tensor_slices import TensorSlice

# --- Adapters of transformers' linears ---
# As PEFT's matrices, whole on every rank.


def counted_once(lora: LinearLora, ranks: Ranks) -> LinearLora:
    """Return the adapter of a module that every tensor-parallel rank computes whole, with gradients on rank 0 only."""
    a_RI, b_OR = (counted_by(ranks.tp_rank == 0, factor) for factor in (lora.a_RI, *lora.b_parts))
    return replace(lora, a_RI=a_RI, b_parts=(b_OR,))


def scalar_head(adapter: Adapter, ranks: Ranks) -> scalar.HeadWeights | None:
    """Return an adapter's head of scalars, if it has one."""
    own = {name: p for name, p in adapter.parameters.items() if name.startswith(scalar.MODULE)}
    return scalar.HeadWeights.among({name: counted_by(ranks.tp_rank == 0, p) for name, p in own.items()})


def counted_by(this_rank: bool, factor: Tensor) -> Tensor:
    """Return a factor whose gradient is of zeros on the other tensor-parallel ranks. They go backward all the same."""
    return factor if this_rank else factor.detach() + 0 * factor


# --- Experts as transformers stacks them ---
# Where the tensors of files lie, and adapters of each expert's linears.
#
# Shape suffixes: T tokens, K experts of a token, M tokens that chose one expert, H hidden size, I inputs of a linear.

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def stacked_slices(name: str, shape: tuple[int, ...], num_ranks: int) -> list[TensorSlice]:
    """Return the tensors of files in a stack of experts, which ranks share out: `ep_rank` has all of an expert's."""
    stack, _, kind = name.rpartition(".")
    num_experts, num_rows, num_inputs = shape
    height, share, slices = num_rows // len(_PARTS[kind]), -(-num_experts // num_ranks), []
    for number in range(num_experts):
        rank, place = divmod(number, share)
        for part, linear in enumerate(_PARTS[kind]):
            start = place * num_rows + part * height
            own, parameter = f"{stack}.{number}.{linear}.weight", on_rank(name, rank)
            whole = (height, num_inputs)
            slices.append(TensorSlice(own, parameter, whole, None, start, start + height, expert=number, ep_rank=rank))
    return slices


def on_rank(name: str, rank: int) -> str:
    """Return the name of a rank's experts of a stack. Each expert is on one rank."""
    return f"{name}@{rank}"


def put_adapters_beside(name: str, experts: Any, active: Callable[[], Adapter | None]) -> dict[str, tuple[int, int]]:
    """Make a layer's experts compute with the active adapter. Returns outputs and inputs of each expert's linears."""
    sizes = {"gate_proj": (experts.intermediate_dim, experts.hidden_dim)}
    sizes |= {"up_proj": sizes["gate_proj"], "down_proj": (experts.hidden_dim, experts.intermediate_dim)}
    own = {f"{name}.{n}.{linear}": size for n in range(experts.num_experts) for linear, size in sizes.items()}

    def linear(adapter: Adapter, number: int, kind: str, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        output_MO, lora = F.linear(x_MI, weight_OI), adapter.linears.get(f"{name}.{number}.{kind}")
        return output_MO if lora is None else lora.added(output_MO, x_MI, weight_OI)

    def expert(adapter: Adapter, number: int, x_MH: Tensor) -> Tensor:
        gate_IH, up_IH = experts.gate_up_proj[number].chunk(2)
        gate_MI = experts.act_fn(linear(adapter, number, "gate_proj", x_MH, gate_IH))
        made_MI = gate_MI * linear(adapter, number, "up_proj", x_MH, up_IH)
        return linear(adapter, number, "down_proj", made_MI, experts.down_proj[number])

    def forward(x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        if (adapter := active()) is None:
            alone: Tensor = alone_forward(x_TH, expert_TK, weight_TK)
            return alone
        return sum_of_experts(x_TH, weight_TK, expert_TK, partial(expert, adapter))

    alone_forward, experts.forward = experts.forward, forward
    return own


# --- Tensor parallel ---
# Tensor parallelism by the plans that transformers has for its models, and adapters of linears that are split.
#
# The embeddings stay whole on tensor-parallel ranks: the head takes log-probabilities of the whole vocabulary.
#
# Shape suffixes: T tokens, I inputs and O outputs of a linear, R rank of an adapter.


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
    lora: LinearLora, style: str | None, input_1TI: Tensor, output_1TO: Tensor, weight_OI: Tensor, ranks: Ranks
) -> Tensor:
    """Add an adapter's output to that of a linear, which may be split over tensor-parallel ranks.

    Gradients of its factors are summed over all ranks. So a factor that every rank computes whole has a gradient on one
    of them only.
    """
    group, rank, (b_OR,) = ranks.mesh["tp"].get_group(), ranks.tp_rank, lora.b_parts
    match style:
        case "colwise":
            own = replace(lora, b_parts=(b_OR.chunk(ranks.tp_size)[rank],))
            return own.added(output_1TO, _AllReduceBackward.apply(input_1TI, group), weight_OI)
        case "rowwise":
            low_1TR = F.linear(input_1TI, lora.a_RI.chunk(ranks.tp_size, dim=1)[rank])
            return lora.plus(output_1TO, _AllReduceForward.apply(low_1TR, group), counted_by(rank == 0, b_OR))
        case _:
            return counted_once(lora, ranks).added(output_1TO, input_1TI, weight_OI)
