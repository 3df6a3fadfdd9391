"""One packed forward of the inputs of one slot, then a light head for each kind of output that is asked for.

The rows of hidden states that heads read are selected once; rows of one kind and temperature are adjacent. Inputs that
only ask for log-probabilities are computed exactly as in a job's bin.

Shape suffixes: T tokens of the pack, N rows, H hidden size, P positions of an input, K labels a position.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_worker.engine import Batch
from megatron_worker.forwards.answers import answers
from megatron_worker.forwards.inputs import CheckedInput, ForwardOutput, HeadCall, Ints
from megatron_worker.forwards.packing import Pack, pack
from megatron_worker.tensors.slot_engine import Engine

Watch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def forward_slot(
    engine: Engine, requests: Sequence[CheckedInput], least_saved_tokens: int, watch: Watch
) -> list[ForwardOutput]:
    """Answer requests with the active slot. `watch` gets what the backbone made, and returns it for the heads.

    Without requests an empty pack goes through the backbone, as other ranks may need this one's part (lockstep.py).
    """
    packed = pack([request.token_L for request in requests], least_saved_tokens)
    asked = _by_question(requests, packed.order)
    rows = [[packed.index_of[n][requests[n].position_P] for n in numbers] for numbers in asked.values()]
    batch = _batch(packed, [index_P for of_question in rows for index_P in of_question], engine.facts.device)
    hidden_NH, weight_VH = watch(*engine.hidden_states(batch))
    outputs = [ForwardOutput() for _ in requests]
    parts = [hidden_NH] if len(asked) == 1 else hidden_NH.split([sum(map(len, of_question)) for of_question in rows])
    for (question, numbers), rows_NH in zip(asked.items(), parts, strict=True):
        found = answers(question, rows_NH, [requests[n] for n in numbers], weight_VH, engine.vocab_shard)
        for number, answer in zip(numbers, found, strict=True):
            outputs[number].found.update(answer)
    return outputs


def _by_question(requests: Sequence[CheckedInput], order: Sequence[int]) -> dict[HeadCall, list[int]]:
    """Return the requests of each question, in the planner's order: heads with a high peak before whole logits."""
    found: dict[HeadCall, list[int]] = {}
    for number in order:
        for question in requests[number].questions:
            found.setdefault(question, []).append(number)
    return dict(sorted(found.items(), reverse=True))


def _batch(packed: Pack, rows: Sequence[Ints], device: torch.device) -> Batch:
    """The pack, and a target for each row. Labels, which heads have from the requests, are 0."""
    index_N = np.concatenate([np.zeros(0, dtype=np.int64), *rows])
    arrays = packed.token_id_T, packed.position_T, packed.parent_T, index_N, np.zeros_like(index_N)
    return Batch.to_score(*(torch.from_numpy(array).to(device) for array in arrays))
