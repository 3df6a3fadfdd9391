"""The most likely token after each sequence, over the shards of the vocabulary."""

import torch
from torch import Tensor

from megatron_worker.engine import Batch
from megatron_worker.megatron.model import MegatronModel
from megatron_worker.megatron.parallel.mesh import Mesh
from megatron_worker.megatron.passes import PipelinePasses


def next_tokens(passes: PipelinePasses, model: MegatronModel, mesh: Mesh, sequences: list[list[int]]) -> list[int]:
    """Return the most likely token after each sequence, all in one bin; the same on every rank."""
    last_BH = passes.hidden_states(Batch.of_sequences(sequences, mesh.device))
    token_B = torch.empty(len(sequences), dtype=torch.int64, device=mesh.device)
    if last_BH is not None:
        logit_BV = last_BH @ model.output_weight_VH.t()
        if (beside := model.beside_head(last_BH)) is not None:
            logit_BV += beside.logits()
        logit_BV = logit_BV[:, : model.shard.num_real].float()
        token_B = _argmax_over_tp(logit_BV, model.shard.first, mesh)
    mesh.pp.broadcast(token_B, mesh.pp.size - 1)
    return token_B.tolist()


def _argmax_over_tp(logit_BV: Tensor, first: int, mesh: Mesh) -> Tensor:
    best_B = logit_BV.new_full((len(logit_BV),), -torch.inf)
    token_B = torch.zeros_like(best_B)
    if logit_BV.shape[1]:
        best_B, index_B = logit_BV.max(dim=1)
        token_B = (index_B + first).double()
    candidates = torch.stack([torch.stack(mesh.tp.gather(x.double())) for x in (best_B, token_B)])
    winner_B = candidates[0].argmax(dim=0)
    return candidates[1].gather(0, winner_B[None])[0].long()
