"""Answers one kind of question about several inputs, from rows of the backbone's hidden states.

Shape suffixes: N rows, H hidden size, V rows of this rank's output embedding, P positions of an input, K labels a
position.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_worker.engine import Outputs
from megatron_worker.forwards.heads import logits_of, ranked
from megatron_worker.forwards.inputs import CheckedInput, HeadCall, Ints, TopK
from megatron_worker.head.logprobs import NO_LABEL, VocabShard, score_targets

OutputFields = dict[str, Any]
"""Some of the fields of a ForwardOutput, by name."""


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
