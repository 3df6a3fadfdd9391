"""Attention over trees against a mask and a softmax; whole engines on trees against the same engines unpacked.

Shape suffixes: T tokens, H query heads, G key/value heads, D size of a head.
"""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longshore.training import Full, Layout, Lora
from megatron_worker.engine import Outputs
from megatron_worker.megatron.attention import attend, plan_bin
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.mixers import tree_attention
from megatron_worker.mixers.forest_calls import depths, find_nodes, mask_elements, plan_calls, subtree_ends
from megatron_worker.mixers.tree_attention import Forest, block_mask, plan_forest
from shared.errors import InvalidInput
from shared.families.architecture import Architecture, Attention, Rope
from tests.megatron_worker.trees import LOSS, as_chain, as_tree, random_sequences

D = 8
ATTENTION = Attention(4, 2, D, Rope(1.0, D))
PLAIN = Architecture("llama", (ATTENTION,), (None,), 4 * D, 8, 1e-6, tied=False)


def random_forest(seed, num_nodes=12, longest=9):
    """Parents of a forest whose tokens stand depth first, with roots and branchings at random."""
    generator = np.random.default_rng(seed)
    parent_T, open_ends = [], []
    for _ in range(num_nodes):
        del open_ends[generator.integers(0, len(open_ends) + 1) :]
        above = open_ends[-1] if open_ends else -1
        length = int(generator.integers(1, longest + 1))
        start = len(parent_T)
        parent_T += [above, *range(start, start + length - 1)]
        open_ends.append(start + length - 1)
    return torch.tensor(parent_T)


def ancestors(parent_T):
    """Whether a token is seen from another, one step up at a time: [T, T] bool."""
    seen = torch.eye(len(parent_T), dtype=torch.bool)
    for token, parent in enumerate(parent_T.tolist()):
        if parent >= 0:
            seen[token] |= seen[parent]
    return seen


def within(parent_T, window):
    """Whether a token is seen from another at most `window` - 1 steps up: [T, T] bool."""
    seen = above = torch.eye(len(parent_T), dtype=torch.bool)
    one_up = torch.zeros_like(seen)
    one_up[parent_T >= 0, parent_T[parent_T >= 0]] = True
    for _ in range(window - 1):
        above = (above.double() @ one_up.double()).bool()
        seen = seen | above
    return seen


def reference(query_THD, key_TGD, value_TGD, parent_T, window=None, sink_H=None):
    """Softmax of the scores that are not masked (Vaswani et al. 2017, equation 1), and of a sink."""
    per_group = query_THD.shape[1] // key_TGD.shape[1]
    key_THD, value_THD = (x.repeat_interleave(per_group, 1) for x in (key_TGD, value_TGD))
    score = torch.einsum("qhd,khd->hqk", query_THD, key_THD) * D**-0.5
    seen = ancestors(parent_T) if window is None else within(parent_T, window)
    score = score.masked_fill(~seen, -torch.inf)
    if sink_H is not None:
        score = torch.cat([score, sink_H[:, None, None].expand(-1, len(parent_T), 1)], -1)
    weight = score.softmax(-1)[..., : len(parent_T)]
    return torch.einsum("hqk,khd->qhd", weight, value_THD)


def heads(num_tokens, dtype, seed=0, num_heads=4, num_groups=2):
    generator = torch.Generator().manual_seed(seed)
    sizes = (num_heads, num_groups, num_groups)
    return [torch.randn(num_tokens, n, D, dtype=torch.float64, generator=generator).to(dtype) for n in sizes]


def with_gradients(function, inputs):
    """The output, and the gradients of a fixed weighting of it."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def forest_of(parent_T, dtype, call_pairs):
    return Forest(calls=tuple(plan_calls(find_nodes(parent_T.numpy()), dtype, call_pairs)))


# A call that costs nothing leaves nothing to a mask; one that costs a lot leaves all to masks; 40 mixes both.
@pytest.mark.parametrize("call_pairs", [0, 40, 10**6])
@pytest.mark.parametrize("seed", range(12))
def test_output_and_gradients_in_float64(seed, call_pairs):
    parent_T = random_forest(seed)
    inputs = heads(len(parent_T), torch.float64, seed)
    forest = forest_of(parent_T, torch.float64, call_pairs)
    ours = with_gradients(lambda *x: tree_attention.attend_forest(*x, forest), inputs)
    theirs = with_gradients(lambda *x: reference(*x, parent_T), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-12 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("call_pairs", [0, 40, 10**6])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 40, None])
@pytest.mark.parametrize("seed", range(4))
def test_windows_and_sinks_in_float64(seed, window, call_pairs):
    parent_T = random_forest(seed, longest=20)
    inputs = [*heads(len(parent_T), torch.float64, seed), torch.tensor([-9.0, 0.0, 2.0, 50.0], dtype=torch.float64)]
    nodes = find_nodes(parent_T.numpy(), longest=window)
    forest = Forest(calls=tuple(plan_calls(nodes, torch.float64, call_pairs, window=window)))
    ours = with_gradients(lambda q, k, v, s: tree_attention.attend_forest(q, k, v, forest, s), inputs)
    theirs = with_gradients(lambda q, k, v, s: reference(q, k, v, parent_T, window, s), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-12 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("window", [3, 17, 64])
def test_windows_and_sinks_of_chains_and_of_a_rank_with_half_of_the_queries(window):
    lengths = [70, 1, 33, 64]
    parent_T = torch.tensor([at - 1 if at else -1 for at in range(70)] + [-1])
    parent_T = torch.cat([parent_T, *(torch.arange(n) + start - 1 for start, n in ((71, 33), (104, 64)))])
    parent_T[[71, 104]] = -1
    inputs = [*heads(len(parent_T), torch.float64), torch.tensor([-9.0, 0.0, 2.0, 5.0], dtype=torch.float64)]
    position_T = torch.cat([torch.arange(n) for n in lengths])
    mixers = [dataclasses.replace(ATTENTION, window=each, has_sinks=True) for each in (window, None)]
    plan = plan_bin(position_T, parent_T, dataclasses.replace(PLAIN, mixers=tuple(mixers)), {}, torch.float64)
    theirs = with_gradients(lambda q, k, v, s: reference(q, k, v, parent_T, window, s), inputs)
    ours = with_gradients(lambda q, k, v, s: attend(q, k, v, plan, window, s), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-12 * max(1.0, float(b.abs().max()))
    chunks = (slice(20, 40), slice(90, 150))
    rows = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
    forest = plan_forest(parent_T, torch.float64, chunks, window)
    own = tree_attention.attend_forest(inputs[0][rows], inputs[1], inputs[2], forest, inputs[3])
    assert (own - theirs[0][rows]).abs().max() <= 1e-12


@pytest.mark.parametrize("window", [5, 40, 300])
def test_the_masks_of_windows_on_cuda(window):
    """The block mask against the definition; and its sinks, by flex_attention's slow path."""
    parent_T = random_forest(3, num_nodes=30, longest=30)
    nodes = find_nodes(parent_T.numpy())
    mask = block_mask(subtree_ends(nodes), torch.device("cpu"), block_size=32, depth_T=depths(nodes), window=window)
    inputs, sink_H = heads(len(parent_T), torch.float32), torch.tensor([-2.0, 0.0, 1.0, 4.0])
    flexed = tree_attention.attend_forest(*inputs, Forest(block_mask=mask), sink_H)
    assert (flexed - reference(*inputs, parent_T, window, sink_H)).abs().max() <= 2e-6


def test_a_window_has_few_calls_and_masks_of_its_own_size():
    """A chain of 1,000 tokens in a window of 100: one call of ten blocks, and nine that share one band."""
    calls = plan_calls(find_nodes(np.arange(1000) - 1, longest=100), torch.float32, window=100)
    assert [(c.num_blocks, c.causal) for c in calls] == [(10, True)] + [(1, False)] * 9
    assert len({id(c.mask_LL) for c in calls[1:]}) == 1
    assert mask_elements(np.arange(1000) - 1, 100) == 99 * 100


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_output_and_gradients_in_lower_precision(dtype, bound):
    """bfloat16 against its own inputs in float64: one rounding of the output and of each gradient, few within."""
    for seed in range(4):
        parent_T = random_forest(seed, num_nodes=20, longest=40)
        inputs = heads(len(parent_T), dtype, seed)
        forest = forest_of(parent_T, dtype, 500)
        ours = with_gradients(lambda *x, f=forest: tree_attention.attend_forest(*x, f), inputs)
        theirs = with_gradients(lambda *x, p=parent_T: reference(*x, p), [x.double() for x in inputs])
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == dtype
            assert (a.double() - b).norm() <= bound * b.norm()


def test_the_same_bits_again():
    """Threads share the kernel's work in a fixed way, so that a step that is repeated is the same step."""
    parent_T = random_forest(0, num_nodes=40, longest=60)
    inputs, forest = heads(len(parent_T), torch.float32), forest_of(parent_T, torch.float32, 500)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    first, *others = [with_gradients(lambda *x: tree_attention.attend_forest(*x, forest), inputs) for _ in range(4)]
    torch.set_num_threads(threads)
    for again in others:
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_calls_are_few_and_masks_small_where_completions_share_a_prompt():
    """One prompt and 16 completions of one length: two causal calls and one dense one."""
    prompt, length, count = 512, 64, 16
    parent = list(range(-1, prompt - 1))
    for start in range(prompt, prompt + length * count, length):
        parent += [prompt - 1, *range(start, start + length - 1)]
    calls = plan_calls(find_nodes(np.array(parent)), torch.float32)
    assert [(c.query.start, c.query.stop, c.num_blocks, c.causal) for c in calls] == [
        (0, 512, 1, True),
        (512, 1536, 16, True),
        (512, 1536, 1, False),
    ]
    assert calls[2].key == slice(0, 512)


def test_many_short_branches_take_one_masked_call():
    parent = [-1, *([0] * 20)]
    (call,) = plan_calls(find_nodes(np.array(parent)), torch.float32)
    assert call.mask_LL is not None and call.mask_LL.shape == (21, 21)


@pytest.mark.parametrize(
    ("parent", "rule"),
    [
        ([-1, 0, 3, 2], "before it"),
        ([-1, 0, -2], "before it"),
        ([-1, -1, 0], "depth first"),
        ([-1, 0, 0, 1], "depth first"),
    ],
)
def test_tokens_out_of_order_are_refused(parent, rule):
    with pytest.raises(InvalidInput, match=rule):
        plan_bin(torch.zeros(len(parent)), torch.tensor(parent), PLAIN, {}, torch.float32)


def test_chains_take_the_way_of_chains_to_the_bit():
    """Bins without a branch are planned, and attended, as before there were trees."""
    lengths = [17, 40, 1, 5]
    position_T = torch.cat([torch.arange(n) for n in lengths])
    parent_T = torch.where(position_T == 0, -1, torch.arange(len(position_T)) - 1)
    plan = plan_bin(position_T, parent_T, PLAIN, {}, torch.float32)
    assert not plan.forests and plan.lengths == tuple(lengths)
    inputs = heads(len(parent_T), torch.float32)
    expected = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in parts), is_causal=True, enable_gqa=True)[
            0
        ].transpose(0, 1)
        for parts in zip(*(x.split(lengths) for x in inputs), strict=True)
    ]
    assert torch.equal(attend(*inputs, plan), torch.cat(expected))


# flex_attention, as far as a CPU goes: its mask exactly, its forward unfused.


@pytest.mark.parametrize("seed", range(6))
def test_the_block_mask_is_flex_attention_s_own(seed):
    """Blocks from intervals against blocks counted from all pairs."""
    from torch.nn.attention.flex_attention import create_block_mask

    parent_T = random_forest(seed, num_nodes=25, longest=30)
    num_tokens = len(parent_T)
    end_T = subtree_ends(find_nodes(parent_T.numpy()))
    ours = block_mask(end_T, torch.device("cpu"), block_size=16)
    seen_TT = ancestors(parent_T)
    theirs = create_block_mask(
        lambda b, h, q, k: seen_TT[q, k], None, None, num_tokens, num_tokens, device="cpu", BLOCK_SIZE=16
    )
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for kind in ("kv", "full_kv"):
        for row, (count, other) in enumerate(
            zip(getattr(ours, f"{kind}_num_blocks")[0, 0], getattr(theirs, f"{kind}_num_blocks")[0, 0], strict=True)
        ):
            chosen = [set(getattr(m, f"{kind}_indices")[0, 0, row, :count].tolist()) for m in (ours, theirs)]
            assert count == other and chosen[0] == chosen[1]
    index_T = torch.arange(num_tokens)
    assert torch.equal(ours.mask_mod(0, 0, index_T[:, None], index_T), seen_TT)


def test_flex_attention_sees_what_the_calls_see():
    parent_T = random_forest(3, num_nodes=20, longest=40)
    inputs = heads(len(parent_T), torch.float32)
    end_T = subtree_ends(find_nodes(parent_T.numpy()))
    flexed = tree_attention.attend_forest(*inputs, Forest(block_mask=block_mask(end_T, torch.device("cpu"))))
    assert (flexed - reference(*inputs, parent_T)).abs().max() <= 2e-6


# A part of the queries, as a context-parallel rank has them.


@pytest.mark.parametrize("call_pairs", [0, 40, 10**6])
@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_share_the_queries_out_are_one_together(seed, call_pairs):
    """Outputs side by side, gradients of keys and values added up; edges of chunks fall in nodes and between them."""
    parent_T = random_forest(seed)
    parent_T = parent_T[: len(parent_T) // 6 * 6]
    query_THD, key_TGD, value_TGD = heads(len(parent_T), torch.float64, seed)
    expected = with_gradients(lambda *x: reference(*x, parent_T), (query_THD, key_TGD, value_TGD))
    size = len(parent_T) // 6
    found = [torch.zeros_like(x) for x in expected]
    for rank in range(3):
        chunks = tuple(slice(n * size, (n + 1) * size) for n in (rank, 5 - rank))
        rows = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
        nodes = find_nodes(parent_T.numpy(), [edge for chunk in chunks for edge in (chunk.start, chunk.stop)])
        forest = Forest(calls=tuple(plan_calls(nodes, torch.float64, call_pairs, chunks)))
        leaves = [x.detach().clone().requires_grad_() for x in (query_THD[rows], key_TGD, value_TGD)]
        output = tree_attention.attend_forest(*leaves, forest)
        weighting = torch.linspace(-1, 1, expected[0].numel(), dtype=output.dtype).view(expected[0].shape)
        output.backward(weighting[rows])
        found[0][rows], found[1][rows] = output.detach(), leaves[0].grad
        found[2] += leaves[1].grad
        found[3] += leaves[2].grad
    assert all((ours - theirs).abs().max() <= 1e-12 for ours, theirs in zip(found, expected, strict=True))


def test_flex_attention_of_some_queries_is_that_of_all():
    """The block mask's rows of two chunks; on CUDA a chunk is whole blocks."""
    parent_T = random_forest(3, num_nodes=30, longest=60)[:384]
    inputs = heads(len(parent_T), torch.float32)
    end_T = subtree_ends(find_nodes(parent_T.numpy()))
    chunks = (slice(64, 128), slice(256, 320))
    rows = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
    mask = block_mask(end_T, torch.device("cpu"), block_size=32, chunks=chunks)
    flexed = tree_attention.attend_forest(inputs[0][rows], *inputs[1:], Forest(block_mask=mask))
    assert len(parent_T) == 384
    assert (flexed - reference(*inputs, parent_T)[rows]).abs().max() <= 2e-6


# Whole engines.


def engine_of(model, kind, dtype="float32"):
    """An engine whose adapter is no longer zero, so that all of it has gradients."""
    engine = MegatronEngine(model, Layout(), dtype)
    engine.train_full(Full()) if kind == "full" else engine.add_adapter("run", Lora(rank=3, alpha=6), seed=5)
    if kind == "lora":
        generator = torch.Generator().manual_seed(0)
        flat = engine.adapters["run"].flat
        for name, view in flat.views.items():
            if ".B" in name:
                view.copy_(0.05 * torch.randn(view.shape, generator=generator))
    return engine


def scored(engine, batches):
    """Log-probabilities in nats, and gradients of the sums, over all batches."""
    engine.zero_grad()
    logprobs = []
    for batch in batches:
        with torch.no_grad():
            logprobs.append(engine.forward(batch, Outputs()).logprob_N)
        engine.forward_backward(batch, LOSS)
    return torch.cat(logprobs), engine.trained.optimizer.grad.buffer.clone()


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("seed", range(4))
def test_trees_score_and_learn_as_sequences_alone(model, kind, seed):
    rows = random_sequences(seed)
    engine = engine_of(model, kind)
    tree, chains = as_tree(rows), [as_chain(row) for row in rows]
    assert len(tree.token_id_T) < 0.6 * sum(len(chain.token_id_T) for chain in chains)
    tree_logprob_N, tree_gradient = scored(engine, [tree])
    chain_logprob_N, chain_gradient = scored(engine, chains)
    assert (tree_logprob_N - chain_logprob_N).abs().max() <= 2e-6
    assert (tree_gradient - chain_gradient).norm() <= 2e-6 * chain_gradient.norm()


@pytest.mark.parametrize("seed", range(4))
def test_trees_equal_sequences_alone_in_float64(model, seed):
    """The whole model in double precision; gradients straight from autograd, for the optimizer's are float32."""
    engine = MegatronEngine(model, Layout(), "float64")  # type: ignore[arg-type]
    parameters = engine._model.parameters
    rows = random_sequences(seed)

    def logprob_and_gradients(batches):
        logprobs = []
        for parameter in parameters.values():
            parameter.requires_grad_(True).grad = None
        for batch in batches:
            scores = engine.forward(batch, Outputs())
            LOSS.sums(scores, batch).loss.backward()
            logprobs.append(scores.logprob_N.detach())
        return torch.cat(logprobs), {name: parameter.grad for name, parameter in parameters.items()}

    tree_logprob_N, tree_gradients = logprob_and_gradients([as_tree(rows)])
    chain_logprob_N, chain_gradients = logprob_and_gradients([as_chain(row) for row in rows])
    assert tree_logprob_N.dtype == torch.float64
    assert (tree_logprob_N - chain_logprob_N).abs().max() <= 1e-12
    for name, gradient in chain_gradients.items():
        assert (tree_gradients[name] - gradient).norm() <= 1e-12 * gradient.norm(), name
