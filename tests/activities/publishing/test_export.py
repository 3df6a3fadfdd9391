"""Exports: read back by transformers and by the gguf package's reader, within what each format may be off."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from temporalio.testing import ActivityEnvironment
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from activities.host_context import HostContext
from activities.publishing.export import Exports, ExportSource, Fp8, Mlx, write_export
from examples.tiny_model import make_tiny_model
from longshore.accounts import Room
from longshore.fields import Artifact
from longshore.views import Export
from shared.errors import CorruptArtifact, InvalidInput
from shared.models.merging import Merger
from shared.runs.start import LABELS, ExportRequest
from shared.settings import Settings
from shared.storage.artifacts import manifest_of, seal, upload_artifact
from tests.conftest import CORPUS

IDS = torch.tensor([[5, 80, 33, 7, 100, 200]])
SIZES = {"hidden_size": 128, "num_kv_heads": 4, "head_dim": 32}


def source_of(model: Path, form: str, stored_as: str | None = None, adapter: Path | None = None) -> ExportSource:
    names = [path.name for path in sorted(model.iterdir())]
    return ExportSource(
        model=str(model),
        weights=tuple(name for name in names if name.endswith(".safetensors")),
        others=tuple(name for name in names if not name.endswith((".safetensors", "index.json"))),
        adapter=str(adapter) if adapter else None,
        export=Export.model_validate({"format": form, "type": stored_as}),
        title="t",
    )


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def adapter_of(model: Path, folder: Path, dora: bool = False, more: tuple[str, ...] = ()) -> Path:
    """A LoRA of PEFT's on every linear of a model, with both factors other than zero, and other norms of rows."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(model)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", *more]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=linears, init_lora_weights=False, use_dora=dora)
    made = get_peft_model(base, config)
    for name, tensor in made.named_parameters():
        if "magnitude" in name:
            tensor.data *= torch.rand_like(tensor) + 0.5
    made.save_pretrained(folder, save_embedding_layers=False)
    return folder


def exported(source: ExportSource, folder: Path) -> Path:
    folder.mkdir()
    write_export(source, str(folder))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), CORPUS, family="llama", **SIZES)


def in_shards(model: Path, folder: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder, max_shard_size="200KB")
    for path in model.iterdir():
        if not (folder / path.name).exists() and not path.name.endswith(".safetensors"):
            (folder / path.name).write_bytes(path.read_bytes())
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def test_embeddings_are_merged_where_the_output_layer_has_weights_of_its_own(tmp_path) -> None:
    for tied in (False, True):
        model = make_tiny_model(tmp_path / f"{tied}", CORPUS, family="llama", tied=tied, **SIZES)
        adapter = adapter_of(model, tmp_path / f"{tied}-adapter", more=("embed_tokens",))
        if tied:
            told = refused(source_of(model, "merged", adapter=adapter), tmp_path / "refused")
            assert "changes embeddings that are tied: the output layer would change, too" in told
            continue
        expected = logits_of(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter))
        folder = exported(source_of(model, "merged", adapter=adapter), tmp_path / "merged")
        assert (logits_of(AutoModelForCausalLM.from_pretrained(folder)) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("dora", [False, True])
def test_merged_shards_compute_what_the_adapter_does(llama, tmp_path, dora) -> None:
    model, adapter = in_shards(llama, tmp_path / "model"), adapter_of(llama, tmp_path / "adapter", dora)
    expected = logits_of(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter))
    folder = exported(source_of(model, "merged", adapter=adapter), tmp_path / "merged")
    assert (logits_of(AutoModelForCausalLM.from_pretrained(folder)) - expected).abs().max() <= 1e-4
    assert {path.name for path in folder.iterdir()} >= {path.name for path in model.iterdir()}


@pytest.mark.parametrize(("stored_as", "most"), [("q8_0", 0.06), ("bf16", 0.02), ("f16", 0.002)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_is_read_by_transformers_within_its_type(tmp_path, family, stored_as, most) -> None:
    sizes = SIZES | {"head_dim": 128 if family == "qwen3" else 32}  # transformers takes 128 for Qwen3's
    model = make_tiny_model(tmp_path / "model", CORPUS, family=family, tied=family != "qwen2", **sizes)
    adapter = adapter_of(model, tmp_path / "adapter")
    expected = logits_of(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter))
    folder = exported(source_of(in_shards(model, tmp_path / "s"), "gguf", stored_as, adapter), tmp_path / "gguf")
    config = AutoConfig.from_pretrained(model)  # its reader leaves Llama 3's scaling out
    options = {"gguf_file": f"t-{stored_as}.gguf", "config": config, "dtype": torch.float32}
    found = logits_of(AutoModelForCausalLM.from_pretrained(folder, **options))
    assert (found - expected).abs().max() <= most * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fp8_is_read_by_transformers_and_each_number_is_torchs(tmp_path, family) -> None:
    model = make_tiny_model(tmp_path / "model", CORPUS, family=family, **SIZES)
    folder = exported(source_of(model, "fp8"), tmp_path / "fp8")
    read = FineGrainedFP8Config(dequantize=True)
    found = AutoModelForCausalLM.from_pretrained(folder, quantization_config=read, dtype=torch.float32)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(model))
    assert (logits_of(found) - expected).abs().max() <= 0.08 * expected.abs().max()
    weights, name = load_file(model / "model.safetensors"), "model.layers.1.self_attn.q_proj.weight"
    block = torch.from_numpy(weights[name])
    scale = block.abs().max() / 448
    theirs = (block / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(found.get_parameter(name), theirs)


def test_fp8_rounds_every_number_as_torch_does() -> None:
    values = torch.cat([torch.linspace(-448, 448, 100_001), torch.linspace(-0.05, 0.05, 100_001), torch.zeros(3)])
    padded = torch.cat([values, torch.zeros(-len(values) % (128 * 128))]).reshape(-1, 128)
    padded[::128, 0] = 448.0  # so that every block's scale is one
    codes, scales = Fp8().encode(padded.numpy())
    assert set(np.frombuffer(scales, np.float32)) == {1.0}
    theirs = padded.to(torch.float8_e4m3fn).view(torch.uint8).flatten().numpy()
    assert np.array_equal(np.frombuffer(codes, np.uint8), theirs)


@pytest.mark.parametrize(("stored_as", "bits"), [("q4", 4), ("q8", 8)])
def test_mlx_holds_each_number_within_half_a_step(llama, tmp_path, stored_as, bits) -> None:
    """mlx-lm itself has read such folders (docs/models.md); here the words are unpacked by hand."""
    folder = exported(source_of(llama, "mlx", stored_as), tmp_path / "mlx")
    before, after = (load_file(each / "model.safetensors") for each in (llama, folder))
    for name, weight in before.items():
        if weight.ndim == 1:
            assert np.array_equal(after[name], weight)
            continue
        stem = name.removesuffix(".weight")
        codes = np.stack([(after[name] >> at) & (2**bits - 1) for at in range(0, 32, bits)], -1)
        groups = codes.reshape(-1, 64) * after[f"{stem}.scales"].reshape(-1, 1) + after[f"{stem}.biases"].reshape(-1, 1)
        off = np.abs(groups - weight.reshape(-1, 64))
        assert (off <= after[f"{stem}.scales"].reshape(-1, 1) * 0.501 + 1e-7).all()
    assert json.loads((folder / "config.json").read_text())["quantization"]["bits"] == bits


def refused(source: ExportSource, folder: Path) -> str:
    with pytest.raises(InvalidInput) as error:
        exported(source, folder)
    return str(error.value)


def test_what_a_format_cannot_hold_is_refused_by_file_and_key(llama, tiny_model, tmp_path) -> None:
    hybrid = make_tiny_model(tmp_path / "hybrid", CORPUS, family="qwen3_5")
    told = refused(source_of(hybrid, "gguf"), tmp_path / "1")
    assert told == (
        "config.json: model_type 'qwen3_5' is not exported as gguf: gguf is written of llama, qwen2, qwen3; "
        "merged of every family"
    )
    told = refused(source_of(tiny_model, "fp8"), tmp_path / "2")
    assert "model.safetensors: model.layers.0" in told and "blocks of 128 by 128" in told
    model = Path(in_shards(llama, tmp_path / "model"))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": {"type": "Whitespace"}}))
    assert refused(source_of(model, "gguf"), tmp_path / "3").startswith("tokenizer.json: pre_tokenizer")
    adapter = adapter_of(llama, tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    save_file({name.replace("layers.1.", "layers.7."): one for name, one in load_file(path).items()}, path)
    told = refused(source_of(llama, "merged", adapter=adapter), tmp_path / "4")
    assert told.startswith("adapter_model.safetensors: the base model has no model.layers.7.")
    config = json.loads((model / "config.json").read_text())
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (model / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    assert "rope_parameters of type 'linear'" in refused(source_of(model, "gguf"), tmp_path / "5")


@pytest.mark.parametrize("form", ["gguf", "fp8", "mlx"])
def test_a_number_that_is_not_finite_and_a_cut_shard_are_refused(llama, tmp_path, form) -> None:
    model = in_shards(llama, tmp_path / "model")
    name = "model.layers.0.self_attn.q_proj.weight"
    path = next(each for each in sorted(model.glob("*.safetensors")) if name in load_file(each))
    weights = load_file(path)
    weights[name][3, 5] = np.nan
    save_file(weights, path)
    told = refused(source_of(model, form), tmp_path / "1")
    assert told == f"{path.name}: tensor {name} holds a number that is not finite"
    path.write_bytes(path.read_bytes()[:-8])
    assert path.name in refused(source_of(model, form), tmp_path / "2")


@pytest.mark.parametrize("label", ["gguf-q8_0", "fp8", "mlx-q4", "merged"])
def test_a_file_that_is_not_what_was_written_fails_when_it_is_read_back(llama, tmp_path, label, monkeypatch) -> None:
    """One weight is merged otherwise the second time."""
    adapter, calls = adapter_of(llama, tmp_path / "adapter"), []
    merged = Merger.blocks

    def spoilt(self, entry, source, place):
        calls.append(entry.name)
        if calls.count(entry.name) == 2 and entry.name.endswith("1.mlp.up_proj.weight"):
            self.factors = {name: replace(own, scale=3 * own.scale) for name, own in self.factors.items()}
        return merged(self, entry, source, place)

    monkeypatch.setattr(Merger, "blocks", spoilt)
    form, _, stored_as = label.partition("-")
    with pytest.raises(CorruptArtifact, match=r"model.layers.1.mlp.up_proj.weight is not what was written"):
        exported(source_of(llama, form, stored_as or None, adapter), tmp_path / "out")


def request_for(settings: Settings, model: Path, label: str = "gguf-q8_0") -> ExportRequest:
    seal(model)
    host = HostContext(settings)
    form, _, stored_as = label.partition("-")
    export = Export.model_validate({"format": form, "type": stored_as or None})
    key = f"tenants/default/models/tiny/v000001/exports/{label}"
    artifact: Artifact = upload_artifact(host.store, "tenants/default/models/tiny/v000001", model)
    return ExportRequest(key=key, name="tiny:v1", tenant="default", model=artifact, adapter=None, export=export)


def test_the_activity_writes_once_within_the_quota(llama, tmp_path) -> None:
    settings = Settings(root=tmp_path / "root")
    request = request_for(settings, in_shards(llama, tmp_path / "model"))
    done = ActivityEnvironment().run(Exports(HostContext(settings)).export, request)
    path = Path(done.uri.removeprefix("file://")) / "tiny-v1-q8_0.gguf"
    before = path.stat()
    assert ActivityEnvironment().run(Exports(HostContext(settings)).export, request) == done
    assert path.stat() == before and [each.path for each in manifest_of(path.parent).files] == [path.name]
    other = Export(format="gguf", type="f16")
    more = request.model_copy(
        update={"key": request.key.replace("q8_0", "f16"), "export": other, "room": Room(most=1_000_000)}
    )
    with pytest.raises(InvalidInput, match="quota stored_bytes"):
        ActivityEnvironment().run(Exports(HostContext(settings)).export, more)


def test_a_type_belongs_to_its_format() -> None:
    assert Export(format="gguf").label == "gguf-q8_0" and Export(format="mlx").label == "mlx-q4"
    assert len(set(LABELS)) == 7
    with pytest.raises(ValueError, match="fp8 has no type q8_0: it has none"):
        Export(format="fp8", type="q8_0")
    assert Mlx(8, "BF16").rows == 1
