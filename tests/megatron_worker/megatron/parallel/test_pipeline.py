"""The order of a pipeline stage's forwards and backwards; that they compute the right thing is test_parallel.py's."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from longshore.training import Layout
from megatron_worker.megatron.parallel import Group, Link, join_mesh, layers_of, one_forward_one_backward


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
