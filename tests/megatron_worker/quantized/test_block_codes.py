"""Codes against the formats' definitions in float64; products with codes against products with whole weights."""

import pytest
import torch
import torch.nn.functional as F

from megatron_worker import quantized as block_codes
from megatron_worker.memory import CpuMeter
from megatron_worker.quantized import CODES, QuantizedTensors, quantized_linear, quantized_product

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
