"""Forms of LoRA that PEFT has: trained as PEFT trains them, read and written as it does, and sampled with."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longshore.layout import Layout
from longshore.training import Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.adapters import load_adapter
from megatron_worker.sampler.decoder import Decoder
from shared.errors import InvalidInput
from shared.models.peft import config_of, read_config
from tests.megatron_worker.driving import ADAM, LEARNING_RATE, train
from tests.megatron_worker.engines import ENGINES
from tests.megatron_worker.rows import Row, bin_of, distinct_model, random_rows, reference_steps
from tests.megatron_worker.scores import logprobs, logprobs_by_steps, logprobs_in_transformers

STEPS = [random_rows([20, 31, 12], seed=seed) for seed in range(10)]
FORMS = {
    "regex": Lora(rank=4, alpha=8, target_pattern=r"model\.layers\.(0|1)\..*(q|down)_proj"),
    "layers": Lora(rank=4, alpha=8, layers=(1,)),
    "patterns": Lora(
        rank=4,
        alpha=8,
        rank_pattern={"q_proj": 2, r"layers\.0\.mlp\..*": 6},
        alpha_pattern={"v_proj": 3, r"layers\.1\..*_proj": 5},
        rank_stabilized=True,
    ),
}
ON_FSDP = ("regex", "layers", "patterns")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return distinct_model(tmp_path_factory.mktemp("model"), "qwen3", tied=False)


def in_peft(model: Path, weights: Path, is_trainable: bool = False):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model), weights, is_trainable=is_trainable
    ).train(is_trainable)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert set(ours) == set(theirs)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def trained(engine, lora: Lora, folder: Path):
    """The adapter before and after ten steps, as folders."""
    engine.add_adapter("run", lora, seed=3)
    engine.save(folder / "before")
    train(engine, [[rows[:2], rows[2:]] for rows in STEPS])
    engine.save(folder / "after")
    return folder / "before" / "weights", folder / "after" / "weights"


@pytest.mark.parametrize(
    ("name", "engine"), [*((name, "megatron") for name in FORMS), *((name, "fsdp") for name in ON_FSDP)]
)
def test_ten_steps_are_peft_s_and_the_sampler_s(model, tmp_path, name, engine):
    ours = ENGINES[engine](model, Layout(), "float32")
    before, after = trained(ours, FORMS[name], tmp_path)
    reference = in_peft(model, before, is_trainable=True)
    reference_steps(reference, STEPS, LEARNING_RATE, ADAM.weight_decay, ADAM.clip_norm)
    reference.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    rows = random_rows([40, 17], seed=9)
    expected = logprobs_in_transformers(reference.eval(), rows)
    assert furthest(weights_of(after), weights_of(tmp_path / "theirs")) <= 1e-5
    assert (logprobs(ours, bin_of(rows)) - expected).abs().max() <= 1e-5
    assert (logprobs_in_transformers(in_peft(model, after), rows) - expected).abs().max() <= 1e-5
    ours.set_adapter(None)
    assert (logprobs(ours, bin_of(rows)) - expected).abs().max() > 1e-2

    # What PEFT has written of it is read as the same settings, loaded, and sampled with, as PEFT reads it: it sorts
    # patterns when it writes them, and takes the first that matches.
    assert config_of(read_config(tmp_path / "theirs")) == config_of(read_config(after))
    reference = in_peft(model, tmp_path / "theirs")
    expected = logprobs_in_transformers(reference, rows)
    ours.load_adapter("theirs", tmp_path / "theirs", None, trainable=False)
    assert (logprobs(ours, bin_of(rows)) - expected).abs().max() <= 1e-5
    decoder = Decoder(model, torch.float32, torch.device("cpu"))
    adapter = load_adapter("theirs", tmp_path / "theirs", decoder)
    ids = rows[0].ids
    whole = logprobs_in_transformers(reference, [Row(ids, [1.0] * len(ids))])
    drawn = logprobs_by_steps(decoder, ids, range(10, 30), adapter.lora_weights)
    assert (drawn - whole[9:29]).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("settings", "place", "words"),
    [
        ({"target_pattern": r".*\.mlp"}, "target_pattern", "model.layers.0.mlp, too, which is no linear"),
        ({"target_pattern": "x_proj"}, "target_pattern", "no linear of that name"),
        ({"layers": [0, 7]}, "layers", "nothing to adapt in layer 7"),
        ({"rank_pattern": {"q_prj": 2}}, "rank_pattern", "rank_pattern q_prj"),
        ({"targets": ["q_proj"], "alpha_pattern": {"v_proj": 2}}, "alpha_pattern", "alpha_pattern v_proj"),
    ],
)
def test_what_a_model_has_not_is_refused_by_its_field(model, settings, place, words):
    with pytest.raises(InvalidInput, match=words) as refused:
        MegatronEngine(model, Layout(), "float32").add_adapter("run", Lora.model_validate(settings), seed=0)
    assert refused.value.place == place
