"""One packed forward of the inputs of one slot, then a light head for each kind of output that is asked for.

The rows of hidden states that heads read are selected once; rows of one kind and temperature are adjacent. Inputs that
only ask for log-probabilities are computed exactly as in a job's bin.

Shape suffixes: T tokens of the pack, N rows, H hidden size, P positions of an input, K labels a position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_worker.engine import Batch
from megatron_worker.forwards.answers import answers
from megatron_worker.forwards.engine import ForwardEngine
from megatron_worker.forwards.inputs import CheckedInput, ForwardOutput, HeadCall, Ints
from megatron_worker.forwards.packing import Pack, pack

Watch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class _Rows:
    """The rows of one question: indices of hidden states, and for each array of indices the request's number."""

    indices: list[Ints] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)

    @property
    def num(self) -> int:
        return sum(map(len, self.indices))


def forward_slot(
    engine: ForwardEngine, requests: Sequence[CheckedInput], least_saved_tokens: int, watch: Watch
) -> list[ForwardOutput]:
    """Answer requests with the active slot. `watch` gets what the backbone made, and returns it for the heads.

    Without requests an empty pack goes through the backbone, as other ranks may need this one's part (lockstep.py).
    """
    packed = pack([request.token_L for request in requests], least_saved_tokens)
    asked = _by_question(requests, packed)
    batch = _batch(requests, packed, list(asked.values()), engine.facts.device)
    hidden_NH, weight_VH = watch(*engine.hidden_states(batch))
    outputs = [ForwardOutput() for _ in requests]
    parts = [hidden_NH] if len(asked) == 1 else hidden_NH.split([rows.num for rows in asked.values()])
    for (question, rows), rows_NH in zip(asked.items(), parts, strict=True):
        asking = [requests[number] for number in rows.requests]
        found = answers(question, rows_NH, asking, weight_VH, engine.vocab_shard)
        for number, answer in zip(rows.requests, found, strict=True):
            outputs[number].found.update(answer)
    return outputs


def _by_question(requests: Sequence[CheckedInput], packed: Pack) -> dict[HeadCall, _Rows]:
    """Return rows by question, in the order that the planner assumes: heads with a high peak before whole logits."""
    found: dict[HeadCall, _Rows] = {}
    for number in packed.order:
        index_P = packed.index_of[number][requests[number].position_P]
        for question in requests[number].questions:
            rows = found.setdefault(question, _Rows())
            rows.indices.append(index_P)
            rows.requests.append(number)
    return {question: found[question] for question in sorted(found, reverse=True)}


def _batch(requests: Sequence[CheckedInput], packed: Pack, asked: Sequence[_Rows], device: torch.device) -> Batch:
    """The pack, and a target for each row. Labels are those that the scoring head wants, and 0 for the others."""

    def on_device(array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    nothing = np.zeros(0, dtype=np.int64)
    index_N = np.concatenate([nothing, *(index_P for rows in asked for index_P in rows.indices)])
    label_N = torch.zeros(len(index_N), dtype=torch.int64, device=device)
    token_id_T, position_T, parent_T = map(on_device, (packed.token_id_T, packed.position_T, packed.parent_T))
    return Batch.to_score(token_id_T, position_T, parent_T, on_device(index_N), label_N)
