"""Adapters are PEFT's: it loads ours, we load its, and neither of us accepts what is damaged or different."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.training import LINEARS, Layout, Lora
from megatron_worker.engine import Outputs
from megatron_worker.megatron.engine import MegatronEngine
from shared.errors import InvalidInput
from tests.megatron_worker.driving import accumulate, train
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows

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


def logprobs(engine):
    with torch.no_grad():
        return engine.forward(bin_of(ROWS), Outputs()).logprob_N


@pytest.mark.parametrize("targets", [LINEARS, ("q_proj", "v_proj"), ("k_proj",), ("up_proj", "o_proj")])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_peft_gives_the_engine_s_logits(tmp_path, family, targets):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = distinct_model(tmp_path / "model", family, tied=family == "qwen3")
    engine = MegatronEngine(folder, Layout(), "float32")
    before = logprobs(engine)
    engine.add_adapter("run", Lora(rank=3, alpha=5, targets=targets), seed=1)
    train(engine, [[ROWS]] * 3, learning_rate=1e-2)
    engine.save(tmp_path / "saved")
    reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "saved" / "weights")
    expected = []
    with torch.no_grad():
        for row in ROWS:
            scores = reference(torch.tensor([row.ids])).logits[0, :-1].log_softmax(-1)
            picked = scores.gather(1, torch.tensor(row.ids)[1:, None])[:, 0]
            expected.append(picked[torch.tensor(row.weights)[1:] > 0])
    assert (logprobs(engine) - torch.cat(expected)).abs().max() <= 1e-5
    assert (logprobs(engine) - before).abs().max() > 1e-2


def test_names_and_shapes_are_those_that_peft_writes(model, trained, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(LINEARS))
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(tmp_path)
    theirs = load_file(tmp_path / "adapter_model.safetensors")
    ours = load_file(trained / "weights" / "adapter_model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}


def test_an_adapter_that_peft_wrote_is_loaded(model, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    reference = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).eval()
    reference.save_pretrained(tmp_path)
    engine = MegatronEngine(model, Layout(), "float32")
    engine.load_adapter("theirs", tmp_path, None, trainable=False)
    ids = torch.tensor([ROWS[0].ids])
    with torch.no_grad():
        expected = reference(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        logprob_N = engine.forward(bin_of(ROWS[:1]), Outputs()).logprob_N
    assert (logprob_N - expected[torch.tensor(ROWS[0].weights)[1:] > 0]).abs().max() <= 1e-5


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


def test_the_seed_decides(model, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        engine = MegatronEngine(model, Layout(), "float32")
        engine.add_adapter("run", LORA, seed)
        engine.save(tmp_path / name)
    a, b, c = ((tmp_path / n / "weights" / "adapter_model.safetensors").read_bytes() for n in "abc")
    assert a == b != c


def test_a_loaded_adapter_is_trained_on(model, trained, tmp_path):
    """From the published weights, with a cold optimizer."""
    engine = MegatronEngine(model, Layout(), "float32")
    engine.load_adapter("run", trained / "weights", LORA, trainable=True)
    engine.save(tmp_path)
    adapter = "weights/adapter_model.safetensors"
    assert (tmp_path / adapter).read_bytes() == (trained / adapter).read_bytes()
    first = accumulate(engine, [ROWS])
    engine.zero_grad()
    assert train(engine, [[ROWS]] * 3)[-1][0] < first


def test_two_slots_do_not_touch_each_other(model, trained):
    engine = MegatronEngine(model, Layout(), "float32")
    base = logprobs(engine)
    engine.load_adapter("fixed", trained / "weights", None, trainable=False)
    fixed = logprobs(engine)
    engine.add_adapter("run", LORA, seed=9)
    assert torch.equal(logprobs(engine), base)
    train(engine, [[ROWS]] * 2)
    engine.set_adapter("fixed")
    assert torch.equal(logprobs(engine), fixed)
    with pytest.raises(AssertionError, match="nothing is being trained"):
        accumulate(engine, [ROWS])


def test_bfloat16_keeps_masters_that_are_saved(model, trained, tmp_path):
    engine = MegatronEngine(model, Layout(), "bfloat16")
    engine.load_adapter("run", trained / "weights", LORA, trainable=True)
    engine.save(tmp_path)
    adapter = "weights/adapter_model.safetensors"
    assert (tmp_path / adapter).read_bytes() == (trained / adapter).read_bytes()


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
