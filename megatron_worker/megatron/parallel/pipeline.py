"""Pipeline parallelism: hidden states and their gradients pass between stages in the order 1F1B.

Each stage first does as many forwards as there are stages after it, then alternates one forward and one backward
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1), which bounds the bins that are alive on it. Every stage has
every bin, and so knows the shape of what it receives.

Shape suffixes: s tokens of a bin that a rank has between layers, H hidden size.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_worker.megatron.parallel.mesh import Mesh


@dataclass(frozen=True)
class Link:
    """This stage's connections. The first stage receives None as hidden states, the last one as gradient."""

    mesh: Mesh
    hidden_size: int
    dtype: torch.dtype

    def exchange(
        self,
        *,
        forward: Tensor | None = None,
        backward: Tensor | None = None,
        rows_forward: int | None = None,
        rows_backward: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send hidden states on and a gradient back; receive hidden states and a gradient of the given rows."""
        pp = self.mesh.pp
        before, behind = pp.ranks[pp.rank - 1], pp.ranks[(pp.rank + 1) % pp.size]
        sends = [
            *([] if forward is None or self.mesh.is_last_stage else [(forward.detach(), behind)]),
            *([] if backward is None or self.mesh.is_first_stage else [(backward, before)]),
        ]
        received = None if rows_forward is None or self.mesh.is_first_stage else self._room(rows_forward)
        gradient = None if rows_backward is None or self.mesh.is_last_stage else self._room(rows_backward)
        receives = [(room, rank) for room, rank in ((received, before), (gradient, behind)) if room is not None]
        operations = [dist.P2POp(dist.isend, x.contiguous(), rank, pp.group) for x, rank in sends]
        operations += [dist.P2POp(dist.irecv, x, rank, pp.group) for x, rank in receives]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received, gradient

    def _room(self, rows: int) -> Tensor:
        return torch.empty(rows, 1, self.hidden_size, dtype=self.dtype, device=self.mesh.device)


# A bin's forward on this stage: its number, the received and the sent hidden states, or, on the last stage, the loss.
StageForward = Callable[[int, Tensor | None], Tensor]


def one_forward_one_backward(link: Link, rows: Sequence[int], forward: StageForward) -> None:
    """Run forward and backward of all bins; gradients accumulate. `rows`: each bin's, between layers on this rank."""
    mesh, num_bins = link.mesh, len(rows)
    alive: deque[tuple[int, Tensor | None, Tensor]] = deque()

    def go(number: int, received: Tensor | None) -> Tensor:
        if received is not None:
            received.requires_grad_(True)
        output = forward(number, received)
        alive.append((number, received, output))
        return output

    def go_back(gradient: Tensor | None) -> Tensor | None:
        _number, received, output = alive.popleft()
        if output.requires_grad:  # which it does not if the first stages have no trained parameters
            torch.autograd.backward(output, gradient)
        return None if received is None else received.grad

    num_ahead = min(mesh.pp.size - mesh.pp.rank - 1, num_bins)
    for number in range(num_ahead):
        received, _ = link.exchange(rows_forward=rows[number])
        link.exchange(forward=go(number, received))
    if num_ahead < num_bins:
        received, _ = link.exchange(rows_forward=rows[num_ahead])
    for number in range(num_ahead, num_bins):
        output = go(number, received)
        _, gradient = link.exchange(forward=output, rows_backward=rows[alive[0][0]])
        returned = go_back(gradient)
        following = rows[number + 1] if number + 1 < num_bins else None
        received, _ = link.exchange(backward=returned, rows_forward=following)
    while alive:
        _, gradient = link.exchange(rows_backward=rows[alive[0][0]])
        link.exchange(backward=go_back(gradient))
