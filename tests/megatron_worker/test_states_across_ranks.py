"""The gated delta rule, Mamba-2 and their convolution over a bin that context-parallel ranks share out."""

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_worker.mixers.linear_attention import (
    RecurrentPlan,
    Share,
    convolve,
    gated_delta_rule,
    plan_recurrence,
    scan,
    with_ancestors,
)

HEADS, KEY_HEADS, KEY, VALUE, WIDTH = 4, 2, 5, 3, 4
Mixer = Callable[[dict[str, Tensor], RecurrentPlan], Tensor]


def mixer_inputs(num_tokens: int, seed: int) -> dict[str, Tensor]:
    """Random inputs of both mixers, in float64."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=random, dtype=torch.float64).requires_grad_()

    sizes = {"query": (KEY_HEADS, KEY), "key": (KEY_HEADS, KEY), "value": (HEADS, VALUE), "step": (HEADS,)}
    return {name: normal(*shape) for name, shape in sizes.items()} | {"decay": normal(HEADS)}


def delta_rule(x: dict[str, Tensor], plan: RecurrentPlan) -> Tensor:
    return gated_delta_rule(x["query"], x["key"], x["value"], -x["decay"].exp() / 4, x["step"].sigmoid(), plan)[0]


def mamba(x: dict[str, Tensor], plan: RecurrentPlan) -> Tensor:
    return scan(x["value"], x["key"], x["query"], x["step"].sigmoid(), -x["decay"].exp() / 4, plan)[0]


def convolution(x: dict[str, Tensor], plan: RecurrentPlan) -> Tensor:
    weight = torch.linspace(-1, 1, HEADS * VALUE * WIDTH, dtype=torch.float64).view(-1, WIDTH)
    return F.silu(convolve(with_ancestors(x["value"].flatten(1), plan), weight))


def shared_out(parent_T: Tensor, parts: list[tuple[slice, ...]], mixer: Mixer, x: dict[str, Tensor]) -> Tensor:
    """Compute each rank's share in a thread of its own; they meet where ranks gather. Returns all outputs."""
    num_ranks = len(parts)
    given: list[Tensor] = [torch.empty(0)] * num_ranks
    outputs: list[Tensor | None] = [None] * num_ranks
    errors: list[BaseException] = []
    meet = threading.Barrier(num_ranks)

    def compute(rank: int) -> None:
        def gather(rows: Tensor) -> Tensor:
            given[rank] = rows
            meet.wait()
            gathered = torch.cat(given)
            meet.wait()
            assert len(gathered) == num_ranks * len(rows), "ranks give different numbers of rows"
            return gathered

        try:
            plan = plan_recurrence(parent_T, WIDTH, Share(rank, tuple(parts), gather))
            own = torch.cat([torch.arange(len(parent_T))[part] for part in parts[rank]])
            outputs[rank] = torch.zeros(len(parent_T), HEADS * VALUE, dtype=torch.float64).index_copy(
                0, own, mixer({name: rows[own] for name, rows in x.items()}, plan).flatten(1)
            )
        except BaseException as error:
            errors.append(error)
            meet.abort()

    threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return torch.stack([output for output in outputs if output is not None]).sum(0)


def cut(num_tokens: int, num_ranks: int) -> list[tuple[slice, ...]]:
    """Give rank r the r-th chunk and the r-th from the end, as the engine does."""
    edges = [num_tokens * k // (2 * num_ranks) for k in range(2 * num_ranks + 1)]
    chunks = [slice(a, b) for a, b in itertools.pairwise(edges)]
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(num_ranks)]


@st.composite
def forests(draw: st.DrawFn) -> Tensor:
    """Parents in depth-first order: chains, trees and combs of chunks' size, and single tokens."""
    parents: list[int] = []

    def grow(above: int, depth: int) -> None:
        begin = len(parents)
        length = draw(st.sampled_from([1, 2, 3, 15, 16, 17, 40, 70]))
        parents.extend([above, *range(begin, begin + length - 1)])
        last = len(parents) - 1
        for _ in range(draw(st.sampled_from([0, 0, 1, 2, 3])) if depth else 0):
            grow(last, depth - 1)

    for _ in range(draw(st.integers(1, 3))):
        grow(-1, 3)
    return torch.tensor(parents)


@pytest.mark.parametrize("mixer", [delta_rule, mamba, convolution])
@given(parent_T=forests(), num_ranks=st.sampled_from([2, 3, 4]), seed=st.integers(0, 9))
def test_shares_together_are_the_whole(mixer: Mixer, parent_T: Tensor, num_ranks: int, seed: int) -> None:
    if len(parent_T) < 2 * num_ranks:
        return
    x, towards = mixer_inputs(len(parent_T), seed), torch.Generator().manual_seed(seed)
    whole = mixer(x, plan_recurrence(parent_T, WIDTH)).flatten(1)
    found = shared_out(parent_T, cut(len(parent_T), num_ranks), mixer, x)
    assert (found - whole).abs().max() <= 1e-11
    direction = torch.randn(whole.shape, generator=towards, dtype=torch.float64)
    used = [rows for rows in x.values() if rows.requires_grad]
    expected = torch.autograd.grad((whole * direction).sum(), used, allow_unused=True)
    for name, a, b in zip(
        x, expected, torch.autograd.grad((found * direction).sum(), used, allow_unused=True), strict=True
    ):
        assert (a is None) == (b is None), name
        assert a is None or (a - b).abs().max() <= 1e-10, name


@pytest.mark.parametrize("mixer", [delta_rule, mamba, convolution])
def test_a_sequence_s_bits_do_not_depend_on_the_others(mixer: Mixer) -> None:
    """Three sequences over three ranks, the middle one a tree; what is changed shows in its own sequence alone."""
    lengths, begin = [50, 71, 23], [0, 50, 121]
    parent_T = torch.cat(
        [torch.arange(begin, begin + length) - 1 for begin, length in zip(begin, lengths, strict=True)]
    )
    parent_T[begin] = -1
    parent_T[95] = 69
    x = {name: rows.detach() for name, rows in mixer_inputs(len(parent_T), 0).items()}
    parts = cut(len(parent_T), 3)
    before = shared_out(parent_T, parts, mixer, x).split(lengths)
    for changed in range(3):
        here = slice(begin[changed], begin[changed] + lengths[changed])
        other = {name: rows.clone() for name, rows in x.items()}
        for rows in other.values():
            rows[here] += 1
        after = shared_out(parent_T, parts, mixer, other).split(lengths)
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [each != changed for each in range(3)]
