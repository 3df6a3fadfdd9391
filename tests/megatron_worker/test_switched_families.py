"""Granite and OLMo 3, which differ from others by switches; and the lengths that rope scaling leaves computed."""

import json
import shutil

import pytest
import torch

from activities.sampling.client import Sampler
from benchmarks.families import measure
from longshore.layout import Layout
from longshore.training import LINEARS, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder, computes
from megatron_worker.sampler.decoders import open_decoder
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows
from tests.megatron_worker.sampler_process import NAME, running
from tests.megatron_worker.scores import logprobs, logprobs_in_transformers, transformers_model

STEPS = [random_rows([40, 17, 90, 25], seed=step) for step in range(5)]


@pytest.fixture(scope="module", params=drawn(["granite", "olmo3"], 1))
def model(request, tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp(request.param), request.param, tied=False, num_layers=4)


@pytest.mark.parametrize("family", drawn(["granite", "olmo3"], 1))
def test_what_the_page_of_families_measures(tmp_path, family):
    row = measure(family, tmp_path)
    assert max(row[name] for name in ("packed", "tree", "gradient", "sampler")) <= 1e-5
    assert max(row[name] for name in ("lora", "full", "saved")) <= 1e-4


def test_a_trained_adapter_scores_in_peft_as_here(model, tmp_path):
    from peft import PeftModel

    driven = start("megatron", model)
    driven.add_adapter("run", Lora(rank=4, alpha=8, targets=LINEARS), seed=3)
    train(driven, [[rows[:2], rows[2:]] for rows in STEPS])
    driven.save(tmp_path)
    reloaded = PeftModel.from_pretrained(transformers_model(model), tmp_path / "weights")
    row = [STEPS[0][2]]
    assert (logprobs(driven, bin_of(row)) - logprobs_in_transformers(reloaded, row)).abs().max() <= 1e-5


def test_both_decoders_score_prompts_as_the_trainer_does(model):
    (row,) = random_rows((200,))
    row.weights[1:] = [1.0] * 199
    expected = logprobs(MegatronEngine(model, Layout(), "float32"), bin_of([row]))
    for by_transformers in (False, True):
        decoder = open_decoder(model, torch.float32, torch.device("cpu"), by_transformers)
        assert isinstance(decoder, Decoder) == (computes(decoder.architecture) and not by_transformers)
        ids = tuple(row.ids)
        found = torch.tensor(decoder.score(ids, decoder.prefill(ids, {})).logprobs)
        assert (found - expected).abs().max() <= 1e-5


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("granite", {"embedding_multiplier": 12.0}),
        ("granite", {"attention_multiplier": 0.0078125}),
        ("granite", {"residual_multiplier": 0.22}),
        ("granite", {"logits_scaling": 8.0}),
        ("granite", {"embedding_multiplier": None, "logits_scaling": None}),
        ("olmo3", {"sliding_window": 1}),
        ("olmo3", {"layer_types": None}),
        ("olmo3", {"rms_norm_eps": 0.1}),
        ("olmo3", {"rope_parameters": None, "rope_scaling": YARN}),  # as published
        ("olmo3", {"rope_parameters": None, "rope_theta": 100.0}),  # of layers that attend to everything alone
        ("olmo3", {"rope_parameters": {"sliding_attention": YARN}}),
    ],
    ids=str,
)
def test_settings_mean_what_they_do_in_transformers(tmp_path, family, change):
    folder, rows = distinct_model(tmp_path / "model", family, num_layers=4), random_rows((90, 2, 133))
    changed = shutil.copytree(folder, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text()) | change
    config = {name: value for name, value in config.items() if name not in change or value is not None}
    (changed / "config.json").write_text(json.dumps(config))
    found, before = (logprobs(MegatronEngine(each, Layout(), "float32"), bin_of(rows)) for each in (changed, folder))
    assert (found - logprobs_in_transformers(transformers_model(changed), rows)).abs().max() <= 1e-5
    assert (found - before).abs().max() > 1e-3


def test_a_sampler_reads_no_more_than_is_computed(tmp_path):
    folder = distinct_model(tmp_path / "model")
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_parameters": rope, "original_max_position_embeddings": 40}
    (folder / "config.json").write_text(json.dumps(config))
    with running(folder, tmp_path) as ready, Sampler(ready.url, ready.api_key) as sampler:
        assert sampler.models()[NAME].max_model_len == 40
