"""A bin on one rank: padded to a length that the layout divides, and cut over context-parallel ranks.

A bin is cut into twice as many chunks as there are context-parallel ranks; rank r has chunk r and the r-th from the
end, so that a long sequence costs all ranks the same.

Shape suffixes: T tokens of a padded bin, t those of this rank, s those that it has between layers, N targets of the
bin, M those whose hidden states are this rank's; L layers with experts, K experts of a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.engine import Batch
from megatron_worker.families.rope import check_lengths
from megatron_worker.megatron.attention import BinPlan, Context, plan_bin
from megatron_worker.megatron.parallel.collectives import sum_alike
from megatron_worker.megatron.parallel.mesh import Mesh
from shared.families.architecture import Architecture
from shared.families.rope import Rope

_CUDA_CHUNK = 128  # tokens: a chunk is whole blocks of flex_attention's mask


@dataclass(frozen=True)
class LocalBin:
    """A bin on this rank. `rows`: hidden states between layers. `route_LsK`: their experts, if the bin says them."""

    token_id_t: Tensor
    plan: BinPlan
    rows: int
    hidden_index_M: Tensor
    target_M: Tensor | None  # which of the bin's targets; None: all
    num_targets: int
    context: Context | None
    route_LsK: Tensor | None = None

    def of_all_targets(self, values_M: Tensor) -> Tensor:
        """Gather values of all context-parallel ranks' targets, in the order of the bin, on every rank: [N, ...].

        All ranks must compute the same with the result, since gradients are not summed over ranks.
        """
        if self.target_M is None or self.context is None:
            return values_M
        zeros_N = values_M.new_zeros(self.num_targets, *values_M.shape[1:])
        return sum_alike(zeros_N.index_copy(0, self.target_M, values_M), self.context.group)


def localised(
    batch: Batch, mesh: Mesh, a: Architecture, frequencies: Mapping[Rope, Tensor], dtype: torch.dtype
) -> LocalBin:
    """Make a rank's bin. All ranks of a bin raise the same error.

    Raises InvalidInput: a tree's tokens are not in depth-first order, or a sequence is too long.
    """
    check_lengths(batch.position_T, a.max_positions)
    token_id_T, position_T, parent_T = _padded(batch, _multiple(mesh))
    context, token_id_t, position_t = None, token_id_T, position_T
    hidden_index_M, target_M = batch.hidden_index_N, None
    if mesh.cp.size > 1:
        context = _context(len(token_id_T), mesh)
        rows_t = context.rows(len(token_id_T), token_id_T.device)
        token_id_t, position_t = token_id_T[rows_t], position_T[rows_t]
        local_T = torch.full_like(token_id_T, -1)
        local_T[rows_t] = torch.arange(len(rows_t), device=rows_t.device)
        target_M = (local_T[hidden_index_M] >= 0).nonzero()[:, 0]
        hidden_index_M = local_T[hidden_index_M[target_M]]
    rows = len(token_id_t) // (mesh.tp.size if mesh.layout.sp else 1)
    return LocalBin(
        token_id_t=token_id_t,
        plan=plan_bin(position_t, parent_T, a, frequencies, dtype, context),
        rows=rows,
        hidden_index_M=hidden_index_M,
        target_M=target_M,
        num_targets=len(batch.label_N),
        context=context,
        route_LsK=_routes(batch, len(token_id_T), context, mesh),
    )


def _routes(batch: Batch, num_tokens: int, context: Context | None, mesh: Mesh) -> Tensor | None:
    """Return the experts of this rank's tokens. Tokens that pad a bin take the first ones."""
    if batch.route_TLK is None:
        return None
    padding = num_tokens - len(batch.route_TLK), batch.route_TLK.shape[1], 1
    first_K = torch.arange(batch.route_TLK.shape[2], dtype=batch.route_TLK.dtype, device=batch.route_TLK.device)
    route_sLK = torch.cat([batch.route_TLK, first_K.repeat(padding)])
    if context is not None:
        route_sLK = route_sLK[context.rows(num_tokens, route_sLK.device)]
    if mesh.layout.sp:
        route_sLK = route_sLK.tensor_split(mesh.tp.size)[mesh.tp.rank]
    return route_sLK.transpose(0, 1).contiguous()


def _multiple(mesh: Mesh) -> int:
    multiple = mesh.tp.size if mesh.layout.sp else 1
    if mesh.cp.size > 1:
        multiple *= 2 * mesh.cp.size * (_CUDA_CHUNK if mesh.device.type == "cuda" else 1)
    return multiple


def _padded(batch: Batch, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and parents, padded with a sequence of zeros; an empty bin is padded to one token."""
    num_tokens = len(batch.token_id_T)
    num_missing = -max(num_tokens, 1) % multiple + (num_tokens == 0)
    if not num_missing:
        return batch.token_id_T, batch.position_T, batch.parent_T
    position = torch.arange(num_missing, device=batch.position_T.device)
    parent = torch.where(position == 0, -1, position - 1 + num_tokens)
    return (
        F.pad(batch.token_id_T, (0, num_missing)),
        torch.cat([batch.position_T, position]),
        torch.cat([batch.parent_T, parent]),
    )


def _context(num_tokens: int, mesh: Mesh) -> Context:
    size = num_tokens // (2 * mesh.cp.size)

    def chunk(number: int) -> slice:
        return slice(number * size, (number + 1) * size)

    chunks = [(chunk(rank), chunk(2 * mesh.cp.size - 1 - rank)) for rank in range(mesh.cp.size)]
    gathered_T = torch.cat([torch.arange(part.start, part.stop) for own in chunks for part in own])
    return Context(mesh.cp, chunks[mesh.cp.rank], gathered_T.argsort().to(mesh.device))
