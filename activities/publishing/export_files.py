"""Writes the files of an export, one at a time, from a model's folder and an adapter's: confined calls.

Of the weights a few megabytes are held at a time. Each file is read back when it is complete.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from activities.confined.fork_server import sign
from activities.models.gguf_names import GGUF_FAMILIES
from activities.publishing.encodings import FP8_BLOCK, MLX_GROUP, Encoding, Fp8, Mlx, Written
from activities.publishing.gguf_writing import ROPE_FACTORS, ggml_of, gguf_writer, rope_factors
from longshore.fields import Frozen
from shared.errors import CorruptArtifact, InvalidInput
from shared.models.config import DenseConfig, MixtureConfig, read_model_config
from shared.models.merging import Entry, Floats, Merger, floats_of, read_header
from shared.models.peft import WEIGHTS, read_config
from shared.runs.exports import Export

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_FAMILIES = {"gguf": GGUF_FAMILIES, "fp8": (*_DENSE, "qwen3_moe"), "mlx": _DENSE}
SAFETENSORS = ".safetensors"


class ExportSource(Frozen):
    """What is exported, and how: folders of a model and of an adapter, the names of its weights' files, a title."""

    model: str
    shards: tuple[str, ...]
    adapter: str | None
    export: Export
    title: str

    @property
    def folder(self) -> Path:
        return Path(self.model)

    def config(self) -> DenseConfig:
        return read_model_config(json.loads((self.folder / "config.json").read_bytes()), "config.json")

    def merger(self) -> Merger:
        """Return what merges the adapter; without one, what leaves every weight as it is."""
        if self.adapter is None:
            return Merger(0.0, {})
        with (Path(self.adapter) / WEIGHTS).open("rb") as weights:
            return Merger.of(read_config(Path(self.adapter)), weights, WEIGHTS)


def plan_export(source: ExportSource) -> list[str]:
    """Check that a model can be exported, by its config and the headers of its files.

    Returns:
        The names of the files that hold the weights, each to be written by `write_file`.

    Raises:
        InvalidInput: names the file and the key that the format cannot hold, or the factor that has no weight.
    """
    export, config, merger = source.export, source.config(), source.merger()
    families = _FAMILIES.get(export.format)
    if families is not None and config.model_type not in families:
        rule = f"{export.format} is written of {', '.join(families)}; merged of every family"
        raise InvalidInput(
            f"model_type {config.model_type!r} is not exported as {export.format}: {rule}", "config.json"
        )
    entries = {entry.name: (name, entry) for name in source.shards for entry in _entries(source.folder / name)}
    for name in merger.factors.keys() - entries.keys():
        raise InvalidInput(f"the base model has no {name}, which the adapter changes", WEIGHTS)
    for place, entry in entries.values():
        _check(entry, export, place)
    if export.format != "gguf":
        return list(source.shards)
    for place, entry in entries.values():
        ggml_of(entry, config, export, place)
    gguf_writer(source.folder, None, config, export, source.title)  # llama.cpp must know its tokenizer and its rotation
    return [f"{source.title}-{export.stored_as}.gguf"]


def write_file(source: ExportSource, name: str, target: str) -> dict[str, int]:
    """Write one file of weights into the folder `target`, and read it back.

    Returns:
        The bytes of each tensor in it.

    Raises:
        CorruptArtifact: what is read back is not what was written.
    """
    export, merger, path = source.export, source.merger(), Path(target) / name
    if export.format == "gguf":
        return _write_gguf(source, merger, path)
    with (source.folder / name).open("rb") as shard, path.open("wb") as file:
        _, entries = read_header(shard, name)
        outputs = {entry: _outputs(entry, export) for entry in entries}
        file.write(_header(outputs, {"format": "mlx" if export.format == "mlx" else "pt"}))
        for entry in entries:
            _encode(merger.blocks(entry, shard, name), entry, _encoding(entry, export), file, name)
    _read_back(source.folder / name, path, merger, outputs, export)
    return {each.name: each.num_bytes for tensors in outputs.values() for each in tensors}


def config_of_export(source: ExportSource) -> dict[str, Any]:
    """Return the exported model's `config.json`."""
    content: dict[str, Any] = json.loads((source.folder / "config.json").read_bytes())
    config = source.config()
    match source.export.format:
        case "fp8":
            routers = config.num_hidden_layers if isinstance(config, MixtureConfig) else 0
            content["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
                "modules_to_not_convert": ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(routers))],
            }
        case "mlx":
            bits = {"q4": 4, "q8": 8}[str(source.export.stored_as)]
            content["quantization"] = {"group_size": MLX_GROUP, "bits": bits, "mode": "affine"}
    return content


def _entries(path: Path) -> list[Entry]:
    with path.open("rb") as file:
        return read_header(file, path.name)[1]


def _is_linear(entry: Entry) -> bool:
    return ".layers." in entry.name and entry.name.endswith("_proj.weight")


def _check(entry: Entry, export: Export, place: str) -> None:
    if export.format == "fp8" and _is_linear(entry) and any(size % FP8_BLOCK for size in entry.shape):
        rule = f"fp8 has blocks of {FP8_BLOCK} by {FP8_BLOCK}, of which both sizes must be multiples"
        raise InvalidInput(f"{entry.name} is of {list(entry.shape)}: {rule}", place)


def _encoding(entry: Entry, export: Export) -> Fp8 | Mlx | None:
    """How a tensor is written; None: as it is."""
    if export.format == "fp8" and _is_linear(entry):
        return Fp8()
    if export.format == "mlx" and len(entry.shape) == 2 and not entry.shape[1] % MLX_GROUP:
        return Mlx({"q4": 4, "q8": 8}[str(export.stored_as)], entry.dtype)
    return None


def _outputs(entry: Entry, export: Export) -> list[Written]:
    encoding = _encoding(entry, export)
    return list(encoding.tensors(entry)) if encoding else [Written(entry.name, entry.dtype, entry.shape)]


def _header(outputs: Mapping[Entry, list[Written]], metadata: dict[str, str]) -> bytes:
    content: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for each in (each for tensors in outputs.values() for each in tensors):
        content[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": (at, at + each.num_bytes)}
        at += each.num_bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _encode(blocks: Iterator[bytes], entry: Entry, encoding: Encoding | None, file: BinaryIO, place: str) -> None:
    """Write a tensor: its first part as it comes, its scales behind it."""
    sign(f"{place}: {entry.name}")
    if encoding is None:
        file.writelines(blocks)
        return
    behind: list[tuple[bytes, ...]] = []
    for rows_OI in _rows(blocks, entry, encoding.rows):
        if not np.isfinite(rows_OI).all():
            raise InvalidInput(f"tensor {entry.name} holds a number that is not finite", place)
        first, *others = encoding.encode(rows_OI)
        file.write(first)
        behind.append(tuple(others))
        sign(f"{place}: {entry.name}")
    for parts in zip(*behind, strict=True):
        file.writelines(parts)


def _rows(blocks: Iterator[bytes], entry: Entry, multiple: int) -> Iterator[Floats]:
    """Yield a tensor's rows as float32, in multiples of a number that divides all of them. A vector is one row."""
    num_inputs = entry.shape[-1]
    num_bytes = multiple * num_inputs * {"F32": 4, "F16": 2, "BF16": 2}[entry.dtype]
    held = b""
    for block in blocks:
        held += block
        whole = len(held) - len(held) % num_bytes
        if whole:
            yield floats_of(held[:whole], entry.dtype, entry.name).reshape(-1, num_inputs)
        held = held[whole:]


def _write_gguf(source: ExportSource, merger: Merger, path: Path) -> dict[str, int]:
    config, export = source.config(), source.export
    writer = gguf_writer(source.folder, path, config, export, source.title)
    shards = {name: _entries(source.folder / name) for name in source.shards}
    found: dict[str, int] = {}
    factors = rope_factors(config.rope, config.size_of_heads) if config.rope.rope_type == "llama3" else None
    if factors is not None:
        found[ROPE_FACTORS] = factors.nbytes
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for shard, entries in shards.items():
        for entry in entries:
            if (named := ggml_of(entry, config, export, shard)) is not None:
                found[named[0]] = named[1].num_bytes(entry.shape)
                writer.add_tensor_info(named[0], entry.shape, np.dtype(np.float32), found[named[0]], named[1].type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    if factors is not None:
        file.write(factors.tobytes())
        writer.write_padding(file, factors.nbytes)
    for shard, entries in shards.items():
        with (source.folder / shard).open("rb") as weights:
            header, _ = read_header(weights, shard)
            for entry in entries:
                if (named := ggml_of(entry, config, export, shard)) is not None:
                    weights.seek(len(header) + entry.start)
                    _encode(merger.blocks(entry, weights, shard), entry, named[1], file, shard)
                    writer.write_padding(file, found[named[0]])
    writer.close()
    _read_gguf_back(source, path, merger, found)
    return found


def _read_back(shard: Path, path: Path, merger: Merger, outputs: Mapping[Entry, list[Written]], export: Export) -> None:
    """Read a file of safetensors back: by its library, and the first rows of each tensor by their values."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        expected = {each.name: each for tensors in outputs.values() for each in tensors}
        if set(file.keys()) != expected.keys():
            raise CorruptArtifact("read back, it holds other tensors than were written", path.name)
        for name, each in expected.items():
            found = file.get_slice(name)
            if (found.get_dtype(), tuple(found.get_shape())) != (each.dtype, each.shape):
                raise CorruptArtifact(f"read back, {name} has another type or shape", path.name)
    with path.open("rb") as written:
        header, entries = read_header(written, path.name)
    regions = {each.name: (len(header) + each.start, each.stop - each.start) for each in entries}
    _compare(
        shard,
        path,
        merger,
        lambda entry: (_encoding(entry, export), [regions[each.name] for each in outputs[entry]]),
    )


def _read_gguf_back(source: ExportSource, path: Path, merger: Merger, expected: Mapping[str, int]) -> None:
    """The same of a GGUF file, by its package's reader."""
    from gguf import GGUFReader

    config, export = source.config(), source.export
    found = {each.name: each for each in GGUFReader(path).tensors}
    if {name: each.n_bytes for name, each in found.items()} != expected:
        raise CorruptArtifact("read back, it holds other tensors than were written", path.name)

    def region(entry: Entry) -> tuple[Encoding, list[tuple[int, int]]] | None:
        if (named := ggml_of(entry, config, export, path.name)) is None:
            return None
        each = found[named[0]]
        if (each.tensor_type, tuple(map(int, reversed(each.shape)))) != (named[1].type, entry.shape):
            raise CorruptArtifact(f"read back, {each.name} has another type or shape", path.name)
        return named[1], [(each.data_offset, each.n_bytes)]

    for name in source.shards:
        _compare(source.folder / name, path, merger, region)


def _compare(
    shard: Path,
    path: Path,
    merger: Merger,
    region: Callable[[Entry], tuple[Encoding | None, list[tuple[int, int]]] | None],
) -> None:
    """Compare the first rows of each tensor with those of the model. `region`: where its parts lie: start and bytes."""
    with shard.open("rb") as source, path.open("rb") as written:
        header, entries = read_header(source, shard.name)
        for entry in entries:
            if (found := region(entry)) is None:
                continue
            encoding, regions = found
            source.seek(len(header) + entry.start)
            blocks = merger.blocks(entry, source, shard.name)
            if encoding is None:
                block = next(blocks, b"")
                is_right = _at(written, regions[0][0], len(block)) == block
            else:
                rows_OI = next(_rows(blocks, entry, encoding.rows))
                share = len(rows_OI), entry.shape[0] if len(entry.shape) > 1 else 1
                parts = (_at(written, start, size * share[0] // share[1]) for start, size in regions)
                off = np.abs(encoding.decode(tuple(parts), entry.shape[-1]) - rows_OI).max()
                is_right = bool(off <= encoding.error * np.abs(rows_OI).max())
            if not is_right:
                raise CorruptArtifact(f"read back, {entry.name} is not what was written", path.name)


def _at(file: BinaryIO, start: int, num_bytes: int) -> bytes:
    file.seek(start)
    return file.read(num_bytes)
