"""One rank against transformers, peft and torch: the same losses, step after step; packed as unpacked."""

import math

import pytest
import torch

from megatron_worker.engine import Outputs
from megatron_worker.megatron.engine import MegatronEngine
from shared.jobs import Adam, Full, Lora
from shared.layout import Layout
from tests.megatron_worker.driving import ADAM, LEARNING_RATE, LOSS, accumulate, train
from tests.megatron_worker.rows import (
    bin_of,
    distinct_model,
    random_rows,
    reference_loss,
    reference_steps,
    total_weight,
)

LORA = Lora(rank=4, alpha=8)
STEPS = [random_rows([40, 17, 90, 25, 60, 8], seed=step % 4) for step in range(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("qwen3"))


def as_bins(rows):
    return [rows[:2], rows[2:]]


def gradients(engine):
    return engine._training.optimizer.grad.buffer.clone()


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("llama", True)])
def test_twenty_lora_steps_equal_those_of_peft(tmp_path, family, tied):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = MegatronEngine(distinct_model(tmp_path / "model", family, tied), Layout(), "float32")
    engine.add_adapter("run", LORA, seed=3)
    engine.save(tmp_path / "start")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    reference = PeftModel.from_pretrained(base, tmp_path / "start" / "weights", is_trainable=True)
    expected = reference_steps(reference, STEPS, LEARNING_RATE, ADAM.weight_decay, ADAM.clip_norm)
    history = train(engine, [as_bins(rows) for rows in STEPS])
    assert expected[-1][0] < expected[0][0]
    assert [loss for loss, _ in history] == pytest.approx([loss for loss, _ in expected], rel=1e-4)
    assert [norm for _, norm in history] == pytest.approx([norm for _, norm in expected], rel=1e-3)


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False)])
def test_twenty_full_steps_equal_those_of_torch(tmp_path, family, tied):
    from transformers import AutoModelForCausalLM

    folder = distinct_model(tmp_path / "model", family, tied)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    expected = reference_steps(reference, STEPS, 3e-4, ADAM.weight_decay, ADAM.clip_norm)
    engine = MegatronEngine(folder, Layout(), "float32")
    engine.train_full(Full())
    history = train(engine, [as_bins(rows) for rows in STEPS], learning_rate=3e-4)
    assert expected[-1][0] < expected[0][0]
    assert [loss for loss, _ in history] == pytest.approx([loss for loss, _ in expected], rel=1e-4)

    engine.save(tmp_path / "end")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "end" / "weights")
    ids = torch.tensor([STEPS[0][2].ids])
    with torch.no_grad():
        difference = (reloaded(ids).logits - reference(ids).logits).abs().max()
        logprob_N = engine.forward(bin_of(STEPS[0]), Outputs()).logprob_N
    mean_loss = -(logprob_N * bin_of(STEPS[0]).weight_N).sum() / total_weight(STEPS[0])
    assert difference <= 2e-3
    with torch.no_grad():
        assert float(mean_loss) == pytest.approx(float(reference_loss(reloaded, STEPS[0])), rel=1e-6)


@pytest.mark.parametrize("full", [False, True])
def test_the_result_does_not_depend_on_how_a_batch_is_split(model, full):
    rows = random_rows([40, 17, 90, 25, 60, 8, 3, 2])
    splits = [[rows], [[row] for row in rows], [rows[::2], rows[1::2]], [rows[5:], [], rows[:5]]]
    results = []
    for bins in splits:
        engine = MegatronEngine(model, Layout(), "float32")
        engine.train_full(Full()) if full else engine.add_adapter("run", LORA, seed=0)
        if not full:
            train(engine, [[rows]])  # with B zero, A has no gradient
        loss = accumulate(engine, [b for b in bins if b])
        results.append((loss, gradients(engine) / total_weight(rows)))
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert (gradient - results[0][1]).norm() <= 1e-6 * results[0][1].norm().clamp(min=1)


def test_a_sequence_does_not_see_its_neighbours(model):
    engine = MegatronEngine(model, Layout(), "float32")
    rows, others = random_rows([30, 50], seed=1), random_rows([64], seed=2)
    with torch.no_grad():
        alone = engine.forward(bin_of(rows[1:]), Outputs()).logprob_N
        beside = engine.forward(bin_of([others[0], rows[1]]), Outputs()).logprob_N[-len(alone) :]
        between = engine.forward(bin_of([rows[0], rows[1], others[0]]), Outputs()).logprob_N
    first = len(bin_of(rows[:1]).label_N)
    assert (beside - alone).abs().max() <= 2e-6
    assert (between[first : first + len(alone)] - alone).abs().max() <= 2e-6


def test_greedy_equals_generate(model):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model)
    engine = MegatronEngine(model, Layout(), "float32")
    prompts = [row.ids for row in random_rows([5, 30, 1, 12], seed=4)]
    free = engine.greedy(prompts, 12, frozenset())
    stop = frozenset({free[1][4], free[0][7]})
    for stop_ids in (frozenset(), stop):
        completions = engine.greedy(prompts, 12, stop_ids)
        for prompt, completion in zip(prompts, completions, strict=True):
            expected = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=sorted(stop_ids) or VOCAB_END,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            assert completion == [t for t in expected if t not in stop_ids]
    assert len(engine.greedy(prompts, 12, stop)[1]) <= 4


VOCAB_END = 10_000  # no such token: generate stops at the length alone


def test_a_gradient_that_is_not_finite_changes_no_weight(model):
    engine = MegatronEngine(model, Layout(), "float32")
    engine.add_adapter("run", LORA, seed=0)
    train(engine, [[STEPS[0]]])
    optimizer = engine._training.optimizer
    before = [flat.buffer.clone() for flat in (engine._adapters["run"].flat, optimizer.exp_avg, optimizer.exp_avg_sq)]
    accumulate(engine, [STEPS[1]])
    norms = engine.optim_step(ADAM, LEARNING_RATE, math.nan)
    after = [engine._adapters["run"].flat.buffer, optimizer.exp_avg.buffer, optimizer.exp_avg_sq.buffer]
    assert not math.isfinite(norms.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.step_count == 1
    assert not optimizer.grad.buffer.any()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_ends_with_the_same_bits(model, tmp_path, full, dtype):
    def start():
        engine = MegatronEngine(model, Layout(), dtype)
        engine.train_full(Full()) if full else engine.add_adapter("run", LORA, seed=0)
        return engine

    steps = [as_bins(rows) for rows in STEPS[:6]]
    whole = start()
    train(whole, steps[:3])
    whole.save(tmp_path / "middle")
    train(whole, steps[3:])
    whole.save(tmp_path / "end")

    resumed = start()
    resumed.load(tmp_path / "middle")
    train(resumed, steps[3:])
    resumed.save(tmp_path / "again")
    files = sorted(p.relative_to(tmp_path / "end") for p in (tmp_path / "end").rglob("*") if p.is_file())
    assert len(files) >= 3
    for file in files:
        assert (tmp_path / "end" / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file


def test_twenty_bfloat16_lora_steps_follow_peft_s(model, tmp_path):
    """PEFT keeps its adapters in float32 beside a bfloat16 base, we float32 masters of bfloat16 ones."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = MegatronEngine(model, Layout(), "bfloat16")
    engine.add_adapter("run", LORA, seed=3)
    engine.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    reference = PeftModel.from_pretrained(base, tmp_path / "weights", is_trainable=True)
    expected = reference_steps(reference, STEPS, LEARNING_RATE, ADAM.weight_decay, ADAM.clip_norm)
    history = train(engine, [as_bins(rows) for rows in STEPS])
    losses, reference_losses = ([loss for loss, _ in h] for h in (history, expected))
    print("largest relative difference", max(abs(a / b - 1) for a, b in zip(losses, reference_losses, strict=True)))
    assert losses[-1] < losses[0] - 0.05
    assert losses == pytest.approx(reference_losses, rel=2e-3)


def test_bfloat16_training_follows_float32(model):
    """bf16 holds 8 bits: losses agree to about 1 %, and the masters move by steps that bf16 weights could not."""
    histories = {}
    for dtype in ("float32", "bfloat16"):
        engine = MegatronEngine(model, Layout(), dtype)
        engine.add_adapter("run", LORA, seed=0)
        histories[dtype] = [loss for loss, _ in train(engine, [as_bins(rows) for rows in STEPS[:8]])]
    assert histories["bfloat16"] == pytest.approx(histories["float32"], rel=2e-2)


def test_memory_is_counted(model):
    engine = MegatronEngine(model, Layout(), "float32")
    weights = sum(weight.numel() for _, weight in engine.named_weights())
    assert 4 * weights <= engine.memory().device_bytes <= 4 * weights * 1.05 + 4096
    engine.train_full(Full())
    assert 16 * weights <= engine.memory().device_bytes <= 16 * weights * 1.05 + 16384


def test_the_active_adapter_decides(model):
    engine = MegatronEngine(model, Layout(), "float32")
    batch = bin_of(STEPS[0])
    with torch.no_grad():
        base = engine.forward(batch, Outputs()).logprob_N
        engine.add_adapter("run", LORA, seed=0)
        assert torch.equal(engine.forward(batch, Outputs()).logprob_N, base)
    train(engine, [[STEPS[0]]])
    with torch.no_grad():
        adapted = engine.forward(batch, Outputs()).logprob_N
        assert (adapted - base).abs().max() > 1e-3
        engine.set_adapter(None)
        assert torch.equal(engine.forward(batch, Outputs()).logprob_N, base)
        engine.set_adapter("run")
        assert torch.equal(engine.forward(batch, Outputs()).logprob_N, adapted)


def test_clipping_bounds_the_update(model):
    """With one step, Adam's update does not tell the gradient's length; its first moment does."""
    engine = MegatronEngine(model, Layout(), "float32")
    engine.train_full(Full())
    accumulate(engine, [STEPS[0]])
    norms = engine.optim_step(Adam(clip_norm=1e-3), 1e-4, total_weight(STEPS[0]))
    assert norms.clipped
    assert norms.grad_norm > 1e-3
    assert float(engine._training.optimizer.exp_avg.buffer.norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)
    assert LOSS.outputs.logprob
