"""Adapters resolved against a model, in every family as the worker refuses them; and what a run began with."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.models.resolve import (
    HUB_PATTERNS,
    WEIGHTS,
    AdapterRequest,
    Resolve,
    ResolvedAdapter,
    check_weights,
    read_config,
)
from activities.sources.models import locate
from longshore.dataset_runs import DistillRun, DPORun, RewardRun, SFTRun
from longshore.fields import Artifact
from longshore.runs import RLRun
from longshore.training import LINEARS, Lora, ScalarHead, SessionRun
from shared.errors import CorruptArtifact, InvalidInput
from shared.families import FAMILIES, read_architecture, read_model_config
from shared.families import read_config as read_model
from shared.families.model_slices import shape_of
from shared.families.tensor_slices import modules_of
from shared.models.peft import OUTPUT, UNREAD, layer_of, module_of
from shared.models.shape import ModelShape
from shared.runs.start import ModelRequest, ResolvedModel, RLStart, RunStart, SessionStart
from shared.settings import Settings
from shared.storage.artifacts import manifest_of, refer, upload_files
from shared.storage.paths import RunKeys, checkpoint_adapter, published_version, version_claim
from tests.activities.models.resolving import edit, stage
from tests.megatron_worker.rows import distinct_model, model_with_tower
from workflows.training.job_plan import adapter_request

SIZES = {
    **{"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16},
    **{"intermediate_size": 192, "vocab_size": 512},
}


def shape_with(**settings) -> ModelShape:
    return shape_of(read_model_config(SIZES | settings, "config.json"))


SHAPE = shape_with()


def resolve_adapter(config: Settings, uri: str | Path, **wanted) -> ResolvedAdapter:
    request = AdapterRequest(uri=str(uri), tenant="default", **{"shape": SHAPE, **wanted})
    return ActivityEnvironment().run(Resolve(HostContext(config)).resolve_adapter, request)


def adapter_refusal(config: Settings, uri: str | Path, **wanted) -> str:
    with pytest.raises(InvalidInput) as refused:
        resolve_adapter(config, uri, **wanted)
    return str(refused.value)


def test_an_adapter(config, adapter) -> None:
    resolved = resolve_adapter(config, adapter)
    assert resolved.lora == Lora(rank=4, alpha=8, targets=("q_proj", "o_proj"))
    assert stage(config, resolved) == adapter.resolve()


def test_an_adapter_of_experts_has_tensors_for_each(config, tmp_path) -> None:
    sizes = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    experts = shape_with(model_type="qwen3_moe", **sizes)
    tensors = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.up_proj.lora_{side}.weight": np.zeros(shape, "f4")
        for layer in range(2)
        for expert in range(3)
        for side, shape in (("A", (4, 64)), ("B", (32, 4)))
    }
    (tmp_path / "experts").mkdir()
    save_file(tensors, tmp_path / "experts" / "adapter_model.safetensors")
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"], "bias": "none"}
    (tmp_path / "experts" / "adapter_config.json").write_text(json.dumps(lora))
    resolved = resolve_adapter(config, tmp_path / "experts", shape=experts)
    assert resolved.lora == Lora(rank=4, alpha=8, targets=("up_proj",))
    message = adapter_refusal(config, tmp_path / "experts")
    assert "12 tensors; this model and these targets need 4" in message


def test_an_adapter_of_embeddings_that_peft_wrote(config, tiny_model, tmp_path) -> None:
    """With a copy of the model's own, which the worker compares."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=8, target_modules=["q_proj", "embed_tokens"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), lora).save_pretrained(tmp_path / "peft")
    assert resolve_adapter(config, tmp_path / "peft").lora.targets == ("q_proj", "embed_tokens")
    wanted = "embed_tokens of the model has 511 inputs"
    assert wanted in adapter_refusal(config, tmp_path / "peft", shape=SHAPE.model_copy(update={"vocab_size": 511}))
    wanted = "the adapter's targets is ['embed_tokens', 'q_proj']"
    assert wanted in adapter_refusal(config, tmp_path / "peft", lora=Lora(rank=8, alpha=8, targets=("q_proj",)))


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_that_peft_wrote(config, tiny_model, tmp_path, dora) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "down_proj"], use_dora=dora)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), lora).save_pretrained(tmp_path / "peft")
    resolved = resolve_adapter(config, tmp_path / "peft")
    assert resolved.lora == Lora(rank=8, alpha=16, targets=("q_proj", "down_proj"), dora=dora)
    if dora:
        edit(tmp_path / "peft" / "adapter_config.json", use_dora=False)
        assert "lora_magnitude_vector belongs to none of" in adapter_refusal(config, tmp_path / "peft")


def test_an_adapter_with_a_head_goes_on_where_one_is_asked_for(config, tiny_model, tmp_path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForTokenClassification

    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="TOKEN_CLS")
    headed = AutoModelForTokenClassification.from_pretrained(tiny_model, num_labels=2)
    get_peft_model(headed, lora).save_pretrained(tmp_path / "peft")
    head = ScalarHead(names=("good", "true"))
    asked = Lora(rank=8, alpha=16, targets=("q_proj", "down_proj"), head=head)
    assert resolve_adapter(config, tmp_path / "peft", lora=asked).lora == asked
    assert "its head gives scalars (TOKEN_CLS)" in adapter_refusal(config, tmp_path / "peft")
    other = asked.model_copy(update={"head": ScalarHead(names=head.names, per="sequence")})
    assert "head is 2 scalars a token, 2 scalars a sequence" in adapter_refusal(config, tmp_path / "peft", lora=other)


def test_the_order_of_patterns_which_peft_sorts_counts_where_it_makes_a_difference(config, tiny_model, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    ranks, alphas = {"q_proj": 2, "down_proj": 4}, {"q_proj": 3, r"layers.1.self_attn.q_proj": 5}
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "down_proj"], rank_pattern=ranks)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), lora).save_pretrained(tmp_path / "peft")
    asked = Lora.model_validate({"rank": 8, "alpha": 16, "targets": ["q_proj", "down_proj"], "rank_pattern": ranks})
    resolved = resolve_adapter(config, tmp_path / "peft", lora=asked)
    assert [name for name, _ in resolved.lora.rank_pattern] == ["down_proj", "q_proj"]
    edit(tmp_path / "peft" / "adapter_config.json", alpha_pattern=dict(sorted(alphas.items())))
    same = asked.model_copy(update={"alpha_pattern": tuple(sorted(alphas.items()))})
    resolve_adapter(config, tmp_path / "peft", lora=same)
    other = asked.model_copy(update={"alpha_pattern": tuple(alphas.items())})
    message = adapter_refusal(config, tmp_path / "peft", lora=other)
    assert "matches model.layers.1.self_attn.q_proj" in message and "name them in the adapter's order" in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 0}, "adapter_config.json: r = 0 "),
        ({"r": 5}, "does not fit r=5"),
        ({"use_dora": True}, "8 tensors; this model and these targets need 12"),
        ({"use_dora": "x"}, "use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, "q_proj.lora_A.weight has the shape (4, 64), which does not fit r=2"),
        ({"rank_pattern": {"(q": 2}}, "rank_pattern.0.0 = '(q' cannot be used: no regular expression"),
        ({"layers_to_transform": [0]}, "layers.1.self_attn.o_proj.lora_A.weight belongs to none of the adapter's"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": "all-linear"}, "8 tensors; this model and these targets need 28"),
        ({"target_modules": ".*(q"}, "target_modules = '.*(q' cannot be used: no regular expression"),
        ({"target_modules": ["q_proj"]}, "o_proj.lora_A.weight belongs to none of the adapter's target_modules"),
        ({"target_modules": ["q_proj", "o_proj", "v_proj"]}, "8 tensors; this model and these targets need 12"),
    ],
)
def test_an_adapter_that_cannot_be_used_names_its_field(config, adapter, changes, reason) -> None:
    edit(adapter / "adapter_config.json", **changes)
    assert reason in adapter_refusal(config, adapter)


def test_an_adapter_of_another_rank_or_a_deeper_model_is_refused(config, adapter) -> None:
    message = adapter_refusal(config, adapter, lora=Lora(rank=8, alpha=8, targets=("q_proj", "o_proj")))
    assert "the adapter's rank is 4, 8 is asked for" in message
    assert "but the model has 1 layers" in adapter_refusal(config, adapter, shape=shape_with(num_hidden_layers=1))


def test_a_missing_or_truncated_adapter_is_named(config, adapter) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "adapter_model.safetensors: truncated" in adapter_refusal(config, adapter)
    weights.unlink()
    assert "the adapter has no adapter_model.safetensors" in adapter_refusal(config, adapter)
    (adapter / "adapter_config.json").unlink()
    assert "there is no such folder, or it is empty" in adapter_refusal(config, adapter)
    assert "there is no such folder" in adapter_refusal(config, adapter / "gone")


def resolve_for(config: Settings, uri: Path, run_id: str) -> ResolvedModel:
    return ActivityEnvironment().run(
        Resolve(HostContext(config)).resolve_model, ModelRequest(uri=str(uri), tenant="default", run_id=run_id)
    )


def flip_last_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_run_goes_on_with_the_model_that_it_began_with_alone(config, model) -> None:
    began = resolve_for(config, model, "r1")
    (model / "model.safetensors").touch()
    assert resolve_for(config, model, "r1").model.sha256 == began.model.sha256
    flip_last_byte(model / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"that the run began with: model\.safetensors changed") as refused:
        resolve_for(config, model, "r1")
    assert str(refused.value).startswith(f"{model}: this model is not")
    assert resolve_for(config, model, "r2").model.sha256 != began.model.sha256, "a new run may begin with it"
    flip_last_byte(model / "model.safetensors")
    assert resolve_for(config, model, "r1").model.sha256 == began.model.sha256, "put back"
    edit(model / "config.json", rope_theta=5e5)
    (model / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(InvalidInput, match=r"config\.json.* changed since; put the former files back"):
        resolve_for(config, model, "r1")


@pytest.mark.parametrize("role", ["initial_adapter", "reference"])
def test_a_run_goes_on_with_the_adapters_that_it_began_with_alone(config, adapter, role) -> None:
    resolve_adapter(config, adapter, run_id="r1", role=role)
    flip_last_byte(adapter / "adapter_model.safetensors")
    message = adapter_refusal(config, adapter, run_id="r1", role=role)
    name = role.replace("_", " ")
    assert f"this {name} is not the one that the run began with: adapter_model.safetensors changed" in message
    resolve_adapter(config, adapter, run_id="r2", role=role)


def test_a_damaged_record_of_the_beginning_is_told_as_such(config, model) -> None:
    resolve_for(config, model, "r1")
    (config.root_path / "store" / "runs" / "r1" / "began_with" / "model.json").write_bytes(b"{")
    with pytest.raises(CorruptArtifact, match=r"began_with/model\.json: the file is damaged"):
        resolve_for(config, model, "r1")


RUNS = (SFTRun, DPORun, DistillRun, RewardRun, RLRun, SessionRun)


def other_weights(folder: Path) -> Path:
    """Change a model's weights, not their shapes."""
    flip_last_byte(folder / "model.safetensors")
    return folder


def on(config: Settings, model: Path | str, base: Path, **wanted) -> dict:
    """Return what a request has of the model that an adapter is put on; `base`: the model's folder."""
    request = ModelRequest(uri=str(base), tenant="default")
    resolved = ActivityEnvironment().run(Resolve(HostContext(config)).resolve_model, request)
    return {"base": resolved.model, "model": str(model), **wanted}


def test_an_adapter_of_another_base_that_can_be_read_is_refused_by_its_weights_and_tokenizer(
    config, model, adapter, tmp_path
):
    copied = Path(shutil.copytree(model, tmp_path / "copied"))
    other = other_weights(Path(shutil.copytree(model, tmp_path / "other")))
    tokenizer = Path(shutil.copytree(model, tmp_path / "tokenizer"))
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    edit(tokenizer / "tokenizer.json", added_tokens=content["added_tokens"][:-1])
    (copied / "chat_template.jinja").write_text("{{ messages }}")  # what else lies there is no matter
    here = on(config, model, model)
    for named in (copied, model, f"{model}/", tmp_path / "gone", "/etc", "base", "a\0b", None, ""):
        edit(adapter / "adapter_config.json", base_model_name_or_path=named and str(named))
        resolve_adapter(config, adapter, **here)
    for named, what in ((other, "model.safetensors"), (tokenizer, "tokenizer.json")):
        edit(adapter / "adapter_config.json", base_model_name_or_path=str(named))
        message = adapter_refusal(config, adapter, **here)
        assert f"made on {named}, whose {what} is another, and not on {model}" in message
        assert "set allow_other_base to insist" in message
        resolve_adapter(config, adapter, **here, allow_other_base=True)
        resolve_adapter(config, adapter)


@pytest.mark.parametrize(
    ("named", "model_named", "is_other"),
    [
        ("Org/One", "org/one", False),
        ("Org/One", "org/one@main", False),
        ("Org/One", "mirror/One", False),  # whose repository is of the same name
        ("Org/One", "Org/Two", True),
        ("Org/One", "/cache/hub/models--Org--One/snapshots/0123", False),
        ("/other/hub/models--Org--Two/snapshots/0123", "Org/One", True),
        ("Org/One", "/models/base", False),  # a folder's name says nothing
        ("/models/base", "Org/One", False),
        ("/models/one", "/models/two", False),
        ("", "Org/One", False),
    ],
)
def test_where_hashes_are_not_known_names_of_the_hub_are_compared(config, model, adapter, named, model_named, is_other):
    edit(adapter / "adapter_config.json", base_model_name_or_path=named)
    asked = on(config, model_named, model)
    if not is_other:
        resolve_adapter(config, adapter, **asked)
        return
    assert f"made on {named}, which is another model, and not on {model_named}" in adapter_refusal(
        config, adapter, **asked
    )


@pytest.mark.parametrize("kind", ["version", "checkpoint"])
def test_a_published_adapter_is_of_the_base_that_its_run_found(config, model, adapter, kind):
    """Also where that folder has another model now, and whatever the adapter's own configuration says."""
    store, began = HostContext(config).store, on(config, model, model, run_id="r1")
    resolve_for(config, model, "r1")
    edit(adapter / "adapter_config.json", base_model_name_or_path="Org/Other")
    files = manifest_of(adapter)
    if kind == "checkpoint":
        weights = upload_files(store, f"{RunKeys('r1').checkpoints}/weights", adapter, files)
        root = files.model_copy(update={"root": weights.uri})
        published = refer(store, checkpoint_adapter("default", "r1", "a" * 64), root)
    else:
        store.put_bytes(version_claim("default", "adapters", "mine", 1), b'{"run_id": "r1"}')
        published = upload_files(store, published_version("default", "adapters", "mine", 1), adapter, files)
    resolve_adapter(config, published.uri, **began)
    other_weights(model)
    message = adapter_refusal(config, published.uri, **on(config, model, model))
    assert "whose model.safetensors is another" in message
    resolve_adapter(config, published.uri, **on(config, model, model), allow_other_base=True)


@pytest.mark.parametrize("kind", ["sft", "dpo", "distill", "reward", "rl", "session"])
def test_every_kind_of_run_compares_bases_unless_it_insists(kind):
    fields = {"model": "org/m", "dataset": {"uri": "/d"}, "steps": 1, "batch_size": 1, "teacher": "base"}
    fields |= {"learning_rate": 1.0}
    model = next(each for each in RUNS if each.model_fields["kind"].default == kind)
    run = model.model_validate({name: value for name, value in fields.items() if name in model.model_fields})
    resolved = ResolvedModel(model=Artifact(uri="file:///m", sha256="0" * 64), shape=SHAPE)
    start_type = {"rl": RLStart, "session": SessionStart}.get(kind, RunStart)
    for insists in (False, True):
        start = start_type(run_id="r1", run=run.model_copy(update={"allow_other_base": insists}))
        request = adapter_request(start, "/adapter", resolved)
        assert (request.base, request.model, request.allow_other_base) == (resolved.model, "org/m", insists)


WITH_TOWERS = ("qwen3_5", "gemma3", "gemma4", "mistral")


def modules_before_a_run(config, model) -> dict[str, bool]:
    location = locate(str(model), "default", config, HUB_PATTERNS, lambda _: None)
    found = modules_of(check_weights(location, read_config(location)).slices)
    return {name: can_adapt for name, can_adapt in found.items() if name != OUTPUT}


def modules_in_the_worker(model) -> dict[str, bool]:
    found = modules_of(read_architecture(model).slices(1))
    return {name: can_adapt for name, can_adapt in found.items() if name != OUTPUT}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_modules_of_a_model_are_those_that_its_worker_adapts(config, tmp_path, family) -> None:
    model = distinct_model(tmp_path / "model", family, tied=family.startswith("gemma"), num_layers=4)
    found = modules_before_a_run(config, model)
    assert found == modules_in_the_worker(model)
    assert True in found.values() and False in found.values()
    shape, sizes = shape_of(read_model(model)), {}
    for name, tensor in load_file(model / WEIGHTS).items():
        *_, outer, inner, linear, _ = f"...{name}".split(".")
        if (
            name.endswith(".weight")
            and found.get(module_of(name))
            and UNREAD not in name
            and layer_of(name) is not None
        ):
            of = "experts" if outer == "experts" else "shared" if inner.startswith("shared_expert") else ""
            sizes.setdefault((linear, of, layer_of(name)), []).append(tuple(tensor.shape))
    assert {key: [shape.linear_size(*key)[::-1]] * len(own) for key, own in sizes.items()} == sizes
    assert shape.num_linears(LINEARS) == sum(map(len, sizes.values()))


@pytest.mark.parametrize("family", WITH_TOWERS)
def test_linears_of_a_tower_are_not_the_decoder_s(config, tmp_path, family) -> None:
    _, whole = model_with_tower(tmp_path, family)
    assert modules_before_a_run(config, whole) == modules_in_the_worker(whole)


def test_layers_that_predict_more_tokens_are_not_adapted(config, tmp_path) -> None:
    model = distinct_model(tmp_path / "model", "deepseek_v3", tied=False, num_layers=4)
    before, tensors = modules_in_the_worker(model), load_file(model / WEIGHTS)
    behind = {f"model.layers.4.{name}.weight": torch.ones(8, 8) for name in ("eh_proj", "self_attn.o_proj")}
    save_torch(tensors | behind, model / WEIGHTS, {"format": "pt"})
    edit(model / "config.json", num_nextn_predict_layers=1)
    assert modules_before_a_run(config, model) == before


@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        ("qwen3", Lora(target_pattern=r".*\.mlp"), "model.layers.0.mlp, too, which takes no adapter"),
        ("nemotron_h", Lora(target_pattern=r".*\.(in|out)_proj"), "mixer.out_proj, too, which takes no adapter"),
        ("nemotron_h", Lora(targets=("out_proj",)), "no linear out_proj"),
        ("gpt_oss", Lora(targets=("up_proj",)), "no linear up_proj"),
        ("deepseek_v3", Lora(targets=("k_proj",)), "no linear k_proj"),
        ("deepseek_v3", Lora(rank_pattern={"k_proj": 2}), "like that: k_proj"),
        ("granitemoehybrid", Lora(target_pattern=r".*sparse_moe.*"), "sparse_moe.*, too, which takes no adapter"),
        ("lfm2", Lora(targets=("in_proj", "out_proj", "w2")), None),
        ("lfm2", Lora(targets=("o_proj",)), "no linear o_proj"),
        ("granitemoehybrid", Lora(targets=("input_linear", "out_proj")), None),
        ("nemotron_h", Lora(targets=("q_proj", "embed_tokens")), "embeddings are not called embed_tokens, and take no"),
        ("nemotron_h", Lora(target_pattern=r".*experts\..*up_proj"), r"mixer.experts.\d.up_proj, too, which takes no"),
        ("qwen3_moe", Lora(targets=("gate_proj", "o_proj")), "gate_proj and up_proj go together"),
        ("deepseek_v3", Lora(target_pattern=r".*\.experts\.[01]\..*_proj"), "go together, and a layer's experts"),
        ("deepseek_v3", Lora(layers=(0,)), "only dense MLPs of a mixture are meant"),
        ("qwen3_5_moe", Lora(rank_pattern={"down_proj": 2}), "leave MLPs out of rank_pattern"),
        ("glm4_moe_lite", Lora(dora=True, target_pattern=r".*shared_experts\..*"), "PEFT has no DoRA beside MLPs"),
        ("qwen3_5_moe", Lora(dora=True, target_pattern=r".*shared_expert\..*"), None),
        ("gemma4", Lora(layers=(0, 4)), "nothing to adapt in layer 4"),
        ("gemma4", Lora(targets=("lm_head",)), None),
    ],
    ids=str,
)
def test_a_run_is_refused_before_a_worker_is_leased(config, tmp_path, family, lora, words) -> None:
    model = distinct_model(tmp_path / "model", family, tied=family.startswith("gemma"), num_layers=4)
    request = ModelRequest(uri=str(model), tenant="default", trainable=lora)
    resolve = Resolve(HostContext(config)).resolve_model
    if words is None:
        ActivityEnvironment().run(resolve, request)
        return
    with pytest.raises(InvalidInput, match=words):
        ActivityEnvironment().run(resolve, request)
