"""Dense models of families that are not ours, on the FSDP engine: exact, or refused by what the probe finds."""

import pytest
import torch

from longshore.training import Layout
from megatron_worker.fsdp import model as fsdp_model
from megatron_worker.fsdp.engine import FsdpEngine
from megatron_worker.fsdp.model import probe
from megatron_worker.mixers.tree_attention import plan_forest
from megatron_worker.sampler.decoder import Decoder
from shared.errors import InvalidInput
from tests.depth import drawn
from tests.megatron_worker.driving import ADAM, train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import bin_of, random_rows, reference_steps
from tests.megatron_worker.scores import logprobs, logprobs_by_steps, logprobs_in_transformers, transformers_model
from tests.megatron_worker.trees import as_chains, as_one_sequence, trees_beside_chains
from tests.megatron_worker.unknown_models import COMPUTED, unknown_model

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = [random_rows([40, 17, 90, 25, 60, 8], seed=step) for step in range(5)]
RATES = {"lora": 3e-3, "full": 3e-4}


@pytest.fixture(scope="module", params=drawn([*COMPUTED], 2))
def model(request, tmp_path_factory):
    return unknown_model(tmp_path_factory.mktemp(request.param), request.param)


def test_rows_of_a_bin_and_trees_score_as_alone(model, tmp_path):
    driven, rows = start("fsdp", model, "lora"), random_rows((90, 2, 300, 33))
    found = logprobs(driven, bin_of(rows))
    assert (found - logprobs_in_transformers(transformers_model(model), rows)).abs().max() <= 1e-5
    logprob, relative = trees_beside_chains(driven, tmp_path)
    assert logprob <= 1e-5 and relative <= 1e-5


def test_steps_equal_those_of_peft(model, tmp_path):
    from peft import PeftModel

    driven = start("fsdp", model, "lora")
    driven.save(tmp_path / "begin")
    reference = PeftModel.from_pretrained(
        transformers_model(model), tmp_path / "begin" / "weights", is_trainable=True
    ).eval()
    expected = reference_steps(reference, STEPS, RATES["lora"], ADAM.weight_decay, ADAM.clip_norm)
    history = train(driven, [[rows[:2], rows[2:]] for rows in STEPS], learning_rate=RATES["lora"])
    for (loss, norm), (their_loss, their_norm) in zip(history, expected, strict=True):
        assert (loss, norm) == pytest.approx((their_loss, their_norm), rel=1e-5)
    driven.save(tmp_path / "end")
    reloaded = PeftModel.from_pretrained(transformers_model(model), tmp_path / "end" / "weights")
    row = [STEPS[0][2]]
    assert (logprobs(driven, bin_of(row)) - logprobs_in_transformers(reloaded, row)).abs().max() <= 1e-5


def test_full_steps_equal_those_of_torch_and_are_saved_as_transformers_has_them(model, tmp_path):
    reference = transformers_model(model)
    expected = reference_steps(reference, STEPS, RATES["full"], ADAM.weight_decay, ADAM.clip_norm)
    driven = start("fsdp", model, "full")
    history = train(driven, [[rows[:2], rows[2:]] for rows in STEPS], learning_rate=RATES["full"])
    for (loss, norm), (their_loss, their_norm) in zip(history, expected, strict=True):
        assert (loss, norm) == pytest.approx((their_loss, their_norm), rel=1e-5)
    driven.save(tmp_path)
    row = [STEPS[0][2]]
    reloaded = transformers_model(tmp_path / "weights")
    assert (logprobs(driven, bin_of(row)) - logprobs_in_transformers(reloaded, row)).abs().max() <= 1e-5
    again = start("fsdp", model, "full")
    again.load(tmp_path)
    assert torch.equal(logprobs(again, bin_of(row)), logprobs(driven, bin_of(row)))


def test_the_sampler_draws_by_the_same_scores(model):
    row = random_rows([120])[0]
    scored = logprobs(start("fsdp", model), bin_of([row.__class__(row.ids, [0.0] + [1.0] * 119)]))
    decoder = Decoder(model, torch.float32, torch.device("cpu"))
    assert (logprobs_by_steps(decoder, row.ids, range(50, 80), {}) - scored[49:79]).abs().max() <= 1e-5


def test_a_bfloat16_model_passes_well_within_its_bound(model):
    driven = FsdpEngine(model, Layout(), "bfloat16")
    assert probe(driven._model) > 1e-4  # nats: it is not the float32 one
    assert driven._model.dtype == torch.bfloat16


# What is refused.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parents", [as_one_sequence, as_chains])
def test_attention_that_is_not_the_bin_s_is_refused_with_the_numbers(tmp_path, monkeypatch, parents, dtype):
    def planned(parent_T, dtype, window):
        return plan_forest(parents(parent_T), dtype, window=window)

    monkeypatch.setattr(fsdp_model, "plan_forest", planned)
    rule = r"olmo2 cannot be trained by .* differ from those of transformers' model of each alone .* nats, and .* is"
    with pytest.raises(InvalidInput, match=rule):
        FsdpEngine(unknown_model(tmp_path, "olmo2"), Layout(), dtype)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        (
            "recurrent_gemma",
            {"block_types": ["recurrent", "attention"], "lru_width": 64},
            "of packed sequences differ .* by .* nats",
        ),
        ("mamba", {}, "attends by transformers' attention interface"),
        ("gemma2", {}, "its attention takes softcap"),
        ("granite_swa", {}, "its attention takes s_aux"),
        ("phi", {}, "of packed sequences differ"),
        ("olmo2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "longest sequence"),
        ("bloom", {}, "its config.json has no"),
        ("olmoe", {"num_experts": 4}, "it has experts; the nearest is qwen3_moe"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, family, settings, words):
    folder = unknown_model(tmp_path, family, **settings)
    with pytest.raises(InvalidInput, match=f"{family}.*{words}"):
        FsdpEngine(folder, Layout(), "float32")


def test_layers_that_attend_within_chunks_are_refused(tmp_path, monkeypatch):
    from transformers import masking_utils
    from transformers.models.olmo2 import modeling_olmo2

    def chunked(config, **given):
        config.attention_chunk_size = 8
        return masking_utils.create_chunked_causal_mask(config, **given)

    monkeypatch.setattr(modeling_olmo2, "create_causal_mask", chunked)
    with pytest.raises(InvalidInput, match=r"olmo2 .* attend to other tokens than those before"):
        FsdpEngine(unknown_model(tmp_path, "olmo2"), Layout(), "float32")


def test_a_family_that_transformers_has_not_is_refused(tmp_path):
    folder = unknown_model(tmp_path, "olmo2")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"olmo2"', '"nobody"'))
    with pytest.raises(InvalidInput, match=r"nobody cannot be trained by the engine fsdp"):
        FsdpEngine(folder, Layout(), "float32")


def test_the_megatron_engine_takes_none_of_them(tmp_path):
    with pytest.raises(InvalidInput, match=r"'stablelm' is not a known family: .*fsdp"):
        start("megatron", unknown_model(tmp_path, "stablelm"))
