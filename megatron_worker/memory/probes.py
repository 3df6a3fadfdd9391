"""Measures the passes of a micro-batch: a job's with its loss, or one by one a slot's backbone, and each kind of head.

The size of a job's pass and of a backbone is the tokens of the pack; a head's is the number of rows of hidden states.
Backbones and heads have a loss of zero times the outputs, so that gradients do not change. Masks, which grow with the
square of small trees, are subtracted from a backbone's bytes, and computed for each pack.

Shape suffixes: T tokens of a pack, N targets or rows, H hidden size, V rows of the output embedding.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from megatron_worker.engine import Batch, Facts, LossFunction
from megatron_worker.forwards.answers import answers
from megatron_worker.forwards.inputs import CheckedInput, ForwardInput, HeadCall, Ints, TopK
from megatron_worker.memory.pass_costs import PassBytes, PassCost, measure
from megatron_worker.mixers.forest_calls import mask_elements
from megatron_worker.tensors.slot_engine import Engine

# Large enough that an allocator's rounding does not matter. The last two sizes of heads are larger than their chunks.
_BACKBONE_TOKENS = {"cpu": (4, 16, 64, 256), "cuda": (128, 512, 1024)}
_HEAD_ROWS = {"cpu": (16, 32, 256, 512), "cuda": (512, 1024, 4096, 8192)}
_FIRST_STEP_TOKENS = {"cpu": 8, "cuda": 512}
_STEP_TOKENS = {device: tuple(int(first * 1.5**n) for n in range(24)) for device, first in _FIRST_STEP_TOKENS.items()}
_MASK_BLOCK = 128  # tokens, on CUDA


def measure_step(
    engine: Engine, loss: LossFunction, branches: bool, budget_bytes: float, most_tokens: int | None = None
) -> PassCost:
    """Measure the memory of forward_backward by tokens, up to `most_tokens`; all tokens are targets.

    The active slot must hold no gradients: those of the measuring passes are dropped. Collective.
    """
    device, world_size = engine.facts.device, engine.facts.layout.world_size
    if (divergence := loss.outputs.divergence) is not None:  # of a whole distribution: no other takes more
        outputs = dataclasses.replace(loss.outputs, divergence=dataclasses.replace(divergence, tokens="all"))
        loss = dataclasses.replace(loss, outputs=outputs)

    def probe(num_tokens: int) -> Iterator[float]:
        batch = _two_sequences(num_tokens, branches, device, num_targets=num_tokens)
        yield 0
        if divergence is not None:
            with torch.no_grad():
                batch = dataclasses.replace(batch, teacher=engine.teacher_states(batch))
        engine.forward_backward(batch, loss)
        yield 0
        yield 0

    rising = _STEP_TOKENS[device.type]
    sizes = rising[:1] + tuple(size for size in rising[1:] if most_tokens is None or size <= most_tokens)
    cost = measure(probe, sizes, device, world_size, budget_bytes)
    engine.zero_grad()
    return cost


def measure_backbone(engine: Engine, keeps_graph: bool, branches: bool, budget_bytes: float) -> PassCost:
    """Measure the backbone with the slot that is active. Collective."""
    facts, device = engine.facts, engine.facts.device

    def probe(num_tokens: int) -> Iterator[float]:
        yield 0
        with torch.set_grad_enabled(keeps_graph):
            hidden_NH, weight_VH = engine.hidden_states(_two_sequences(num_tokens, branches, device))
        yield 0
        if hidden_NH.requires_grad:
            (hidden_NH * 0).sum().backward()
        del hidden_NH, weight_VH
        yield 0

    def without_masks(size: int, point: PassBytes) -> PassBytes:
        masks = mask_bytes(_two_sequences(size, branches, device).parent_T.cpu().numpy(), facts)
        return PassBytes(*(max(0.0, value - masks) for value in point))

    cost = measure(probe, _BACKBONE_TOKENS[device.type], device, facts.layout.world_size, budget_bytes)
    return PassCost(cost.sizes, tuple(map(without_masks, cost.sizes, cost.points)))


def measure_head(
    engine: Engine, question: HeadCall, num_labels: int, keeps_graph: bool, budget_bytes: float
) -> PassCost:
    """Measure a head on hidden states of zeros, whose memory counts as the head's. Collective."""
    device = engine.facts.device
    dtype, hidden_size = getattr(torch, engine.facts.dtype), engine.facts.hidden_size

    def probe(num_rows: int) -> Iterator[float]:
        request = _request(question, num_labels, num_rows)
        with torch.set_grad_enabled(keeps_graph):
            weight_VH = engine.hidden_states(_two_sequences(1, False, device))[1]
        weight_VH = weight_VH.detach().requires_grad_(weight_VH.requires_grad)
        if weight_VH.requires_grad and not engine.needs_lockstep:  # in step, it is kept until the backbone's backward
            weight_VH.register_post_accumulate_grad_hook(_drop_gradient)
        yield 0
        with torch.set_grad_enabled(keeps_graph):
            rows_NH = torch.zeros(num_rows, hidden_size, dtype=dtype, device=device, requires_grad=keeps_graph)
            (answer,) = answers(question, rows_NH, [request], weight_VH, engine.vocab_shard)
        outputs = [value.logprob_PK if isinstance(value, TopK) else value for value in answer.values()]
        graded = [tensor for tensor in outputs if tensor.requires_grad]
        yield sum(tensor.nbytes for tensor in graded)
        if graded:
            torch.stack([(tensor * 0).sum() for tensor in graded]).sum().backward()
        if not engine.needs_lockstep:  # in step, its gradient is kept until the backbone's backward
            del rows_NH
        yield 0

    return measure(probe, _HEAD_ROWS[device.type], device, engine.facts.layout.world_size, budget_bytes)


def _drop_gradient(weight_VH: Tensor) -> None:
    weight_VH.grad = None


def _request(question: HeadCall, num_labels: int, num_rows: int) -> CheckedInput:
    token_L, label_PK = np.zeros(num_rows + 1, np.int64), np.zeros((num_rows, num_labels), np.int64)
    asked = ForwardInput(
        token_L,
        target_logprobs=question.kind == "scores",
        entropy=question.entropy,
        labels=label_PK if num_labels else None,
        top_k=question.top_k,
        logits=question.kind == "logits",
        hidden=question.kind == "hidden",
    )
    return CheckedInput(token_L, np.arange(num_rows), label_PK, asked, None)


def _two_sequences(num_tokens: int, branches: bool, device: torch.device, num_targets: int = 1) -> Batch:
    """Make a pack of two chains, or of two branches after a prefix of two tokens; its last tokens are targets.

    Every loss has a value for them. All tokens are at position 0: models may be limited in positions.
    """
    index_T = torch.arange(num_tokens, device=device)
    zero_T, parent_T = torch.zeros_like(index_T), index_T - 1
    root = 2 if branches else 0
    second = root + (num_tokens - root) // 2
    parent_T[second] = root - 1
    index_N = index_T[num_tokens - num_targets :]
    sequence_N = (index_N >= second).long()
    batch = Batch.to_score(zero_T, zero_T, parent_T, index_N, torch.zeros_like(index_N))
    advantage_N = 1.0 - 2.0 * sequence_N
    return dataclasses.replace(
        batch, weight_N=torch.ones_like(advantage_N), advantage_N=advantage_N, sequence_N=sequence_N
    )


def mask_bytes(parent_T: Ints, facts: Facts) -> float:
    """Return the bytes of the attention masks of a pack, which all layers of one window share.

    On the CPU [L, L] for each small tree with many branches, and what a window cuts off. On CUDA a block mask: four
    lists of int32, of partial and full blocks by rows and columns. Sequences without branches or windows have none.
    """
    element_bytes: int = getattr(torch, facts.dtype).itemsize
    is_chain = bool(((parent_T == -1) | (parent_T == np.arange(len(parent_T)) - 1)).all())
    windows = [window for window in facts.windows if window is not None or not is_chain]
    if facts.device.type == "cuda":
        return len(windows) * 4 * 4 * (-(-len(parent_T) // _MASK_BLOCK)) ** 2
    return element_bytes * sum(mask_elements(parent_T, window) for window in windows)
