"""Writes the files of an export from the folders of a model and an adapter, and reads them back: a confined call.

It holds only a few megabytes of weights in memory at a time.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from activities.confined.fork_server import sign
from activities.models.files import INDEX
from activities.models.gguf_names import GGUF_FAMILIES
from activities.publishing.encodings import MLX_GROUP, Encoding, Fp8, Mlx, Written
from activities.publishing.gguf_writing import begin_gguf, ggml_of
from longshore.fields import Frozen
from shared.errors import CorruptArtifact, InvalidInput
from shared.models.config import read_model_config
from shared.models.dense import DenseConfig
from shared.models.end_tokens import GENERATION
from shared.models.families import MixtureConfig
from shared.models.merging import (
    FP8_BLOCK,
    ITEM_BYTES,
    Entry,
    Floats,
    Merger,
    floats_of,
    header_of,
    parts_of,
    read_header,
)
from shared.models.peft import WEIGHTS, read_config
from shared.runs.models import Export

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
    for entry, how, blocks in _blocks(source, shard, plan, merger):
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


def _blocks(
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
    for entry, how, blocks in _blocks(source, shard, plan, merger):
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
