"""Experts as transformers stacks them: where the tensors of files lie, and adapters of each expert's linears.

Shape suffixes: T tokens, K experts of a token, M tokens that chose one expert, H hidden size, I inputs of a linear.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.fsdp.adapter import FsdpAdapter, add_adapter
from shared.families.tensor_slices import TensorSlice

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
