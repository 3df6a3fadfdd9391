"""Muon, LoRA+ and groups of decay: beside plain torch, torch's own and PEFT's, on both engines, whatever the layout."""

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from longshore.layout import Layout
from longshore.training import Adam, Muon
from megatron_worker.megatron.optimizer import MegatronOptimizer, arrange
from megatron_worker.megatron.parallel import join_mesh
from megatron_worker.optimizers import groups_of, orthogonal
from megatron_worker.tensors.slot_engine import gradient_noise
from shared.families.tensor_slices import TensorSlice
from tests.depth import drawn
from tests.megatron_worker.driving import LOSS, train
from tests.megatron_worker.engines import checkpoint_bytes, furthest, gradient, start
from tests.megatron_worker.optimizers import references
from tests.megatron_worker.optimizers.optimizer_ranks import RATES, STEPS, Trial, do
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows, total_weight
from tests.megatron_worker.scores import transformers_model
from tests.megatron_worker.trials import run_trials

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
    alone = [references.orthogonal(m.double(), 5) for m in matrix.view(-1, *shape[-2:])]
    assert (found.view(-1, *shape[-2:]) - torch.stack(alone)).abs().max() <= 1e-5
    assert not orthogonal(torch.zeros(shape), 5, torch.float32).any()


@pytest.mark.parametrize(("name", "tied"), drawn([*product(OPTIMIZERS, (True, False))], 2))
def test_ten_steps_of_all_weights_are_plain_torch_s(tmp_path, engine, name, tied):
    model = distinct_model(tmp_path / "model", "qwen2" if not tied else "qwen3", tied)
    reference = transformers_model(model)
    references.train(reference, ROWS, OPTIMIZERS[name], RATES["full"])
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
    references.train(reference, ROWS, optimizer, 1e-3)
    train(driven, BINS, optimizer, 1e-3)
    assert furthest(weights(driven, tmp_path / "end"), peft_weights(reference, tmp_path)) <= 1e-5


def test_ten_steps_of_lora_plus_are_peft_s(model, tmp_path, engine):
    from peft.optimizers import create_loraplus_optimizer

    driven = start(engine, model, "lora")
    reference = in_peft(driven, model, tmp_path)
    settings = {"lr": 1e-3, "loraplus_lr_ratio": 8.0, "loraplus_weight_decay": 0.1, "eps": 1e-5}
    theirs = create_loraplus_optimizer(reference, torch.optim.AdamW, **settings)
    for rows in ROWS:
        references.reference_loss(reference, rows).backward()
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


# Layouts, and kills.

LORA_PLUS = Muon(weight_decay=0.1, lora_plus_ratio=4.0, eps=1e-5)
DP2, TP2, SP2 = Layout(dp=2), Layout(tp=2), Layout(tp=2, sp=True)
ALL_TRIALS = [
    {"kind": "full", "layout": DP2, "optimizer": MUON},
    {"kind": "full", "layout": TP2, "optimizer": MUON},
    {"kind": "lora", "layout": DP2, "optimizer": LORA_PLUS},
    {"kind": "lora", "layout": SP2, "optimizer": LORA_PLUS},
    {"kind": "full", "layout": Layout(pp=2), "optimizer": OPTIMIZERS["muon original"]},
    {"kind": "full", "layout": DP2, "optimizer": OPTIMIZERS["matrices"]},
    {"kind": "lora", "layout": DP2, "optimizer": MUON, "states": "8bit"},
    {"kind": "full", "layout": DP2, "optimizer": MUON, "engine": "fsdp"},
    {"kind": "full", "layout": TP2, "optimizer": MUON, "engine": "fsdp"},
    {"kind": "lora", "layout": DP2, "optimizer": LORA_PLUS, "engine": "fsdp"},
    {"kind": "full", "layout": Layout(dp=2, ep=2), "optimizer": MUON, "model": "gpt_oss"},
    {"kind": "full", "layout": Layout(dp=2, ep=2), "optimizer": MUON, "model": "qwen3_moe"},
    {"kind": "full", "layout": DP2, "optimizer": MUON, "model": "qwen3_moe", "engine": "fsdp"},
    {"kind": "lora", "layout": DP2, "optimizer": MUON, "measures": True},
    {"kind": "full", "layout": DP2, "optimizer": MUON, "measures": True},
    {"kind": "lora", "layout": DP2, "optimizer": MUON, "measures": True, "engine": "fsdp"},
]
TRIALS = drawn(ALL_TRIALS, 4, always=[trial for trial in ALL_TRIALS if "measures" in trial])


def in_words(trial):
    words = [
        f"{v.label}" if isinstance(v, Layout) else v for k, v in trial.items() if k not in ("optimizer", "measures")
    ]
    return "-".join([*words, trial["optimizer"].kind])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All trials done by two ranks; and a folder for what one does."""
    folder = tmp_path_factory.mktemp("optimizers")
    models = {f: distinct_model(folder / f, f, num_kv_heads=2) for f in ("qwen3", "qwen3_moe", "gpt_oss")}
    trials = {
        in_words(t): Trial(**t | {"model": models[t.get("model", "qwen3")]}) for t in TRIALS if "measures" not in t
    }
    measured = [Trial(**t | {"model": models["qwen3"]}) for t in TRIALS if "measures" in t]
    run_trials("optimizers.optimizer_ranks", folder, [*trials.values(), *measured], 2, 580)
    return folder, trials, measured


@pytest.mark.parametrize("name", [in_words(t) for t in TRIALS if "measures" not in t])
def test_two_ranks_give_one_rank_s_weights_and_after_a_kill_their_own_bits(results, name):
    folder, trials, _ = results
    trial = trials[name]
    two = folder / trial.name
    assert checkpoint_bytes(two / "end") == checkpoint_bytes(two / "again")
    alone = trial.model_copy(update={"layout": Layout()})
    do(alone, folder)
    one = folder / alone.name
    assert checkpoint_bytes(one / "end") == checkpoint_bytes(one / "again")
    file = "adapter_model.safetensors" if trial.kind == "lora" else "model.safetensors"
    ends = [load_file(place / "end" / "weights" / file) for place in (one, two)]
    assert furthest(*ends) <= (1e-5 if trial.states == "float32" else 1e-3)


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


def test_ranks_tell_the_noise_of_their_own_gradients(results, tmp_path):
    folder, _, measured = results
    for trial in measured:
        whole = []
        for rows in STEPS[1]:
            engine = start(trial.engine, trial.model, trial.kind)
            train(engine, STEPS[:1], Adam(), RATES[trial.kind])
            engine.forward_backward(bin_of(rows), LOSS)
            of_rank = gradient(engine, tmp_path / f"{trial.name}-{len(whole)}", total_weight(rows))
            whole.append((total_weight(rows), torch.cat([t.flatten() for t in of_rank.values()]).double()))
        total = sum(weight for weight, _ in whole)
        square = float((sum(weight * g for weight, g in whole) / total).square().sum())
        trace = sum(weight * float(g.square().sum()) for weight, g in whole) - total * square
        expected = {"grad_noise_trace": trace, "grad_signal": square - trace / total}
        for rank in range(2):
            found = json.loads((folder / trial.name / f"noise-{rank}.json").read_text())
            assert found["grad_noise_trace"] == pytest.approx(expected["grad_noise_trace"], rel=1e-3)
            assert found["grad_signal"] == pytest.approx(expected["grad_signal"], rel=1e-3)


# What cannot be.


def test_a_client_may_change_the_optimizer_between_steps(model, engine):
    """AdamW goes on from moments that Muon has kept up: its steps are of the rate's size."""
    driven = start(engine, model, "full")
    train(driven, BINS[:3], MUON, 3e-4)
    before = {name: tensor.clone() for name, tensor in driven.named_weights()}
    train(driven, BINS[3:4], Adam(), 3e-4)
    assert 1e-4 < furthest(before, dict(driven.named_weights())) < 2e-3
