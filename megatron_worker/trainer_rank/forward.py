"""One packed forward of the inputs of one slot, then a light head for each kind of output that is asked for.

The rows of hidden states that heads read are selected once; rows of one kind and temperature are adjacent. Inputs that
only ask for log-probabilities are computed exactly as in a job's bin.

Shape suffixes: T tokens of the pack, N rows, H hidden size, P positions of an input, K labels a position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_worker.engine import Batch, Outputs
from megatron_worker.head.logprobs import NO_LABEL, VocabShard, score_targets
from megatron_worker.trainer_rank.forward_engine import ForwardEngine
from megatron_worker.trainer_rank.heads import logits_of, ranked
from megatron_worker.trainer_rank.inputs import CheckedInput, ForwardOutput, HeadCall, Ints, TopK
from megatron_worker.trainer_rank.packing import Pack, pack

Watch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
OutputFields = dict[str, Any]
"""Some of the fields of a ForwardOutput, by name."""


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


def answers(
    question: HeadCall, rows_NH: Tensor, requests: Sequence[CheckedInput], weight_VH: Tensor, shard: VocabShard
) -> list[OutputFields]:
    """Compute one kind of output for several requests. `rows_NH`: their rows, one request after another."""
    sizes = [len(request.position_P) for request in requests]
    match question.kind:
        case "hidden":
            return [{"hidden_PH": part} for part in rows_NH.split(sizes)]
        case "logits":
            return [{"logit_PV": part} for part in logits_of(rows_NH, weight_VH, shard).split(sizes)]
        case "scores":
            return _scored(question, rows_NH, requests, sizes, weight_VH, shard)
        case _:
            return _ranked(question, rows_NH, requests, sizes, weight_VH, shard)


def _scored(
    question: HeadCall,
    rows_NH: Tensor,
    requests: Sequence[CheckedInput],
    sizes: list[int],
    weight_VH: Tensor,
    shard: VocabShard,
) -> list[OutputFields]:
    label_N = np.concatenate([request.token_L[request.position_P + 1] for request in requests])
    outputs = Outputs(entropy=question.entropy, temperature=question.temperature)
    scores = score_targets(rows_NH, weight_VH, torch.from_numpy(label_N).to(rows_NH.device), outputs, shard)
    found: list[OutputFields] = [{} for _ in requests]
    for name, values_N in (("target_logprob_P", scores.logprob_N), ("entropy_P", scores.entropy_N)):
        parts = [] if values_N is None else values_N.split(sizes)
        for answer, request, part in zip(found, requests, parts, strict=False):
            if name == "entropy_P" or request.asked.target_logprobs:
                answer[name] = part
    return found


def _ranked(
    question: HeadCall,
    rows_NH: Tensor,
    requests: Sequence[CheckedInput],
    sizes: list[int],
    weight_VH: Tensor,
    shard: VocabShard,
) -> list[OutputFields]:
    """Compute labels and top-k of all rows at once. Rows with fewer labels than others are padded."""
    labels = [_labels(request) for request in requests]
    widest = max(label_PK.shape[1] for label_PK in labels)
    filled = [np.pad(x, ((0, 0), (0, widest - x.shape[1])), constant_values=NO_LABEL) for x in labels]
    label_NK = torch.from_numpy(np.concatenate(filled)).to(rows_NH.device)
    parts = ranked(rows_NH, weight_VH, label_NK, question.top_k, shard, question.temperature)
    found = []
    for request, *of_request in zip(requests, *(x.split(sizes) for x in parts), strict=True):
        label_logprob_PK, top_id_PK, top_logprob_PK = of_request
        answer: OutputFields = {}
        if request.label_PK is not None:
            answer["label_logprob_PK"] = label_logprob_PK[:, : request.label_PK.shape[1]]
        if request.asked.top_k:
            answer["top_k"] = TopK(top_id_PK, top_logprob_PK)
        found.append(answer)
    return found


def _labels(request: CheckedInput) -> Ints:
    """Return a request's labels, [P, K]; K is 0 if it has none."""
    return np.zeros((len(request.position_P), 0), dtype=np.int64) if request.label_PK is None else request.label_PK
