"""LoRA in the worker, in all of its forms (Hu et al. 2021, arXiv:2106.09685): for both engines and for the sampler.

Three types carry an adapter. `LinearForm` says how it lies beside one linear: the parts that it adapts, their ranks and
scales, and their tensors under PEFT's names. `LinearLora` has these tensors while they are trained. `AppliedLora` is
what a sampler computes with. `Adapter` makes the first two of a `Lora`; the others know no form:

    Lora -> Adapter -> LinearForm -> LinearLora -> lora_linear          the Megatron engine, and its experts
                                                -> LinearLora.added     the FSDP engine, behind transformers' linears
                                                -> LinearLora.of_tokens, .beside_head     embeddings and lm_head
                                                -> AppliedLora.linear, .of_tokens         the sampler

The input of a fused linear (query, key and value; gate and up) meets the stacked A matrices in one product, and their
B matrices, each in its own rows and columns of an otherwise empty matrix, in another. Under tensor parallelism the B
of a column-parallel linear is sharded with its rows, the A of a row-parallel one with its columns; the other matrix is
whole on every rank, and its gradient is complete because the rank-r activations are summed over tp. If ranks have
different tokens (sequence parallelism; experts) an adapter sums nothing itself: its output, or its input's gradient, is
summed with the linear's, and the gradient of the matrix that is whole on every rank is only its rank's part.

Shape suffixes: T tokens, N targets, I input features, O output features of this rank, R ranks of all parts of a linear
together, H hidden size.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from longshore.training import Lora
from megatron_worker.families import local_of, write_slice
from megatron_worker.head import scalar
from megatron_worker.head.scalar import LmHeadLora
from megatron_worker.offload import Flat
from megatron_worker.quantized import QuantizedTensor, quantized_linear, whole
from shared.families.tensor_slices import Linear, TensorSlice
from shared.models.peft import DRAWN, NORMS, AdaptedModules, Dimension, LoraSize, module_of, name_of, tensors_of

# --- The tensors of an adapter ---


@dataclass(frozen=True)
class LinearForm:
    """How an adapter lies beside one fused linear: the parts that it adapts, and the kinds of tensors of each."""

    linear: Linear
    sizes: Mapping[TensorSlice, LoraSize]
    kinds: Mapping[str, tuple[Dimension, ...]]

    def parameters(self, kind: str) -> list[str]:
        """Return the names of the parameters that hold tensors of a kind: A of all parts are in one."""
        return [f"{self.linear.name}.{kind}{'' if kind == 'A' else number}" for number in range(len(self.sizes))]

    @property
    def slices(self) -> list[TensorSlice]:
        """The tensors of every part, under PEFT's names."""
        split_along: dict[str, Dimension] = {"column": "outputs", "row": "inputs"}
        slices, start, along = list[TensorSlice](), 0, split_along.get(self.linear.kind)
        for number, (part, size) in enumerate(self.sizes.items()):
            lengths: dict[Dimension, int] = {"rank": size.rank, "outputs": part.shape[0], "inputs": part.shape[1]}
            for kind, dimensions in self.kinds.items():
                shape, first = tuple(lengths[each] for each in dimensions), start if kind == "A" else 0
                split = dimensions.index(along) if along in dimensions else None
                own = replace(part, name=name_of(part.name, kind), parameter=self.parameters(kind)[number], groups=1)
                slices.append(replace(own, shape=shape, split=split, start=first, stop=first + shape[0]))
            start += size.rank
        return slices

    def scale(self, device: torch.device) -> float | Tensor:
        """Return the scale of the stacked ranks: one of each rank, float32 [R], if they differ."""
        sizes = list(self.sizes.values())
        if len({size.scale for size in sizes}) == 1:
            return sizes[0].scale
        return torch.tensor([size.scale for size in sizes for _ in range(size.rank)], device=device)


def forms_of(lora: Lora, linears: Sequence[Linear]) -> list[LinearForm]:
    """Return how an adapter lies beside the linears that it targets."""
    adapted, forms = AdaptedModules(lora), []
    for linear in linears:
        sizes = {part: adapted.of(module_of(part.name)) for part in linear.slices if part.takes_adapter}
        if found := {part: size for part, size in sizes.items() if size is not None}:
            forms.append(LinearForm(linear, found, tensors_of(lora)))
    return forms


class Adapter:
    """One slot: an adapter's weights for every linear it targets, and its head, in one buffer.

    Each tensor is whole here: `megatron.linears.MegatronAdapter` splits them.

    Attributes:
        slices: all of its tensors; `more` of them belong to no linear.
        linears: the weights by the names of fused linears.
    """

    def __init__(
        self,
        lora: Lora,
        linears: Sequence[Linear],
        more: Sequence[TensorSlice],
        dtype: torch.dtype,
        device: torch.device,
        mask_place: int = 0,
    ) -> None:
        self.lora, self.masks = lora, Masks(lora.dropout, seed=0)
        self._mask_place = mask_place
        forms = forms_of(lora, linears)
        self.slices = [*(s for form in forms for s in form.slices), *more]
        held = [s for s in self.slices if self._holds(s)]
        rows: dict[str, int] = {}
        for s in held:
            rows[s.parameter] = max(rows.get(s.parameter, 0), s.stop)
        shapes: dict[str, tuple[int, ...]] = {}
        for s in held:
            _, size = self._split(s)
            own_rows = -(-rows[s.parameter] // (size if s.split == 0 else 1))  # a vocabulary's last shard is padded
            shapes[s.parameter] = (own_rows, *(columns // (size if s.split == 1 else 1) for columns in s.shape[1:]))
        self.flat = self._arrange(shapes, held, dtype, device)
        self.parameters = {name: Parameter(view, requires_grad=False) for name, view in self.flat.views.items()}
        self.linears = {f.linear.name: self._linear(f, device) for f in forms if self._holds(next(iter(f.sizes)))}

    # What a layout decides.

    def _holds(self, s: TensorSlice) -> bool:
        """Return True if this rank holds a part of a tensor."""
        return True

    def _split(self, s: TensorSlice) -> tuple[int, int]:
        """Return this rank's place among those that a tensor is split over, and their number."""
        return 0, 1

    def _arrange(
        self, shapes: dict[str, tuple[int, ...]], held: Sequence[TensorSlice], dtype: torch.dtype, device: torch.device
    ) -> Flat:
        """Make the buffer."""
        return Flat(shapes, dtype, device)

    def _place(self, linear: Linear) -> tuple[int, Callable[[Tensor], None] | None]:
        """Return `place` and `sum_columns` of a LinearLora."""
        return self._mask_place, None

    def _linear(self, form: LinearForm, device: torch.device) -> "LinearLora":
        a, b, norms = (
            tuple(self.parameters[name] for name in form.parameters(kind) if kind in form.kinds)
            for kind in ("A", "B", NORMS)
        )
        return LinearLora(form, form.scale(device), self.masks, *self._place(form.linear), a[0], b, norms)

    def initialise(self, seed: int, weight_of: Callable[[str], Tensor]) -> None:
        """Begin with what `initial` says: each tensor is made whole, then cut.

        `weight_of`: gathers the weight of the model whose factor has this name; collective.
        """
        for s in self.slices:
            begun = norms_of_rows(weight_of(s.name)) if s.name.endswith(NORMS) else None
            if self._holds(s) and (begun := initial(s, seed) if begun is None else begun) is not None:
                self.write(s, begun)

    def write(self, s: TensorSlice, whole: Tensor) -> None:
        """Copy this rank's part of a whole tensor to its place."""
        write_slice(s, self.flat.views[s.parameter], local_of(s, whole, *self._split(s)))


def initial(s: TensorSlice, seed: int) -> Tensor | None:
    """Return what a tensor of a fresh adapter is, whole and float32, from the seed and its PEFT name; None: zeros.

    A as PEFT's (Kaiming-uniform, a = sqrt 5); of embeddings it is B that begins at random, with a deviation of 1. A
    head's weight is normal with a variance of 1 / (inputs + 1) (Stiennon et al. 2020, arXiv:2009.01325). It is the same
    for every engine and layout. DoRA begins with the norms of the model's own rows.
    """
    digest = hashlib.sha256(f"{seed}:{s.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    drawn = torch.empty(s.shape)
    if s.parameter == scalar.WEIGHT:
        return drawn.normal_(0.0, (s.shape[1] + 1) ** -0.5, generator=generator)
    if not s.name.endswith(DRAWN):
        return None
    if s.name.endswith("_B"):
        return drawn.normal_(generator=generator)
    return drawn.uniform_(-(s.shape[1] ** -0.5), s.shape[1] ** -0.5, generator=generator)


# --- Dropout of adapters' inputs (Srivastava et al. 2014, JMLR 15:1929), from masks that are never stored ---
#
# A mask follows from the run's seed, the step, the bin in it and the linear: a run that was killed draws the same
# again.


@dataclass
class Masks:
    """An adapter's dropout masks follow from this. `moment`: the step and the bin in it; None: nothing is dropped."""

    rate: float
    seed: int
    moment: tuple[int, int] | None = None

    @contextmanager
    def at(self, moment: tuple[int, int] | None) -> Iterator[None]:
        before, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.moment = before

    def seed_of(self, linear: str, place: int) -> int | None:
        """Return the seed of a linear's mask on ranks of this place; None if nothing is dropped."""
        if self.moment is None or not self.rate:
            return None
        digest = hashlib.sha256(f"{self.seed}:{self.moment}:{linear}:{place}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def dropped(x: Tensor, rate: float, seed: int | None) -> Tensor:
    """Return x with a share `rate` of its numbers zero and the others larger, so that the mean stays; None: x itself.

    The gradient of a sum of products with the result, by x, is the same function of the gradient by the result.
    """
    if seed is None:
        return x
    generator = torch.Generator(x.device).manual_seed(seed)
    kept = torch.rand(x.shape, generator=generator, device=x.device) >= rate
    return x * kept.to(x.dtype).div_(1 - rate)


# --- An adapter of one linear, while it is trained ---


@torch.no_grad()
def norms_of_rows(weight_OI: Tensor, change_OI: Tensor | float = 0.0) -> Tensor:
    """Return the norms of the rows of W + scale B A, DoRA's divisors, in float32: constants, as in PEFT."""
    norm_O: Tensor = torch.linalg.vector_norm(weight_OI.float() + change_OI, dim=1)
    return norm_O


@dataclass(frozen=True)
class LinearLora:
    """An adapter's weights for one fused linear. Its parts have ranks one after another.

    `scale`: of the ranks, [R] if parts have different ones. `place`: ranks of one place have the same inputs, and so
    the same mask. `sum_columns`: over ranks with other columns of these rows. `norm_parts`: DoRA's norms of each part's
    rows, if it has any.
    """

    form: LinearForm
    scale: float | Tensor
    masks: Masks
    place: int
    sum_columns: Callable[[Tensor], None] | None
    a_RI: Tensor
    b_parts: tuple[Tensor, ...]
    norm_parts: tuple[Tensor, ...]

    @property
    def seed(self) -> int | None:
        """The seed of the mask of the parts' common input; None: nothing is dropped."""
        return self.masks.seed_of(self.form.linear.name, self.place)

    def kept(self, input_TI: Tensor) -> Tensor:
        """Return the input after dropout."""
        return dropped(input_TI, self.masks.rate, self.seed)

    def gain_O(self, weight_OI: Tensor) -> Tensor:
        """Return DoRA's factor for each row of W + scale B A, which gives the row its trained norm."""
        b_OR = (self.b_OR(len(weight_OI)) * self.scale).to(self.a_RI.dtype)
        norm_O = norms_of_rows(weight_OI, b_OR @ self.a_RI.detach())
        if self.sum_columns is not None:
            self.sum_columns(norm_O.square_())
            norm_O.sqrt_()
        norm_O = norm_O.to(weight_OI.dtype)  # rounded like the trained norm, which it equals before training
        trained_O = norm_O.clone()
        for part, own in zip(self.form.sizes, self.norm_parts, strict=True):
            trained_O.view(part.groups, -1)[:, part.start : part.stop] = own.view(part.groups, -1)
        return trained_O / norm_O

    def b_OR(self, num_rows: int) -> Tensor:
        """Return all B matrices in one, each in its own rows and ranks."""
        if len(self.b_parts) == 1 and self.b_parts[0].shape[0] == num_rows:
            return self.b_parts[0].detach()
        dense_OR = self.a_RI.new_zeros(num_rows, len(self.a_RI))
        for target, source in zip(self.blocks(dense_OR), self.b_parts, strict=True):
            target.copy_(source.detach().view(target.shape))
        return dense_OR

    def blocks(self, dense_OR: Tensor) -> list[Tensor]:
        """Return the block of each part, [groups, rows, rank] views."""
        blocks, first = [], 0
        for part, size in self.form.sizes.items():
            columns = slice(first, first := first + size.rank)
            blocks.append(dense_OR.view(part.groups, -1, dense_OR.shape[1])[:, part.start : part.stop, columns])
        return blocks

    def of_tokens(self, token_id_T: Tensor, table_scale: float | Tensor = 1.0) -> Tensor:
        """See AppliedLora."""
        return AppliedLora(self.a_RI, self.b_parts[0], self.scale).of_tokens(token_id_T, table_scale)

    def beside_head(self, hidden_NH: Tensor) -> LmHeadLora:
        """Return what the output layer's adapter adds for some targets."""
        return LmHeadLora(F.linear(self.kept(hidden_NH), self.a_RI) * self.scale, self.b_parts[0])

    def added(self, output: Tensor, input_: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return the known output of a linear of one part, [..., O], with the adapter's: y + scale (x A^T) B^T."""
        (b_OR,) = self.b_parts
        if self.norm_parts:
            gain_O = self.gain_O(weight_OI)
            alone = output if bias_O is None else output - bias_O
            if self.masks.rate:  # what a gain adds has the mask, too
                alone = F.linear(self.kept(input_), weight_OI)
            output, b_OR = output + alone * (gain_O - 1), b_OR * gain_O[:, None]
        return self.plus(output, F.linear(self.kept(input_), self.a_RI), b_OR)

    def plus(self, output: Tensor, low: Tensor, b_OR: Tensor) -> Tensor:
        """Add the product of B, or of this rank's rows of it, with A's output, [..., R]."""
        assert isinstance(self.scale, float), "a linear of one part has one scale"
        flat_TO, low_TR = output.flatten(0, -2), low.flatten(0, -2)
        return torch.addmm(flat_TO, low_TR, b_OR.t(), alpha=self.scale).view(output.shape)

    @torch.no_grad()
    def applied(self, weight_OI: Tensor) -> "AppliedLora":
        """Return copies of the factors for a sampler."""
        gain_O = self.gain_O(weight_OI) if self.norm_parts else None
        return AppliedLora(self.a_RI.clone(), self.b_OR(len(weight_OI)).clone(), self.scale, gain_O)


def lora_linear(
    input_: Tensor,
    weight_OI: Tensor | QuantizedTensor,
    bias_O: Tensor | None,
    lora: LinearLora | None,
    forward_group: dist.ProcessGroup | None = None,
    backward_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Apply a linear with its adapter, if any. An adapter's output, or its input's gradient, is summed over a group."""
    if lora is None:
        if isinstance(weight_OI, Tensor):
            return F.linear(input_, weight_OI, bias_O)
        return quantized_linear(input_, weight_OI, bias_O, forward_group, backward_group)
    flat_TI = input_.reshape(-1, input_.shape[-1])
    groups = forward_group, backward_group
    own_bias_O = None if lora.norm_parts else bias_O
    output_TO = _LoraLinear.apply(flat_TI, weight_OI, own_bias_O, lora, *groups, lora.a_RI, *lora.b_parts)
    if lora.norm_parts:
        gain_O = lora.gain_O(whole(weight_OI))
        output_TO = gained(output_TO, gain_O, bias_O)
        if lora.seed is not None:  # what a gain adds has the mask, too
            left_TI = lora.kept(flat_TI) - flat_TI
            output_TO = output_TO + quantized_linear(left_TI, weight_OI, None, *groups) * (gain_O - 1)
    return output_TO.view(*input_.shape[:-1], output_TO.shape[-1])


class _LoraLinear(torch.autograd.Function):
    """y = x W^T + bias + scale (x A^T) B^T with W frozen; only x and the rank-r activations are kept.

    A quantized W is made whole for each of its two products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_TI: Tensor,
        weight: Tensor | QuantizedTensor,
        bias_O: Tensor | None,
        lora: LinearLora,
        forward_group: dist.ProcessGroup | None,
        backward_group: dist.ProcessGroup | None,
        a_RI: Tensor,
        *b_parts: Tensor,
    ) -> Tensor:
        low_TR = (lora.kept(input_TI) @ a_RI.t()).mul_(lora.scale)
        weight_OI = whole(weight)
        b_OR = lora.b_OR(weight_OI.shape[0])
        output_TO = input_TI @ weight_OI.t() if bias_O is None else torch.addmm(bias_O, input_TI, weight_OI.t())
        _sum(output_TO, forward_group)
        _sum(low_TR, forward_group)
        output_TO.addmm_(low_TR, b_OR.t())
        ctx.save_for_backward(input_TI, a_RI, b_OR, low_TR)
        ctx.weight, ctx.lora, ctx.group, ctx.seed = weight, lora, backward_group, lora.seed
        return output_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        input_TI, a_RI, b_OR, low_TR = ctx.saved_tensors
        lora: LinearLora = ctx.lora
        grad_low_TR = (grad_TO @ b_OR).mul_(lora.scale)
        _sum(grad_low_TR, ctx.group)
        grad_TI = None
        if ctx.needs_input_grad[0]:
            grad_TI = grad_TO @ whole(ctx.weight)
            _sum(grad_TI, ctx.group)
            if ctx.seed is None:
                grad_TI.addmm_(grad_low_TR, a_RI)
            else:
                grad_TI += dropped(grad_low_TR @ a_RI, lora.masks.rate, ctx.seed)
        grad_a_RI = grad_low_TR.t() @ dropped(input_TI, lora.masks.rate, ctx.seed) if ctx.needs_input_grad[6] else None
        grad_b: list[Tensor | None] = [None] * len(lora.b_parts)
        if any(ctx.needs_input_grad[7:]):
            blocks = lora.blocks(grad_TO.t() @ low_TR)
            grad_b = [block.reshape(p.shape) for block, p in zip(blocks, lora.b_parts, strict=True)]
        return (grad_TI, None, None, None, None, None, grad_a_RI, *grad_b)


def _sum(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, group=group)


def gained(output_TO: Tensor, gain_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return the product with DoRA's W, from that with W + scale B A, with the bias, which has no gain."""
    return output_TO * gain_O if bias_O is None else torch.addcmul(bias_O, output_TO, gain_O)


# --- An adapter of one linear as a sampler computes with it ---


@dataclass(frozen=True)
class AppliedLora:
    """An adapter's matrices for one fused linear; `b_OR` is zero except in each part's block of rows and ranks.

    `scale`: of the ranks, [R] if parts have different ones. `gain_O`: DoRA's factor for each row.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float | Tensor
    gain_O: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {"a": self.a_RI, "b": self.b_OR, "gain": self.gain_O}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def linear(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Apply a frozen linear with the adapter."""
        y = F.linear(x, weight_OI, bias_O if self.gain_O is None else None)
        y += F.linear(F.linear(x, self.a_RI).mul_(self.scale), self.b_OR)
        return y if self.gain_O is None else gained(y, self.gain_O, bias_O)

    def of_tokens(self, token_id_T: Tensor, table_scale: float | Tensor = 1.0) -> Tensor:
        """Return what an adapter of the embeddings adds to those of some tokens, [T, H], which are scaled."""
        return F.embedding(token_id_T, self.a_RI.t()) * (self.scale * table_scale) @ self.b_OR.t()
