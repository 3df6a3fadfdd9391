"""What TrainerRank asks and answers about sequences: inputs, packs, heads, answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, Union

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_worker.engine import EngineInfo, Outputs
from megatron_worker.head.logprobs import NO_LABEL, VocabShard, score_targets, sum_over
from megatron_worker.head.torch_tiles import rows_of_labels, slices
from shared.errors import InvalidInput
from shared.jobs.packed import RouteShape
from shared.jobs.prefix_tree import (
    Node,
    grow,
    indices,
    routes_of_parts,
    shared_where_it_saves,
    tables,
    token_ids,
)

# --- The inputs and outputs of a forward. Only what an input asks for is computed ---
#
# Shape suffixes: L tokens of an input, P positions asked about, K labels a position, V vocabulary, H hidden size.

Ints = NDArray[np.int64]
FoundT = TypeVar("FoundT")
Inputs = Union["ForwardInput", Sequence["Inputs"], Mapping[str, "Inputs"]]
"""Inputs, in lists and dicts as their user likes. The outputs come in the same ones."""


class AdapterChoice(Enum):
    """A choice of an adapter. `ACTIVE`: the one that is set when the forward begins."""

    ACTIVE = "active"


ACTIVE = AdapterChoice.ACTIVE


@dataclass(frozen=True, eq=False)
class ForwardInput:
    """One sequence, and the outputs that are requested for it.

    Attributes:
        tokens: [L] ids.
        positions: [P], rising: the positions to compute outputs for. By default all; all but the last with
            `target_logprobs` or `entropy`, as nothing follows it. Position p predicts token p + 1.
        target_logprobs: the log-probability of the token that follows each position.
        entropy: of the distribution at each position; a constant.
        labels: [P, K] ids, each scored at its position.
        top_k: how many of the most probable ids to return at each position, with their log-probabilities.
        logits: of the whole vocabulary, float32, not divided by the temperature.
        hidden: the hidden state after the final norm.
        adapter: the name of a slot; None for the base alone.
        temperature: logits are divided by it before the softmax.
        no_grad: its outputs have no graph, beside inputs that keep theirs.
        routes: [L, layers with experts, experts of a token]: the experts that compute each token, in place of the
            router's choice, as a sampler reported them; no gradient reaches the choice in either case.
    """

    tokens: Sequence[int] | NDArray[np.integer] | Tensor
    positions: Sequence[int] | NDArray[np.integer] | Tensor | None = None
    target_logprobs: bool = False
    entropy: bool = False
    labels: Sequence[Sequence[int]] | NDArray[np.integer] | Tensor | None = None
    top_k: int = 0
    logits: bool = False
    hidden: bool = False
    adapter: str | AdapterChoice | None = ACTIVE
    temperature: float = 1.0
    no_grad: bool = False
    routes: NDArray[np.integer] | Tensor | None = None


class Pass(NamedTuple):
    """Inputs that go through the backbone together are equal in these."""

    adapter: str | None
    no_grad: bool = False
    has_routes: bool = False
    part: int = 0

    @property
    def place(self) -> tuple[bool, str, bool, bool, int]:
        """The order of passes, which is the same on every rank: the base first, then adapters by name."""
        return self.adapter is not None, self.adapter or "", self.no_grad, self.has_routes, self.part


@dataclass(frozen=True, eq=False)
class TopK:
    """The most probable ids, the best first: `id_PK` int64, `logprob_PK` float32 in nats."""

    id_PK: Tensor
    logprob_PK: Tensor


class ForwardOutput:
    """The outputs that an input asked for. Gradients flow through all but entropy and ids.

    To read one that was not asked for raises InvalidInput, which names what asks for it.
    """

    def __init__(self, **found: "Tensor | TopK") -> None:
        self.found = found

    @property
    def target_logprob_P(self) -> Tensor:
        return self._found("target_logprob_P", Tensor, "target_logprobs=True")

    @property
    def entropy_P(self) -> Tensor:
        return self._found("entropy_P", Tensor, "entropy=True")

    @property
    def label_logprob_PK(self) -> Tensor:
        return self._found("label_logprob_PK", Tensor, "labels")

    @property
    def top_k(self) -> TopK:
        return self._found("top_k", TopK, "top_k")

    @property
    def logit_PV(self) -> Tensor:
        return self._found("logit_PV", Tensor, "logits=True")

    @property
    def hidden_PH(self) -> Tensor:
        return self._found("hidden_PH", Tensor, "hidden=True")

    def _found(self, name: str, kind: type[FoundT], asked_by: str) -> FoundT:
        found = self.found.get(name)
        if not isinstance(found, kind):
            raise InvalidInput(f"it was not asked for: {asked_by} in the ForwardInput does", name)
        return found


@dataclass(frozen=True, order=True)
class HeadRequest:
    """A kind of output with its settings. Rows of equal questions go through a head together."""

    kind: str
    entropy: bool = False
    temperature: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, eq=False)
class CheckedInput:
    """A checked input, as arrays, with defaults filled in: without labels K is 0.

    `part`: of an item whose inputs go through in several passes.
    """

    token_L: Ints
    position_P: Ints
    label_PK: Ints
    asked: ForwardInput
    adapter: str | None
    route_LEK: NDArray[np.integer] | None = None
    part: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.questions or not len(self.position_P)

    @property
    def goes_in(self) -> Pass:
        return Pass(self.adapter, self.asked.no_grad, self.route_LEK is not None, self.part)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(question.kind for question in self.questions)

    @property
    def fields(self) -> list[str]:
        """The fields of its ForwardOutput."""
        a = self.asked
        asked = {
            "target_logprob_P": a.target_logprobs,
            "entropy_P": a.entropy,
            "label_logprob_PK": a.labels is not None,
            "top_k": a.top_k > 0,
            "logit_PV": a.logits,
            "hidden_PH": a.hidden,
        }
        return [name for name, is_asked in asked.items() if is_asked]

    @property
    def questions(self) -> list[HeadRequest]:
        """The heads that it needs: `scores` compute one log-probability a position, `ranks` labels and top-k."""
        asked, temperature = self.asked, self.asked.temperature
        found = [
            HeadRequest(kind) for kind, is_asked in (("hidden", asked.hidden), ("logits", asked.logits)) if is_asked
        ]
        if asked.labels is not None or asked.top_k:
            found.append(HeadRequest("ranks", temperature=temperature, top_k=asked.top_k))
        if asked.target_logprobs or asked.entropy:
            found.append(HeadRequest("scores", entropy=asked.entropy, temperature=temperature))
        return found


def leaves(inputs: Inputs, place: str) -> Iterator[tuple[str, ForwardInput]]:
    """Yield inputs, however they are nested, and the place of each. Raises InvalidInput for anything else."""
    match inputs:
        case ForwardInput():
            yield place, inputs
        case Mapping():
            for name, each in inputs.items():
                yield from leaves(each, f"{place}.{name}")
        case Sequence() if not isinstance(inputs, str | bytes):
            for number, each in enumerate(inputs):
                yield from leaves(each, f"{place}[{number}]")
        case _:
            raise InvalidInput(f"a ForwardInput is wanted, or lists and dicts of them, not {type(inputs)}", place)


def nested_alike(inputs: Inputs, outputs: Iterator[ForwardOutput]) -> Any:
    """Return the next outputs in the lists and dicts of their inputs."""
    match inputs:
        case ForwardInput():
            return next(outputs)
        case Mapping():
            return {name: nested_alike(each, outputs) for name, each in inputs.items()}
        case _:
            return [nested_alike(each, outputs) for each in inputs]


def empty_output(request: CheckedInput, facts: EngineInfo) -> ForwardOutput:
    """Return the outputs of an input without positions: tensors without rows, for each requested output."""
    number_0 = torch.zeros(0, device=facts.device)
    number_0K = number_0.view(0, request.asked.top_k)
    fields: dict[str, Tensor | TopK] = {
        "target_logprob_P": number_0,
        "entropy_P": number_0,
        "label_logprob_PK": number_0.view(0, request.label_PK.shape[1]),
        "top_k": TopK(number_0K.long(), number_0K),
        "logit_PV": number_0.view(0, facts.vocab_size),
        "hidden_PH": number_0.view(0, facts.hidden_size),
    }
    return ForwardOutput(**{name: fields[name] for name in request.fields})


def check(
    asked: ForwardInput, place: str, vocab_size: int, active: str | None, routes: RouteShape | None = None
) -> CheckedInput:
    """Check an input and fill in its defaults. Raises InvalidInput naming the input, the field and the rule.

    `routes`: of the model's experts, if it takes an input's routes.
    """
    token_L = _ids(asked.tokens, f"{place}.tokens", vocab_size)
    if token_L.ndim != 1 or not len(token_L):
        raise InvalidInput("a sequence of at least one token is wanted", f"{place}.tokens")
    follows = asked.target_logprobs or asked.entropy
    last = len(token_L) - 1 if follows else len(token_L)
    if asked.positions is None:
        position_P = np.arange(last)
    else:
        position_P = _ids(asked.positions, f"{place}.positions", last)
        if position_P.ndim != 1 or (np.diff(position_P) <= 0).any():
            raise InvalidInput("positions must rise, each once", f"{place}.positions")
    label_PK = np.zeros((len(position_P), 0), dtype=np.int64)
    if asked.labels is not None:
        label_PK = _ids(asked.labels, f"{place}.labels", vocab_size)
        if label_PK.ndim != 2 or len(label_PK) != len(position_P):
            message = f"labels are of shape {label_PK.shape}; a row for each of {len(position_P)} positions is wanted"
            raise InvalidInput(message, f"{place}.labels")
    if not 0 <= asked.top_k <= vocab_size:
        raise InvalidInput(f"top_k must lie between 0 and the vocabulary's {vocab_size}", f"{place}.top_k")
    if not asked.temperature > 0:
        raise InvalidInput("the temperature must be positive", f"{place}.temperature")
    adapter = active if isinstance(asked.adapter, AdapterChoice) else asked.adapter
    route_LEK = None if asked.routes is None else _routes(asked.routes, f"{place}.routes", len(token_L), routes)
    return CheckedInput(token_L, position_P, label_PK, asked, adapter, route_LEK)


def in_parts(item: Sequence[CheckedInput], num_parts: int) -> list[CheckedInput]:
    """Divide an item's inputs, in their order, into parts of about as many tokens. Each part goes through in a pass."""
    ends = np.cumsum([len(request.token_L) for request in item])
    middles = ends - np.diff(ends, prepend=0) / 2
    return [replace(r, part=int(middle * num_parts / ends[-1])) for r, middle in zip(item, middles, strict=True)]


def _routes(values: object, place: str, num_tokens: int, routes: RouteShape | None) -> NDArray[np.integer]:
    if routes is None:
        raise InvalidInput("this model has no experts, or this engine takes no routes for them", place)
    route_LEK, wanted = _ids(values, place, routes.num_experts), (num_tokens, routes.num_layers, routes.per_token)
    if route_LEK.shape != wanted:
        raise InvalidInput(f"they are of shape {route_LEK.shape}; tokens, layers, experts are {wanted}", place)
    if (np.diff(np.sort(route_LEK)) == 0).any():
        raise InvalidInput("the experts of a token in a layer differ from each other", place)
    return route_LEK.astype(routes.dtype.base)


def _ids(values: object, place: str, bound: int) -> Ints:
    array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidInput("whole numbers are wanted", place)
    if array.size and (array.min() < 0 or array.max() >= bound):
        raise InvalidInput(f"{int(array.min())} to {int(array.max())} are not all from 0 to {bound - 1}", place)
    return array.astype(np.int64)


# --- Packs the inputs of one slot. Common prefixes are stored once, as trees, if that saves enough tokens ---
#
# If no inputs share a prefix, or every shared prefix is stored once, the pack equals a job's bin of the same inputs to
# the bit (shared/jobs/prefix_tree.py): the same tokens and targets in the same order.
#
# Shape suffixes: T tokens of the pack, L tokens of an input.

# From here on a tree is faster than separate sequences, on the CPU: `python -m benchmarks.prefix_sharing --short`.
LEAST_SAVED = 8  # tokens


@dataclass(frozen=True, eq=False)
class Pack:
    """The table of tokens; for each input the indices of its tokens, [L]; the inputs in the order of their trees."""

    token_id_T: Ints
    position_T: Ints
    parent_T: Ints
    index_of: list[Ints]
    order: list[int]
    route_TEK: NDArray[np.integer] | None = None


def pack(sequences: Sequence[Ints], least_saved_tokens: int, routes: Sequence[NDArray[np.integer] | None] = ()) -> Pack:
    """Pack all sequences. Trees are in the order of their first sequences, which are in the order given.

    `routes`: of each sequence, if they have any. Those of a shared part are one sequence's, as in a job's bin.
    """
    order, nodes = grow(sequences)
    nodes = shared_where_it_saves(nodes, least_saved_tokens)
    roots = [number for number, node in enumerate(nodes) if node.parent < 0]
    trees = sorted(
        (sorted(order[nodes[begin].first : nodes[begin].last]), begin, end)
        for begin, end in pairwise([*roots, len(nodes)])
    )
    placed: list[Node] = []
    for _, begin, end in trees:
        moved = len(placed) - begin
        placed += [node._replace(parent=max(-1, node.parent + moved * (node.parent >= 0))) for node in nodes[begin:end]]
    position_T, parent_T = tables(placed)
    members = [member for each, _, _ in trees for member in each]
    route_TEK = routes_of_parts(routes, order, placed) if routes else None
    tokens = token_ids(sequences, order, placed)
    return Pack(tokens, position_T, parent_T, indices(order, placed), members, route_TEK)


# --- Heads on the backbone's hidden states, for several labels a position, top-k and whole logits ---
#
# All probabilities come from the scan of `head.logprobs`: Triton's kernels on CUDA, chunks of torch elsewhere, merged
# over the shards of the vocabulary. One label a position uses that head directly. Several labels, and the top ids, use
# one scan without a label, which gives minus the logsumexp (and keeps its gradient, one row a target, [N, H] in
# float32), and the logits of their ids, from rows of the output embedding that are gathered for some targets at a
# time:
#
#     logprob_nk = h_n . W[id_nk] / t - lse_n
#
# The gradient of the hidden states comes out summed over the group, as in head/logprobs.py; that of a trained
# embedding's shard is complete.
#
# Shape suffixes: N rows, H hidden size, V rows of this rank's shard, C rows of a chunk, K ids a row.

CHUNK_ROWS = 256


def ranked(
    hidden_NH: Tensor, weight_VH: Tensor, label_NK: Tensor, k: int, shard: VocabShard, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of labels, [N, K], and of the `k` most probable ids, [N, k], with those: float32 (float64).

    Top ids are sorted, the most probable first, and of equals the lower id; int64. `NO_LABEL` pads shorter rows.
    """
    none_N = label_NK.new_full((len(label_NK),), NO_LABEL)
    outputs = Outputs(temperature=temperature, top_k=k)
    found = score_targets(hidden_NH, weight_VH, none_N, outputs, shard)
    assert found.logprob_N is not None
    top_id_NK = label_NK[:, :0] if found.top_id_NK is None else found.top_id_NK
    logit_NK: Tensor = _LogitsAt.apply(hidden_NH, weight_VH, torch.cat([label_NK, top_id_NK], dim=1), shard)
    logprob_NK = shard.logits(logit_NK) / temperature + found.logprob_N[:, None]
    label_logprob_NK, top_logprob_NK = logprob_NK.split([label_NK.shape[1], k], dim=1)
    if found.top_logprob_NK is not None:
        # The values of the scan, which decided the order, with the gradient of those computed here.
        top_logprob_NK = found.top_logprob_NK + (top_logprob_NK - top_logprob_NK.detach())
    return label_logprob_NK, top_id_NK, top_logprob_NK


def logits_of(hidden_NH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
    """All logits of the whole vocabulary, [N, vocabulary], float32 (float64 for float64)."""
    return shard.logits(_Logits.apply(hidden_NH, weight_VH, shard))


class _LogitsAt(torch.autograd.Function):
    """Products with some ids' rows, [N, K], float32 (float64 for float64); 0 of `NO_LABEL`."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, id_NK: Tensor, shard: VocabShard) -> Tensor:
        logit_NK = hidden_NH.new_empty(id_NK.shape, dtype=torch.promote_types(torch.float32, hidden_NH.dtype))
        for chunk in _chunks(id_NK, shard, hidden_NH.shape[1]):
            rows_CKH = _gathered(weight_VH, id_NK[chunk], shard)
            hidden_CH = hidden_NH[chunk].to(rows_CKH.dtype)
            torch.bmm(rows_CKH, hidden_CH[:, :, None], out=logit_NK[chunk][:, :, None])
            del rows_CKH  # before the next chunk's come
        sum_over(logit_NK, shard.group)
        ctx.save_for_backward(weight_VH, id_NK, hidden_NH if ctx.needs_input_grad[1] else None)
        ctx.shard, ctx.hidden = shard, (hidden_NH.shape, hidden_NH.dtype)
        return logit_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NK: Tensor) -> tuple[Tensor | None, ...]:
        weight_VH, id_NK, hidden_NH = ctx.saved_tensors
        shape, dtype = ctx.hidden
        grad_NH, grad_VH = grad_NK.new_empty(shape, dtype=dtype), None
        if hidden_NH is not None:
            grad_VH = torch.zeros_like(weight_VH, dtype=grad_NK.dtype)
        for chunk in _chunks(id_NK, ctx.shard, weight_VH.shape[1]):
            rows_CKH = _gathered(weight_VH, id_NK[chunk], ctx.shard)
            grad_NH[chunk] = torch.bmm(grad_NK[chunk][:, None], rows_CKH)[:, 0].to(dtype)
            if grad_VH is not None:
                column_CK, owned_CK = rows_of_labels(id_NK[chunk], ctx.shard.first, ctx.shard.num_real)
                torch.mul((grad_NK[chunk] * owned_CK)[:, :, None], hidden_NH[chunk][:, None], out=rows_CKH)
                grad_VH.index_add_(0, column_CK.flatten(), rows_CKH.flatten(0, 1))
            del rows_CKH
        sum_over(grad_NH, ctx.shard.group)
        return grad_NH, grad_VH, None, None


def _chunks(id_NK: Tensor, shard: VocabShard, hidden_size: int) -> list[slice]:
    """Return rows whose ids' rows of the embedding take no more than the logits of CHUNK_ROWS rows do."""
    num_rows, num_ids = id_NK.shape
    step = max(1, CHUNK_ROWS * shard.size // max(1, num_ids * hidden_size))
    return slices(num_rows, step)


def _gathered(weight_VH: Tensor, id_CK: Tensor, shard: VocabShard) -> Tensor:
    """Return the embedding's rows of ids, zeros of those of other shards, [C, K, H] in the softmax's dtype."""
    column_CK, owned_CK = rows_of_labels(id_CK, shard.first, shard.num_real)
    return weight_VH[column_CK].to(torch.promote_types(torch.float32, weight_VH.dtype)).mul_(owned_CK[:, :, None])


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
        ctx.save_for_backward(weight_VH, hidden_NH if ctx.needs_input_grad[1] else None)
        ctx.shard, ctx.dtype = shard, hidden_NH.dtype
        own_NV = (hidden_NH @ weight_VH.t()).to(torch.promote_types(torch.float32, hidden_NH.dtype))
        if shard.group is None:
            return own_NV[:, : shard.vocab_size]
        shards = [torch.empty_like(own_NV) for _ in range(shard.group.size())]
        dist.all_gather(shards, own_NV, group=shard.group)
        return torch.cat(shards, dim=1)[:, : shard.vocab_size].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, ...]:
        weight_VH, hidden_NH = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        own_NV = grad_NV[:, shard.first : shard.first + shard.num_real].to(ctx.dtype)
        grad_NH, grad_VH = own_NV @ weight_VH[: shard.num_real], None
        if hidden_NH is not None:
            grad_VH = torch.zeros_like(weight_VH)
            torch.mm(own_NV.t(), hidden_NH, out=grad_VH[: shard.num_real])
        sum_over(grad_NH, shard.group)
        return grad_NH, grad_VH, None


# --- Answers one kind of question about several inputs, from rows of the backbone's hidden states ---
#
# Shape suffixes: N rows, H hidden size, V rows of this rank's output embedding, P positions of an input, K labels a
# position.


def answers(
    question: HeadRequest, rows_NH: Tensor, requests: Sequence[CheckedInput], weight_VH: Tensor, shard: VocabShard
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
