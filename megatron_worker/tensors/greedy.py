"""Greedy decoding that runs every sequence again for each token: for an evaluation's few samples, not for serving."""

from collections.abc import Callable

import torch

NextTokens = Callable[[list[list[int]]], list[int]]


@torch.no_grad()
def greedy(
    next_tokens: NextTokens, prompts: list[list[int]], max_tokens: int, stop_ids: frozenset[int]
) -> list[list[int]]:
    """Append the most likely token, the lowest id among equals, until a stop id (left out) or `max_tokens`.

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
