"""An engine on a quantized base against whole weights; codes of weights and moments against their definitions."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from longshore.fields import Artifact
from longshore.training import Full, Layout, Lora
from megatron_worker import quantized as block_codes
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.memory import CpuMeter
from megatron_worker.quantized import CODES, CodedMoment, QuantizedTensors, quantized_linear, quantized_product
from megatron_worker.warm_engine import build_engine
from shared.jobs.job import SessionPlan
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import LORA, furthest, gradient
from tests.megatron_worker.launch import in_turn, on_ranks
from tests.megatron_worker.parallel_ranks import SFT_LOSS, scores, sft_bins, step
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows
from tests.megatron_worker.scores import logprobs
from tests.megatron_worker.trees import LOSS

# scipy.stats.norm.ppf at the paper's probabilities: 8 from 1/2 to its offset, 9 on the other side, over the last.
_OFFSET = (1 - 1 / 30 + 1 - 1 / 32) / 2


def nf4_values():
    """Dettmers et al. 2023: equally probable parts of a normal distribution, a zero among them, up to 1."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    positive = normal.icdf(torch.linspace(_OFFSET, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -normal.icdf(torch.linspace(_OFFSET, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat([negative, torch.zeros(1, dtype=torch.float64), positive]).sort().values
    return values / values.max()


def e4m3_values():
    """Every finite number of 4 bits of exponent, whose bias is 7, and 3 of mantissa; over the largest, 448."""
    magnitudes = [m / 8 * 2.0**-6 for m in range(8)]
    magnitudes += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    assert max(magnitudes) == 448
    return torch.tensor([-m for m in magnitudes] + magnitudes, dtype=torch.float64) / 448


VALUES = {
    "nf4": (64, nf4_values()),
    "int8": (None, torch.arange(-127, 128, dtype=torch.float64) / 127),
    "fp8": (128, e4m3_values()),
}


def matrix(num_rows=12, num_columns=300):
    """Rows of very different sizes, one of zeros, and one whose last block is smaller than any scale."""
    torch.manual_seed(0)
    made = torch.randn(num_rows, num_columns) * torch.logspace(-6, 6, num_rows)[:, None]
    made[3] = 0
    made[4, 256:] = 1e-42
    return made


def packed(kind, whole, dtype=torch.float32):
    (quantized,) = QuantizedTensors(CODES[kind], {"w": tuple(whole.shape)}, dtype, whole.device).values()
    quantized.store(whole)
    return quantized


@pytest.mark.parametrize("kind", CODES)
def test_each_number_is_the_nearest_that_its_block_has(kind):
    whole = matrix()
    found = packed(kind, whole).whole().double()
    size, values = VALUES[kind]
    for block, ours in zip(whole.double().split(size or 300, 1), found.split(size or 300, 1), strict=True):
        scale = block.abs().amax(1, keepdim=True)
        distance = (block[..., None] - values * scale[..., None]).abs().amin(-1)
        assert ((ours - block).abs() <= distance + 1e-6 * scale + 1e-38).all()
        exact = (ours[..., None] - values * scale[..., None]).abs().amin(-1)
        assert (exact <= 3e-7 * scale + 1e-38).all()


@pytest.mark.parametrize("kind", CODES)
def test_rows_do_not_depend_on_each_other_nor_on_how_many_are_coded_at_a_time(kind, monkeypatch):
    whole = matrix()
    together = packed(kind, whole).whole()
    assert torch.equal(packed(kind, whole[5:8]).whole(), together[5:8])
    monkeypatch.setattr(block_codes, "_CHUNK", 700)
    assert torch.equal(packed(kind, whole).whole(), together)


@pytest.mark.parametrize("kind", CODES)
def test_codes_of_what_codes_stand_for_are_the_same_codes(kind):
    once = packed(kind, matrix())
    again = packed(kind, once.whole())
    assert torch.equal(once._code_OP, again._code_OP)
    assert torch.equal(once._scale_OB, again._scale_OB)


@pytest.mark.parametrize("kind", CODES)
def test_a_whole_weight_is_rounded_once(kind):
    whole = matrix()
    assert torch.equal(packed(kind, whole, torch.bfloat16).whole(), packed(kind, whole).whole().bfloat16())


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4.5), ("int8", 8 + 32 / 256), ("fp8", 8.25)])
def test_bits_of_a_number(kind, bits):
    held = QuantizedTensors(CODES[kind], {"w": (64, 256)}, torch.float32, torch.device("cpu"))
    assert sum(flat.num_bytes for flat in held.flats) * 8 / (64 * 256) == bits


def linear(x, weight, bias):
    return quantized_linear(x, weight, bias)


def of_a_stack(x, weight, bias):
    return quantized_product(bias, x, weight[1])


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("product", [linear, of_a_stack])
def test_a_product_and_its_gradient_are_those_of_the_whole_weight(kind, product):
    torch.manual_seed(1)
    shape = (96, 200) if product is linear else (3, 200, 96)
    quantized = packed(kind, torch.randn(shape))
    bias, x, grad = torch.randn(96), torch.randn(7, 200, requires_grad=True), torch.randn(7, 96)
    output = product(x, quantized, bias)
    output.backward(grad)
    whole = quantized.whole() if product is linear else quantized.whole()[1].t()
    expected = F.linear(x.detach().double(), whole.double(), bias.double())
    assert (output - expected).abs().max() <= 1e-6 * expected.abs().max()
    expected = grad.double() @ whole.double()
    assert (x.grad - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_a_graph_holds_no_whole_weight():
    quantized = packed("nf4", torch.randn(512, 512))
    x = torch.randn(4, 512, requires_grad=True)
    meter = CpuMeter()
    meter.start()
    try:
        output = quantized_linear(x, quantized, None)
        assert meter.mark() == output.nbytes
        output.sum().backward()
        assert meter.mark() <= 3 * output.nbytes
    finally:
        meter.stop()


CODE_STEPS = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25], seed=s % 3) for s in range(24))]
RATES = {"lora": 3e-3, "full": 3e-4}
CPU = torch.device("cpu")


def started(model, kind, dtype="float32", states="8bit"):
    engine = MegatronEngine(model, Layout(), dtype, optimizer_states=states)
    engine.train_full(Full()) if kind == "full" else engine.add_adapter("run", LORA, seed=3)
    return engine


def numbers(is_square):
    """Blocks whose numbers lie far apart, of very different sizes; one of zeros, one with a single number."""
    torch.manual_seed(0)
    made = torch.randn(40, 64) * 10 ** -(6 * torch.rand(40, 64)) * torch.logspace(-9, 9, 40)[:, None]
    made[3] = 0
    made[4, 1:] = 0
    made[5] = -made[5].abs()
    return (made.square() if is_square else made).flatten()


def magnitudes(num_bits):
    """A unary exponent, of ten, leaves a fraction the rest of the bits: the upper end of its part of 0.1 to 1."""
    values = []
    for exponent in range(7):
        fractions = 2 ** (num_bits - exponent)
        values += [10.0**-exponent * (0.1 + 0.9 * (k + 1) / fractions) for k in range(fractions)]
    return values


@pytest.mark.parametrize("is_square", [False, True])
def test_each_number_is_the_nearest_of_its_block_s(is_square):
    values = magnitudes(7) if is_square else [s * v for v in magnitudes(6) for s in (1, -1)]
    values = torch.tensor([0.0, *values], dtype=torch.float64)
    assert len(values) == 255
    moment, given = CodedMoment(2560, is_square, CPU), numbers(is_square)
    moment.write(given)
    ours, theirs = moment.read().double(), given.double()
    if is_square:
        ours, theirs = ours.sqrt(), theirs.sqrt()
    for found, wanted in zip(ours.view(-1, 64), theirs.view(-1, 64), strict=True):
        scale = wanted.abs().max()
        distance = (wanted[:, None] - values * scale).abs().amin(1)
        assert ((found - wanted).abs() <= distance + 3e-7 * (found.abs() + wanted.abs())).all()


@pytest.mark.parametrize("is_square", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1e-12])
def test_what_is_read_has_the_codes_that_it_was_read_from(is_square, factor):
    first, second = (CodedMoment(2560, is_square, CPU) for _ in range(2))
    first.write(numbers(is_square) * (factor**2 if is_square else factor))
    second.write(first.read())
    for one, other in zip(first.flats, second.flats, strict=True):
        assert torch.equal(one.buffer, other.buffer)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_losses_are_those_of_moments_in_float32(model, kind):
    found = train(started(model, kind), CODE_STEPS, learning_rate=RATES[kind])
    expected = train(started(model, kind, states="float32"), CODE_STEPS, learning_rate=RATES[kind])
    differences = [abs(ours / theirs - 1) for (ours, _), (theirs, _) in zip(found, expected, strict=True)]
    assert 0 < max(differences) <= 0.01
    assert expected[-1][0] < 0.9 * expected[0][0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_counted_before_a_slot_is_made_and_there_afterwards(model, dtype):
    engine = MegatronEngine(model, Layout(), dtype, optimizer_states="8bit")
    said = engine.slot_bytes(Full())
    engine.train_full(Full())
    held = engine.memory().parts["optimizer"].device
    num_weights = engine._model.flat.num_elements
    masters = 4 * num_weights if dtype == "bfloat16" else 0
    padding = held - masters - 2 * num_weights * (1 + 4 / 64)
    assert said["optimizer"] == held
    assert 0 <= padding <= 2 * 64 * 4  # of scales


ROWS = random_rows([40, 17, 90])
STEPS = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25], seed=s % 3) for s in range(6))]
FAMILIES = ["qwen3", "qwen3_moe", "qwen3_5_moe", "gpt_oss", "gemma4", "nemotron_h", "deepseek_v3"]
CASES = [(family, "nf4") for family in FAMILIES] + [(f, kind) for f in FAMILIES[:2] for kind in ("int8", "fp8")]


def start(model, kind, dtype="float32"):
    return MegatronEngine(model, Layout(), dtype, quantize=kind)


def named(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def write_whole(named, model, folder):
    """A folder as `model`'s, with the weights that a quantized base stands for in place of its own."""
    shutil.copytree(model, folder)
    kept = {name: tensor for name, tensor in load_file(model / "model.safetensors").items() if name not in named}
    whole = {name: tensor.contiguous() for name, tensor in named.items()}
    save_file(kept | whole, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def is_quantized(name):
    linear = "_proj" in name or "experts.gate_up" in name
    return linear and "bias" not in name and "per_layer" not in name


@pytest.mark.parametrize(("family", "kind"), drawn(CASES, len(CASES) // 2))
def test_it_computes_and_trains_as_the_whole_weights_do(tmp_path, family, kind):
    model = distinct_model(tmp_path / "model", family, tied=False)
    engine = start(model, kind)
    whole, published = named(engine), load_file(model / "model.safetensors")
    changed = {name for name, weight in whole.items() if not torch.equal(weight, published[name])}
    assert changed == {name for name in whole if is_quantized(name)}
    for name in changed:
        off = (whole[name] - published[name]).norm() / published[name].norm()
        assert off <= {"nf4": 0.12, "int8": 0.02, "fp8": 0.04}[kind], name
    reference = MegatronEngine(write_whole(whole, model, tmp_path / "whole"), Layout(), "float32")
    batch = bin_of(ROWS)
    assert (logprobs(engine, batch) - logprobs(reference, batch)).abs().max() <= 1e-5
    plain = MegatronEngine(model, Layout(), "float32")
    assert (logprobs(engine, batch) - logprobs(plain, batch)).abs().max() > 1e-3
    found = []
    for name, each in (("quantized", engine), ("reference", reference)):
        each.add_adapter("run", LORA, seed=3)
        train(each, STEPS[:2])  # B is not zero any more
        each.forward_backward(batch, LOSS)
        found.append(gradient(each, tmp_path / name))
        train(each, STEPS[2:4])
    largest = max(float(tensor.abs().max()) for tensor in found[1].values())
    assert furthest(*found) <= 1e-4 * largest
    assert (logprobs(engine, batch) - logprobs(reference, batch)).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", CODES)
def test_bytes_of_the_base_are_those_of_its_codes_and_go_away_and_come_back(model, kind):
    engine = start(model, kind, "bfloat16")
    linears = sum(weight.numel() for name, weight in engine.named_weights() if is_quantized(name))
    others = engine._model.flat.num_bytes
    held = engine.memory().parts["weights"].device - others
    padding = 64 * 5 * 2 * 4  # between tensors, of codes and of scales
    size = {"nf4": 1 / 2 + 4 / 64, "int8": 1 + 4 / 64, "fp8": 4 / 3 + 4 / 64}[kind]  # rows have 64 numbers, or 192
    assert (1 / 2 if kind == "nf4" else 1) * linears < held <= size * linears + padding < 2 * linears
    before = logprobs(engine, bin_of(ROWS))
    engine.place("host")
    assert engine.memory().device_bytes == 0
    engine.place("device")
    assert torch.equal(logprobs(engine, bin_of(ROWS)), before)
    engine.place("dropped")
    engine.place("device")
    assert torch.equal(logprobs(engine, bin_of(ROWS)), before)


def test_it_is_never_trained(model):
    with pytest.raises(AssertionError, match="frozen"):
        start(model, "nf4").train_full(Full())


def test_a_job_s_engine_is_as_its_plan_says(model):
    nothing = Artifact(uri="file:///x", sha256="0" * 64)
    fields = {"run_id": "r", "job_id": "000001", "model": nothing, "trainable": LORA, "max_tokens": 64}
    engine = build_engine(SessionPlan(**fields, quantize_base="int8", optimizer_states="8bit"), model)
    engine.add_adapter("run", LORA, seed=3)
    expected = MegatronEngine(model, Layout(), "float32", quantize="int8", optimizer_states="8bit")
    expected.add_adapter("run", LORA, seed=3)
    plain = build_engine(SessionPlan(**fields), model)
    plain.add_adapter("run", LORA, seed=3)
    assert engine.memory() == expected.memory()
    assert engine.memory().parts["weights"].device < plain.memory().parts["weights"].device
    assert engine.memory().parts["optimizer"].device < plain.memory().parts["optimizer"].device


def test_it_takes_adapters_beside_some_linears_and_none(model, tmp_path):
    """Those without one are multiplied by themselves."""
    engine = start(model, "nf4")
    reference = MegatronEngine(write_whole(named(engine), model, tmp_path / "whole"), Layout(), "float32")
    for each in (engine, reference):
        each.add_adapter("run", Lora(rank=4, targets=("q_proj", "down_proj")), seed=0)
        train(each, STEPS[:2])
    assert (logprobs(engine, bin_of(ROWS)) - logprobs(reference, bin_of(ROWS))).abs().max() <= 1e-5


SOME = Lora(rank=3, alpha=6, targets=("q_proj", "down_proj"))  # other linears have a backward of their own


def apart_and_moved(model, layout, kind, folder):
    """Of scores before two steps of an adapter and after them: how far they are from those of whole weights on the same
    layout, and how far the steps have moved them."""

    def scored(engine):
        found = [scores(engine, sft_bins(0)[0])[0]]
        engine.add_adapter("run", SOME, seed=5)
        for seed in range(2):
            step(engine, sft_bins(seed), SFT_LOSS, 1e-2)
        return torch.tensor([*found, scores(engine, sft_bins(0)[0])[0]])

    engine = MegatronEngine(model, layout, "float32", quantize=kind)
    whole = write_whole(named(engine), model, folder / f"{model.name}-{layout.label}-{engine.facts.rank}")
    found = scored(engine)
    expected = scored(MegatronEngine(whole, layout, "float32"))
    return float((found - expected).abs().max()), float((found[0] - found[1]).abs().max())


def test_layouts_compute_with_the_codes_of_their_own_parts(tmp_path):
    dense = distinct_model(tmp_path / "dense", "qwen3", num_kv_heads=2)
    mixture = distinct_model(tmp_path / "mixture", "qwen3_moe", num_kv_heads=2)
    stacked = distinct_model(tmp_path / "stacked", "gpt_oss")
    cases = [
        (dense, Layout(tp=2), "nf4"),
        (dense, Layout(tp=2, sp=True), "int8"),
        (dense, Layout(pp=2), "fp8"),
        (mixture, Layout(ep=2, dp=2), "nf4"),
        (mixture, Layout(tp=2, sp=True, etp=2), "int8"),
        (stacked, Layout(ep=2, dp=2), "nf4"),
    ]
    for found in on_ranks(2, in_turn, apart_and_moved, [(*case, tmp_path) for case in cases]):
        for case, (apart, moved) in zip(cases, found, strict=True):
            assert apart <= 2e-5, case
            assert moved > 1e-3, case
