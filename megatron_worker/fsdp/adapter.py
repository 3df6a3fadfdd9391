"""LoRA in the FSDP engine: on linears, on experts, and on linears that ranks share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.parallel_utils import _AllReduceBackward, _AllReduceForward
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from longshore.training import Lora
from megatron_worker.fsdp.optimizer import FsdpOptimizer, Ranks, SplitByTp
from megatron_worker.head import scalar
from megatron_worker.head.scalar import BesideHead
from megatron_worker.tensors.adapter_tensors import Masks, dropped, initial, norms_of_rows
from megatron_worker.tensors.offload import Flat
from shared.errors import InvalidInput
from shared.families.tensor_slices import TensorSlice
from shared.models.peft import NORMS, OUTPUT, PREFIX, AdaptedModules, factor_of

# --- LoRA on transformers' linears ---
# As PEFT's matrices (Hu et al. 2021, arXiv:2106.09685), whole on every rank.
#
# Shape suffixes: T tokens, I input features, O output features, R rank.

Sizes = Mapping[str, tuple[int, int]]


class FsdpAdapter:
    """One slot: an adapter's weights for every linear it targets, and its head, in one buffer."""

    def __init__(self, lora: Lora, sizes: Sizes, more: Sequence[TensorSlice], ranks: Ranks, dtype: torch.dtype) -> None:
        """`sizes`: outputs and inputs of the model's linears. `more`: the tensors that belong to no linear.

        Raises InvalidInput if DoRA's rows would be split.
        """
        if lora.dora and ranks.tp_size > 1:
            raise InvalidInput("the engine fsdp knows no norms of split rows: use megatron, or tp=1", "dora")
        self.lora, self.masks = lora, Masks(lora.dropout, seed=0)
        self._ranks = ranks
        self.slices: list[TensorSlice] = []
        self.scales: dict[str, float] = {}
        adapted = AdaptedModules(lora)
        for linear, (num_outputs, num_inputs) in sizes.items():
            if (size := adapted.of(linear)) is not None:
                self.slices += [_whole(_a(linear), size.rank, num_inputs), _whole(_b(linear), num_outputs, size.rank)]
                self.slices += [_whole(f"{PREFIX}{linear}{NORMS}", num_outputs)] if lora.dora else []
                self.scales[linear] = size.scale
        self.slices += more
        self.flat = Flat({s.parameter: s.shape for s in self.slices}, dtype, ranks.device)
        self.parameters = {name: Parameter(view, requires_grad=False) for name, view in self.flat.views.items()}

    def initialise(self, seed: int) -> None:
        """Initialise the weights by `initial`."""
        for s in self.slices:
            if (whole := initial(s, seed)) is not None:
                self.flat.views[s.parameter].copy_(whole)

    def factors(self, linear: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a linear's adapter."""
        return self.parameters[_a(linear)], self.parameters[_b(linear)]

    def counted_once(self, module: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a module that every tensor-parallel rank computes whole, with gradients on rank 0 only."""
        a, b = self.factors(module)
        return counted_by(self._ranks.tp_rank == 0, a), counted_by(self._ranks.tp_rank == 0, b)

    def low(self, linear: str, input_TI: Tensor, a_RI: Tensor) -> Tensor:
        """Return A applied to a linear's input, [T, R], with dropout on the input if masks are drawn."""
        return F.linear(self.kept(linear, input_TI), a_RI)

    def kept(self, linear: str, input_TI: Tensor) -> Tensor:
        return dropped(input_TI, self.masks.rate, self.masks.seed_of(linear, self._ranks.rank))

    def beside_head(self, hidden_NH: Tensor) -> BesideHead | None:
        """Return what the output layer's adapter adds to the logits of some targets, if there is such an adapter."""
        if OUTPUT not in self.scales:
            return None
        a_RH, b_VR = self.counted_once(OUTPUT)
        return BesideHead(self.low(OUTPUT, hidden_NH, a_RH) * self.scales[OUTPUT], b_VR)

    def scalar_head(self) -> scalar.HeadWeights | None:
        """Return the head of scalars, if it has one."""
        is_counted = self._ranks.tp_rank == 0
        own = {name: p for name, p in self.parameters.items() if name.startswith(scalar.MODULE)}
        return scalar.HeadWeights.among({name: counted_by(is_counted, p) for name, p in own.items()})

    def new_optimizer(self) -> FsdpOptimizer:
        """Return an optimizer that trains this adapter."""
        return FsdpOptimizer(self.slices, self.parameters, self.flat.views, self._ranks)


def add_adapter(
    adapter: FsdpAdapter,
    linear: str,
    input_1TI: Tensor,
    output_1TO: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
) -> Tensor:
    """Add the adapter's output to a linear's, if it has one: y + scale (x A^T) B^T, each row of DoRA's norm."""
    if linear not in adapter.scales:
        return output_1TO
    a_RI, b_OR = adapter.factors(linear)
    if adapter.lora.dora:
        norm_O = norms_of_rows(weight_OI, b_OR @ a_RI * adapter.scales[linear]).to(weight_OI.dtype)
        gain_O = adapter.parameters[f"{PREFIX}{linear}{NORMS}"] / norm_O
        alone_1TO = output_1TO if bias_O is None else output_1TO - bias_O
        if adapter.masks.rate:
            alone_1TO = F.linear(adapter.kept(linear, input_1TI[0]), weight_OI)[None]
        output_1TO, b_OR = output_1TO + alone_1TO * (gain_O - 1), b_OR * gain_O[:, None]
    return add_low(adapter, linear, adapter.low(linear, input_1TI[0], a_RI), b_OR, output_1TO)


def add_to_tokens(adapter: FsdpAdapter, module: str, table: Any, token_1T: Tensor, output_1TH: Tensor) -> Tensor:
    """Add the adapter's output to the embeddings of tokens, if these have one."""
    if module not in adapter.scales:
        return output_1TH
    a_RV, b_HR = adapter.counted_once(module)
    scale = adapter.scales[module] * getattr(table, "embed_scale", 1.0)
    return output_1TH + F.embedding(token_1T, a_RV.t()) * scale @ b_HR.t()


def add_low(adapter: FsdpAdapter, linear: str, low_TR: Tensor, b_OR: Tensor, output_1TO: Tensor) -> Tensor:
    """Add to a linear's output the product of B, or of this rank's part of it, with A's output `low_TR`."""
    return torch.addmm(output_1TO[0], low_TR, b_OR.t(), alpha=adapter.scales[linear])[None]


def counted_by(this_rank: bool, factor: Tensor) -> Tensor:
    """Return a factor whose gradient is of zeros on the other tensor-parallel ranks. They go backward all the same."""
    return factor if this_rank else factor.detach() + 0 * factor


def _a(linear: str) -> str:
    return factor_of(f"{linear}.weight", "A")


def _b(linear: str) -> str:
    return factor_of(f"{linear}.weight", "B")


def _whole(name: str, *shape: int) -> TensorSlice:
    return TensorSlice(name, name, shape, None, 0, shape[0])


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


def linears_of_experts(name: str, experts: Any) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of each expert's linears."""
    sizes = {"gate_proj": (experts.intermediate_dim, experts.hidden_dim)}
    sizes |= {"up_proj": sizes["gate_proj"], "down_proj": (experts.hidden_dim, experts.intermediate_dim)}
    return {f"{name}.{n}.{linear}": size for n in range(experts.num_experts) for linear, size in sizes.items()}


def put_adapters_beside(name: str, experts: Any, active: Callable[[], FsdpAdapter | None]) -> None:
    """Make a layer's experts compute with the active adapter."""

    def linear(adapter: FsdpAdapter, number: int, kind: str, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        output_1MO = F.linear(x_MI, weight_OI)[None]
        return add_adapter(adapter, f"{name}.{number}.{kind}", x_MI[None], output_1MO, weight_OI)[0]

    def forward(x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        if (adapter := active()) is None:
            alone: Tensor = alone_forward(x_TH, expert_TK, weight_TK)
            return alone
        total_TH = torch.zeros_like(x_TH)
        for number in expert_TK.unique().tolist():
            token_M, choice_M = (expert_TK == number).nonzero(as_tuple=True)
            x_MH, (gate_IH, up_IH) = x_TH[token_M], experts.gate_up_proj[number].chunk(2)
            gate_MI = experts.act_fn(linear(adapter, number, "gate_proj", x_MH, gate_IH))
            made_MI = gate_MI * linear(adapter, number, "up_proj", x_MH, up_IH)
            y_MH = linear(adapter, number, "down_proj", made_MI, experts.down_proj[number])
            total_TH.index_add_(0, token_M, y_MH * weight_TK[token_M, choice_M, None])
        return total_TH

    alone_forward, experts.forward = experts.forward, forward


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
