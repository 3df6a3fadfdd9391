"""Tensor slices: the rows of the engine's parameters that each Hugging Face tensor fills, under tensor parallelism.

The engine's parameters are fused (query, key and value interleaved by key/value head; gate beside up) and split over
the tensor-parallel ranks. A tensor slice describes one Hugging Face tensor: the part of it that a rank holds, and the
rows of the rank's parameter that this part fills.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron_worker.families.architecture import Architecture


@dataclass(frozen=True)
class TensorSlice:
    """A whole tensor `name` of `shape`, split along dimension `split` (None: every rank holds all of it).

    On each rank it fills rows `start` to `stop` of each of the `groups` equal row groups of `parameter`. `expert`: the
    number of the expert that it is of, if any, and it is split over expert-tensor-parallel ranks then. `stage` and
    `ep_rank`: the pipeline stage and the expert-parallel rank that hold it.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    split: int | None
    start: int
    stop: int
    groups: int = 1
    expert: int | None = None
    stage: int = 0
    ep_rank: int = 0

    def bounds(self, rank: int, size: int) -> tuple[int, int]:
        """Return the range of dimension `split` that a rank of `size` holds; the last ranks' may be short or empty."""
        assert self.split is not None
        share = -(-self.shape[self.split] // size)
        return min(rank * share, self.shape[self.split]), min((rank + 1) * share, self.shape[self.split])

    def local(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return a rank's part of the whole tensor."""
        if self.split is None:
            return whole
        first, last = self.bounds(rank, size)
        return whole.narrow(self.split, first, last - first)

    def write(self, parameter: Tensor, local: Tensor) -> None:
        """Copy a rank's part of the tensor into its rows of the parameter."""
        target = self._rows(parameter, self.start + local.shape[0] // self.groups)
        target.copy_(local.reshape(target.shape))

    def read(self, parameter: Tensor, num_rows: int) -> Tensor:
        """Return what `write` wrote: a rank's part, of `num_rows` rows, contiguous."""
        rows = self._rows(parameter, self.start + num_rows // self.groups)
        return rows.reshape(num_rows, *parameter.shape[1:]).contiguous()

    def _rows(self, parameter: Tensor, stop: int) -> Tensor:
        return parameter.view(self.groups, -1, *parameter.shape[1:])[:, self.start : stop]


@dataclass(frozen=True)
class Linear:
    """A fused linear of the engine and the Hugging Face linears in it, in the order of their rows."""

    name: str
    kind: Literal["column", "row"]  # megatron's words: "column" splits output rows over ranks, "row" input columns
    slices: tuple[TensorSlice, ...]


def linears_of(slices: Sequence[TensorSlice]) -> list[Linear]:
    """Return the linears that LoRA can adapt, in model order."""
    grouped: dict[str, list[TensorSlice]] = {}
    for s in slices:
        if s.name.endswith("_proj.weight"):
            grouped.setdefault(s.parameter.removesuffix(".weight"), []).append(s)
    return [Linear(name, "row" if own[0].split == 1 else "column", tuple(own)) for name, own in grouped.items()]


def slices_of(a: Architecture, tp: int, etp: int = 1) -> list[TensorSlice]:
    """Return every tensor of a model, by the names that Llama and Qwen share, for `tp` and `etp` ranks."""
    vocab = (a.vocab_size, a.hidden_size)
    rows = -(-a.vocab_size // tp)
    slices = [TensorSlice("model.embed_tokens.weight", "embedding.word_embeddings.weight", vocab, 0, 0, rows)]
    for layer in range(a.num_layers):
        slices += _attention(a, tp, layer) + (_experts(a, etp, layer) if a.num_experts else _mlp(a, tp, layer))
    slices.append(_vector("model.norm.weight", "decoder.final_layernorm.weight", a.hidden_size))
    if not a.tied:
        slices.append(TensorSlice("lm_head.weight", "output_layer.weight", vocab, 0, 0, rows))
    return slices


def _attention(a: Architecture, tp: int, layer: int) -> list[TensorSlice]:
    """Return the tensors of a layer without its MLP's."""
    theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
    attention = f"{theirs}.self_attn"
    slices = [_vector(f"{theirs}.input_layernorm.weight", f"{ours}.input_layernorm.weight", a.hidden_size)]
    slices += _qkv(a, tp, attention, f"{ours}.self_attention.linear_qkv", "weight", (a.hidden_size,))
    if a.qkv_bias:
        slices += _qkv(a, tp, attention, f"{ours}.self_attention.linear_qkv", "bias", ())
    if a.qk_norm:
        slices.append(_vector(f"{attention}.q_norm.weight", f"{ours}.self_attention.q_layernorm.weight", a.head_dim))
        slices.append(_vector(f"{attention}.k_norm.weight", f"{ours}.self_attention.k_layernorm.weight", a.head_dim))
    projection, shape = f"{ours}.self_attention.linear_proj.weight", (a.hidden_size, a.num_heads * a.head_dim)
    slices.append(TensorSlice(f"{attention}.o_proj.weight", projection, shape, 1, 0, a.hidden_size))
    norm = f"{theirs}.post_attention_layernorm.weight"
    slices.append(_vector(norm, f"{ours}.pre_mlp_layernorm.weight", a.hidden_size))
    return slices


def _mlp(a: Architecture, tp: int, layer: int) -> list[TensorSlice]:
    return _swiglu(f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp", a.hidden_size, a.ffn_size, tp)


def _experts(a: Architecture, etp: int, layer: int) -> list[TensorSlice]:
    theirs, ours = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    router = (a.num_experts, a.hidden_size)
    slices = [TensorSlice(f"{theirs}.gate.weight", f"{ours}.router.weight", router, None, 0, a.num_experts)]
    for number in range(a.num_experts):
        names = f"{theirs}.experts.{number}", f"{ours}.experts.{number}"
        slices += _swiglu(*names, a.hidden_size, a.expert_ffn_size, etp, number)
    return slices


def _swiglu(
    theirs: str, ours: str, hidden_size: int, ffn_size: int, num_ranks: int, expert: int | None = None
) -> list[TensorSlice]:
    up, down, share = (ffn_size, hidden_size), (hidden_size, ffn_size), ffn_size // num_ranks
    fc1, fc2 = f"{ours}.linear_fc1.weight", f"{ours}.linear_fc2.weight"
    return [
        TensorSlice(f"{theirs}.gate_proj.weight", fc1, up, 0, 0, share, expert=expert),
        TensorSlice(f"{theirs}.up_proj.weight", fc1, up, 0, share, 2 * share, expert=expert),
        TensorSlice(f"{theirs}.down_proj.weight", fc2, down, 1, 0, hidden_size, expert=expert),
    ]


def _qkv(a: Architecture, tp: int, theirs: str, ours: str, suffix: str, rest: tuple[int, ...]) -> list[TensorSlice]:
    """Return query, key and value, which megatron interleaves by key/value head: its queries, its key, its value."""
    slices, start = [], 0
    for name, per_group in (("q_proj", a.heads_per_group), ("k_proj", 1), ("v_proj", 1)):
        stop = start + per_group * a.head_dim
        whole = (a.num_kv_heads * per_group * a.head_dim, *rest)
        groups = a.num_kv_heads // tp
        slices.append(TensorSlice(f"{theirs}.{name}.{suffix}", f"{ours}.{suffix}", whole, 0, start, stop, groups))
        start = stop
    return slices


def _vector(name: str, parameter: str, size: int) -> TensorSlice:
    return TensorSlice(name, parameter, (size,), None, 0, size)
