"""Engines, alone and against each other: as transformers, peft and torch; packed as unpacked; each other's states."""

import dataclasses
import itertools
import math
import subprocess
import sys
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from longshore.training import Adam, EngineName
from megatron_worker.engine import Outputs
from shared.errors import InvalidInput
from tests.megatron_worker.driving import ADAM, LEARNING_RATE, LOSS, accumulate, train
from tests.megatron_worker.engines import ENGINES, checkpoint_bytes, furthest, gradient, moments, start
from tests.megatron_worker.launch import REPOSITORY, environment
from tests.megatron_worker.rows import (
    Row,
    bin_of,
    distinct_model,
    empty_bin,
    random_rows,
    reference_steps,
    total_weight,
)
from tests.megatron_worker.trees import as_tree, random_sequences

STEPS = [random_rows([40, 17, 90, 25, 60, 8], seed=step % 4) for step in range(20)]


def as_bins(rows):
    return [rows[:2], rows[2:]]


def test_every_engine_of_the_contract_is_driven_here():
    assert set(ENGINES) == set(get_args(EngineName))


# Against references.


def test_twenty_bfloat16_lora_steps_follow_peft_s(model, tmp_path, engine):
    """PEFT keeps its adapters in float32 beside a bfloat16 base, we float32 masters of bfloat16 ones."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    driven = start(engine, model, "lora", "bfloat16")
    driven.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    reference = PeftModel.from_pretrained(base, tmp_path / "weights", is_trainable=True)
    expected = reference_steps(reference, STEPS, LEARNING_RATE, ADAM.weight_decay, ADAM.clip_norm)
    history = train(driven, [as_bins(rows) for rows in STEPS])
    losses, reference_losses = ([loss for loss, _ in h] for h in (history, expected))
    print("largest relative difference", max(abs(a / b - 1) for a, b in zip(losses, reference_losses, strict=True)))
    assert losses[-1] < losses[0] - 0.05
    assert losses == pytest.approx(reference_losses, rel=2e-3)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_bfloat16_training_follows_float32(model, engine, kind):
    """bf16 holds 8 bits: losses agree to about 1 %, and the masters move by steps that bf16 weights could not."""
    rate, histories = {"lora": LEARNING_RATE, "full": 3e-4}[kind], {}
    for dtype in ("float32", "bfloat16"):
        driven = start(engine, model, kind, dtype)
        histories[dtype] = [loss for loss, _ in train(driven, [as_bins(s) for s in STEPS[:8]], learning_rate=rate)]
    assert histories["bfloat16"] == pytest.approx(histories["float32"], rel=2e-2)


VOCAB_END = 10_000  # no such token: generate stops at the length alone


def test_greedy_equals_generate(model, engine):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model)
    driven = start(engine, model)
    prompts = [row.ids for row in random_rows([5, 30, 1, 12], seed=4)]
    free = driven.greedy(prompts, 12, frozenset())
    stop = frozenset({free[1][4], free[0][7]})
    for stop_ids in (frozenset(), stop):
        completions = driven.greedy(prompts, 12, stop_ids)
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
    assert len(driven.greedy(prompts, 12, stop)[1]) <= 4


# Forward.


def test_a_tree_out_of_order_is_refused_and_the_engine_goes_on(model, engine):
    driven = start(engine, model)
    good = bin_of(STEPS[0])
    parent_T = good.parent_T.clone()
    parent_T[5], parent_T[6], parent_T[7] = 2, 4, 2  # what descends from 4 stands behind another child of 2
    with torch.no_grad():
        before = driven.forward(good, Outputs()).logprob_N
        with pytest.raises(InvalidInput, match="depth first"):
            driven.forward(_with_parents(good, parent_T), Outputs())
        assert torch.equal(driven.forward(good, Outputs()).logprob_N, before)


def _with_parents(batch, parent_T):
    return dataclasses.replace(batch, parent_T=parent_T)


def test_what_is_not_asked_for_is_not_there(model, engine):
    driven, batch = start(engine, model), bin_of(STEPS[0])
    with torch.no_grad():
        nothing, both = driven.forward(batch, Outputs(logprob=False)), driven.forward(batch, Outputs(entropy=True))
        entropy = driven.forward(batch, Outputs(logprob=False, entropy=True))
        warm = driven.forward(batch, Outputs(temperature=2.0)).logprob_N
    assert nothing.logprob_N is None and nothing.entropy_N is None
    assert entropy.logprob_N is None and torch.equal(entropy.entropy_N, both.entropy_N)
    assert both.logprob_N.dtype == both.entropy_N.dtype == torch.float32
    assert (both.entropy_N > 0).all() and (both.entropy_N < math.log(driven.facts.vocab_size)).all()
    assert (warm - both.logprob_N).abs().max() > 0.1


def test_the_most_likely_ids_come_with_their_log_probabilities(model, engine):
    driven, batch = start(engine, model), bin_of(STEPS[0])
    with torch.no_grad():
        top = driven.forward(batch, Outputs(logprob=False, top_k=3))
        labels = dataclasses.replace(batch, label_N=top.top_id_NK[:, 0])
        first_N = driven.forward(labels, Outputs()).logprob_N
    assert top.logprob_N is None and top.top_logprob_NK.shape == (len(batch.label_N), 3)
    assert (top.top_logprob_NK[:, 0] - first_N).abs().max() <= 2e-6
    assert (top.top_logprob_NK.diff(dim=1) <= 0).all()


def test_an_id_that_pads_elsewhere_is_trained_like_any_other(tmp_path, engine):
    """transformers gives the embedding of its padding token no gradient; a bin has no padding."""
    from transformers import AutoConfig

    folder = distinct_model(tmp_path / "model", tied=False)
    pad = AutoConfig.from_pretrained(folder).pad_token_id
    assert pad is not None
    driven = start(engine, folder, "full")
    row = Row([5, pad, 9, 11], [0.0, 0.0, 1.0, 1.0])
    accumulate(driven, [[row]])
    embedding_VH = gradient(driven, tmp_path / "end")["model.embed_tokens.weight"]
    assert embedding_VH[pad].any() and embedding_VH[9].any() and not embedding_VH[12].any()


# Backward and steps.


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_result_does_not_depend_on_how_a_batch_is_split(model, tmp_path, engine, kind):
    """Bins add up over calls, the empty ones of a rank without bins too."""
    rows = random_rows([40, 17, 90, 25, 60, 8, 3, 2])
    splits = [[rows], [[row] for row in rows], [rows[::2], rows[1::2]], [rows[5:], [], rows[:5]]]
    results = []
    for number, bins in enumerate(splits):
        driven = start(engine, model, kind)
        if kind == "lora":
            train(driven, [[rows]])  # with B zero, A has no gradient
        loss = accumulate(driven, [b for b in bins if b])
        if [] in bins:
            assert not any(driven.forward_backward(empty_bin(), LOSS).values())
        results.append((loss, gradient(driven, tmp_path / str(number), total_weight(rows))))
    for loss, found in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert furthest(found, results[0][1]) <= 1e-6


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_graph_that_is_kept_gives_the_gradient_of_forward_backward(model, tmp_path, engine, kind):
    """Two forwards are alive at once, as custom training code may have them."""
    driven, bins = start(engine, model, kind), [bin_of(rows) for rows in as_bins(STEPS[0])]
    scores = [driven.forward(batch, LOSS.outputs) for batch in bins]
    sum(LOSS.sums(s, batch).loss for s, batch in zip(scores, bins, strict=True)).backward()
    kept = gradient(driven, tmp_path / "kept")
    for batch in bins:
        driven.forward_backward(batch, LOSS)
    assert furthest(gradient(driven, tmp_path / "calls"), kept) <= 1e-5 * max(
        float(g.abs().max()) for g in kept.values()
    )


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("cut", ["forward", "backward"])
def test_a_bin_that_fails_half_way_leaves_the_engine_as_good_as_new(model, tmp_path, engine, kind, cut):
    def memory_is_full(after):
        calls = itertools.count()

        def save(tensor):
            if next(calls) >= after:
                raise MemoryError("out of memory")
            return tensor

        return save

    driven, fresh = (start(engine, model, kind) for _ in range(2))
    hooks = {"forward": (memory_is_full(25), lambda t: t), "backward": (lambda t: t, memory_is_full(25))}[cut]
    with pytest.raises(MemoryError), torch.autograd.graph.saved_tensors_hooks(*hooks):
        driven.forward_backward(bin_of(STEPS[0]), LOSS)
    driven.zero_grad()
    for one, folder in ((driven, tmp_path / "driven"), (fresh, tmp_path / "fresh")):
        train(one, [as_bins(rows) for rows in STEPS[:2]], learning_rate=3e-4)
        one.save(folder)
    assert checkpoint_bytes(tmp_path / "driven") == checkpoint_bytes(tmp_path / "fresh")


def test_a_gradient_that_is_not_finite_changes_nothing(model, tmp_path, engine):
    driven = start(engine, model, "lora")
    train(driven, [[STEPS[0]]])
    driven.save(tmp_path / "before")
    accumulate(driven, [STEPS[1]])
    norms = driven.optim_step(ADAM, LEARNING_RATE, math.nan)
    driven.save(tmp_path / "after")
    assert not math.isfinite(norms.grad_norm)
    assert checkpoint_bytes(tmp_path / "before") == checkpoint_bytes(tmp_path / "after")
    assert not any(g.any() for g in gradient(driven, tmp_path / "zero").values())


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_clipping_bounds_the_update(model, tmp_path, engine, kind):
    """With one step, Adam's update does not tell the gradient's length; its first moment does."""
    driven = start(engine, model, kind)
    accumulate(driven, [STEPS[0]])
    norms = driven.optim_step(Adam(clip_norm=1e-3), 1e-4, total_weight(STEPS[0]))
    driven.save(tmp_path)
    moment = torch.cat([m.flatten() for m in moments(tmp_path).values()])
    assert norms.clipped
    assert norms.grad_norm > 1e-3
    assert float(moment.norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_sums_are_reduced_by_their_names(model, engine):
    driven = start(engine, model)
    sums = {"loss": torch.tensor(2.0), "ratio:max": torch.tensor(3.0)}
    assert driven.reduce(sums) == {"loss": 2.0, "ratio:max": 3.0}


TEN_STEPS = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25, 60, 8], seed=s % 4) for s in range(10))]
RATES = {"lora": 3e-3, "full": 3e-4}
FAMILIES = [("qwen3", True), ("qwen2", False), ("llama", True)]  # and whether their embeddings are tied


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda p: p[0])
def of_family(request, tmp_path_factory):
    family, tied = request.param
    return distinct_model(tmp_path_factory.mktemp(family), family, tied)


@pytest.fixture(scope="module")
def ten_steps(of_family, tmp_path_factory):
    """By engine and kind of training: losses and norms of ten steps, and a folder with the checkpoint of each half."""
    results = {}
    for name in ENGINES:
        for kind in RATES:
            folder, driven = tmp_path_factory.mktemp(f"{name}-{kind}"), start(name, of_family, kind)
            history = train(driven, TEN_STEPS[:5], learning_rate=RATES[kind])
            driven.save(folder / "middle")
            history += train(driven, TEN_STEPS[5:], learning_rate=RATES[kind])
            driven.save(folder / "end")
            results[name, kind] = history, folder
    return results


def tensors(checkpoint):
    return {n: t for path in sorted(checkpoint.rglob("*.safetensors")) for n, t in load_file(path).items()}


@pytest.mark.parametrize(
    ("family", "tied"), [*FAMILIES, ("ministral", False), ("smollm3", True), ("granite", False), ("olmo3", False)]
)
def test_engines_agree_per_token(tmp_path, family, tied):
    folder = distinct_model(tmp_path, family, tied)
    ours, theirs = (start(name, folder) for name in ENGINES)
    for batch in (bin_of(TEN_STEPS[0][0] + TEN_STEPS[0][1]), as_tree(random_sequences(1))):
        with torch.no_grad():
            mine, other = (e.forward(batch, Outputs(entropy=True)) for e in (ours, theirs))
        assert (mine.logprob_N - other.logprob_N).abs().max() <= 1e-5
        assert (mine.entropy_N - other.entropy_N).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "megatron"])
def test_engines_agree_after_ten_steps(ten_steps, name, kind):
    (ours, folder), (theirs, other) = ten_steps[name, kind], ten_steps["megatron", kind]
    assert ours[-1][0] < ours[0][0]
    for (loss, norm), (expected, expected_norm) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    difference = furthest(tensors(folder / "end"), tensors(other / "end"))
    print(f"{name} {kind}: largest difference of a weight or moment {difference:.1e}")
    assert difference <= 2e-5
    assert [p.name for p in sorted(folder.rglob("*"))] == [p.name for p in sorted(other.rglob("*"))]


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "megatron"])
def test_an_engine_goes_on_from_the_other_s_checkpoint(of_family, ten_steps, tmp_path, name, kind):
    for ours, theirs in ((name, "megatron"), ("megatron", name)):
        driven = start(ours, of_family, kind)
        driven.load(ten_steps[theirs, kind][1] / "middle")
        train(driven, TEN_STEPS[5:], learning_rate=RATES[kind])
        driven.save(tmp_path / ours)
        assert furthest(tensors(tmp_path / ours), tensors(ten_steps[theirs, kind][1] / "end")) <= 2e-5


def test_the_fsdp_engine_needs_no_megatron(tmp_path):
    """With any family it is torch and transformers alone: what megatron-core asks of a machine, it does not.

    Nor does a job's beginning load torch's compiler, which nothing uses without CUDA.
    """
    folders = [str(distinct_model(tmp_path / family, family, tied)) for family, tied in FAMILIES]
    program = f"""
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
from megatron_worker.worker import make_deterministic
make_deterministic(SimpleNamespace(threads_per_rank=1, seed=0))
assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
assert torch.cuda.is_available() or "torch._dynamo" not in sys.modules
from megatron_worker.fsdp.engine import FsdpEngine
from longshore.training import Layout
for folder in {folders!r}:
    FsdpEngine(Path(folder), Layout(), "float32").greedy([[5, 6]], 2, frozenset())
print(sorted(name for name in sys.modules if name.split(".")[0] in ("megatron", "peft")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
