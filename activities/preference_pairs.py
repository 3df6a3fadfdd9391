"""Preference pairs as units: the prompt once, its chosen and its rejected answer as branches. Pure functions.

The loss DPO tells them apart by columns alone: sequences 2k and 2k + 1 are a pair; the chosen has advantage +1, the
rejected -1.
"""

from collections.abc import Sequence

import numpy as np

from activities.prefix_tree import SequenceRow, TreeUnit, build_tree
from shared.errors import InvalidInput


def pair_unit(prompt_ids: Sequence[int], chosen_ids: Sequence[int], rejected_ids: Sequence[int]) -> TreeUnit:
    """One pair as one unit, whose targets are all tokens of both answers, the end of turn included if it is there.

    Raises:
        InvalidInput: a part is empty, or the answers are the same.
    """
    for name, ids in (("prompt", prompt_ids), ("chosen", chosen_ids), ("rejected", rejected_ids)):
        if not len(ids):
            raise InvalidInput("it has no tokens", name)
    if list(chosen_ids) == list(rejected_ids):
        raise InvalidInput("it is the chosen answer again: nothing to prefer", "rejected")
    return build_tree([_answer(prompt_ids, chosen_ids, 1.0), _answer(prompt_ids, rejected_ids, -1.0)])


def _answer(prompt_ids: Sequence[int], answer_ids: Sequence[int], sign: float) -> SequenceRow:
    num_tokens = len(prompt_ids) + len(answer_ids)
    nothing_L = np.zeros(num_tokens, dtype=np.float32)
    return SequenceRow(
        token_ids=np.array([*prompt_ids, *answer_ids], dtype=np.int64),
        target_mask=np.arange(num_tokens) >= len(prompt_ids),
        weight=np.ones(num_tokens, dtype=np.float32),
        advantage=np.full(num_tokens, sign, dtype=np.float32),
        old_logprob=np.full(num_tokens, np.nan, dtype=np.float32),  # nobody sampled them
        ref_logprob=nothing_L,
    )
