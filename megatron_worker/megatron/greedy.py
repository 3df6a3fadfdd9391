"""Greedy continuations, every sequence run again for each token: for an evaluation's few samples, not for serving."""

import torch
from torch import Tensor

from megatron_worker.engine import Batch
from megatron_worker.megatron.mesh import Mesh
from megatron_worker.megatron.model import Model


@torch.no_grad()
def greedy(
    model: Model, mesh: Mesh, prompts: list[list[int]], max_tokens: int, stop_ids: frozenset[int]
) -> list[list[int]]:
    """The most likely next token, the lowest id among equals, until a stop id (left out) or `max_tokens`."""
    completions: list[list[int]] = [[] for _ in prompts]
    open_rows = [row for row, prompt in enumerate(prompts) if prompt]
    for _ in range(max_tokens):
        if not open_rows:
            break
        tokens = next_tokens(model, mesh, [prompts[row] + completions[row] for row in open_rows])
        for row, token in zip(open_rows, tokens, strict=True):
            if token not in stop_ids:
                completions[row].append(token)
        open_rows = [row for row, token in zip(open_rows, tokens, strict=True) if token not in stop_ids]
    return completions


def next_tokens(model: Model, mesh: Mesh, sequences: list[list[int]]) -> list[int]:
    """The most likely token after each sequence, all in one bin."""
    batch = sequences_as_batch(sequences, mesh.device)
    last_BH = model.hidden_states(batch).index_select(0, batch.hidden_index_N)
    logit_BV = (last_BH @ model.output_weight_VH[: model.shard.num_real].t()).float()
    return _argmax_over_tp(logit_BV, model.shard.first, mesh).tolist()


def _argmax_over_tp(logit_BV: Tensor, first: int, mesh: Mesh) -> Tensor:
    best_B = logit_BV.new_full((len(logit_BV),), -torch.inf)
    token_B = torch.zeros_like(best_B)
    if logit_BV.shape[1]:
        best_B, index_B = logit_BV.max(dim=1)
        token_B = (index_B + first).double()
    candidates = torch.stack([torch.stack(mesh.gather_over_tp(x.double())) for x in (best_B, token_B)])
    winner_B = candidates[0].argmax(dim=0)
    return candidates[1].gather(0, winner_B[None])[0].long()


def sequences_as_batch(sequences: list[list[int]], device: torch.device) -> Batch:
    """A bin of whole sequences, one target each: what comes after the last token."""
    lengths = torch.tensor([len(s) for s in sequences])
    position_T = torch.cat([torch.arange(n) for n in lengths])
    index_T = torch.arange(len(position_T))
    parent_T = torch.where(position_T == 0, -1, index_T - 1)
    zero_N = torch.zeros(len(sequences), device=device)
    return Batch(
        token_id_T=torch.tensor([t for s in sequences for t in s], device=device),
        position_T=position_T.to(device),
        parent_T=parent_T.to(device),
        hidden_index_N=(lengths.cumsum(0) - 1).to(device),
        label_N=zero_N.long(),
        weight_N=zero_N,
        advantage_N=zero_N,
        old_logprob_N=zero_N,
        ref_logprob_N=zero_N,
        sampler_logprob_N=zero_N,
        sequence_N=torch.arange(len(sequences), device=device),
    )
