"""What ranks do in which order, and with which tokens; that they compute the right thing is test_parallel.py's."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch.autograd import gradcheck

from longshore.training import Layout
from megatron_worker.megatron.parallel import (
    Group,
    Link,
    added,
    copied,
    dispatch,
    join_mesh,
    layers_of,
    one_forward_one_backward,
)


@dataclass(frozen=True)
class Alone(Link):
    """A stage whose neighbours answer at once."""

    def exchange(self, *, forward=None, backward=None, rows_forward=None, rows_backward=None):
        wanted = (rows_forward is not None and self.mesh.pp.rank > 0), (rows_backward is not None and not self.is_last)
        return tuple(torch.ones(2, 1, 3) if is_wanted else None for is_wanted in wanted)

    @property
    def is_last(self) -> bool:
        return self.mesh.is_last_stage


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, events, number):
        ctx.events, ctx.number = events, number
        events.append(f"F{number}")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append(f"B{ctx.number}")
        return grad, None, None


def events_of(stage: int, num_stages: int, num_bins: int) -> list[str]:
    mesh = dataclasses.replace(join_mesh(Layout()), pp=Group(tuple(range(num_stages)), stage, None))
    events: list[str] = []

    def forward(number, received):
        hidden = torch.ones(2, 1, 3, requires_grad=True) if received is None else received
        hidden = Noted.apply(hidden, events, number)
        return hidden.sum() if mesh.is_last_stage else hidden

    one_forward_one_backward(Alone(mesh, 3, torch.float32), [2] * num_bins, forward)
    return events


def test_a_stage_takes_turns_once_those_behind_it_are_busy():
    assert events_of(0, 3, 4) == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    assert events_of(1, 3, 4) == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    assert events_of(2, 3, 4) == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]


@pytest.mark.parametrize("num_bins", [0, 1, 2, 7])
@pytest.mark.parametrize(("stage", "num_stages"), [(0, 2), (1, 2), (0, 4), (2, 4), (3, 4)])
def test_no_more_bins_are_alive_than_stages_from_here_on(stage, num_stages, num_bins):
    alive = most = 0
    events = events_of(stage, num_stages, num_bins)
    for event in events:
        alive += 1 if event.startswith("F") else -1
        most = max(most, alive)
    assert most == min(num_stages - stage, num_bins)
    for kind in "FB":
        assert [e for e in events if e.startswith(kind)] == [f"{kind}{n}" for n in range(num_bins)]


def test_layers_are_shared_out_evenly_and_once():
    for num_layers in range(1, 12):
        for num_stages in range(1, num_layers + 1):
            shares = [layers_of(stage, num_stages, num_layers) for stage in range(num_stages)]
            assert [layer for share in shares for layer in share] == list(range(num_layers))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_token_goes_once_to_each_rank_that_has_experts_of_its_choice():
    ep, etp, both = (Group(tuple(range(size)), 0, None) for size in (2, 2, 4))
    mesh = dataclasses.replace(join_mesh(Layout()), ep=ep, etp=etp, experts=both)
    expert_sK = torch.tensor([[1, 0], [0, 2], [3, 2], [2, 1]])  # two experts a rank of ep
    way = dispatch(expert_sK, 2, mesh)
    assert way.sent == [3, 3, 3, 3]
    assert way.token_C.tolist() == [0, 1, 3] * 2 + [1, 2, 3] * 2


def test_blocks_are_copied_and_added_with_their_derivatives():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    index, counts = torch.tensor([0, 2, 4, 2, 0, 3]), [3, 0, 2, 1]  # an empty block among them
    rows = copied(x, index, counts)
    assert torch.equal(rows, x[index])
    y = torch.randn(6, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.equal(added(y, index, counts, 5), torch.zeros_like(x).index_add(0, index, y))
    assert gradcheck(lambda x: copied(x, index, counts), (x,))
    assert gradcheck(lambda y: added(y, index, counts, 5), (y,))
