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


def answers(
    question: HeadCall, rows_NH: Tensor, requests: Sequence[CheckedInput], weight_VH: Tensor, shard: VocabShard
) -> list[dict[str, Any]]:
    """Compute one kind of output for several requests. `rows_NH`: their rows, one request after another.

    Returns the fields of their ForwardOutputs, by name.
    """
    sizes = [len(request.position_P) for request in requests]
    columns: dict[str, Sequence[Any]]
    match question.kind:
        case "hidden":
            columns = {"hidden_PH": rows_NH.split(sizes)}
        case "logits":
            columns = {"logit_PV": logits_of(rows_NH, weight_VH, shard).split(sizes)}
        case "scores":
            label_N = np.concatenate([request.token_L[request.position_P + 1] for request in requests])
            outputs = Outputs(entropy=question.entropy, temperature=question.temperature)
            scores = score_targets(rows_NH, weight_VH, torch.from_numpy(label_N).to(rows_NH.device), outputs, shard)
            found = {"target_logprob_P": scores.logprob_N, "entropy_P": scores.entropy_N}
            columns = {name: values_N.split(sizes) for name, values_N in found.items() if values_N is not None}
        case _:
            label_NK = torch.from_numpy(_labels(requests)).to(rows_NH.device)
            parts = ranked(rows_NH, weight_VH, label_NK, question.top_k, shard, question.temperature)
            labelled, top_ids, top_logprobs = (x.split(sizes) for x in parts)
            own = [part[:, : r.label_PK.shape[1]] for part, r in zip(labelled, requests, strict=True)]
            columns = {"label_logprob_PK": own, "top_k": list(map(TopK, top_ids, top_logprobs))}
    return [
        {name: parts[number] for name, parts in columns.items() if name in request.fields}
        for number, request in enumerate(requests)
    ]


def _labels(requests: Sequence[CheckedInput]) -> Ints:
    """Return the labels of all rows, [N, K]. Rows with fewer than others are padded."""
    widest = max(request.label_PK.shape[1] for request in requests)
    padded = [((0, 0), (0, widest - request.label_PK.shape[1])) for request in requests]
    return np.concatenate(
        [np.pad(r.label_PK, pad, constant_values=NO_LABEL) for r, pad in zip(requests, padded, strict=True)]
    )
