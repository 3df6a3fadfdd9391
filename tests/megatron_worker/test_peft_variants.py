"""Folders that PEFT itself writes, one for each thing that it does: computed as PEFT does, or refused by the field."""

import dataclasses
import json
import warnings

import pytest
import torch

from longshore.training import Layout, Lora
from megatron_worker.engine import Outputs
from megatron_worker.megatron.engine import MegatronEngine
from shared.errors import InvalidInput
from shared.models.peft import config_of, lora_of, read_config
from tests.megatron_worker.rows import bin_of, random_rows

ROWS = random_rows([31])
TARGETS = ["q_proj", "v_proj", "down_proj"]


def peft_folder(model, folder, **fields):
    """What PEFT writes of an adapter after a step of training, and the log-probabilities that it gives when loaded."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([ROWS[0].ids])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(model)
        config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | fields)
        trained = get_peft_model(base, config)
        optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
        trained(ids, labels=ids).loss.backward()
        optimizer.step()
        trained.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(model)
        loaded = PeftModel.from_pretrained(again, folder).eval()
    with torch.no_grad():
        logprob = loaded(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprob[torch.tensor(ROWS[0].weights)[1:] > 0]


def ours(model, folder):
    engine = MegatronEngine(model, Layout(), "float32")
    engine.load_adapter("theirs", folder, None, trainable=False)
    with torch.no_grad():
        return engine.forward(bin_of(ROWS), Outputs()).logprob_N


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": False, "inference_mode": False},
        {"use_rslora": True},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1.*": 2}},
        {"layers_to_transform": [1]},
        {"layers_to_transform": 0, "layers_pattern": "layers"},
        {"target_modules": ["self_attn.q_proj", "layers.1.mlp.down_proj"]},
        {"target_modules": r"(?:.*?(?:language|text|model).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bx)"},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "layers_to_transform": [0]},
    ],
    ids=str,
)
def test_what_is_computed_is_what_peft_computes(model, tmp_path, fields):
    expected = peft_folder(model, tmp_path / "theirs", **fields)
    assert (ours(model, tmp_path / "theirs") - expected).abs().max() <= 1e-5


def variants():
    from peft import KasaConfig, MontecloraConfig, VeloraConfig

    return {
        "pissa": ("init_lora_weights", {"init_lora_weights": "pissa"}),
        "pissa, fast": ("init_lora_weights", {"init_lora_weights": "pissa_niter_4"}),
        "olora": ("init_lora_weights", {"init_lora_weights": "olora"}),
        "mica": ("init_lora_weights", {"init_lora_weights": "mica"}),
        "alora": ("alora_invocation_tokens", {"alora_invocation_tokens": ROWS[0].ids[10:12]}),
        "kasa": ("kasa_config", {"kasa_config": KasaConfig()}),
        "monteclora": ("monteclora_config", {"monteclora_config": MontecloraConfig()}),
        "velora": ("velora_config", {"velora_config": VeloraConfig()}),
        "modules": ("modules_to_save", {"modules_to_save": ["lm_head"]}),
        "tokens": ("trainable_token_indices", {"trainable_token_indices": [5, 6]}),
        "biases": ("bias", {"bias": "all"}),
        "left out": ("exclude_modules", {"exclude_modules": ["model.layers.0.self_attn.q_proj"]}),
    }


@pytest.mark.parametrize("name", variants())
def test_what_is_not_computed_is_refused_by_its_field(model, tmp_path, name):
    field, fields = variants()[name]
    folder = tmp_path / "theirs"
    peft_folder(model, folder, **fields)
    with pytest.raises(InvalidInput, match=f"{field} = .* cannot be used") as refused:
        read_config(folder)  # the worker's
    assert "adapter_config.json" in str(refused.value)
    with pytest.raises(InvalidInput, match=field):
        lora_of(json.loads((folder / "adapter_config.json").read_text()), "place")  # where a run is submitted
    with pytest.raises(InvalidInput, match=field):
        ours(model, folder)


# Of each field of PEFT's LoraConfig: a value that is not the default, and whether the computation is the same with it.
HARMLESS = {
    "task_type": "SEQ_CLS",
    "auto_mapping": {"parent_library": "x"},
    "peft_version": "9",
    "base_model_name_or_path": "x/y",
    "revision": "main",
    "inference_mode": True,
    "lora_dropout": 0.5,
    "megatron_core": "x",
    "qalora_group_size": 8,
    "runtime_config": {"ephemeral_gpu_offload": True},
    "corda_config": {"x": 1},
    "eva_config": {"x": 1},
    "loftq_config": {"x": 1},
    "lora_ga_config": {"x": 1},
    "init_lora_weights": "eva",
}
READ = {"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern"}
READ |= {"layers_to_transform", "layers_pattern", "use_dora"}
LOADING_CHANGES_THE_BASE = ["pissa", "olora", "corda", "loftq", "lora_ga", "mica", "something_new"]


def test_every_field_of_peft_is_read_harmless_or_refused():
    from peft import LoraConfig

    plain = config_of(Lora(rank=4, alpha=8))
    whole = {n: list(v) if isinstance(v, set) else v for n, v in LoraConfig().to_dict().items()} | plain
    assert lora_of(whole, "place") == Lora(rank=4, alpha=8)  # PEFT's defaults ask for nothing more
    for field in (field.name for field in dataclasses.fields(LoraConfig)):
        if field in READ:
            continue
        if field in HARMLESS:
            lora_of(whole | {field: HARMLESS[field]}, "place")
            continue
        for value in (True, "x", {"x": 1}, [1]):
            with pytest.raises(InvalidInput, match=f"{field} = .* cannot be used"):
                lora_of(whole | {field: value}, "place")
    for init in LOADING_CHANGES_THE_BASE:
        with pytest.raises(InvalidInput, match="init_lora_weights"):
            lora_of(whole | {"init_lora_weights": init}, "place")


def test_a_field_of_a_peft_to_come_is_refused_once_it_is_on():
    plain = config_of(Lora())
    lora_of(plain | {"use_next": False, "next_config": None}, "place")
    with pytest.raises(InvalidInput, match=r"next_config = \{'x': 1\} cannot be used: only plain LoRA"):
        lora_of(plain | {"next_config": {"x": 1}}, "place")
