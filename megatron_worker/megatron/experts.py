"""A mixture of experts in a layer's MLP (Shazeer et al. 2017, arXiv:1701.06538), its experts spread over ranks.

The ranks of `mesh.experts` hold one copy of all experts. Each routes the tokens that it has; the tokens of all are
gathered, each rank computes what its experts (under etp its slice of them) make of those that chose them, and the sums
go back to where the tokens came from. Nothing is dropped, and no loss for balance is added: what is learned does not
depend on the layout.

Shape suffixes: s tokens of this rank, S tokens of all ranks of the group, padded; K experts of a token, E experts,
H hidden size; M tokens of one expert, F feed-forward size of an expert on this rank.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_worker.families.architecture import Architecture
from megatron_worker.lora import ExpertLinear
from megatron_worker.megatron.collectives import gather_rows, sum_rows
from megatron_worker.megatron.mesh import Mesh


@dataclass
class Turn:
    """What all layers are to know of the bin at hand. `rows`: the most tokens that a rank of the group has."""

    rows: int = 0


class Router(torch.nn.Module):
    """Which experts a token goes to, and with which weights."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(architecture.num_experts, architecture.hidden_size, dtype=dtype))
        self._num_chosen, self._normalised = architecture.experts_per_token, architecture.normalised_experts

    def forward(self, hidden_sH: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in the dtype of the hidden states, and expert numbers: both [s, K]. The softmax is in float32."""
        logit_sE = F.linear(hidden_sH, self.weight)
        probability_sE = logit_sE.softmax(dim=-1, dtype=torch.promote_types(torch.float32, logit_sE.dtype))
        weight_sK, expert_sK = probability_sE.topk(self._num_chosen, dim=-1)
        if self._normalised:
            weight_sK = weight_sK / weight_sK.sum(dim=-1, keepdim=True)
        return weight_sK.to(hidden_sH.dtype), expert_sK


class Expert(torch.nn.Module):
    """A SwiGLU MLP, or this rank's slice of it: its output is then to be added up over etp."""

    def __init__(self, hidden_size: int, ffn_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear_fc1 = ExpertLinear(hidden_size, 2 * ffn_size, dtype)
        self.linear_fc2 = ExpertLinear(ffn_size, hidden_size, dtype)

    def forward(self, hidden_MH: Tensor) -> Tensor:
        gate_MF, up_MF = self.linear_fc1(hidden_MH).chunk(2, dim=-1)
        output_MH: Tensor = self.linear_fc2(F.silu(gate_MF) * up_MF)
        return output_MH


class Experts(torch.nn.Module):
    """Stands where megatron's spec wants an MLP."""

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, mesh: Mesh, turn: Turn, **_: object
    ) -> None:
        super().__init__()
        a, dtype = architecture, config.params_dtype
        per_rank = a.num_experts // mesh.ep.size
        own = range(mesh.ep.rank * per_rank, (mesh.ep.rank + 1) * per_rank)
        self.router = Router(a, dtype)
        self.experts = torch.nn.ModuleDict(
            {str(number): Expert(a.hidden_size, a.expert_ffn_size // mesh.etp.size, dtype) for number in own}
        )
        self._group, self._turn = mesh.experts, turn

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        hidden_sH = hidden_states.reshape(-1, hidden_states.shape[-1])
        weight_sK, expert_sK = self.router(hidden_sH)
        num_missing = self._turn.rows - len(hidden_sH)
        hidden_SH = gather_rows(F.pad(hidden_sH, (0, 0, 0, num_missing)), self._group)
        weight_SK = gather_rows(F.pad(weight_sK, (0, 0, 0, num_missing)), self._group)
        expert_SK = self._group.join_shares(F.pad(expert_sK, (0, 0, 0, num_missing), value=-1))
        output_SH = self._computed(hidden_SH, weight_SK, expert_SK)
        output_sH = sum_rows(output_SH, self._group)[: len(hidden_sH)]
        return output_sH.view(hidden_states.shape), None

    def _computed(self, hidden_SH: Tensor, weight_SK: Tensor, expert_SK: Tensor) -> Tensor:
        """What this rank's experts make of the tokens that chose them; zeros elsewhere."""
        output_SH = torch.zeros_like(hidden_SH)
        for number, expert in self.experts.items():
            token_M, choice_M = (expert_SK == int(number)).nonzero(as_tuple=True)
            weight_M = weight_SK[token_M, choice_M]
            output_SH = output_SH.index_add(0, token_M, expert(hidden_SH[token_M]) * weight_M[:, None])
        return output_SH
