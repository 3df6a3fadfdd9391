"""AdamW's moments in 8 bits: codes against their definition, training beside float32's, kills, bytes."""

import pytest
import torch
from safetensors.torch import load_file

from longshore.layout import Layout
from longshore.training import Full
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.quantized import CodedMoment
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import LORA, checkpoint_bytes
from tests.megatron_worker.quantized.quantized_ranks import Trial
from tests.megatron_worker.rows import distinct_model, random_rows
from tests.megatron_worker.trials import run_trials

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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_killed_and_resumed_ends_with_the_same_bits(model, tmp_path, kind, dtype):
    whole = start(model, kind, dtype)
    train(whole, STEPS[:3], learning_rate=RATES[kind])
    whole.save(tmp_path / "middle")
    train(whole, STEPS[3:6], learning_rate=RATES[kind])
    whole.save(tmp_path / "end")
    resumed = start(model, kind, dtype)
    resumed.load(tmp_path / "middle")
    train(resumed, STEPS[3:6], learning_rate=RATES[kind])
    resumed.save(tmp_path / "again")
    assert checkpoint_bytes(tmp_path / "end") == checkpoint_bytes(tmp_path / "again")


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


def test_ranks_hold_codes_of_their_shares(tmp_path):
    """Trained, killed and resumed by two ranks; and from one rank's checkpoint, near to what that one does."""
    dense = distinct_model(tmp_path / "dense", "qwen3", num_kv_heads=2)
    results = tmp_path / "results"
    results.mkdir()
    layouts = [Layout(dp=2), Layout(tp=2, sp=True)]
    run_trials("quantized.quantized_ranks", results, [Trial(model=dense, layout=one) for one in layouts], 2, 240)
    single = start(dense, "lora")
    train(single, STEPS[:6])
    single.save(results / "single")
    ours = load_file(results / "single" / "weights" / "adapter_model.safetensors")
    for layout in layouts:
        place = results / f"dense-{layout.label}"
        assert checkpoint_bytes(place / "end") == checkpoint_bytes(place / "again")
        theirs = load_file(place / "end" / "weights" / "adapter_model.safetensors")
        square = sum(float((ours[name] - theirs[name]).norm()) ** 2 for name in ours)
        assert square <= 0.05**2 * sum(float(tensor.norm()) ** 2 for tensor in ours.values())
