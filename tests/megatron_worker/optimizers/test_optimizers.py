"""Muon, LoRA+ and groups of decay: beside plain torch, torch's own and PEFT's. Over ranks: test_plans.py."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from longshore.training import Adam, Layout, Muon, Optimizer
from megatron_worker.megatron.optimizer import MegatronOptimizer, arrange
from megatron_worker.megatron.parallel import join_mesh
from megatron_worker.optimizers import groups_of, orthogonal
from megatron_worker.tensors.slot_engine import gradient_noise
from shared.families.tensor_slices import TensorSlice
from tests.depth import drawn
from tests.megatron_worker.driving import LOSS, train
from tests.megatron_worker.engines import furthest, gradient, start
from tests.megatron_worker.launch import in_turn, on_ranks
from tests.megatron_worker.parallel_ranks import accumulate
from tests.megatron_worker.rows import Row, bin_of, distinct_model, random_rows, reference_loss, total_weight
from tests.megatron_worker.scores import transformers_model


def orthogonal_reference(matrix: Tensor, num_steps: int) -> Tensor:
    """Jordan's quintic iteration, an element of its polynomial at a time."""
    x = matrix / (matrix.norm() + 1e-30)
    for _ in range(num_steps):
        symmetric = x @ x.T
        x = 3.4445 * x - 4.7750 * symmetric @ x + 2.0315 * symmetric @ symmetric @ x
    return x


def is_of_layer(name: str, p: Tensor) -> bool:
    return p.ndim == 2 and (".layers." in name or ".lora_" in name)


class Reference:
    """Steps of `optimizer`. Muon's are of whole matrices, in the parameters' dtype."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
        self.named, self.optimizer, self.count = [(n, p) for n, p in named if p.requires_grad], optimizer, 0
        self.states = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.named}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        o, self.count = self.optimizer, self.count + 1
        if o.clip_norm:
            nn.utils.clip_grad_norm_([p for _, p in self.named], o.clip_norm)
        for name, p in self.named:
            rate = learning_rate * (o.lora_plus_ratio if ".lora_B" in name else 1)
            decays = o.decay == "all" or (p.ndim >= 2 and "embed" not in name)
            p *= 1 - rate * (o.weight_decay if decays else 0)
            mean, square = self.states[name]
            if o.kind == "muon" and is_of_layer(name, p):
                mean.copy_(o.momentum * mean + (1 - o.momentum) * p.grad)
                direction = o.momentum * mean + (1 - o.momentum) * p.grad if o.nesterov else mean
                sizes = p.shape
                scale = (
                    0.2 * math.sqrt(max(sizes)) if o.scale == "match_rms_adamw" else max(1, sizes[0] / sizes[1]) ** 0.5
                )
                p -= rate * scale * orthogonal_reference(direction, o.newton_schulz_steps)
            else:
                mean.copy_(o.beta1 * mean + (1 - o.beta1) * p.grad)
                square.copy_(o.beta2 * square + (1 - o.beta2) * p.grad**2)
                corrected = (square / (1 - o.beta2**self.count)).sqrt() + o.eps
                p -= rate * mean / (1 - o.beta1**self.count) / corrected
            p.grad = None


def train_reference(model: Any, steps: Sequence[Sequence[Row]], optimizer: Optimizer, learning_rate: float) -> None:
    reference = Reference(list(model.named_parameters()), optimizer)
    for rows in steps:
        reference_loss(model, rows).backward()
        reference.step(learning_rate)


pytestmark = pytest.mark.usefixtures("one_thread")

# An epsilon above what gradients round to: else AdamW's step of a gradient of rounding alone is of the rate's size.
MUON = Muon(weight_decay=0.1, eps=1e-5)
OPTIMIZERS = {
    "muon": MUON,
    "muon original": Muon(
        momentum=0.8,
        nesterov=False,
        newton_schulz_steps=4,
        scale="original",
        weight_decay=0.1,
        decay="matrices",
        eps=1e-5,
    ),
    "matrices": Adam(weight_decay=3.0, decay="matrices", eps=1e-5),
}
RATES = {"lora": 3e-3, "full": 3e-4}
STEPS = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25], seed=s) for s in range(4))]
ROWS = [random_rows([40, 17, 90, 25], seed=step % 4) for step in range(10)]
BINS = [[rows[:2], rows[2:]] for rows in ROWS]


# Against references.


@pytest.mark.parametrize("shape", [(5, 40), (40, 5), (3, 24, 16)])
def test_singular_values_are_near_one_and_those_of_each_matrix_alone(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrix, 5, torch.float32)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.3
    alone = [orthogonal_reference(m.double(), 5) for m in matrix.view(-1, *shape[-2:])]
    assert (found.view(-1, *shape[-2:]) - torch.stack(alone)).abs().max() <= 1e-5
    assert not orthogonal(torch.zeros(shape), 5, torch.float32).any()


@pytest.mark.parametrize(("name", "tied"), drawn([*product(OPTIMIZERS, (True, False))], 2))
def test_ten_steps_of_all_weights_are_plain_torch_s(tmp_path, engine, name, tied):
    model = distinct_model(tmp_path / "model", "qwen2" if not tied else "qwen3", tied)
    reference = transformers_model(model)
    train_reference(reference, ROWS, OPTIMIZERS[name], RATES["full"])
    driven = start(engine, model, "full")
    train(driven, BINS, OPTIMIZERS[name], RATES["full"])
    ours, theirs = dict(driven.named_weights()), dict(reference.named_parameters())
    assert furthest(ours, {n: p.detach() for n, p in theirs.items()}) <= 1e-5
    before = dict(transformers_model(model).named_parameters())
    assert all((ours[n] - p).abs().max() > 1e-4 for n, p in before.items())


@pytest.mark.parametrize(
    "optimizer", [MUON, Muon(lora_plus_ratio=4.0), Adam(lora_plus_ratio=4.0, weight_decay=0.1, eps=1e-5)]
)
def test_ten_steps_of_an_adapter_are_plain_torch_s(model, tmp_path, engine, optimizer):
    driven = start(engine, model, "lora")
    reference = in_peft(driven, model, tmp_path)
    train_reference(reference, ROWS, optimizer, 1e-3)
    train(driven, BINS, optimizer, 1e-3)
    assert furthest(weights(driven, tmp_path / "end"), peft_weights(reference, tmp_path)) <= 1e-5


def test_ten_steps_of_lora_plus_are_peft_s(model, tmp_path, engine):
    from peft.optimizers import create_loraplus_optimizer

    driven = start(engine, model, "lora")
    reference = in_peft(driven, model, tmp_path)
    settings = {"lr": 1e-3, "loraplus_lr_ratio": 8.0, "loraplus_weight_decay": 0.1, "eps": 1e-5}
    theirs = create_loraplus_optimizer(reference, torch.optim.AdamW, **settings)
    for rows in ROWS:
        reference_loss(reference, rows).backward()
        theirs.step()
        theirs.zero_grad()
    train(driven, BINS, Adam(lora_plus_ratio=8.0, weight_decay=0.1, eps=1e-5, clip_norm=0), 1e-3)
    assert furthest(weights(driven, tmp_path / "end"), peft_weights(reference, tmp_path)) <= 1e-5


def in_peft(driven, model, folder):
    from peft import PeftModel

    driven.save(folder / "start")
    return PeftModel.from_pretrained(transformers_model(model), folder / "start" / "weights", is_trainable=True)


def weights(driven, folder):
    driven.save(folder)
    return load_file(folder / "weights" / "adapter_model.safetensors")


def peft_weights(reference, folder):
    reference.save_pretrained(folder / "theirs")
    return load_file(folder / "theirs" / "adapter_model.safetensors")


SHAPES = {"layers.0.wide": (16, 40), "layers.0.tall": (33, 20), "layers.0.norm": (7,)}


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_steps_in_bfloat16_are_those_of_torch_s_muon(scale):
    """Which computes its products in bfloat16, as we do beside bfloat16 weights; both have float32 masters."""
    mesh = join_mesh(Layout())
    flat, regions = arrange(SHAPES, dict.fromkeys(SHAPES, "split"), mesh, torch.bfloat16)
    slices = [TensorSlice(name, name, shape, None, 0, shape[0]) for name, shape in SHAPES.items()]
    parameters = {name: torch.nn.Parameter(view) for name, view in flat.views.items()}
    ours = MegatronOptimizer(parameters, flat, regions, mesh, slices=slices)
    theirs = {name: torch.nn.Parameter(torch.zeros(SHAPES[name])) for name in ("layers.0.wide", "layers.0.tall")}
    settings = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": scale}
    reference = torch.optim.Muon(theirs.values(), **settings)
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in parameters.items():
            grad = torch.randn(parameter.shape, generator=generator).bfloat16()
            (parameter * grad).sum().backward()
            if name in theirs:
                theirs[name].grad = grad.float()
        ours.apply(Muon(weight_decay=0.1, clip_norm=0, scale=scale), 1e-3, ours.reduce(1.0))
        reference.step()
    found = ours.gathered("master")
    for name, parameter in theirs.items():
        assert (found[name] - parameter).abs().max() <= 1e-5
        assert parameter.abs().max() > 1e-3


def test_groups_are_what_their_names_say():
    """Of a layer's vectors, filters and stacks, of embeddings and heads, in names of several families."""
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": ((8, 8), True, True),
        "transformer.h.3.attn.c_proj.weight": ((8, 8), True, True),
        "model.layers.0.input_layernorm.weight": ((8,), False, False),
        "model.layers.0.self_attn.q_proj.bias": ((8,), False, False),
        "model.layers.0.linear_attn.conv1d.weight": ((8, 1, 4), False, True),
        "model.embed_tokens.weight": ((8, 8), False, False),
        "transformer.wte.weight": ((8, 8), False, False),
        "backbone.embeddings.weight": ((8, 8), False, False),
        "lm_head.weight": ((8, 8), False, True),
        "embed_out.weight": ((8, 8), False, True),
        "base_model.model.lm_head.lora_A.weight": ((2, 8), True, True),
    }
    for name, (shape, is_layers, is_matrix) in shapes.items():
        (group,) = groups_of([TensorSlice(name, "p", shape, None, 0, shape[0])]).values()
        assert (group.is_layers, group.is_matrix) == (is_layers, is_matrix), name
    for shape, is_matrix in (((4, 8, 8), True), ((4, 8), False)):
        stack = TensorSlice("model.layers.0.mlp.experts.down", "p", shape, 0, 0, 4, is_stack=True)
        assert groups_of([stack])["p"].is_layers == groups_of([stack])["p"].is_matrix == is_matrix


# The gradient's noise.


def test_the_noise_is_what_two_sizes_of_batches_tell():
    """McCandlish et al.'s equations A.2 and A.3, of ranks with equal weights."""
    generator = torch.Generator().manual_seed(0)
    each = torch.randn(4, 30, generator=generator, dtype=torch.float64) + 0.5  # mean gradients of four ranks
    small, big = float(each.square().sum(1).mean()), float(each.mean(0).square().sum())
    trace, signal = (small - big) / (1 / 8 - 1 / 32), (32 * big - 8 * small) / 24
    found = gradient_noise({"square": 8 * small * 4, "weight": 32.0, "ranks": 4.0}, big**0.5 * 32)
    expected = {"grad_noise_trace": trace, "grad_signal": signal, "grad_noise_scale": trace / signal}
    assert found == pytest.approx(expected, rel=1e-9)
    assert gradient_noise({"square": 1.0, "weight": 8.0, "ranks": 1.0}, 8.0) == {}
    assert "grad_noise_scale" not in gradient_noise({"square": 64.0, "weight": 8.0, "ranks": 2.0}, 8.0)


def test_the_estimates_are_unbiased_whatever_ranks_weigh():
    generator, weights = torch.Generator().manual_seed(1), torch.tensor([3.0, 10.0, 40.0], dtype=torch.float64)
    mean, draws = torch.full((20,), 0.3, dtype=torch.float64), []
    for _ in range(2000):
        noise = torch.randn(3, 20, generator=generator, dtype=torch.float64) * 2 / weights.sqrt()[:, None]
        each = mean + noise
        sums = {"square": float((weights * each.square().sum(1)).sum()), "weight": 53.0, "ranks": 3.0}
        draws.append(gradient_noise(sums, float((weights[:, None] * each).sum(0).norm())))
    assert sum(d["grad_noise_trace"] for d in draws) / 2000 == pytest.approx(80, rel=0.02)
    assert sum(d["grad_signal"] for d in draws) / 2000 == pytest.approx(1.8, rel=0.05)


NOISY = Adam(noise_scale=True, clip_norm=0)
OF_NOISE = [("megatron", "lora"), ("megatron", "full"), ("fsdp", "lora")]


def noise_of(engine, kind, model):
    """By data-parallel ranks, after a step: LoRA's A has a gradient from then on."""
    driven = start(engine, model, kind, layout=Layout(dp=2))
    train(driven, STEPS[:1], Adam(), RATES[kind])
    sums = accumulate(driven, [bin_of(rows) for rows in STEPS[1]], LOSS)
    return dict(driven.optim_step(NOISY, 1e-4, sums["weight"]).noise)


def test_ranks_tell_the_noise_of_their_own_gradients(model, tmp_path):
    by_rank = on_ranks(2, in_turn, noise_of, [(*case, model) for case in OF_NOISE])
    for number, (engine, kind) in enumerate(OF_NOISE):
        whole = []
        for rows in STEPS[1]:
            driven = start(engine, model, kind)
            train(driven, STEPS[:1], Adam(), RATES[kind])
            driven.forward_backward(bin_of(rows), LOSS)
            of_rank = gradient(driven, tmp_path / f"{number}-{len(whole)}", total_weight(rows))
            whole.append((total_weight(rows), torch.cat([t.flatten() for t in of_rank.values()]).double()))
        total = sum(weight for weight, _ in whole)
        square = float((sum(weight * g for weight, g in whole) / total).square().sum())
        trace = sum(weight * float(g.square().sum()) for weight, g in whole) - total * square
        for found in by_rank:
            assert found[number]["grad_noise_trace"] == pytest.approx(trace, rel=1e-3)
            assert found[number]["grad_signal"] == pytest.approx(square - trace / total, rel=1e-3)


# What cannot be.


def test_a_client_may_change_the_optimizer_between_steps(model, engine):
    """AdamW goes on from moments that Muon has kept up: its steps are of the rate's size."""
    driven = start(engine, model, "full")
    train(driven, BINS[:3], MUON, 3e-4)
    before = {name: tensor.clone() for name, tensor in driven.named_weights()}
    train(driven, BINS[3:4], Adam(), 3e-4)
    assert 1e-4 < furthest(before, dict(driven.named_weights())) < 2e-3
