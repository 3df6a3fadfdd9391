"""AdamW on flat buffers, against torch's own."""

import pytest
import torch

from longshore.training import Adam, Layout
from megatron_worker.megatron.optimizer import MegatronOptimizer, arrange
from megatron_worker.megatron.parallel import join_mesh

SHAPES = {"w": (33, 20), "b": (7,), "big": (600, 500)}


def flat_optimizer(dtype=torch.float32):
    mesh = join_mesh(Layout())
    flat, regions = arrange(SHAPES, dict.fromkeys(SHAPES, "split"), mesh, dtype)
    generator = torch.Generator().manual_seed(0)
    for view in flat.views.values():
        view.copy_(torch.randn(view.shape, generator=generator))
    parameters = {name: torch.nn.Parameter(view) for name, view in flat.views.items()}
    return flat, parameters, MegatronOptimizer(parameters, flat, regions, mesh)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1e9])
def test_ten_steps_equal_torch_s_adamw(clip_norm):
    adam = Adam(beta1=0.8, beta2=0.95, eps=1e-7, weight_decay=0.1, clip_norm=clip_norm)
    flat, parameters, optimizer = flat_optimizer()
    theirs = {name: torch.nn.Parameter(view.detach().clone()) for name, view in flat.views.items()}
    reference = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1)
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in parameters.items():
            gradient = torch.randn(parameter.shape, generator=generator)
            for part in (0.25, 0.75):  # two bins
                (parameter * gradient * part * 3.0).sum().backward()
            theirs[name].grad = gradient.clone()
        norms = optimizer.apply(adam, 1e-2, optimizer.reduce(3.0))
        expected = torch.cat([p.grad.reshape(-1) for p in theirs.values()]).double().norm()
        torch.nn.utils.clip_grad_norm_(theirs.values(), clip_norm or float("inf"))
        reference.step()
        assert norms.grad_norm == pytest.approx(float(expected), rel=1e-6)
        assert norms.clipped == (0 < clip_norm < float(expected))
    for name, parameter in parameters.items():
        assert (parameter - theirs[name]).abs().max() <= 2e-6


def test_masters_move_where_bfloat16_weights_cannot():
    adam = Adam(clip_norm=0)
    flat, parameters, optimizer = flat_optimizer(torch.bfloat16)
    before, working = optimizer.master.buffer.clone(), flat.buffer.clone()
    for _ in range(3):
        (parameters["w"] * 1.0).sum().backward()
        optimizer.apply(adam, 1e-5, optimizer.reduce(1.0))
    moved = (optimizer.master.buffer - before)[: 33 * 20].view(33, 20)
    assert moved == pytest.approx(torch.full((33, 20), -3e-5), abs=1e-6)
    assert float((flat.buffer != working).float().mean()) < 0.05
    assert torch.equal(flat.buffer, optimizer.master.buffer.bfloat16())


def test_bfloat16_gradients_are_accumulated_in_float32():
    _, parameters, optimizer = flat_optimizer(torch.bfloat16)
    for value in (1.0, 2**-10, 2**-10):  # in bfloat16, 1 + 2^-10 is 1
        (parameters["b"] * value).sum().backward()
    assert torch.equal(optimizer.grad.views["b"], torch.full((7,), 1 + 2**-9))
    assert parameters["b"].grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_changes_nothing(bad):
    flat, parameters, optimizer = flat_optimizer()
    (parameters["b"] * bad).sum().backward()
    before = flat.buffer.clone()
    assert not optimizer.apply(Adam(weight_decay=0.5), 1.0, optimizer.reduce(1.0)).clipped
    assert torch.equal(flat.buffer, before)
    assert optimizer.step_count == 0
    assert not optimizer.grad.buffer.any()


def test_gaps_between_tensors_stay_zero():
    flat, parameters, optimizer = flat_optimizer()
    for parameter in parameters.values():
        parameter.square().sum().backward()
    optimizer.apply(Adam(weight_decay=0.1), 1e-2, optimizer.reduce(1.0))
    covered = torch.zeros(flat.num_elements, dtype=torch.bool)
    for name, shape in flat.shapes.items():
        covered[flat.offsets[name] : flat.offsets[name] + torch.Size(shape).numel()] = True
    assert not covered.all()
    assert not flat.buffer[~covered].any()


def test_detached_parameters_are_frozen_and_hold_no_gradient():
    _, parameters, optimizer = flat_optimizer()
    parameters["b"].sum().backward()
    optimizer.detach()
    assert all(p.grad is None and not p.requires_grad for p in parameters.values())
