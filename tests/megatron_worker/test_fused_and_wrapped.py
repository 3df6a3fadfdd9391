"""Phi-3 and Phi-4, whose files hold several linears as one; and Mistral's decoder within a model that reads images."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from longshore.training import Layout, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder
from shared.errors import InvalidInput
from shared.models.merging import Merger
from shared.models.peft import WEIGHTS, read_config
from tests.megatron_worker.driving import ADAM, LEARNING_RATE, train
from tests.megatron_worker.engines import ENGINES, start
from tests.megatron_worker.rows import bin_of, distinct_model, model_with_tower, random_rows, reference_steps
from tests.megatron_worker.scores import logprobs, logprobs_by_steps, logprobs_in_transformers

STEPS = [random_rows([40, 17, 60, 8], seed=seed) for seed in range(3)]
ROWS = random_rows([40, 17], seed=9)
KINDS = {"phi3": AutoModelForCausalLM, "mistral3": AutoModelForImageTextToText}
OWN = {"phi3": ("qkv_proj", "gate_up_proj", "o_proj", "down_proj"), "mistral3": ("q_proj", "v_proj", "up_proj")}


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mistral3":
        return request.param, model_with_tower(folder, "mistral")[1]
    return request.param, distinct_model(folder / "model", "phi3", tied=False)


def loaded(model: tuple[str, Path], folder: Path | None = None):
    return KINDS[model[0]].from_pretrained(folder or model[1], dtype=torch.float32)


def furthest(*logprob: torch.Tensor) -> float:
    return float((logprob[0] - logprob[1]).abs().max())


def history_of(driven, rate: float) -> list[tuple[float, float]]:
    return train(driven, [[rows[:2], rows[2:]] for rows in STEPS], learning_rate=rate)


def apart(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    """The furthest of losses, and of norms of gradients, relative."""
    return float((torch.tensor(found) / torch.tensor(expected) - 1).abs().max())


def merged(base: Path, adapter: Path, target: Path) -> Path:
    shutil.copytree(base, target)
    with (adapter / WEIGHTS).open("rb") as weights:
        merger = Merger.of(read_config(adapter), weights, WEIGHTS)
    with (target / "model.safetensors").open("wb") as file:
        merger.merge(io.BytesIO((base / "model.safetensors").read_bytes()), file, "model.safetensors")
    merger.check_used(WEIGHTS)
    return target


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_is_trained_saved_and_merged_as_by_peft(model, tmp_path, engine):
    driven = start(engine, model[1])
    driven.add_adapter("run", Lora(rank=4, alpha=8, targets=(*OWN[model[0]], "lm_head")), seed=3)
    driven.save(tmp_path / "fresh")
    reference = PeftModel.from_pretrained(loaded(model), tmp_path / "fresh" / "weights", is_trainable=True)
    expected = reference_steps(reference, STEPS, LEARNING_RATE, ADAM.weight_decay, ADAM.clip_norm)
    assert apart(history_of(driven, LEARNING_RATE), expected) <= 1e-5
    driven.save(tmp_path / "saved")
    theirs = logprobs_in_transformers(reference.eval(), ROWS)
    assert furthest(logprobs(driven, bin_of(ROWS)), theirs) <= 1e-4
    again = PeftModel.from_pretrained(loaded(model), tmp_path / "saved" / "weights").eval()
    assert furthest(logprobs(driven, bin_of(ROWS)), logprobs_in_transformers(again, ROWS)) <= 1e-5

    # Merged it is of the layout that was read, and computes the same.
    folder = merged(model[1], tmp_path / "saved" / "weights", tmp_path / "merged")
    before, after = (load_file(each / "model.safetensors") for each in (model[1], folder))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    assert furthest(logprobs(start(engine, folder), bin_of(ROWS)), logprobs(driven, bin_of(ROWS))) <= 1e-4
    assert furthest(logprobs_in_transformers(loaded(model, folder), ROWS), logprobs(driven, bin_of(ROWS))) <= 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_that_peft_has_written_is_read(model, tmp_path, engine):
    targets = rf".*language_model.*\.({'|'.join(OWN[model[0]])})" if model[0] == "mistral3" else list(OWN[model[0]])
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    theirs = get_peft_model(loaded(model), config)
    theirs.save_pretrained(tmp_path / "theirs")
    driven = start(engine, model[1])
    before = logprobs(driven, bin_of(ROWS))
    driven.load_adapter("theirs", tmp_path / "theirs", None, trainable=False)
    driven.set_adapter("theirs")
    found = logprobs(driven, bin_of(ROWS))
    assert furthest(found, logprobs_in_transformers(theirs.eval(), ROWS)) <= 1e-5 < furthest(found, before)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_weight_is_trained_and_saved_in_the_layout_that_was_read(model, tmp_path, engine):
    driven = start(engine, model[1], "full")
    reference = loaded(model)
    for name, weight in reference.named_parameters():
        weight.requires_grad_("vision_tower" not in name and "multi_modal" not in name)
    expected = reference_steps(reference, STEPS, 3e-4, ADAM.weight_decay, ADAM.clip_norm)
    assert apart(history_of(driven, 3e-4), expected) <= 1e-5
    driven.save(tmp_path / "saved")
    before, after = (load_file(each / "model.safetensors") for each in (model[1], tmp_path / "saved" / "weights"))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {name for name in before if name.startswith(("vision_tower.", "multi_modal_projector."))}
    with torch.no_grad():
        theirs = logprobs_in_transformers(reference.eval(), ROWS)
    assert furthest(logprobs_in_transformers(loaded(model, tmp_path / "saved" / "weights"), ROWS), theirs) <= 1e-4


def test_the_sampler_draws_by_the_trainer_s_numbers(model, tmp_path):
    driven = start("megatron", model[1])
    decoder = Decoder(model[1], torch.float32, torch.device("cpu"))
    row = random_rows([60])[0]
    expected = logprobs(driven, bin_of([dataclasses.replace(row, weights=[0.0] + [1.0] * 59)]))
    assert furthest(logprobs_by_steps(decoder, row.ids, range(20, 50), {}), expected[19:49]) <= 1e-5


def changed(folder: Path, target: Path, **settings: object) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | settings))
    return target


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("part", [1.0, 0.75])
def test_longrope_of_phi_is_that_of_transformers(tmp_path, engine, part):
    """As Phi-4-mini's file has it: what it was trained on stands beside the scaling, not in it."""
    size = int(16 * part) // 2
    scaling = {"type": "longrope", "short_factor": [1.0 + n / 4 for n in range(size)], "long_factor": [9.0] * size}
    more = {"rope_theta": 1e4, "partial_rotary_factor": part, "max_position_embeddings": 8192, "rope_parameters": None}
    plain = distinct_model(tmp_path / "plain", "phi3", tied=False)
    folder = changed(plain, tmp_path / "long", **more, rope_scaling=scaling, original_max_position_embeddings=700)
    rows = random_rows((90, 2, 700, 33))
    reference = AutoModelForCausalLM.from_pretrained(folder)
    driven = start(engine, folder)
    assert furthest(logprobs(driven, bin_of(rows)), logprobs_in_transformers(reference, rows)) <= 1e-5
    assert furthest(logprobs(driven, bin_of(rows)), logprobs(start(engine, plain), bin_of(rows))) > 1e-3
    with pytest.raises(InvalidInput, match=r"a sequence has 701 tokens.*of up to 700"):
        logprobs(driven, bin_of(random_rows((701,))))


def test_a_window_of_phi_is_of_all_layers(tmp_path):
    folder = changed(distinct_model(tmp_path / "model", "phi3"), tmp_path / "windowed", sliding_window=20)
    rows = random_rows((90, 33))
    reference = AutoModelForCausalLM.from_pretrained(folder)
    assert (
        furthest(logprobs(start("megatron", folder), bin_of(rows)), logprobs_in_transformers(reference, rows)) <= 1e-5
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported; these are: default"),
        ({"rope_parameters": None, "partial_rotary_factor": 0.2}, "rotates 3 of 16 dimensions"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"qk_norm": True}, "qk_norm"),
    ],
    ids=str,
)
def test_what_phi_does_not_compute_is_refused(tmp_path, settings, words):
    folder = changed(distinct_model(tmp_path / "model", "phi3"), tmp_path / "changed", **settings)
    with pytest.raises(InvalidInput, match=words):
        MegatronEngine(folder, Layout(), "float32")


def test_what_is_no_mistral_within_is_refused(tmp_path):
    _, whole = model_with_tower(tmp_path, "mistral")
    text = json.loads((whole / "config.json").read_text())["text_config"]
    for inner, words in (("ministral3", "which needs queries whose scale grows"), ("llama", "of the family mistral")):
        folder = changed(whole, tmp_path / inner, text_config=text | {"model_type": inner})
        with pytest.raises(InvalidInput, match=f"text_config: its model_type is '{inner}'.*{words}"):
            MegatronEngine(folder, Layout(), "float32")
    tensors = load_file(whole / "model.safetensors")
    folder = changed(whole, tmp_path / "without")
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"the weights lack the tensor language_model.lm_head.weight"):
        MegatronEngine(folder, Layout(), "float32")
