"""Log-probabilities of tokens, in nats: by an engine, by transformers, and by the sampler, a step at a time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_worker.engine import Batch, Outputs
from megatron_worker.lora import AppliedLora
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.tensors.slot_engine import Engine
from tests.megatron_worker.rows import Row


def logprobs(engine: Engine, batch: Batch) -> Tensor:
    """Of a bin's targets."""
    with torch.no_grad():
        found = engine.forward(batch, Outputs()).logprob_N
    assert found is not None
    return found


def logprobs_in_transformers(model: Any, rows: Sequence[Row]) -> Tensor:
    """Of the tokens that have a weight, a row at a time."""
    found = []
    for row in rows:
        ids = torch.tensor(row.ids)
        with torch.no_grad():
            logprob = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append(logprob[torch.tensor(row.weights)[1:] > 0])
    return torch.cat(found)


def transformers_model(
    folder: Path, kind: str = "AutoModelForCausalLM", dtype: torch.dtype | Literal["auto"] = "auto"
) -> Any:
    import transformers

    return getattr(transformers, kind).from_pretrained(folder, dtype=dtype)


def logprobs_by_steps(
    decoder: Decoder, ids: Sequence[int], steps: range, lora_weights: Mapping[str, AppliedLora]
) -> Tensor:
    """Of the ids at these places, each drawn in a slot behind those before it, the first ones read as a prompt."""
    read, cache = decoder.prefill(tuple(ids[: steps.start]), lora_weights), decoder.new_cache(2)
    cache.fill(1, read)
    hidden, found = read.hidden_H, []
    for position in steps:
        found.append(decoder.logits(hidden[None], lora_weights)[0].log_softmax(-1)[ids[position]])
        token_B, position_B = torch.tensor([0, ids[position]]), torch.tensor([0, position])
        hidden = decoder.step(token_B, position_B, cache, lora_weights)[1]
    return torch.stack(found)
