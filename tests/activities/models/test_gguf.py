"""A model folder of a GGUF file: as transformers reads it; what is cut or strange is refused by file, key and rule."""

import json
import re
import struct
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quantize
from gguf.gguf_reader import ReaderTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from activities.model_look import look_at
from activities.publishing.export import write_export
from examples.tiny_model import make_tiny_model
from longshore.accounts import Room
from longshore.training import Lora
from shared.errors import InvalidInput
from shared.storage.store import open_store
from tests.activities.models.resolving import refusal, resolve, stage
from tests.activities.publishing.test_export import source_of
from tests.conftest import CORPUS

TEXT = "How many crates are on quay 12?<|im_end|>\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of one file, which is a tiny Llama's."""
    model = make_tiny_model(tmp_path / "whole", CORPUS, family="llama", hidden_size=128, num_kv_heads=2, head_dim=32)
    (tmp_path / "gguf").mkdir()
    write_export(source_of(model, "gguf", "q8_0"), str(tmp_path / "gguf"))
    return tmp_path / "gguf"


def rewritten(folder: Path, **changes: object) -> None:
    """Write the file again, with other values of some keys or names of tensors; None: without a key."""
    [path] = folder.glob("*.gguf")
    reader = GGUFReader(path)
    writer = GGUFWriter(folder / "new", "llama")
    for name, field in reader.fields.items():
        value = changes.pop(name, field.contents())
        if not name.startswith("GGUF.") and name != "general.architecture" and value is not None:
            kind = {int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array", bool: "add_bool"}
            getattr(writer, kind[type(value)])(name, value)
    for name, value in changes.items():
        if isinstance(value, int):
            writer.add_uint32(name, value)
        elif name.startswith("tokenizer."):
            writer.add_string(name, str(value))
    for tensor in reader.tensors:
        renamed = str(changes.get(tensor.name, tensor.name))
        writer.add_tensor(renamed, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "new").rename(path)


@pytest.mark.parametrize(("family", "stored_as"), [("llama", "q8_0"), ("qwen2", "f16"), ("qwen3", "bf16")])
def test_numbers_tokens_and_settings_are_those_that_transformers_reads(config, tmp_path, family, stored_as) -> None:
    sizes = {"hidden_size": 128, "head_dim": 128 if family == "qwen3" else 32}  # transformers takes 128 for Qwen3's
    whole = make_tiny_model(tmp_path / "whole", CORPUS, family=family, tied=family != "qwen2", **sizes)
    folder = tmp_path / "gguf"
    folder.mkdir()
    write_export(source_of(whole, "gguf", stored_as), str(folder))
    made = stage(config, resolve(config, folder))
    assert resolve(config, folder).model.uri.endswith(made.name), "it was converted once"
    look = look_at(folder, Lora())
    assert look.problems == () and look.shape is not None and look.shape.family == family
    ours = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=f"t-{stored_as}.gguf", dtype=torch.float32)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    before, after = (json.loads((each / "config.json").read_text()) for each in (whole, made))
    assert before["rope_parameters"] == after["rope_parameters"]
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (whole, made)]
    assert tokenizers[0].encode(TEXT) == tokenizers[1].encode(TEXT) and tokenizers[1].eos_token == "<|im_end|>"
    chat = [{"role": "user", "content": "hello"}]
    assert len({each.apply_chat_template(chat, tokenize=False) for each in tokenizers}) == 1


def test_types_that_only_others_write_are_dequantized_as_by_transformers(config, folder) -> None:
    [path] = folder.glob("*.gguf")
    reader = GGUFReader(path, "r")
    writer = GGUFWriter(folder / "new", "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:])
    for tensor in reader.tensors:
        data, kind = np.array(tensor.data), tensor.tensor_type
        if "ffn_" in tensor.name and kind == GGMLQuantizationType.Q8_0:
            data, kind = quantize(np.random.default_rng(0).normal(size=tensor.shape[::-1]).astype(np.float32), 3), 3
        writer.add_tensor(tensor.name, data, raw_dtype=GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "new").rename(path)
    ours = AutoModelForCausalLM.from_pretrained(stage(config, resolve(config, folder)), dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32)
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.9999])
def test_a_cut_file_is_refused_by_the_key_or_tensor_that_reaches_beyond_it(config, folder, share) -> None:
    [path] = folder.glob("*.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    told = refusal(config, folder)
    assert path.name in told and "cut: " in told and "of " in told, told
    assert path.name in look_at(folder, Lora()).problems[0]
    assert share < 0.5 or "tensor blk." in told or "tensor output_norm" in told or "tensor token_embd" in told, told


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tokenizer.ggml.pre": "hunyuan"}, "tokenizer.ggml.pre 'hunyuan'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model 'llama'"),
        ({"llama.block_count": None}, "the key llama.block_count is missing"),
        ({"llama.embedding_length": "wide"}, "the key llama.embedding_length has a value of the type str"),
        ({"llama.expert_count": 8}, "the key llama.expert_count asks for what is not read"),
        ({"llama.block_count": 3}, "lack the tensor model.layers.2"),
        ({"blk.0.ffn_up.weight": "blk.0.ffn_sideways.weight"}, "tensor blk.0.ffn_sideways.weight is none"),
        ({"llama.embedding_length": 64}, "model.embed_tokens.weight is (512, 128)"),
        ({"tokenizer.chat_template": None}, "no chat template"),
        ({"tokenizer.chat_template./../x": "{{ messages }}"}, "a template's name is of letters"),
        ({"rope_freqs.weight": "blk.0.attn_norm.bias"}, "the first is 'model.layers.0.input_layernorm.bias'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_used_is_refused_by_its_key(config, folder, changes, rule) -> None:
    rewritten(folder, **changes)
    told = refusal(config, folder)
    assert ".gguf" in told and rule in told, told


def test_two_files_are_refused_and_safetensors_beside_one_are_the_model(config, folder, model) -> None:
    [path] = folder.glob("*.gguf")
    (model / "beside.gguf").write_bytes(path.read_bytes()[:100])
    assert resolve(config, model).shape.hidden_size == 64
    (folder / "z.gguf").write_bytes(b"GGUF")
    assert "z.gguf: there are 2 .gguf files" in refusal(config, folder)


def test_what_is_no_gguf_file_is_refused(config, tmp_path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(4096))
    assert "m.gguf: this is no GGUF file that can be read" in refusal(config, tmp_path / "none")


# Files that are made to do harm, and what they may cost.


def edited_tensors(folder: Path, change: Callable[[int, ReaderTensor], dict[str, int]], repeat: int = 1) -> int:
    """Write a file by hand: its keys as they are, and a list of tensors that says what `change` does. Returns bytes.

    `repeat`: how often the tensors of the first layer are listed, each time under the number of another layer.
    """
    [path] = folder.glob("*.gguf")
    reader, data = GGUFReader(path), path.read_bytes()
    begin = min(int(tensor.field.offset) for tensor in reader.tensors)
    layer = [tensor for tensor in reader.tensors if tensor.name.startswith("blk.0.")]
    listed = [(tensor.name, tensor) for tensor in reader.tensors]
    listed += [(tensor.name.replace("blk.0", f"blk.{n}"), tensor) for n in range(2, repeat) for tensor in layer]
    infos = b""
    for number, (name, tensor) in enumerate(listed):
        said = {"offset": int(tensor.data_offset - reader.data_offset), "first": int(tensor.shape[0])}
        said |= change(number, tensor)
        dims = [said["first"], *map(int, tensor.shape[1:])]
        infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
        infos += struct.pack(f"<{len(dims)}QIQ", *dims, int(tensor.tensor_type), said["offset"])
    head = data[:8] + struct.pack("<Q", len(listed)) + data[16:begin] + infos
    head += bytes(-len(head) % 32)
    path.write_bytes(head + data[reader.data_offset :])
    return path.stat().st_size


def written_below(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_tensors_that_share_bytes_are_refused_before_one_is_written(config, folder) -> None:
    """So a file of a few megabytes would become gigabytes."""
    rewritten(folder, **{"llama.block_count": 400})
    size = edited_tensors(folder, lambda number, tensor: {}, repeat=400)
    assert size < 4 << 20
    told = refusal(config, folder)
    assert re.search(r"tensor blk\.\d+\.\w+\.weight and tensor blk\.\d+\.\w+\.weight share bytes", told), told
    assert written_below(config.root_path) < 1 << 20
    assert "share bytes" in look_at(folder, Lora()).problems[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first": 0}, "tensor token_embd.weight has a dimension of 0"),
        ({"first": 1 << 62}, "cut: tensor token_embd.weight reaches"),
        ({"first": 96}, "tensor model.embed_tokens.weight is (512, 96), config.json says (512, 128)"),
        ({"offset": 1 << 63}, "cut: tensor token_embd.weight reaches"),
    ],
    ids=str,
)
def test_a_tensor_of_another_size_is_refused_before_one_is_written(config, folder, change, words) -> None:
    def changed(number: int, tensor: ReaderTensor) -> dict[str, int]:
        return change if tensor.name == "token_embd.weight" else {}

    edited_tensors(folder, changed)
    told = refusal(config, folder)
    assert words in told, told
    assert written_below(config.root_path) < 1 << 20


def test_a_tenant_s_room_is_asked_for_before_a_byte_is_written(config, folder) -> None:
    told = refusal(config, folder, room=Room(most=300_000))
    assert ".gguf: quota stored_bytes: default stores 0 bytes of 300,000" in told
    assert written_below(config.root_path) < 100_000


def test_a_file_in_s3_may_be_as_large_as_others_that_are_fetched(config, folder, s3_server) -> None:
    place = f"{s3_server.uri}/users/{uuid.uuid4().hex}"
    [path] = folder.glob("*.gguf")
    open_store(place, s3_server.settings).put_file(path.name, path)
    limits = config.download.model_copy(update={"max_bytes": 100_000})
    narrow = config.model_copy(update={"s3": s3_server.settings, "download": limits})
    assert re.search(
        r"\.gguf: [\d,]+ bytes to transfer; the limit is 100,000: download.max_bytes", refusal(narrow, place)
    )
    assert written_below(config.root_path) < 10_000
    resolve(config.model_copy(update={"s3": s3_server.settings}), place)


@pytest.mark.parametrize("form", ["files", "a list"])
def test_all_chat_templates_go_into_a_file_and_come_back(config, tmp_path, form) -> None:
    model = make_tiny_model(tmp_path / "whole", CORPUS, family="llama")
    texts = {"default": (model / "chat_template.jinja").read_text(), "tool_use": "{{ tools }}", "rag-2": "{{ docs }}"}
    if form == "files":
        (model / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag-2"):
            (model / "additional_chat_templates" / f"{name}.jinja").write_text(texts[name])
    else:
        (model / "chat_template.jinja").unlink()
        settings = json.loads((model / "tokenizer_config.json").read_text())
        settings["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "gguf").mkdir()
    write_export(source_of(model, "gguf", "q8_0"), str(tmp_path / "gguf"))
    [path] = (tmp_path / "gguf").glob("*.gguf")
    fields = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    assert fields["tokenizer.chat_template"] == texts["default"]
    assert sorted(fields["tokenizer.chat_templates"]) == ["rag_2", "tool_use"]
    named = {name: fields[f"tokenizer.chat_template.{name}"] for name in ("tool_use", "rag_2")}
    assert named == {"tool_use": "{{ tools }}", "rag_2": "{{ docs }}"}
    made = stage(config, resolve(config, tmp_path / "gguf"))
    assert AutoTokenizer.from_pretrained(made).chat_template == named | {"default": texts["default"]}


def test_a_vocabulary_without_merges_is_refused_at_export(tmp_path) -> None:
    model = make_tiny_model(tmp_path / "whole", CORPUS, family="llama")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "gguf").mkdir()
    with pytest.raises(InvalidInput, match=r"tokenizer.json: model: it has no merges, without which llama.cpp reads"):
        write_export(source_of(model, "gguf", "q8_0"), str(tmp_path / "gguf"))
