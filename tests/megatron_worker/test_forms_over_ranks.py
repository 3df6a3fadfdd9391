"""DoRA and adapters of embeddings over ranks and beside quantized weights. On one rank: test_lora_forms.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longshore.layout import Layout
from longshore.training import Adam, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.trainer_rank import ForwardInput, TrainerRank
from tests.depth import drawn
from tests.megatron_worker import form_ranks
from tests.megatron_worker.driving import ADAM, LEARNING_RATE
from tests.megatron_worker.engines import checkpoint_bytes
from tests.megatron_worker.form_ranks import STEPS, Trial
from tests.megatron_worker.rows import Row, distinct_model, random_rows, reference_steps
from tests.megatron_worker.scores import logprobs_in_transformers
from tests.megatron_worker.test_lora_forms import TOKENS, furthest, in_peft, weights_of
from tests.megatron_worker.trials import run_trials

DORA = Lora(rank=4, alpha=8, dora=True, rank_pattern={"q_proj": 2})
QWEN2 = drawn([("fsdp", Layout(dp=2)), ("megatron", Layout(tp=2, sp=True)), ("megatron", Layout(pp=2))], 1)
ALL_QWEN3 = [("megatron", Layout(tp=2)), ("megatron", Layout(cp=2)), ("megatron", Layout(dp=2))]
QWEN3 = drawn(ALL_QWEN3, 1, always=ALL_QWEN3[:1])
LATENT = [("megatron", Layout(tp=2, sp=True))]
OF_LATENT = Lora(rank=4, alpha=8, dora=True, targets=("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"))
OF_TOKENS = [*ALL_QWEN3, ("megatron", Layout(tp=2, sp=True)), ("fsdp", Layout(dp=2)), ("fsdp", Layout(tp=2))]
OF_TOKENS = drawn(OF_TOKENS, 2)
OF_TIED = [("megatron", Layout(pp=2))]


@pytest.fixture(scope="module")
def trials(tmp_path_factory) -> dict[str, tuple[Trial, Path]]:
    out = tmp_path_factory.mktemp("dora")
    asked = [("qwen2", DORA, QWEN2), ("qwen3", DORA, QWEN3), ("glm4_moe_lite", OF_LATENT, LATENT)]
    asked += [("llama", TOKENS, OF_TOKENS), ("gemma3", TOKENS, OF_TIED)]
    found = []
    for family, lora, layouts in asked:
        model = distinct_model(out / "models" / family, family, tied=family != "llama")
        found += [Trial(model=model, lora=lora, engine=engine, layout=layout) for engine, layout in layouts]
    run_trials("form_ranks", out, found, num_ranks=2, timeout_s=300)
    return {trial.name: (trial, out / trial.name) for trial in found}


NAMES = [f"qwen2-{engine}-{layout.label}" for engine, layout in QWEN2]
NAMES += [f"qwen3-{engine}-{layout.label}" for engine, layout in QWEN3]
NAMES += [f"glm4_moe_lite-{engine}-{layout.label}" for engine, layout in LATENT]
NAMES += [f"llama-{engine}-{layout.label}" for engine, layout in OF_TOKENS]
NAMES += [f"gemma3-{engine}-{layout.label}" for engine, layout in OF_TIED]


def peft_s(trial: Trial, before: Path, out: Path) -> dict[str, torch.Tensor]:
    """The adapter after PEFT's own ten steps."""
    reference = in_peft(trial.model, before, is_trainable=True)
    reference_steps(reference, STEPS, LEARNING_RATE, ADAM.weight_decay, ADAM.clip_norm)
    reference.save_pretrained(out)
    return weights_of(out)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_train_what_peft_trains_and_resume_to_the_bit(trials, tmp_path, name):
    trial, out = trials[name]
    after = weights_of(out / "after" / "weights")
    assert furthest(after, peft_s(trial, out / "before" / "weights", tmp_path)) <= 1e-5
    moved = [n for n in after if n.endswith(("magnitude_vector", "embedding_A", "embedding_B"))]
    assert moved and all(not torch.equal(after[n], weights_of(out / "before" / "weights")[n]) for n in moved)
    assert checkpoint_bytes(out / "after") == checkpoint_bytes(out / "resumed")


def test_it_begins_with_the_norms_that_peft_begins_with(trials):
    from peft import get_peft_model
    from peft.tuners.lora import LoraConfig
    from transformers import AutoModelForCausalLM

    trial, out = trials["qwen3-megatron-tp2"]
    own = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(trial.model), LoraConfig(r=4, use_dora=True, target_modules=own)
    ).state_dict()
    ours = {n: t for n, t in weights_of(out / "before" / "weights").items() if n.endswith("magnitude_vector")}
    for name, norms in ours.items():
        assert (norms - theirs[f"{name}.default.weight"]).abs().max() <= 1e-5
    assert len(ours) == len([name for name in theirs if "magnitude_vector" in name])


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_beside_quantized_weights_it_is_peft_s_beside_what_they_stand_for(tmp_path, kind):
    model = distinct_model(tmp_path / "model", "qwen3", tied=False)
    trial = Trial(model=model, lora=DORA, settings={"quantize": kind})
    engine = MegatronEngine(model, Layout(), "float32", quantize=kind)
    whole = {name: tensor.clone().contiguous() for name, tensor in engine.named_weights()}
    form_ranks.run(trial, tmp_path / "out")
    save_file(whole, model / "model.safetensors", metadata={"format": "pt"})
    theirs = peft_s(trial, tmp_path / "out" / "before" / "weights", tmp_path / "theirs")
    assert furthest(weights_of(tmp_path / "out" / "after" / "weights"), theirs) <= 1e-5
    assert checkpoint_bytes(tmp_path / "out" / "after") == checkpoint_bytes(tmp_path / "out" / "resumed")


@pytest.mark.parametrize("lora", [DORA, Lora(rank=4, alpha=8, targets=("embed_tokens", "q_proj"))])
def test_passes_of_one_s_own_take_both(trials, tmp_path, lora):
    model = trials["qwen3-megatron-tp2"][0].model
    rank = TrainerRank(MegatronEngine(model, Layout(), "float32"))
    rank.create_adapter("run", lora, seed=3)
    row = random_rows([30], seed=4)[0]
    for step in range(2):
        (found,) = rank.forward([ForwardInput(row.ids, target_logprobs=True, adapter="run")])
        if step == 0:
            rank.backward(-found.target_logprob_P.sum())
            before = rank.snapshot("run").tensors
            rank.optim_step(Adam(), 1e-2, 1.0, adapters=["run"])
    after = rank.snapshot("run")
    assert all(not torch.equal(after.tensors[n], before[n]) for n in before if n.endswith(("vector", "embedding_A")))
    after.write(tmp_path)
    expected = logprobs_in_transformers(in_peft(model, tmp_path), [Row(row.ids, [1.0] * 30)])
    assert (found.target_logprob_P - expected).abs().max() <= 1e-5
