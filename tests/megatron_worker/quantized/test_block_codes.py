"""Codes of weights and of moments against their definitions; products and training with them beside whole ones."""

import pytest
import torch
import torch.nn.functional as F

from longshore.training import Full, Layout
from megatron_worker import quantized as block_codes
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.memory import CpuMeter
from megatron_worker.quantized import CODES, CodedMoment, QuantizedTensors, quantized_linear, quantized_product
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import LORA
from tests.megatron_worker.rows import random_rows

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


STEPS = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25], seed=s % 3) for s in range(24))]
RATES = {"lora": 3e-3, "full": 3e-4}
CPU = torch.device("cpu")


def start(model, kind, dtype="float32", states="8bit"):
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
    found = train(start(model, kind), STEPS, learning_rate=RATES[kind])
    expected = train(start(model, kind, states="float32"), STEPS, learning_rate=RATES[kind])
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
