"""Greedy decoding that runs every sequence again for each token: for an evaluation's few samples, not for serving."""

from collections.abc import Callable

import torch

from megatron_worker.engine import Batch, Outputs, Scores


@torch.no_grad()
def greedy(
    forward: Callable[[Batch, Outputs], Scores],
    device: torch.device,
    prompts: list[list[int]],
    max_tokens: int,
    stop_ids: frozenset[int],
) -> list[list[int]]:
    """Append the most likely token, the lowest id among equals, until a stop id (left out) or `max_tokens`."""
    completions: list[list[int]] = [[] for _ in prompts]
    open_rows = [row for row, prompt in enumerate(prompts) if prompt]
    for _ in range(max_tokens):
        if not open_rows:
            break
        batch = Batch.of_sequences([prompts[row] + completions[row] for row in open_rows], device)
        found = forward(batch, Outputs(logprob=False, top_k=1)).top_id_NK
        assert found is not None, "it was asked for"
        tokens = found[:, 0].tolist()
        for row, token in zip(open_rows, tokens, strict=True):
            if token not in stop_ids:
                completions[row].append(token)
        open_rows = [row for row, token in zip(open_rows, tokens, strict=True) if token not in stop_ids]
    return completions
