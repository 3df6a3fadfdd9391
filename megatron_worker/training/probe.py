"""The probe: log-probabilities of a few tokens by a job's last weights, which a sampler is compared with.

Shape suffixes: T tokens of the probe, N of them that are scored: all but the first.
"""

import torch

from megatron_worker.engine import Batch, Engine, Outputs
from shared.errors import InvalidInput


def check_probe(token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises InvalidInput for an id that the model does not have."""
    for place, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidInput(f"token {token_id} is outside the vocabulary of {vocab_size}", f"probe[{place}]")


def probe(engine: Engine, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """Return log-probabilities of token_ids[1:] by the current weights, in nats, at temperature 1; on every rank.

    Collective: every data-parallel rank computes the same one sequence.
    """
    with torch.no_grad():
        logprob_N = engine.forward(_chain(token_ids, engine.facts.device), Outputs()).logprob_N
    assert logprob_N is not None
    return tuple(logprob_N.tolist())


def _chain(token_ids: tuple[int, ...], device: torch.device) -> Batch:
    """Make a bin of one sequence, every token but the first a target."""
    token_id_T = torch.tensor(token_ids, device=device)
    position_T = torch.arange(len(token_ids), device=device)
    return Batch.to_score(token_id_T, position_T, position_T - 1, position_T[:-1], token_id_T[1:])
