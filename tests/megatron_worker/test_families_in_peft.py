"""What is saved of each family is what PEFT computes when it loads it; what PEFT saves of it is read so, or refused."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, conversion_mapping

from activities.publishing.publish import REGISTERING
from longshore.training import Lora
from shared.errors import InvalidInput
from shared.families import FAMILIES
from shared.models.peft import config_of, read_config
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import EXPERTS_BESIDE, bin_of, distinct_model, model_with_tower, random_rows
from tests.megatron_worker.scores import logprobs, logprobs_in_transformers

WITH_EXPERTS = "gemma4 with experts"
STEPS = [[random_rows([20, 31], seed=seed)] for seed in range(2)]
ROWS = random_rows([40, 17], seed=9)
MLPS = ("gate_proj", "up_proj", "down_proj")
FORMS = {
    "default": Lora(rank=4, alpha=8),
    "experts alone": Lora(rank=4, alpha=8, targets=MLPS),
    "one stack": Lora(rank=4, alpha=8, targets=("o_proj", "down_proj")),
    "gate and up": Lora(rank=4, alpha=8, targets=("gate_proj", "up_proj")),
    "stabilized, with dropout": Lora(rank=4, alpha=9, rank_stabilized=True, dropout=0.25),
    "a layer": Lora(rank=4, alpha=8, layers=(1,)),
    "ranks beside": Lora(rank=4, alpha=8, rank_pattern={"o_proj": 2}, alpha_pattern={"self_attn.*": 5}),
    "a pattern of all": Lora(rank=4, alpha=8, target_pattern=r".*\.mlp\..*_proj|.*\.1\..*o_proj"),
    "a pattern of experts": Lora(rank=4, alpha=8, target_pattern=r".*layers\.1\.mlp\.experts\.\d\..*_proj"),
    "a pattern of others": Lora(
        rank=4, alpha=8, target_pattern=r".*mlp\.shared_experts?\.(gate|up|down)_proj|.*o_proj"
    ),
}
STACKED: tuple[str, ...] = ("qwen3_moe", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite")
CASES: list[tuple[str, str]] = [(family, "default") for family in (*FAMILIES, WITH_EXPERTS)]
OF_STACKS = [(family, form) for family in STACKED for form in FORMS if form != "default"]
OF_STACKS += [("qwen3_moe", "in fsdp"), ("qwen3_5_moe", "with a tower")]


def made(folder: Path, family: str) -> Path:
    if family == WITH_EXPERTS:
        return distinct_model(folder, "gemma4", config=EXPERTS_BESIDE)
    return distinct_model(folder, family, tied=family.startswith("gemma"))


def in_peft(model, weights, kind=AutoModelForCausalLM) -> torch.Tensor:
    loaded = PeftModel.from_pretrained(kind.from_pretrained(model, dtype=torch.float32), weights)
    return logprobs_in_transformers(loaded.eval(), ROWS)


@pytest.mark.parametrize(("family", "form"), [*drawn(CASES, 1), *drawn(OF_STACKS, 2, [("qwen3_5_moe", "a layer")])])
def test_what_is_trained_is_what_peft_loads(tmp_path, monkeypatch, family, form):
    kind = AutoModelForCausalLM
    if form == "with a tower":  # as docs/models.md and the adapter's README.md say
        known = conversion_mapping._checkpoint_conversion_mapping_cache
        monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", dict(known))
        exec(REGISTERING)
        model, kind = model_with_tower(tmp_path, family)[1], AutoModelForImageTextToText
    else:
        model = made(tmp_path / "model", family)
    engine, lora = start("fsdp" if form == "in fsdp" else "megatron", model), FORMS.get(form, FORMS["default"])
    engine.add_adapter("run", lora, seed=3)
    train(engine, STEPS, learning_rate=3e-2)
    engine.save(tmp_path / "saved")
    weights, expected = tmp_path / "saved" / "weights", logprobs(engine, bin_of(ROWS))
    assert (in_peft(model, weights, kind) - expected).abs().max() <= 1e-5

    # It is read back as the same adapter, and gone on from.
    found = read_config(weights, lora)
    assert config_of(found.model_copy(update={"targets": lora.targets})) == config_of(lora)
    engine.load_adapter("again", weights, lora, trainable=True)
    assert torch.equal(logprobs(engine, bin_of(ROWS)), expected)
    engine.set_adapter(None)
    assert (logprobs(engine, bin_of(ROWS)) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(("family", "form"), drawn([(family, f) for family in STACKED for f in ("names", "all")], 1))
def test_what_peft_saves_of_stacked_experts_is_refused_by_its_field(tmp_path, family, form):
    model = made(tmp_path / "model", family)
    targets = "all-linear" if form == "all" else ["o_proj", "mlp.experts.gate_proj", "up_proj", "down_proj"]
    stacks = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **stacks)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(tmp_path / "theirs")
    with pytest.raises(InvalidInput, match=r"target_parameters = .* cannot be used"):
        start("megatron", model).load_adapter("theirs", tmp_path / "theirs", None, trainable=False)
