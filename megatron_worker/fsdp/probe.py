"""The probe of a model of an unknown family: our forward of a bin against transformers' forward of each sequence.

Shape suffixes: T tokens, N targets, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from megatron_worker.engine import Batch
from megatron_worker.fsdp.attention import ATTENTION
from megatron_worker.fsdp.model import FsdpModel
from shared.errors import InvalidInput

_FLOAT32_BOUND = 1e-5
"""Of the largest difference, by the largest log-probability (by 1 where that is smaller)."""
_BFLOAT16_BOUND = 0.05
"""Of the differences' root mean square, by the log-probabilities' standard deviation."""
_OF_ITS_CODE = (AttributeError, LookupError, NotImplementedError, StrictDataclassError, TypeError, ValueError)


@contextmanager
def refusing(family: str) -> Iterator[None]:
    """Name the family in every refusal of the block, and refuse if transformers' code does not take our calls."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{family} cannot be trained by the engine fsdp: {error.message}", "model") from error
    except _OF_ITS_CODE as error:
        rule = f"transformers' model does not take what is needed: {error!r:.200}"
        raise InvalidInput(f"{family} cannot be trained by the engine fsdp: {rule}", "model") from error


@torch.no_grad()
def probe(model: FsdpModel) -> float:
    """Compare log-probabilities of a bin of ours with those of each of its sequences alone. Collective.

    Returns:
        The difference in nats: the largest in float32, the root mean square in bfloat16.

    Raises:
        InvalidInput: they differ by more than the bounds above.
    """
    batch, sequences = _bin(model.architecture.vocab_size, model.device)

    def head(hidden_NH: Tensor, weight_VH: Tensor) -> dict[str, Tensor]:
        return {"logprob": _picked(hidden_NH @ weight_VH.t() / model.logit_divisor, batch.label_N)}

    ours_N = model.forward(batch, head)["logprob"]
    theirs_N = torch.cat([_alone(model, token_id_T) for token_id_T in sequences])
    error_N = ours_N - theirs_N
    if model.dtype == torch.float32:
        found, bound = float(error_N.abs().max()), _FLOAT32_BOUND * max(1.0, float(theirs_N.abs().max()))
    else:
        found, bound = float(error_N.square().mean().sqrt()), _BFLOAT16_BOUND * float(theirs_N.std())
    if not found <= bound:
        what = "log-probabilities of packed sequences differ from those of transformers' model of each alone"
        raise InvalidInput(f"{what} by {found:.1e} nats, and {bound:.1e} is allowed", "model")
    return found


def _picked(logit_NV: Tensor, label_N: Tensor) -> Tensor:
    return logit_NV.float().log_softmax(-1).gather(1, label_N[:, None])[:, 0]


def _bin(vocab_size: int, device: torch.device) -> tuple[Batch, list[Tensor]]:
    """Return a bin of a sequence, and of two that share their beginning; and the three, each whole."""
    first, shared, one, other = (list(range(*edges)) for edges in ((0, 20), (20, 44), (44, 60), (60, 69)))
    token_id_T = torch.arange(1, 70, device=device) * 7919 % vocab_size
    sequences = first, shared + one, shared + other
    parent, position = [-1] * 69, [0] * 69
    for places in sequences:
        for number, (before, place) in enumerate(zip([-1, *places], places, strict=False)):
            parent[place], position[place] = before, number
    index_N = torch.tensor([place for places in sequences for place in places[:-1]], device=device)
    label_N = token_id_T[torch.tensor([place for places in sequences for place in places[1:]], device=device)]
    position_T, parent_T = (torch.tensor(column, device=device) for column in (position, parent))
    batch = Batch.to_score(token_id_T, position_T, parent_T, index_N, label_N)
    return batch, [token_id_T[places] for places in sequences]


def _alone(model: FsdpModel, token_id_T: Tensor) -> Tensor:
    """Return the log-probabilities of a sequence's tokens but the first as transformers computes them."""

    def compute(causal_lm: Any) -> dict[str, Tensor]:
        causal_lm.config._attn_implementation = "eager"
        logit_TV = causal_lm(input_ids=token_id_T[None], use_cache=False).logits[0, :-1]
        causal_lm.config._attn_implementation = ATTENTION
        return {"logprob": _picked(logit_TV, token_id_T[1:])}

    return model.run(compute)["logprob"]
