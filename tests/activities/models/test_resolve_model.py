"""Models: where they may be, what is checked before a GPU is asked for, what there is room for and what is made."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import load_file as torch_file
from safetensors.torch import save_file as save_torch
from safetensors.torch import save_file as save_torch_file
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.models.resolve import WEIGHTS, Resolve, read_tensor_entries
from longshore.training import Dtype, Layout, Lora
from longshore.views import Devices
from megatron_worker.megatron.engine import MegatronEngine
from shared.errors import CorruptArtifact, InvalidInput
from shared.families import read_config
from shared.families.model_slices import shape_of
from shared.models.end_tokens import read_end_ids
from shared.models.shape import ModelShape
from shared.runs.start import ModelRequest
from shared.settings import DownloadSettings
from shared.storage import artifacts
from shared.storage.artifacts import open_artifact
from shared.storage.host_states import write_offer
from shared.storage.store import open_store
from tests.activities.models.resolving import edit, names_of, refusal, resolve, stage
from tests.activities.models.test_resolve_adapter import resolve_adapter
from tests.megatron_worker.rows import distinct_model, model_with_tower

REPOSITORY = Path(__file__).parents[3]


# Where a model may be


def test_a_folder_is_used_where_it_lies(config, model) -> None:
    before = names_of(model)
    resolved = resolve(config, model)
    assert resolved.shape.linears == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert resolved.shape.model_copy(update={"sizes": ()}) == ModelShape(
        family="qwen3", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=192, vocab_size=512
    )
    assert stage(config, resolved) == model.resolve()
    assert names_of(model) == before
    stored = [info.key for info in open_store(config.store, config.s3).list("")]
    assert [key.rpartition("/")[2] for key in stored] == ["manifest.json"]


def test_a_template_of_its_own_for_tools_comes_with_the_model(config, model, tmp_path) -> None:
    folder = model / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{{ tools }}")
    (folder / "rag.jinja").write_text("{{ documents }}")
    read = open_artifact(resolve(config, model).model, config.s3)[1].files
    assert {f.path for f in read if f.path.endswith(".jinja")} == {
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    }
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    assert "tool_use.jinja: this is a link that leads out of its folder" in refusal(config, model)


def test_a_file_uri_and_a_link_are_the_same_model(config, model, tmp_path) -> None:
    (tmp_path / "link").symlink_to(model)
    resolved = resolve(config, model)
    assert resolve(config, f"file://{tmp_path}/a%20model") == resolved
    assert resolve(config, tmp_path / "link") == resolved


def test_a_folder_that_users_may_not_name_is_refused_whether_it_exists_or_not(config, model, tmp_path) -> None:
    """By the rule that holds for datasets. A link does not lead around it; our store needs no such folder."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(model)
    narrow = config.model_copy(update={"download": DownloadSettings(file_roots=(inside,))})
    for place in (
        model,
        f"file://{tmp_path}/a%20model",
        inside / "link",
        inside / ".." / model.name,
        tmp_path / "none",
    ):
        with pytest.raises(InvalidInput, match=r"open only below the folders that its operator names"):
            resolve(narrow, place)
    closed = config.model_copy(update={"download": DownloadSettings()})
    with pytest.raises(InvalidInput, match="file_roots"):
        resolve(closed, model)
    ours = resolve(config, model).model
    assert ours.uri.startswith((config.root_path / "store").as_uri())
    with pytest.raises(InvalidInput, match="nothing of yours"):  # any tenant may have brought it
        resolve(closed, ours.uri)


def test_a_folder_that_changes_later_is_noticed_and_can_be_resolved_again(config, model) -> None:
    resolved = resolve(config, model)
    assert resolve(config, model) == resolved
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    with pytest.raises(CorruptArtifact, match=r"model\.safetensors: the file's SHA-256"):
        stage(config, resolved)
    again = resolve(config, model)
    assert again.model != resolved.model
    assert stage(config, again) == model.resolve()


def test_a_folder_is_uploaded_to_a_store_elsewhere(config, model, s3_server) -> None:
    config = config.model_copy(update={"store_uri": f"{s3_server.uri}/{uuid.uuid4().hex}", "s3": s3_server.settings})
    (model / "modeling_evil.py").write_text("raise SystemExit")
    resolved = resolve(config, model)
    shutil.rmtree(model)
    folder = stage(config, resolved)
    assert folder.is_relative_to(config.root_path / "cache")
    assert names_of(folder) == {
        "manifest.json", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip


def test_an_s3_prefix_is_referred_to(config, model, s3_server) -> None:
    """Read for its hash, never copied: only the manifest is ours."""
    place = f"{s3_server.uri}/users/{uuid.uuid4().hex}"
    theirs = open_store(place, s3_server.settings)
    for path in model.iterdir():
        theirs.put_file(path.name, path)
    config = config.model_copy(update={"store_uri": f"{s3_server.uri}/{uuid.uuid4().hex}", "s3": s3_server.settings})
    resolved = resolve(config, place)
    ours = open_store(config.store, config.s3)
    stored = [info.key for info in ours.list("")]
    assert [key.rpartition("/")[2] for key in stored] == ["manifest.json"]
    assert resolve(config, f"{place}/") == resolved
    assert (stage(config, resolved) / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    theirs.put_bytes("config.json", (model / "config.json").read_bytes().replace(b"silu", b"gelu"))
    shutil.rmtree(config.root_path / "cache")
    with pytest.raises(CorruptArtifact, match=rf"{place}/config\.json"):
        stage(config, resolved)


def test_a_published_model_is_itself(config, model) -> None:
    artifacts.seal(model)
    store = open_store(config.store, config.s3)
    published = artifacts.upload_artifact(store, "tenants/default/models/mine/v000001", model)
    assert resolve(config, published.uri).model == published
    assert resolve(config, published.uri.removeprefix("file://")).model == published


def test_a_half_published_model_is_refused(config, model) -> None:
    shutil.copytree(model, config.root_path / "store/tenants/default/models/mine/v000001")
    message = refusal(config, f"{config.store}/tenants/default/models/mine/v000001")
    assert "nothing was completed there" in message


@pytest.mark.parametrize("uri", ["./here", "gpt2", "ftp://x/y", "../a/b", "a/b/c", ""])
def test_other_places_are_refused(config, uri) -> None:
    assert "give an absolute path, a file:// or s3:// URI, or a hub id such as org/name" in refusal(config, uri)


def test_a_missing_or_empty_folder_is_named(config, tmp_path) -> None:
    assert f"{tmp_path}/none: there is no such folder" in refusal(config, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "there is no such folder, or it is empty" in refusal(config, tmp_path / "empty")


def test_an_offline_hub_is_named(config) -> None:
    message = refusal(config, "org/name@main")
    assert "hub id org/name@main: the hub cannot be reached from this host" in message
    assert "give a folder or an s3:// URI" in message


UNREACHABLE = """
import sys, time
from pathlib import Path
from activities.sources.models import locate
from shared.errors import InvalidInput
from shared.settings import Settings
begun = time.monotonic()
try:
    locate("org/name", "default", Settings(root=Path(sys.argv[1])), ("config.json",), lambda location: None)
except InvalidInput as error:
    print(error)
print(time.monotonic() - begun)
"""


def test_an_unreachable_hub_is_named_soon(tmp_path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", UNREACHABLE, str(tmp_path)],
        capture_output=True, text=True, cwd=REPOSITORY, env=environment,
    )  # fmt: skip
    message, seconds = answer.stdout.splitlines()
    assert "hub id org/name: the hub cannot be reached from this host" in message
    assert float(seconds) < 30


# What is checked


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "64"}, "config.json: hidden_size"),
        ({"hidden_size": 0}, "config.json: hidden_size"),
        ({"num_hidden_layers": None}, "config.json: num_hidden_layers"),
        ({"sliding_window": 0}, "config.json: sliding_window"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act"),
        ({"quantization_config": {"bits": 4}}, "config.json: quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "config.json: rope_scaling"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "needs factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}, "max_position_embeddings": None},
            "needs original_max_position",
        ),
        ({"head_dim": "wide"}, "head_dim"),
        ({"model_type": "qwen3_moe"}, "num_experts"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_before_any_lease(config, model, changes, said) -> None:
    edit(model / "config.json", **changes)
    assert said in refusal(config, model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_missing_or_broken_file_is_named(config, model, name) -> None:
    (model / name).write_text("{not json")
    assert f"{name}: not valid" in refusal(config, model)
    (model / name).unlink()
    assert f"the folder has no {name}" in refusal(config, model)


def test_a_missing_chat_template_is_named_unless_the_tokenizers_config_has_it(config, model) -> None:
    (model / "chat_template.jinja").unlink()
    assert "the model has no chat template" in refusal(config, model)
    edit(model / "tokenizer_config.json", chat_template="{{ messages }}")
    resolve(config, model)


def test_a_tokenizer_larger_than_the_model_is_refused(config, model) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 512, "content": "<|new|>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "it has the id 512, but the model has only 512 embeddings" in refusal(config, model)


def test_a_layout_or_an_engine_that_cannot_hold_the_model_is_refused(config, model) -> None:
    assert "layout.tp: tp=3 does not divide" in refusal(config, model, Layout(tp=3))
    resolve(config, model, engine="fsdp")
    edit(model / "config.json", model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=192)
    lacking = "the weights lack the tensor model.layers.0.mlp.gate.weight and 25 more"
    assert lacking in refusal(config, model, engine="fsdp")
    edit(model / "config.json", model_type="gpt_oss")
    assert refusal(config, model, engine="fsdp") == ("engine: the engine fsdp does not train gpt_oss: use megatron")


def test_truncated_weights_are_named(config, model) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert f"{model.resolve()}".replace(" ", "%20") + "/model.safetensors: " in refusal(config, model)
    path.write_bytes(whole + b"\0")
    assert "truncated or damaged" in refusal(config, model)


def test_only_safetensors_is_read(config, model) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    message = refusal(config, model)
    assert "neither model.safetensors nor" in message and "pytorch_model.bin is not read" in message


def test_an_adapter_is_no_model(config, adapter) -> None:
    assert "this is an adapter, not a model" in refusal(config, adapter)


def shard(model: Path) -> dict[str, str]:
    """Split the weights into two files and an index."""
    from safetensors.numpy import load_file

    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, model / file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return files


def test_shards_with_an_index(config, model) -> None:
    shard(model)
    (model / "consolidated.safetensors").write_bytes(b"another copy of the weights, of another tool")
    resolved = resolve(config, model)
    _, manifest = artifacts.open_artifact(resolved.model, config.s3)
    assert [entry.path for entry in manifest.files if "safetensors" in entry.path] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip


def test_an_incomplete_index_is_named(config, model) -> None:
    files = shard(model)
    edit(
        model / "model.safetensors.index.json", weight_map={**files, "extra.weight": "model-00001-of-00002.safetensors"}
    )
    assert "tensor extra.weight is not in model-00001-of-00002.safetensors" in refusal(config, model)
    edit(model / "model.safetensors.index.json", weight_map={**files, "x": "../../etc/x.safetensors"})
    assert "weight_map must map names" in refusal(config, model)
    edit(model / "model.safetensors.index.json", weight_map=files)
    (model / "model-00002-of-00002.safetensors").unlink()
    assert "the index names model-00002-of-00002.safetensors, which is missing" in refusal(config, model)


def test_quantized_weights_are_refused(config, model) -> None:
    save_file({"model.embed_tokens.weight": np.zeros((512, 64), dtype=np.int8)}, model / "model.safetensors")
    assert "tensor model.embed_tokens.weight is I8" in refusal(config, model)


TENSORS = {"a.weight": np.zeros((3, 4), dtype=np.float32), "b": np.arange(5), "c": np.float16([[1.0]])}


def header_of(data: bytes) -> dict[str, tuple[int, ...]]:
    tensors = read_tensor_entries(lambda start, length: data[start : start + length], len(data), "file")
    return {name: tensor.shape for name, tensor in tensors.items()}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_spoilt_headers_are_refused_or_whole(data) -> None:
    """Whatever is done to the header: a refusal in our words, or tensors that fill the file."""
    whole = bytearray(save(TENSORS))
    header_bytes = struct.unpack("<Q", whole[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 7 + header_bytes))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        shapes = header_of(cut)
    except InvalidInput as error:
        assert str(error).startswith("file: ")
    else:
        assert len(cut) == len(whole) and len(shapes) <= 3


def test_a_header_that_would_take_hundreds_of_its_bytes_is_refused_by_its_size() -> None:
    size, asked = 200 << 20, list[tuple[int, int]]()

    def read(start: int, length: int) -> bytes:
        asked.append((start, length))
        return struct.pack("<Q", 90 << 20)

    with pytest.raises(InvalidInput, match="its first bytes are not the size of a header"):
        read_tensor_entries(read, size, "file")
    assert asked == [(0, 8)]


def test_layers_that_predict_more_tokens_may_stand_behind_the_others(config, tmp_path) -> None:
    model = distinct_model(tmp_path, "deepseek_v3", tied=False)
    found = resolve(config, model)
    assert found.shape == shape_of(read_config(model))
    assert (found.shape.routes.has_experts, found.shape.ffn_size > 0) == ((False, True), True)
    behind = {f"model.layers.2.{name}.weight": np.ones((64, 128), np.float32) for name in ("enorm", "eh_proj")}
    save_file(load_file(model / "model.safetensors") | behind, model / "model.safetensors")
    assert resolve(config, model).shape == found.shape
    edit(model / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]})
    assert "quantization_config: weights that fp8 has quantized so are not read: FP8 is in" in refusal(config, model)


def test_weights_in_fp8_are_read_where_the_configuration_says_so(config, tmp_path) -> None:
    model = distinct_model(tmp_path, "deepseek_v3", tied=False, hidden_size=200)
    shape, tensors = resolve(config, model).shape, torch_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        blocks = [-(-size // 128) for size in tensors[name].shape]
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(blocks)}
    save_torch_file(tensors, model / "model.safetensors")
    assert "_proj.weight is F8_E4M3; weights must be one of" in refusal(config, model)
    edit(model / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert resolve(config, model).shape == shape


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral"])
def test_a_model_that_reads_images_is_its_decoder(config, tmp_path, family) -> None:
    alone, whole = model_with_tower(tmp_path, family)
    (whole / "generation_config.json").unlink()
    found, theirs = resolve(config, whole), resolve(config, alone)
    assert found.shape == theirs.shape == shape_of(read_config(whole))
    assert (not found.shape.split_too) == (not family.startswith("qwen"))
    assert read_end_ids(whole) == read_end_ids(alone) != ()
    edit(whole / "config.json", text_config=None)
    assert "text_config: this field is required" in refusal(config, whole)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": LONG, "max_position_embeddings": 4096, "original_max_position_embeddings": 128},
        {"rope_parameters": LONG | {"original_max_position_embeddings": 128}, "max_position_embeddings": 4096},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 128},
    ],
    ids=str,
)
def test_a_run_s_longest_sequence_is_one_that_is_computed(config, model, settings) -> None:
    edit(model / "config.json", **settings)

    def resolve(max_tokens: int | None) -> int | None:
        request = ModelRequest(uri=str(model), tenant="default", max_tokens=max_tokens)
        return ActivityEnvironment().run(Resolve(HostContext(config)).resolve_model, request).shape.max_positions

    assert resolve(128) == resolve(None) == 128
    with pytest.raises(InvalidInput, match=r"max_tokens=129: by its rope scaling .* sequences of up to 128"):
        resolve(129)
    edit(model / "config.json", rope_parameters=LONG | {"long_factor": LONG["short_factor"]})
    assert resolve(4096) is None  # one factor for all lengths


def test_weights_that_no_device_has_room_for_are_refused_with_both_numbers(config, model) -> None:
    host = HostContext(config)

    def resolve(dtype: Dtype | None, **degrees: int) -> None:
        request = ModelRequest(uri=str(model), tenant="default", dtype=dtype, layout=Layout(**degrees))
        ActivityEnvironment().run(Resolve(host).resolve_model, request)

    def offer(number: int, num_bytes: int) -> None:
        write_offer(host.store, config.shape, 8, Devices(number=number, num_bytes=num_bytes))

    resolve("float32")  # nobody has said what there is
    held = 4 * sum(tensor.size for tensor in load_file(model / "model.safetensors").values())
    offer(8, held)
    resolve("float32")
    offer(8, held - 1)
    with pytest.raises(InvalidInput) as refused:
        resolve("float32")
    assert str(refused.value) == (
        f"layout: a rank of single would hold {held / 1e9:.3g} GB of weights in float32, and the largest device of a "
        f"host of shape cpu has {(held - 1) / 1e9:.3g}: split it by tp, pp or ep, or say quantize_base"
    )
    resolve("bfloat16")
    resolve(None)
    resolve("float32", tp=2)
    offer(1, 2 * held - 1)  # a CPU's memory, which two replicas share
    with pytest.raises(InvalidInput, match="2 ranks of dp2 would hold"):
        resolve("float32", dp=2)
    resolve("float32", dp=2, nodes=2)


@pytest.fixture
def nemotron_h(tmp_path) -> Path:
    return distinct_model(tmp_path / "model", "nemotron_h", num_layers=8)


def rename(nemotron_h: Path) -> None:
    tensors = {re.sub(r"^backbone\.", "model.", name): t for name, t in load_torch(nemotron_h / WEIGHTS).items()}
    save_torch(tensors, nemotron_h / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("prefix", ["backbone", "model"])
def test_a_model_is_resolved_by_either_name(config, nemotron_h, prefix) -> None:
    if prefix == "model":
        rename(nemotron_h)
    found = resolve(config, nemotron_h).shape
    assert found == shape_of(read_config(nemotron_h))
    assert (found.num_layers, found.num_experts, found.routes.num_layers) == (8, 8, 2)
    tensors = load_torch(nemotron_h / WEIGHTS)
    tensors.pop(f"{prefix}.layers.6.mixer.gate.e_score_correction_bias")
    save_torch(tensors, nemotron_h / WEIGHTS, {"format": "pt"})
    name = f"{prefix}.layers.6.mixer.gate.e_score_correction_bias"
    assert f"the weights lack the tensor {name}" in refusal(config, nemotron_h)


def test_published_settings_are_read(config, nemotron_h) -> None:
    (nemotron_h / "config.json").write_text(
        re.sub(
            r'"time_step_limit": \[[^]]*\]',
            '"time_step_limit": [0.0, Infinity]',
            (nemotron_h / "config.json").read_text(),
        )
    )
    assert "Infinity" in (nemotron_h / "config.json").read_text()
    letters = json.loads((nemotron_h / "config.json").read_text()) | {"hybrid_override_pattern": "M*E-M*E-"}
    letters.pop("layers_block_type")
    (nemotron_h / "config.json").write_text(json.dumps(letters))
    assert resolve(config, nemotron_h).shape.num_layers == 8
    edit(nemotron_h / "config.json", hybrid_override_pattern="M*E-M*EX")
    assert "a layer of the kind 'X' is not known" in refusal(config, nemotron_h)


def test_an_adapter_beside_every_linear_is_resolved(config, nemotron_h, tmp_path) -> None:
    driven = MegatronEngine(nemotron_h, Layout(), "float32")
    driven.add_adapter("run", Lora(rank=4, alpha=8), seed=0)
    driven.save(tmp_path / "saved")
    folder, shape = tmp_path / "saved" / "weights", resolve(config, nemotron_h).shape
    asked = Lora(rank=4, alpha=8)
    assert set(resolve_adapter(config, folder, shape=shape, lora=asked).lora.targets) < set(asked.targets)


EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}


def test_experts_beside_an_mlp(config, tmp_path) -> None:
    nemotron_h = distinct_model(tmp_path / "model", "gemma4", config=EXPERTS)
    shape = resolve(config, nemotron_h, Layout(ep=2, dp=2)).shape
    assert shape == shape_of(read_config(nemotron_h))
    assert (shape.num_experts, shape.expert_ffn_size) == (4, 32)
    assert {"gate_proj", "q_proj"} <= set(shape.linears)
    assert "needs sp with tp" in refusal(config, nemotron_h, Layout(tp=2))
