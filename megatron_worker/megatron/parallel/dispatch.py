"""Exchange of tokens with the ranks that hold their experts (all-to-all).

A token is sent once to each of those ranks, with its choices, however many of the rank's experts it chose. Each rank
returns the weighted sum over its experts. So no rank receives more than if all tokens were gathered, and with many
ranks far less. Under etp the token is sent to each rank that has a slice of an expert, and their results are added up.

An index that repeats rows consists of blocks; within a block each row occurs once, so that sums have the same order on
any device.

Shape suffixes: s tokens of this rank, C rows that it sends, R rows that it receives, K experts of a token, G ranks that
share experts, E ranks of ep, B rows of all blocks, X any width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_worker.megatron.parallel.collectives import exchange_rows, linear_map
from megatron_worker.megatron.parallel.mesh import Group, Mesh


@dataclass(frozen=True)
class Dispatch:
    """Rows that this rank sends and receives. `token_C`: the token of each sent row, sorted by the receiving rank.

    `sent` and `received`: numbers of rows by rank.
    """

    group: Group
    num_tokens: int
    token_C: Tensor
    sent: list[int]
    received: list[int]

    def out(self, x_sX: Tensor) -> Tensor:
        """Send rows of tokens to their ranks. Returns the received rows, [R, X]. Collective, its backward too."""
        return exchange_rows(copied(x_sX, self.token_C, self.sent), self.sent, self.received, self.group)

    def back(self, x_RX: Tensor) -> Tensor:
        """Return rows to their ranks, summed for each token: [s, X]. Collective, its backward too."""
        x_CX = exchange_rows(x_RX, self.received, self.sent, self.group)
        return added(x_CX, self.token_C, self.sent, self.num_tokens)


def dispatch(expert_sK: Tensor, experts_per_rank: int, mesh: Mesh) -> Dispatch:
    """Exchange how many rows each rank sends to each. Collective."""
    chosen_sE = torch.zeros(len(expert_sK), mesh.ep.size, dtype=torch.bool, device=expert_sK.device)
    chosen_sE.scatter_(1, expert_sK // experts_per_rank, True)
    chosen_Gs = chosen_sE.t().repeat_interleave(mesh.etp.size, dim=0)  # etp is the dimension that varies fastest
    sent_G = chosen_Gs.sum(1)
    ones = [1] * mesh.experts.size
    received_G = mesh.experts.exchange(sent_G, ones, ones)
    sent, received = torch.stack([sent_G, received_G]).tolist()
    return Dispatch(mesh.experts, len(expert_sK), chosen_Gs.nonzero()[:, 1], sent, received)


def copied(x: Tensor, index_B: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the rows of `x` at `index_B`, which consists of blocks of `counts` rows."""
    num_rows = len(x)
    return linear_map(x, _rows_at, lambda grad, index_B: _sum_rows(grad, index_B, counts, num_rows), index_B)


def added(x_BX: Tensor, index_B: Tensor, counts: Sequence[int], num_rows: int) -> Tensor:
    """Return the sum of rows for each of `num_rows` indices, in the order of the blocks: the transpose of `copied`."""
    return linear_map(x_BX, lambda x_BX, index_B: _sum_rows(x_BX, index_B, counts, num_rows), _rows_at, index_B)


def _rows_at(x: Tensor, index_B: Tensor) -> Tensor:
    return x.index_select(0, index_B)


def _sum_rows(x_BX: Tensor, index_B: Tensor, counts: Sequence[int], num_rows: int) -> Tensor:
    total = x_BX.new_zeros(num_rows, *x_BX.shape[1:])
    for rows, index in zip(x_BX.split(counts), index_B.split(counts), strict=True):
        total.index_add_(0, index, rows)
    return total
