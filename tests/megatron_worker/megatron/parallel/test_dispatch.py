"""Which tokens go to which rank's experts, and sums over blocks; that ranks agree with one is test_parallel.py's."""

import dataclasses

import torch
from torch.autograd import gradcheck

from longshore.training import Layout
from megatron_worker.megatron.parallel import Group, added, copied, dispatch, join_mesh


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
