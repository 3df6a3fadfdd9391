"""Measures the passes of a micro-batch one by one: a slot's backbone, and a head for each question.

A backbone's size is the tokens of its pack; a head's is the number of rows of hidden states. The loss is zero times the
outputs, so that gradients do not change. Masks, which grow with the square of small trees, are subtracted from a
backbone's bytes, and computed for each pack.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from megatron_worker.engine import Batch
from megatron_worker.tensors.pass_costs import PassBytes, PassCost, measure, two_sequences
from megatron_worker.trainer_rank.forward import answers
from megatron_worker.trainer_rank.forward_engine import ForwardEngine
from megatron_worker.trainer_rank.inputs import CheckedInput, ForwardInput, HeadCall, Ints, TopK
from megatron_worker.tree_attention import mask_lengths

# Large enough that an allocator's rounding does not matter. The last two sizes of heads are larger than their chunks.
_BACKBONE_TOKENS = {"cpu": (4, 16, 64, 256), "cuda": (128, 512, 1024)}
_HEAD_ROWS = {"cpu": (16, 32, 256, 512), "cuda": (512, 1024, 4096, 8192)}
_MASK_BLOCK = 128  # tokens, on CUDA


def measure_backbone(engine: ForwardEngine, keeps_graph: bool, branches: bool, budget_bytes: float) -> PassCost:
    """Measure the backbone with the slot that is active. Collective."""
    device, element_bytes = engine.facts.device, getattr(torch, engine.facts.dtype).itemsize

    def probe(num_tokens: int) -> Iterator[float]:
        yield 0
        with torch.set_grad_enabled(keeps_graph):
            hidden_NH, weight_VH = engine.hidden_states(_pack(num_tokens, branches, device))
        yield 0
        if hidden_NH.requires_grad:
            (hidden_NH * 0).sum().backward()
        del hidden_NH, weight_VH
        yield 0

    def without_masks(size: int, point: PassBytes) -> PassBytes:
        if device.type == "cuda":
            masks = block_mask_bytes(size)
        else:
            masks = element_bytes * mask_elements(_pack(size, branches, device).parent_T.numpy())
        return PassBytes(*(max(0.0, value - masks) for value in point))

    cost = measure(probe, _BACKBONE_TOKENS[device.type], device, engine.facts.layout.world_size, budget_bytes)
    return PassCost(cost.sizes, tuple(map(without_masks, cost.sizes, cost.points)))


def measure_head(
    engine: ForwardEngine, question: HeadCall, num_labels: int, keeps_graph: bool, budget_bytes: float
) -> PassCost:
    """Measure a head on hidden states of zeros, whose memory counts as the head's. Collective."""
    device = engine.facts.device
    dtype, hidden_size = getattr(torch, engine.facts.dtype), engine.facts.hidden_size

    def probe(num_rows: int) -> Iterator[float]:
        request = _request(question, num_labels, num_rows)
        with torch.set_grad_enabled(keeps_graph):
            weight_VH = engine.hidden_states(_pack(1, False, device))[1]
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
    asked = ForwardInput(token_L, target_logprobs=question.kind == "scores", top_k=question.top_k)
    return CheckedInput(token_L, np.arange(num_rows), label_PK, asked, None)


def _pack(num_tokens: int, branches: bool, device: torch.device) -> Batch:
    """Make a pack of two sequences (pass_costs.py) with one target."""
    position, parent, _ = two_sequences(num_tokens, branches, device)
    zero_1 = torch.zeros(1, dtype=torch.int64, device=device)
    return Batch.to_score(torch.zeros_like(position), position, parent, zero_1 + num_tokens - 1, zero_1)


def mask_elements(parent_T: Ints) -> int:
    """Return the number of mask elements on the CPU: [L, L] for each small tree with many branches."""
    return sum(length**2 for length in mask_lengths(parent_T))


def block_mask_bytes(num_tokens: int) -> int:
    """Return the bytes of a block mask on CUDA: four lists of int32, of partial and full blocks by rows and columns."""
    return 4 * 4 * (-(-num_tokens // _MASK_BLOCK)) ** 2
