"""Exports a published adapter or model as a new artifact: a whole model in another program's format."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from activities.heartbeats import on_thread
from activities.host_context import OnHost
from activities.models.gguf_file import GGUF_FAMILIES, PAIRED, gguf_name, pre_tokenizer_name, rope_factors, swapped
from activities.models.resolve import INDEX
from activities.sandbox.child import sign
from longshore.fields import Artifact, Frozen
from longshore.views import Export
from shared.errors import CorruptArtifact, InvalidInput
from shared.families import read_model_config
from shared.families.config import DenseConfig, MixtureConfig
from shared.models.end_tokens import GENERATION
from shared.models.merging import (
    FP8_BLOCK,
    ITEM_BYTES,
    Entry,
    Floats,
    Merger,
    bytes_of,
    floats_of,
    header_of,
    parts_of,
    read_header,
)
from shared.models.peft import WEIGHTS, read_config
from shared.runs.start import ExportRequest
from shared.storage.artifacts import find_artifact, open_artifact
from shared.storage.stored_bytes import check_room

if TYPE_CHECKING:
    from gguf import GGUFWriter


# --- Numbers as exports hold them: FP8 in blocks, MLX's groups, GGML's types; written, and read back ---
#
# Shapes: O outputs and I inputs of a weight, or of some of its rows.

MLX_GROUP = 64
_FP8_LARGEST = np.float32(448)
Parts = tuple[bytes, ...]


class Written(NamedTuple):
    """A tensor of an output file: its name, safetensors' name of its type, its shape; or a GGUF file's, by GGML's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def written(name: str, dtype: str, *shape: int) -> Written:
    return Written(name, dtype, shape, prod(shape) * ITEM_BYTES[dtype])


# Each encoding has:
#   rows: it takes rows in multiples of this number;
#   error: the greatest error of a decoded number, as a share of the largest number of its rows;
#   tensors: the tensors written for a weight; encode: each one's bytes, for some rows; decode: the rows of such bytes.


class Fp8:
    """E4M3 with a float32 scale for each block of 128 by 128, as DeepSeek-V3 and Qwen3 publish: w = code * scale."""

    rows = FP8_BLOCK
    error = float(17 / _FP8_LARGEST)  # half a step between the largest numbers is 16; products are rounded

    def tensors(self, entry: Entry) -> tuple[Written, ...]:
        scales = written(f"{entry.name}_scale_inv", "F32", *(size // FP8_BLOCK for size in entry.shape))
        return written(entry.name, "F8_E4M3", *entry.shape), scales

    def encode(self, rows_OI: Floats) -> Parts:
        blocks = _blocks(rows_OI)
        scales = np.maximum(np.abs(blocks).max(axis=(1, 3)) / _FP8_LARGEST, np.float32(1e-30))
        return _e4m3(blocks / scales[:, None, :, None]).tobytes(), scales.tobytes()

    def decode(self, parts: Parts, num_inputs: int) -> Floats:
        blocks = _blocks(_E4M3[np.frombuffer(parts[0], np.uint8)].reshape(-1, num_inputs))
        scales = np.frombuffer(parts[1], np.float32).reshape(-1, num_inputs // FP8_BLOCK)
        return (blocks * scales[:, None, :, None]).reshape(-1, num_inputs)


def _blocks(rows_OI: Floats) -> Floats:
    return rows_OI.reshape(len(rows_OI) // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)


def _e4m3(values: Floats) -> NDArray[np.uint8]:
    """Round numbers to E4M3, to the nearest, to even between two, and to 448 at most."""
    magnitude = np.minimum(np.abs(values), _FP8_LARGEST)
    bits = magnitude.view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = np.rint(magnitude * 2**9)  # below 2**-6 the steps are of 2**-9
    sign = (values.view(np.uint32) >> 24) & 0x80
    return (sign + np.where(magnitude < 2**-6, small, normal)).astype(np.uint8)


_EXPONENTS, _MANTISSAS = np.arange(128) >> 3, np.arange(128) & 7
_POSITIVE = np.where(_EXPONENTS == 0, _MANTISSAS * 2.0**-9, (1 + _MANTISSAS / 8) * 2.0 ** (_EXPONENTS - 7))
_POSITIVE[127] = np.nan
_E4M3 = np.concatenate([_POSITIVE, -_POSITIVE]).astype(np.float32)


@dataclass(frozen=True)
class Mlx:
    """Codes of 4 or 8 bits in words of 32, with a scale and a bias for each group of 64: w = code * scale + bias."""

    bits: int
    dtype: str

    rows = 1

    @property
    def error(self) -> float:
        return 1.1 / (2**self.bits - 1) + 2**-7  # half a step of twice the largest; scale and bias are rounded

    def tensors(self, entry: Entry) -> tuple[Written, ...]:
        stem, (num_rows, num_inputs) = entry.name.removesuffix(".weight"), entry.shape
        groups = (written(f"{stem}.{part}", self.dtype, num_rows, num_inputs // MLX_GROUP) for part in _MLX_PARTS)
        return written(entry.name, "U32", num_rows, num_inputs * self.bits // 32), *groups

    def encode(self, rows_OI: Floats) -> Parts:
        groups, largest = rows_OI.reshape(-1, MLX_GROUP), 2**self.bits - 1
        bias = bytes_of(groups.min(1), self.dtype)
        low = floats_of(bias, self.dtype, "")  # codes are relative to the stored bias
        scale = bytes_of(np.maximum((groups.max(1) - low) / np.float32(largest), np.float32(1e-7)), self.dtype)
        codes = np.rint((groups - low[:, None]) / floats_of(scale, self.dtype, "")[:, None])
        words = np.clip(codes, 0, largest).astype(np.uint32).reshape(-1, 32 // self.bits) << self._shifts
        return words.sum(1, dtype=np.uint32).tobytes(), scale, bias

    def decode(self, parts: Parts, num_inputs: int) -> Floats:
        codes = (np.frombuffer(parts[0], np.uint32)[:, None] >> self._shifts) & np.uint32(2**self.bits - 1)
        scale, bias = (floats_of(part, self.dtype, "")[:, None] for part in parts[1:])
        return (codes.reshape(-1, MLX_GROUP) * scale + bias).astype(np.float32).reshape(-1, num_inputs)

    @property
    def _shifts(self) -> NDArray[np.uint32]:
        return np.arange(0, 32, self.bits, dtype=np.uint32)


_MLX_PARTS = ("scales", "biases")


@dataclass(frozen=True)
class Ggml:
    """A type of GGML, by the `gguf` package: `F32`, `F16`, `BF16` or `Q8_0`.

    `head_size`: of queries and keys of Llama, whose rotated pairs GGUF holds side by side; 0 for other weights.
    """

    name: str
    type: str
    head_size: int = 0

    @property
    def rows(self) -> int:
        return self.head_size or 1

    @property
    def error(self) -> float:
        return {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.51 / 127 + 2**-11}[self.type]

    def tensors(self, entry: Entry) -> tuple[Written, ...]:
        return (Written(self.name, self.type, entry.shape, prod(entry.shape[:-1]) * self._row_bytes(entry.shape[-1])),)

    def encode(self, rows_OI: Floats) -> Parts:
        from gguf import GGMLQuantizationType, quantize

        return (quantize(swapped(rows_OI, 2, self.head_size), GGMLQuantizationType[self.type]).tobytes(),)

    def decode(self, parts: Parts, num_inputs: int) -> Floats:
        from gguf import GGMLQuantizationType, dequantize

        data = np.frombuffer(parts[0], np.uint8).reshape(-1, self._row_bytes(num_inputs))
        return swapped(dequantize(data, GGMLQuantizationType[self.type]), self.head_size // 2, self.head_size)

    def _row_bytes(self, num_inputs: int) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        items, item_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        return num_inputs // items * item_bytes


Encoding = Fp8 | Mlx | Ggml


# --- Gguf writing ---
# The names and encodings of weights in a GGUF file, and the file's header, by the `gguf` package's writer.

_FILE_TYPES = {"q8_0": 7, "f16": 1, "bf16": 32}
_Q8_GROUP = 32


def ggml_of(entry: Entry, config: DenseConfig, stored_as: str, place: str) -> Ggml | None:
    """Return how a GGUF file holds a tensor; None for an output layer that is tied to the embedding.

    Norms and biases stay float32, as llama.cpp wants them; a weight that Q8_0 cannot hold is F16.

    Raises InvalidInput: GGUF has no name for it, or it has a type that cannot be written.
    """
    if config.tie_word_embeddings and entry.name == "lm_head.weight":
        return None
    name = gguf_name(entry.name)
    if name is None or entry.dtype not in ("F32", "F16", "BF16"):
        raise InvalidInput(f"tensor {entry.name} of {entry.dtype} has no place in a GGUF file of this family", place)
    if len(entry.shape) == 1:
        return Ggml(name, "F32")
    is_paired = config.model_type == "llama" and any(f".{part}." in name for part in PAIRED)
    fits = stored_as != "q8_0" or not entry.shape[-1] % _Q8_GROUP
    return Ggml(name, stored_as.upper() if fits else "F16", config.size_of_heads if is_paired else 0)


def begin_gguf(
    folder: Path, path: Path, config: DenseConfig, stored_as: str, title: str, tensors: Sequence[Written]
) -> "GGUFWriter":
    """Return a writer whose file has everything except the tensors' data, which must follow in this order.

    `folder`: the model's, with its tokenizer.

    Raises InvalidInput: names the file and the key that llama.cpp has no name for.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    rope = config.rope
    if rope.rope_type not in ("default", "llama3"):
        rule = "GGUF files are written of default and llama3"
        raise InvalidInput(f"rope_parameters of type {rope.rope_type!r} are not exported: {rule}", "config.json")
    writer = GGUFWriter(path, config.model_type)
    raw: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    writer.add_name(title)
    writer.add_file_type(_FILE_TYPES[stored_as])
    writer.add_quantization_version(2)
    writer.add_context_length(int(raw.get("max_position_embeddings") or 2048))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
    writer.add_key_length(config.size_of_heads)
    writer.add_value_length(config.size_of_heads)
    writer.add_rope_dimension_count(config.size_of_heads)
    writer.add_rope_freq_base(rope.rope_theta or 10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, folder, config.vocab_size)
    factors = rope_factors(rope, config.size_of_heads) if rope.rope_type == "llama3" else None
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for each in tensors:
        kind = GGMLQuantizationType[each.dtype]
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), each.num_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    writer.write_padding(writer.fout[0], writer.fout[0].tell())
    if factors is not None:
        writer.fout[0].write(factors.tobytes())
        writer.write_padding(writer.fout[0], factors.nbytes)
    return writer


def _add_tokenizer(writer: "GGUFWriter", folder: Path, vocab_size: int) -> None:
    """Write a vocabulary of bytes with merges, as GPT-2, Llama 3 and Qwen have it."""
    from gguf import TokenType
    from tokenizers import Tokenizer

    place = folder / "tokenizer.json"
    raw: dict[str, Any] = json.loads(place.read_bytes())
    model = raw.get("model") or {}
    name = pre_tokenizer_name(raw.get("pre_tokenizer"))
    if model.get("type") != "BPE" or model.get("byte_fallback") or name is None:
        rule = "llama.cpp has no name for it that is known here: byte-level BPE as of GPT-2, Llama 3, Qwen or SmolLM"
        raise InvalidInput(f"pre_tokenizer, of a model of type {model.get('type')!r}: {rule}", place.name)
    tokens, types = [f"[PAD{number}]" for number in range(vocab_size)], [TokenType.UNUSED] * vocab_size
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, TokenType.NORMAL
    for added in raw.get("added_tokens", []):
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    if not model["merges"]:
        raise InvalidInput("model: it has no merges, without which llama.cpp reads no vocabulary of bytes", place.name)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in model["merges"]])
    settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_bytes())
    begun = Tokenizer.from_file(str(place)).encode("a").ids[:1]
    for which, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        token = settings.get(f"{which}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content in tokens:
            add(tokens.index(content))
            if which == "bos":
                writer.add_add_bos_token(begun == [tokens.index(content)])
    writer.add_chat_template([{"name": name, "template": text} for name, text in _templates(folder, settings).items()])


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return all chat templates by llama.cpp's names. Files take precedence over tokenizer_config.json."""
    found = settings.get("chat_template") or []
    told = [{"name": "default", "template": found}] if isinstance(found, str) else found
    named = {one["name"]: one["template"] for one in told}
    named |= {path.stem: path.read_text() for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").exists():
        named["default"] = (folder / "chat_template.jinja").read_text()
    made = {re.sub(r"\W", "_", name, flags=re.ASCII): text for name, text in named.items()}
    if len(made) < len(named):
        rule = "in a GGUF file names are of letters, digits and _, and two would be the same"
        raise InvalidInput(f"chat templates {', '.join(map(repr, named))}: {rule}", "tokenizer_config.json")
    return made


# --- Writes the files of an export from the folders of a model and an adapter, and reads them back ---
# A confined call.
#
# It holds only a few megabytes of weights in memory at a time.

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_FAMILIES = {"gguf": GGUF_FAMILIES, "fp8": (*_DENSE, "qwen3_moe"), "mlx": _DENSE}
_BITS = {"q4": 4, "q8": 8}
Plan = Mapping[Entry, Encoding | None]
"""How each tensor of a file is written; None: as it is."""
Regions = dict[str, tuple[Path, int, int]]
"""Where each tensor lies: its file, first byte and number of bytes."""


class ExportSource(Frozen):
    """The source and format of an export: a model's folder with its weights and other files, an adapter's, a title."""

    model: str
    weights: tuple[str, ...]
    others: tuple[str, ...]
    adapter: str | None
    export: Export
    title: str

    @property
    def folder(self) -> Path:
        return Path(self.model)

    def config(self) -> DenseConfig:
        return read_model_config(json.loads((self.folder / "config.json").read_bytes()), "config.json")

    def merger(self) -> Merger:
        """Return the function that merges the adapter into weights; without an adapter it returns them unchanged."""
        if self.adapter is None:
            return Merger({})
        with (Path(self.adapter) / WEIGHTS).open("rb") as weights:
            return Merger.of(read_config(Path(self.adapter)), weights, WEIGHTS)


def write_export(source: ExportSource, target: str) -> None:
    """Write all files of an export into the folder `target`.

    Raises:
        InvalidInput: names the file and the key that the format cannot hold, or the factor that has no weight.
        CorruptArtifact: the data that was read back differs from the written data.
    """
    folder, merger = Path(target), source.merger()
    plans = _plans(source)
    if source.export.format == "gguf":
        regions = _write_gguf(source, plans, merger, folder / f"{source.title}-{source.export.stored_as}.gguf")
    else:
        regions = {}
        for shard, plan in plans.items():
            regions |= _write_shard(source, shard, plan, merger, folder / shard)
        _write_small_files(source, regions, folder)
    merger.check_used(WEIGHTS)
    for shard, plan in plans.items():
        _read_back(source, shard, plan, merger, regions)


def _plans(source: ExportSource) -> dict[str, Plan]:
    config, export = source.config(), source.export
    families = _FAMILIES.get(export.format)
    if families is not None and config.model_type not in families:
        rule = f"{export.format} is written of {', '.join(families)}; merged of every family"
        problem = f"model_type {config.model_type!r} is not exported as {export.format}"
        raise InvalidInput(f"{problem}: {rule}", "config.json")
    if families is not None and config.tensor_prefix != "model":
        rule = f"{export.format} is written of a decoder alone; merged of this model, too"
        raise InvalidInput(f"a decoder beside a tower of vision is not exported so: {rule}", "config.json")
    plans: dict[str, Plan] = {}
    for shard in source.weights:
        with (source.folder / shard).open("rb") as file:
            _, entries = read_header(file, shard)
        found = ((entry, _encoding(entry, config, export, shard)) for entry in entries)
        plans[shard] = {entry: how for entry, how in found if how or export.format != "gguf"}
    return plans


def _encoding(entry: Entry, config: DenseConfig, export: Export, place: str) -> Encoding | None:
    """Return how a tensor is written. None: unchanged, or omitted from a GGUF file."""
    match export.format:
        case "gguf":
            return ggml_of(entry, config, str(export.stored_as), place)
        case "mlx" if len(entry.shape) == 2 and not entry.shape[1] % MLX_GROUP:
            return Mlx(_BITS[str(export.stored_as)], entry.dtype)
        case "fp8" if parts_of(entry.name, entry.shape):
            raise InvalidInput(f"{entry.name} is a stack of experts, which fp8 is not written of", place)
        case "fp8" if ".layers." in entry.name and entry.name.endswith("_proj.weight"):
            if any(size % FP8_BLOCK for size in entry.shape):
                rule = f"fp8 has blocks of {FP8_BLOCK} by {FP8_BLOCK}, of which both sizes must be multiples"
                raise InvalidInput(f"{entry.name} is of {list(entry.shape)}: {rule}", place)
            return Fp8()
    return None


def _tensors(entry: Entry, how: Encoding | None) -> tuple[Written, ...]:
    return how.tensors(entry) if how else (Written(entry.name, entry.dtype, entry.shape, entry.stop - entry.start),)


def _write_shard(source: ExportSource, shard: str, plan: Plan, merger: Merger, path: Path) -> Regions:
    """Write a safetensors file. Returns the tensors' regions, once the safetensors library has opened it."""
    from safetensors import safe_open

    tensors = (each for entry, how in plan.items() for each in _tensors(entry, how))
    with path.open("wb") as file:
        file.write(header_of(tensors, "mlx" if source.export.format == "mlx" else "pt"))
        for _ in _encode(source, shard, plan, merger, file):
            pass
    with safe_open(path, framework="np"), path.open("rb") as file:
        header, entries = read_header(file, shard)
    return {each.name: (path, len(header) + each.start, each.stop - each.start) for each in entries}


def _write_gguf(source: ExportSource, plans: Mapping[str, Plan], merger: Merger, path: Path) -> Regions:
    """Write a GGUF file. Returns where its package's reader finds the tensors."""
    from gguf import GGUFReader

    tensors = [each for plan in plans.values() for entry, how in plan.items() for each in _tensors(entry, how)]
    writer = begin_gguf(source.folder, path, source.config(), str(source.export.stored_as), source.title, tensors)
    assert writer.fout is not None
    for shard, plan in plans.items():
        for entry in _encode(source, shard, plan, merger, writer.fout[0]):
            writer.write_padding(writer.fout[0], _tensors(entry, plan[entry])[0].num_bytes)
    writer.close()
    return {each.name: (path, each.data_offset, each.n_bytes) for each in GGUFReader(path).tensors}


def _encode(source: ExportSource, shard: str, plan: Plan, merger: Merger, file: BinaryIO) -> Iterator[Entry]:
    """Write each tensor block by block, followed by its scales. Yields it when it is written."""
    for entry, how, blocks in _file_blocks(source, shard, plan, merger):
        if how is None:
            file.writelines(blocks)
            yield entry
            continue
        behind = []
        for rows_OI in _rows(blocks, entry, how.rows):
            if not np.isfinite(rows_OI).all():
                raise InvalidInput(f"tensor {entry.name} holds a number that is not finite", shard)
            first, *others = how.encode(rows_OI)
            file.write(first)
            behind.append(others)
            sign(f"{shard}: {entry.name}")
        for parts in zip(*behind, strict=True):
            file.writelines(parts)
        yield entry


def _file_blocks(
    source: ExportSource, shard: str, plan: Plan, merger: Merger
) -> Iterator[tuple[Entry, Encoding | None, Iterator[bytes]]]:
    """Yield the tensors of a file, each with its merged bytes."""
    with (source.folder / shard).open("rb") as weights:
        header, _ = read_header(weights, shard)
        for entry, how in plan.items():
            sign(f"{shard}: {entry.name}")
            weights.seek(len(header) + entry.start)
            yield entry, how, merger.blocks(entry, weights, shard)


def _rows(blocks: Iterator[bytes], entry: Entry, multiple: int) -> Iterator[Floats]:
    """Yield a tensor's rows as float32, in multiples of a number that divides all of them. A vector is one row."""
    num_bytes = multiple * entry.shape[-1] * ITEM_BYTES[entry.dtype]
    held = b""
    for block in blocks:
        held += block
        if whole := len(held) - len(held) % num_bytes:
            yield floats_of(held[:whole], entry.dtype, entry.name).reshape(-1, entry.shape[-1])
        held = held[whole:]


def _read_back(source: ExportSource, shard: str, plan: Plan, merger: Merger, regions: Regions) -> None:
    """Compare the first rows of each tensor with those of the model."""
    for entry, how, blocks in _file_blocks(source, shard, plan, merger):
        places = [regions.get(each.name, (Path(os.devnull), 0, 0)) for each in _tensors(entry, how)]
        if how is None:
            block = next(blocks, b"")
            is_right = _read(places[0], len(block)) == block
        else:
            rows_OI = next(_rows(blocks, entry, how.rows))
            num_rows = entry.shape[0] if len(entry.shape) > 1 else 1
            back_OI = how.decode(tuple(_read(at, at[2] * len(rows_OI) // num_rows) for at in places), entry.shape[-1])
            worst = np.abs(back_OI - rows_OI).max() if back_OI.shape == rows_OI.shape else np.inf
            is_right = bool(worst <= how.error * np.abs(rows_OI).max())
        if not is_right:
            raise CorruptArtifact(f"read back, {entry.name} is not what was written", source.title)


def _read(place: tuple[Path, int, int], num_bytes: int) -> bytes:
    with place[0].open("rb") as file:
        file.seek(place[1])
        return file.read(num_bytes)


def _write_small_files(source: ExportSource, regions: Regions, folder: Path) -> None:
    """Copy the files beside the weights, and an adapter's end tokens; write the config and the index."""
    copied = [source.folder / name for name in source.others]
    copied += [Path(source.adapter) / name for name in (GENERATION, "README.md")] if source.adapter else []
    for path in copied:
        if path.exists():
            target = folder / (path.relative_to(source.folder) if path.is_relative_to(source.folder) else path.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    config: dict[str, Any] = json.loads((source.folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | _quantization(source), indent=2) + "\n")
    if len(source.weights) > 1:
        index = {name: place[0].name for name, place in sorted(regions.items())}
        total = sum(place[2] for place in regions.values())
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2) + "\n"
        )


def _quantization(source: ExportSource) -> dict[str, Any]:
    """Return `config.json`'s entry on the weights' types, as transformers and vLLM read it, or mlx-lm."""
    match source.export.format:
        case "fp8":
            config = source.config()
            routers = config.num_hidden_layers if isinstance(config, MixtureConfig) else 0
            skipped = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(routers))]
            types: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
            types |= {"weight_block_size": [FP8_BLOCK, FP8_BLOCK], "modules_to_not_convert": skipped}
            return {"quantization_config": types}
        case "mlx":
            bits = _BITS[str(source.export.stored_as)]
            return {"quantization": {"group_size": MLX_GROUP, "bits": bits, "mode": "affine"}}
    return {}


class Exports(OnHost):
    """The activity `export`."""

    @on_thread("export")
    def export(self, request: ExportRequest) -> Artifact:
        """Write an export, unless it is in the store.

        Raises:
            InvalidInput: the format cannot hold the model, with the file, the key and the rule; or there is no room.
            CorruptArtifact: a file that was read back differs from the written one.
        """
        if done := find_artifact(self._host.store, request.key):
            return done
        _, manifest = open_artifact(request.model, self._host.settings.s3)
        names = [entry.path for entry in manifest.files]
        check_room(request.room, request.tenant, manifest.num_bytes, request.name)
        source = ExportSource(
            model=str(self._host.stage(request.model)),
            weights=tuple(name for name in names if name.endswith(".safetensors")),
            others=tuple(name for name in names if not name.endswith((".safetensors", INDEX))),
            adapter=str(self._host.stage(request.adapter)) if request.adapter else None,
            export=request.export,
            title=request.name.replace(":", "-"),
        )

        def make(folder: Path) -> None:
            reads = [Path(given) for given in (source.model, source.adapter) if given]
            self._host.confined(write_export, source, str(folder), kind="dataset", reads=reads, writes=[folder])

        return self._host.made_once(request.key, "export", make)
