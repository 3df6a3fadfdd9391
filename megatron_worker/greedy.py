"""Greedy continuations, every sequence run again for each token: for an evaluation's few samples, not for serving."""

from collections.abc import Callable

import torch

from megatron_worker.engine import Batch

NextTokens = Callable[[list[list[int]]], list[int]]


@torch.no_grad()
def greedy(
    next_tokens: NextTokens, prompts: list[list[int]], max_tokens: int, stop_ids: frozenset[int]
) -> list[list[int]]:
    """The most likely next token, the lowest id among equals, until a stop id (left out) or `max_tokens`.

    Args:
        next_tokens: the most likely token after each of some sequences.
    """
    completions: list[list[int]] = [[] for _ in prompts]
    open_rows = [row for row, prompt in enumerate(prompts) if prompt]
    for _ in range(max_tokens):
        if not open_rows:
            break
        tokens = next_tokens([prompts[row] + completions[row] for row in open_rows])
        for row, token in zip(open_rows, tokens, strict=True):
            if token not in stop_ids:
                completions[row].append(token)
        open_rows = [row for row, token in zip(open_rows, tokens, strict=True) if token not in stop_ids]
    return completions


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
