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
from megatron_worker.head.logprobs import NO_LABEL, VocabShard, score_targets
from megatron_worker.trainer_rank.heads import logits_of, ranked
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
    top_k: int = 0
    indices: list[Ints] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        return [len(index_P) for index_P in self.indices]


def forward_slot(
    engine: SlotEngine, requests: Sequence[Request], min_shared_tokens: int, watch: Watch
) -> list[ForwardOutput]:
    """Outputs of requests of the slot that is active, each of which asks for something. `watch` sees the backbone's.

    Of no requests an empty pack goes through the backbone, for ranks that go in step.
    """
    packed = pack([request.token_L for request in requests], min_shared_tokens)
    questions = _questions(requests, packed)
    hidden_NH = watch(engine.hidden_states(_batch(requests, packed, questions, engine.facts.device)))
    weight_VH, shard = engine.output_head
    outputs = [ForwardOutput() for _ in requests]
    parts = [hidden_NH] if len(questions) == 1 else hidden_NH.split([sum(rows.sizes) for rows in questions])
    for rows, rows_NH in zip(questions, parts, strict=True):
        _answer(rows, rows_NH, requests, outputs, weight_VH, shard)
    return outputs


def _questions(requests: Sequence[Request], packed: Pack) -> list[_Rows]:
    """By kind; those of one head that differ in a setting stand apart. In an order that the planner knows, in which
    whole logits come after the heads that need much for a moment.
    """
    found: dict[tuple[str, bool, float, int], _Rows] = {}
    for number in packed.order:
        request = requests[number]
        index_P = packed.index_of[number][request.position_P]
        for kind in sorted(request.kinds):
            entropy = request.asked.entropy and kind == "scores"
            temperature = request.asked.temperature if kind in ("scores", "ranks") else 1.0
            setting = (kind, entropy, temperature, request.asked.top_k if kind == "ranks" else 0)
            rows = found.setdefault(setting, _Rows(*setting))
            rows.indices.append(index_P)
            rows.requests.append(number)
    return [found[setting] for setting in sorted(found, reverse=True)]


def _batch(requests: Sequence[Request], packed: Pack, questions: Sequence[_Rows], device: torch.device) -> Batch:
    """The pack, and a target for each row. Labels are those that the scoring head wants, and 0 for the others."""

    def on_device(array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    nothing = np.zeros(0, dtype=np.int64)
    index_N = np.concatenate([nothing, *(index_P for rows in questions for index_P in rows.indices)])
    label_N = torch.zeros(len(index_N), dtype=torch.int64, device=device)
    token_id_T, position_T, parent_T = map(on_device, (packed.token_id_T, packed.position_T, packed.parent_T))
    return Batch.to_score(token_id_T, position_T, parent_T, on_device(index_N), label_N)


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
    """Labels and top-k of all rows meet the head together; rows of fewer labels than others are filled up."""
    labels = [_labels(request) for request in asked]
    widest = max(label_PK.shape[1] for label_PK in labels)
    filled = [np.pad(x, ((0, 0), (0, widest - x.shape[1])), constant_values=NO_LABEL) for x in labels]
    label_NK = torch.from_numpy(np.concatenate(filled)).to(rows_NH.device)
    found = ranked(rows_NH, weight_VH, label_NK, rows.top_k, shard, rows.temperature)
    answers = []
    for request, *parts in zip(asked, *(x.split(rows.sizes) for x in found), strict=True):
        label_logprob_PK, top_id_PK, top_logprob_PK = parts
        answer: dict[str, Tensor | TopK] = {}
        if request.label_PK is not None:
            answer["label_logprob_PK"] = label_logprob_PK[:, : request.label_PK.shape[1]]
        if request.asked.top_k:
            answer["top_k"] = TopK(top_id_PK, top_logprob_PK)
        answers.append(answer)
    return answers


def _labels(request: Request) -> Ints:
    """[P, K], K 0 where it has none."""
    return np.zeros((len(request.position_P), 0), dtype=np.int64) if request.label_PK is None else request.label_PK
