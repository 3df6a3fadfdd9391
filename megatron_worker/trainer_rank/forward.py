"""One packed forward of the inputs of one slot, then a light head for each kind of question.

The rows that heads read are chosen once, those of one kind and temperature beside each other. Inputs that ask for
log-probabilities alone meet exactly what a job's bin would.

Shape suffixes: T tokens of the pack, N rows, H hidden size, P positions of an input, K labels a position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megatron_worker.engine import Batch, Outputs
from megatron_worker.head import VocabShard, score_targets
from megatron_worker.trainer_rank.heads import logits_of, logprobs_of, top_ids
from megatron_worker.trainer_rank.inputs import ForwardOutput, Ints, Request, TopK
from megatron_worker.trainer_rank.packing import Pack, pack
from megatron_worker.trainer_rank.slot_engine import SlotEngine

Watch = Callable[[Tensor], Tensor]


@dataclass
class _Rows:
    """The rows of one kind of question: which hidden states, and of each input its share, in the order asked."""

    kind: str
    entropy: bool = False
    temperature: float = 1.0
    indices: list[Ints] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        return [len(index_P) for index_P in self.indices]


def forward_slot(
    engine: SlotEngine, requests: Sequence[Request], min_shared_tokens: int, watch: Watch
) -> list[ForwardOutput]:
    """Outputs of requests of the slot that is active, each of which asks for something. `watch` sees the trunk's."""
    packed = pack([request.token_L for request in requests], min_shared_tokens)
    questions = _questions(requests, packed)
    hidden_NH = watch(engine.hidden_states(_batch(requests, packed, questions, engine.facts.device)))
    outputs = [ForwardOutput() for _ in requests]
    parts = [hidden_NH]
    if len(questions) > 1:
        parts = list(hidden_NH.split([sum(rows.sizes) for rows in questions]))
    for rows, rows_NH in zip(questions, parts, strict=True):
        _answer(rows, rows_NH, requests, outputs, *engine.output_head)
    return outputs


def _questions(requests: Sequence[Request], packed: Pack) -> list[_Rows]:
    """By kind; those of one head that differ in a setting stand apart."""
    found: dict[tuple[str, bool, float], _Rows] = {}
    for number in packed.order:
        request = requests[number]
        index_P = packed.index_of[number][request.position_P]
        for kind in sorted(request.kinds):
            entropy = request.asked.entropy and kind == "scores"
            temperature = request.asked.temperature if kind in ("scores", "ranks") else 1.0
            rows = found.setdefault((kind, entropy, temperature), _Rows(kind, entropy, temperature))
            rows.indices.append(index_P)
            rows.requests.append(number)
    return list(found.values())


def _batch(requests: Sequence[Request], packed: Pack, questions: Sequence[_Rows], device: torch.device) -> Batch:
    """The pack, and a target for each row. Labels are those that the scoring head wants, and 0 for the others."""

    def on_device(array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    index_N = np.concatenate([index_P for rows in questions for index_P in rows.indices])
    zeros_N = torch.zeros(len(index_N), device=device)
    return Batch(
        token_id_T=on_device(packed.token_id_T),
        position_T=on_device(packed.position_T),
        parent_T=on_device(packed.parent_T),
        hidden_index_N=on_device(index_N),
        label_N=torch.zeros(len(index_N), dtype=torch.int64, device=device),
        weight_N=zeros_N,
        advantage_N=zeros_N,
        old_logprob_N=zeros_N,
        ref_logprob_N=zeros_N,
        sampler_logprob_N=zeros_N,
        sequence_N=torch.zeros(len(index_N), dtype=torch.int64, device=device),
    )


def _answer(
    rows: _Rows,
    rows_NH: Tensor,
    requests: Sequence[Request],
    outputs: list[ForwardOutput],
    weight_VH: Tensor,
    shard: VocabShard,
) -> None:
    """Fill in what these rows were asked for."""
    asked = [requests[number] for number in rows.requests]
    match rows.kind:
        case "hidden":
            answers = [{"hidden_PH": part} for part in rows_NH.split(rows.sizes)]
        case "logits":
            answers = [{"logit_PV": part} for part in logits_of(rows_NH, weight_VH, shard).split(rows.sizes)]
        case "scores":
            answers = _scored(rows, rows_NH, asked, weight_VH, shard)
        case _:
            answers = _ranked(rows, rows_NH, asked, weight_VH, shard)
    for number, answer in zip(rows.requests, answers, strict=True):
        outputs[number] = replace(outputs[number], **answer)


def _scored(
    rows: _Rows, rows_NH: Tensor, asked: Sequence[Request], weight_VH: Tensor, shard: VocabShard
) -> list[dict[str, Tensor]]:
    label_N = np.concatenate([request.token_L[request.position_P + 1] for request in asked])
    outputs = Outputs(entropy=rows.entropy, temperature=rows.temperature)
    scores = score_targets(rows_NH, weight_VH, torch.from_numpy(label_N).to(rows_NH.device), outputs, shard)
    answers: list[dict[str, Tensor]] = [{} for _ in asked]
    for name, values_N in (("target_logprob_P", scores.logprob_N), ("entropy_P", scores.entropy_N)):
        parts = [] if values_N is None else values_N.split(rows.sizes)
        for answer, request, part in zip(answers, asked, parts, strict=False):
            if name == "entropy_P" or request.asked.target_logprobs:
                answer[name] = part
    return answers


def _ranked(
    rows: _Rows, rows_NH: Tensor, asked: Sequence[Request], weight_VH: Tensor, shard: VocabShard
) -> list[dict[str, Tensor | TopK]]:
    """Labels and top-k of a row meet the head together; rows of fewer ids than others are filled up, and cut again."""
    parts = zip(asked, rows_NH.split(rows.sizes), strict=True)
    ids = [_wanted(request, part_PH, weight_VH, shard) for request, part_PH in parts]
    widest = max(id_PK.shape[1] for id_PK in ids)
    id_NK = torch.cat([torch.nn.functional.pad(id_PK, (0, widest - id_PK.shape[1])) for id_PK in ids])
    logprob_NK = logprobs_of(rows_NH, weight_VH, id_NK, shard, rows.temperature)
    answers = []
    for request, id_PK, part_PK in zip(asked, ids, logprob_NK.split(rows.sizes), strict=True):
        num_labels, width, answer = id_PK.shape[1] - request.asked.top_k, id_PK.shape[1], {}
        if request.label_PK is not None:
            answer["label_logprob_PK"] = part_PK[:, :num_labels]
        if request.asked.top_k:
            answer["top_k"] = TopK(id_PK[:, num_labels:], part_PK[:, num_labels:width])
        answers.append(answer)
    return answers


def _wanted(request: Request, part_PH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
    """The labels of an input and behind them its top ids, [P, K]."""
    num_labels = 0 if request.label_PK is None else request.label_PK.shape[1]
    label_PK = request.label_PK if num_labels else np.zeros((len(request.position_P), 0), dtype=np.int64)
    id_PK = torch.from_numpy(label_PK).to(part_PH.device)
    if not request.asked.top_k:
        return id_PK
    return torch.cat([id_PK, top_ids(part_PH, weight_VH, request.asked.top_k, shard)], dim=1)
