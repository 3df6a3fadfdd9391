"""Adapters are PEFT's: it loads ours, we load its, neither takes what is damaged. AdamW on flat buffers is torch's."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.training import Adam, Layout, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.megatron.optimizer import MegatronOptimizer, arrange
from megatron_worker.megatron.parallel import join_mesh
from shared.errors import InvalidInput
from tests.megatron_worker.driving import train
from tests.megatron_worker.rows import random_rows

ROWS = random_rows([40, 17, 90])
LORA = Lora(rank=4, alpha=8)


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A checkpoint whose B are not zero."""
    folder = tmp_path_factory.mktemp("trained")
    engine = MegatronEngine(model, Layout(), "float32")
    engine.add_adapter("run", LORA, seed=1)
    train(engine, [[ROWS]] * 3, learning_rate=1e-2)
    engine.save(folder)
    return folder


def test_a_starts_kaiming_uniform_and_b_zero(model, tmp_path):
    engine = MegatronEngine(model, Layout(), "float32")
    engine.add_adapter("run", Lora(rank=16), seed=7)
    engine.save(tmp_path)
    tensors = load_file(tmp_path / "weights" / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "lora_B" in name:
            assert not tensor.any()
            continue
        bound = tensor.shape[1] ** -0.5
        assert tensor.abs().max() <= bound
        assert float(tensor.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    first, second = [
        t
        for n, t in tensors.items()
        if n.endswith("0.self_attn.q_proj.lora_A.weight") or "1.self_attn.q_proj.lora_A" in n
    ]
    assert not torch.equal(first, second)


def _edit_tensors(change):
    def edit(folder):
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def _edit_config(**values):
    def edit(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def _truncate(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGE = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "no adapter_config.json"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "missing"),
    "truncated": (_truncate, "damaged or truncated"),
    "empty": (lambda f: (f / "adapter_model.safetensors").write_bytes(b""), "damaged or truncated"),
    "a tensor less": (_edit_tensors(lambda t: t.pop(NAME)), "1 tensors are missing, the first is .*q_proj"),
    "a tensor more": (_edit_tensors(lambda t: t.update(more=torch.zeros(1))), "do not belong here.*more"),
    "a tensor of another shape": (_edit_tensors(lambda t: t.update({NAME: torch.zeros(5, 64)})), "has shape"),
    "another rank": (_edit_config(r=8), "rank is 8"),
    "another alpha": (_edit_config(lora_alpha=9), "alpha is 9"),
    "other targets": (_edit_config(target_modules=["q_proj"]), "targets"),
    "unknown targets": (_edit_config(target_modules=["wte"]), "target_modules"),
    "another method": (_edit_config(lora_bias=True), "lora_bias"),
    "another scale": (_edit_config(use_rslora=True), "rank_stabilized is True"),
    "extra modules": (_edit_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "JSON"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_different_adapter_is_refused_and_never_reset(model, trained, tmp_path, damage):
    edit, words = DAMAGE[damage]
    shutil.copytree(trained, tmp_path / "checkpoint")
    edit(tmp_path / "checkpoint" / "weights")
    engine = MegatronEngine(model, Layout(), "float32")
    with pytest.raises(InvalidInput, match=words):
        engine.load_adapter("run", tmp_path / "checkpoint" / "weights", LORA, trainable=True)
    engine.add_adapter("other", LORA, seed=0)
    with pytest.raises(InvalidInput, match=words):
        engine.load(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("step"), "missing.*'step'"),
        (lambda t: t.pop(f"exp_avg.{NAME}"), "missing"),
        (lambda t: t.update({f"exp_avg_sq.{NAME}": torch.zeros(4, 63)}), "has shape"),
    ],
)
def test_a_damaged_optimizer_is_refused(model, trained, tmp_path, change, words):
    shutil.copytree(trained, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "optimizer" / "optimizer.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    engine = MegatronEngine(model, Layout(), "float32")
    engine.add_adapter("run", LORA, seed=0)
    with pytest.raises(InvalidInput, match=words):
        engine.load(tmp_path / "checkpoint")


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
