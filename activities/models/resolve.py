"""Resolves users' names of models and adapters to artifacts that hosts can stage, checked before a GPU is used.

Files that every host can read in place are not copied.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from activities.heartbeats import cancellation_check, on_thread, stop_if_cancelled
from activities.host_context import HostContext, OnHost
from activities.models.gguf_file import convert_gguf
from activities.sandbox.child import sign
from activities.sources.models import HubId, Location, json_object, locate, located
from longshore.accounts import Room
from longshore.fields import Artifact, Frozen
from longshore.runs import RunId, Tenant
from longshore.training import LINEARS, Lora, Target
from longshore.views import FileEntry
from shared.errors import InvalidInput, NotFound, StoreUnavailable
from shared.families import read_model_config
from shared.families.config import DenseConfig, Fp8, GenericConfig
from shared.families.model_slices import Stored, contents_of, shape_of, unpacked
from shared.families.tensor_slices import TensorSlice, modules_of
from shared.models import peft
from shared.models.merging import FLOATS, Entry, floats_of, parse_header
from shared.models.shape import ITEM_BYTES, ModelShape, Of, check_layout, check_max_tokens, layout_bytes
from shared.runs.start import ModelRequest, ResolvedModel
from shared.storage.artifacts import (
    Manifest,
    find_artifact,
    manifest_of,
    open_artifact,
    read_record,
    refer,
    remember_checked,
    sha256_object,
    upload_files,
)
from shared.storage.host_states import read_offer
from shared.storage.paths import RunKeys, checkpoint_adapter_run, content_key, is_published, model_import
from shared.storage.places import OpenPlaces
from shared.storage.store import LocalStore
from shared.storage.stored_bytes import check_room

# --- Checks of a model folder before any GPU is asked for: cheap ones, of small files and headers alone ---

_MAX_HEADER_BYTES = 8 << 20  # of some 70,000 tensors; parsed, each byte takes thirty
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),  # beside a tower
)
_UNREAD_TEMPLATE = "chat_template.json"  # of processors of images and sounds
HUB_PATTERNS = (*SMALL_FILES, _UNREAD_TEMPLATE, "model*.safetensors", INDEX)
_MAX_TENSORS = 500_000
_BLOCK_BYTES = 8 << 20
_IGNORED = "rotary_emb.inv_freq"  # a buffer that old checkpoints carry


def read_tensor_entries(read: Callable[[int, int], bytes], size: int, place: str) -> dict[str, Entry]:
    """The tensors of a file by name, from its first bytes alone.

    Args:
        read: bytes of the file by first byte and number.
        size: of the whole file, in bytes.

    Raises:
        InvalidInput: no safetensors file, or a truncated one.
    """
    if size < 8:
        raise InvalidInput(f"no safetensors file: it has {size} bytes", place)
    header_bytes = int.from_bytes(read(0, 8), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise InvalidInput("no safetensors file: its first bytes are not the size of a header", place)
    if header_bytes > size - 8:
        raise InvalidInput(f"truncated: a header of {header_bytes:,} bytes in a file of {size:,}", place)
    entries = parse_header(read(8, header_bytes), place)
    expected = 8 + header_bytes + (entries[-1].stop if entries else 0)
    if expected != size:
        raise InvalidInput(
            f"truncated or damaged: the header tells of {expected:,} bytes, the file has {size:,}", place
        )
    return {entry.name: entry for entry in entries}


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder by name, and the file of each.

    `slices`: the computed and trained tensors, by the family's names; empty for a family that is not ours.
    """

    tensors: dict[str, Entry]
    file_of: dict[str, str]
    slices: tuple[TensorSlice, ...] = ()


class _Index(BaseModel):
    model_config = ConfigDict(extra="ignore")

    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/]+\.safetensors$")]] = Field(min_length=1)


def read_config(location: Location, any_family: bool = False) -> DenseConfig:
    """Read `config.json`. `any_family`: see `read_model_config`.

    Raises InvalidInput: it is missing, of an unknown family, or needs something that we do not compute.
    """
    if "config.json" not in location.files and "adapter_config.json" in location.files:
        raise InvalidInput("this is an adapter, not a model: give the model it belongs to", location.store.uri)
    return read_model_config(location.read_json("config.json"), location.place("config.json"), any_family)


def check_tokenizer(location: Location, vocab_size: int, host: HostContext) -> None:
    """Raises InvalidInput when there is no fast tokenizer, or it has ids that the model does not have."""
    data, place = location.read_whole("tokenizer.json"), location.place("tokenizer.json")
    location.read_json("tokenizer_config.json")
    host.confined(check_ids, data.decode(errors="replace"), place, vocab_size)


def check_ids(text: str, place: str, vocab_size: int) -> None:
    """Check token ids in a confined process: a tokenizer.json may have 100 MB. Raises as `check_tokenizer` does."""
    sign(place)
    tokenizer = json_object(text, place)
    try:
        vocab = tokenizer["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))  # Unigram models list their pieces
        largest = max((*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))), default=0)
    except (KeyError, TypeError) as error:
        raise InvalidInput("this is no tokenizer of the tokenizers library", place) from error
    if largest >= vocab_size:
        raise InvalidInput(f"it has the id {largest}, but the model has only {vocab_size} embeddings", place)


def check_chat_template(location: Location) -> None:
    """Raises InvalidInput when no file that a tokenizer reads holds a chat template."""
    if "chat_template.jinja" in location.files or location.read_json("tokenizer_config.json").get("chat_template"):
        return
    if _UNREAD_TEMPLATE in location.files:
        rule = "tokenizers do not read it, in transformers either: write its chat_template to chat_template.jinja"
        raise InvalidInput(rule, location.place(_UNREAD_TEMPLATE))
    raise InvalidInput(
        "the model has no chat template: add chat_template.jinja, or chat_template to tokenizer_config.json",
        location.store.uri,
    )


def weight_files(location: Location) -> list[str]:
    """The safetensors files that make up the weights, and their index. Other files are ignored.

    Raises InvalidInput: there are none, there are two sets, or the index names one that is missing.
    """
    if INDEX in location.files:
        shards = sorted(set(_weight_map(location).values()))
        for shard in shards:
            if shard not in location.files:
                raise InvalidInput(f"the index names {shard}, which is missing", location.place(INDEX))
        if WEIGHTS in location.files and WEIGHTS not in shards:
            rule = f"beside it lies {WEIGHTS}, which it does not name: remove the one that is not the model"
            raise InvalidInput(rule, location.place(INDEX))
        return [INDEX, *shards]
    if WEIGHTS in location.files:
        return [WEIGHTS]
    others = [name for name in location.files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    reason = f"; {others[0]} is not read, since such files can hold code" if others else ""
    raise InvalidInput(f"the folder has neither {WEIGHTS} nor {INDEX}{reason}", location.store.uri)


def gguf_file(location: Location) -> str | None:
    """Return the name of the model's GGUF file if there are no safetensors. Raises InvalidInput for several."""
    found = sorted(name for name in location.files if name.endswith(".gguf"))
    if not found or WEIGHTS in location.files or INDEX in location.files:
        return None
    if len(found) > 1:
        raise InvalidInput(
            f"there are {len(found)} .gguf files: a model is one of them, alone", location.place(found[1])
        )
    return found[0]


def _weight_map(location: Location) -> dict[str, str]:
    try:
        return _Index.model_validate(location.read_json(INDEX)).weight_map
    except ValidationError as error:
        problem = "weight_map must map names of tensors to .safetensors files of this folder"
        raise InvalidInput(problem, location.place(INDEX)) from error


def check_weights(location: Location, config: DenseConfig) -> Weights:
    """Read the headers of the weights. Which tensors a model of no family of ours has is not known here.

    Raises InvalidInput: a file is truncated, or a worker would refuse its tensors (`contents_of`).
    """
    files = weight_files(location)
    tensors: dict[str, Entry] = {}
    file_of: dict[str, str] = {}
    for file in files:
        if file != INDEX:
            found = read_tensors(location, file)
            tensors |= found
            file_of |= dict.fromkeys(found, file)
            if len(tensors) > _MAX_TENSORS:
                raise InvalidInput(f"more than {_MAX_TENSORS:,} tensors", location.store.uri)
    if INDEX in files:
        _check_index(file_of, location)
    is_fp8 = isinstance(config.quantization_config, Fp8)
    stored = {name: Stored(entry.dtype, entry.shape) for name, entry in tensors.items()}
    place = location.place(INDEX if INDEX in files else WEIGHTS)
    if isinstance(config, GenericConfig):
        check_dtypes(unpacked(stored, (), place, is_fp8), place)
        return Weights(tensors, file_of)
    architecture = config.named_as_in(tensors).architecture()
    slices = architecture.slices(tp=1)
    everything = [*slices, *architecture.constants]
    contents = contents_of(everything, architecture.carried, stored, place, is_fp8)
    if contents.tied is not None:
        _check_tied(tensors, file_of, *contents.tied, location)
    return Weights(tensors, file_of, tuple(slices))


def _check_index(file_of: dict[str, str], location: Location) -> None:
    named = _weight_map(location)
    for name, file in named.items():
        if name not in file_of:
            raise InvalidInput(f"tensor {name} is not in {file}, where the index has it", location.place(INDEX))
    for name, file in file_of.items():
        if name not in named and not name.endswith(_IGNORED):
            raise InvalidInput(f"it lacks tensor {name}, which is in {file}", location.place(INDEX))


def _check_tied(
    tensors: dict[str, Entry], file_of: dict[str, str], made: str, embedded: str, location: Location
) -> None:
    """Compare a separate output layer with the embedding. transformers uses the layer if it differs."""
    output, embedding = tensors[made], tensors[embedded]
    is_same = (output.dtype, output.shape) == (embedding.dtype, embedding.shape) and all(
        mine == theirs
        for mine, theirs in zip(
            *(tensor_bytes(location, file_of[name], tensors[name]) for name in (made, embedded)), strict=True
        )
    )
    if not is_same:
        rule = f"but {made} of {file_of[made]} differs from {embedded}: set it to false, or remove that tensor"
        raise InvalidInput(f"tie_word_embeddings is true, {rule}", location.place("config.json"))


def tensor_bytes(location: Location, file: str, tensor: Entry) -> Iterator[bytes]:
    """Yield a tensor's bytes, a few megabytes at a time."""
    begin = 8 + int.from_bytes(location.store.read_range(file, 0, 8), "little")
    for at in range(begin + tensor.start, begin + tensor.stop, _BLOCK_BYTES):
        stop_if_cancelled()
        yield location.store.read_range(file, at, min(_BLOCK_BYTES, begin + tensor.stop - at))


def read_tensors(location: Location, name: str) -> dict[str, Entry]:
    def read(start: int, length: int) -> bytes:
        return location.store.read_range(name, start, length)

    return read_tensor_entries(read, location.files[name].size, location.place(name))


def check_dtypes(tensors: Mapping[str, Entry | Stored], place: str) -> None:
    """Raises InvalidInput for weights that are no floats of a kind that we train."""
    for name, tensor in tensors.items():
        if name.endswith((".weight", ".bias")) and tensor.dtype not in FLOATS:
            problem = f"tensor {name} is {tensor.dtype}; weights must be one of {', '.join(FLOATS)}"
            raise InvalidInput(problem, place)


# --- Checks that a model's weights are finite numbers ---

_ROUTER = re.compile(r"\.(?:gate|router)\.(?:weight|bias|e_score_correction_bias)$")


def check_finite(weights: Weights, location: Location, *, all_of_them: bool) -> None:
    """Read all tensors, a few megabytes at a time, or those of a mixture's routers alone.

    Raises InvalidInput: one holds a number that is not finite; names it.
    """
    for name, tensor in weights.tensors.items():
        if tensor.dtype not in FLOATS or not (all_of_them or _ROUTER.search(name)):
            continue
        file = weights.file_of[name]
        for block in tensor_bytes(location, file, tensor):
            if not np.isfinite(floats_of(block, tensor.dtype, name)).all():
                raise InvalidInput(f"tensor {name} holds a number that is not finite", location.place(file))


_MOST_NAMES = 4
_OF_BASE = (".safetensors", "tokenizer.json")  # suffixes of the files that identify a base model
_TENSOR = re.compile(
    r"base_model\.model\.(model\.(language_model\.)?layers\.(?P<layer>\d+)\.(self_attn|linear_attn|"
    r"(mlp|mixer)((?P<expert>\.experts\.\d+)|(?P<shared>\.shared_experts?))?)\.\w+|lm_head|"
    r"model\.(language_model\.)?embed_tokens)\.lora_(embedding_)?(?P<kind>\w+)(\.weight)?"
)


class AdapterRequest(Frozen):
    """An adapter as a tenant's user names it, and the LoRA settings and model sizes that it must match, if known.

    `run_id` and `role`: the run that uses it, and whether it starts from it, has it as a reference, or is graded by it.
    `base` and `model`: the model that the adapter is used on, and its name; None: unknown, and not compared.
    """

    uri: str
    tenant: Tenant
    run_id: RunId | None = None
    role: Literal["initial_adapter", "reference", "reward_model"] = "initial_adapter"
    lora: Lora | None = None
    shape: ModelShape | None = None
    base: Artifact | None = None
    model: str = ""
    allow_other_base: bool = False
    room: Room = Room()


class ResolvedAdapter(Frozen):
    """The adapter's files and its configuration."""

    adapter: Artifact
    lora: Lora


class Resolve(OnHost):
    """The activities `resolve_model` and `resolve_adapter`.

    Both raise InvalidInput with the file and the rule that it breaks, or the files that changed since the run began,
    and StoreUnavailable when S3 cannot be reached or refuses us.
    """

    @on_thread("resolve_model")
    def resolve_model(self, request: ModelRequest) -> ResolvedModel:
        """Check a model and make an artifact of it."""
        check = partial(_check_small_files, request, self._host)
        location = locate(request.uri, request.tenant, self._host.settings, HUB_PATTERNS, check)
        if (name := gguf_file(location)) is not None:
            location = self._converted(location, name, check, request)
        config = check(location)
        weights, shape = check_contents(location, config), shape_of(config)
        if request.dtype is not None and not shape.is_generic:
            self._check_room(request, {s.name: s.shape for s in weights.slices}, shape)
        if isinstance(request.trainable, Lora) and not shape.is_generic:  # else the worker knows the modules
            peft.beside(request.trainable, modules_of(weights.slices), is_new=True)
        names = [name for name in SMALL_FILES if name in location.files] + weight_files(location)
        return ResolvedModel(model=self._imported(location, names, "model", request), shape=shape)

    def _check_room(self, request: ModelRequest, tensors: dict[str, tuple[int, ...]], shape: ModelShape) -> None:
        """Refuse a model whose weights alone do not fit on any running GPU host. Whether training's other memory fits,
        a worker checks later on its device.
        """
        offer = read_offer(self._host.store, self._host.settings.shape)
        if request.dtype is None or offer is None or offer.devices is None:
            return
        laid, layout = (request.engine, request.layout), request.layout
        held = layout_bytes(tensors, ITEM_BYTES[request.dtype], shape, Lora(), laid).base_bytes
        on_each = -(-layout.ranks_per_node // offer.devices.number)
        if held * on_each > offer.devices.num_bytes:
            ranks = "a rank" if on_each == 1 else f"{on_each} ranks"
            has = f"the largest device of a host of shape {self._host.settings.shape} has"
            rule = f"{ranks} of {layout.label} would hold {held * on_each / 1e9:.3g} GB of weights in {request.dtype}"
            rule = f"{rule}, and {has} {offer.devices.num_bytes / 1e9:.3g}: split it by tp, pp or ep"
            raise InvalidInput(f"{rule}, or say quantize_base", "layout")

    @on_thread("resolve_adapter")
    def resolve_adapter(self, request: AdapterRequest) -> ResolvedAdapter:
        """Check an adapter and make an artifact of it."""
        check = partial(_check_config, request)
        location = locate(request.uri, request.tenant, self._host.settings, (peft.CONFIG, peft.WEIGHTS), check)
        lora = check(location)
        _check_base(location, request, self._host)
        _check_weights(location, lora, request)
        what: str = request.role
        if request.role == "reward_model":
            what = f"{what}_{content_key(request.uri)[:8]}"  # a grader may have several
            lora = _reward_model(location, request.shape)
        return ResolvedAdapter(adapter=self._imported(location, [peft.CONFIG, peft.WEIGHTS], what, request), lora=lora)

    def _converted(
        self, location: Location, name: str, check: Callable[[Location], DenseConfig], request: ModelRequest
    ) -> Location:
        """Make a model folder of a GGUF file, once. Its bytes count as the tenant's."""
        store, place = self._host.store, location.place(name)
        key = model_import(content_key("gguf", location.store.uri, _state(location, name)))
        self._host.use(key)
        if (artifact := find_artifact(store, key)) is None:
            with self._host.scratch("gguf") as scratch:
                path = scratch / "model.gguf"
                if isinstance(location.store, LocalStore):
                    path = location.store.root / name
                else:
                    size, most = location.files[name].size, self._host.settings.download.max_bytes
                    if size > most:
                        rule = f"{size:,} bytes to transfer; the limit is {most:,}: download.max_bytes"
                        raise InvalidInput(rule, place)
                    location.store.get_file(name, path, cancellation_check())
                folder = scratch / "model"
                folder.mkdir()
                num_bytes = self._host.confined(convert_gguf, str(path), place, None, kind="dataset", reads=[path])
                check_room(request.room, request.tenant, num_bytes, place)  # before a byte of them is written
                asked = str(path), place, str(folder)
                self._host.confined(convert_gguf, *asked, kind="dataset", reads=[path], writes=[folder])
                if _state(location.listed_again(), name) != _state(location, name):
                    raise InvalidInput("the file changed while it was being read", place)
                try:
                    made = located(LocalStore(folder), manifest_of(folder, stop_if_cancelled))
                    check_contents(made, check(made))
                except InvalidInput as error:
                    raise InvalidInput(error.message, place) from error
                artifact = self._host.keep(key, folder)
        files, manifest = open_artifact(artifact, self._host.settings.s3)
        return located(files, manifest, artifact)

    def _imported(
        self, location: Location, names: list[str], what: str, request: ModelRequest | AdapterRequest
    ) -> Artifact:
        artifact = import_files(location, names, self._host, request)
        if request.run_id is not None:
            check_began_with(what, artifact, request.uri, request.run_id, self._host)
        return artifact


def _check_small_files(request: ModelRequest, host: HostContext, location: Location) -> DenseConfig:
    """Check a model by its small files, before its weights are fetched."""
    config = read_config(location, any_family=request.any_family or request.engine == "fsdp")
    shape = shape_of(config)
    check_layout(request.layout, shape, request.engine)
    check_max_tokens(request.max_tokens, shape)
    check_tokenizer(location, shape.vocab_size, host)
    check_chat_template(location)
    return config


def check_contents(location: Location, config: DenseConfig, read_all: bool = False) -> Weights:
    """Check a model's weights against its configuration: their names, sizes, and routers' numbers.

    `read_all`: the numbers of all tensors.

    Raises InvalidInput: names the file, the tensor and the rule.
    """
    weights = check_weights(location, config)
    check_finite(weights, location, all_of_them=read_all)
    return weights


def _check_config(request: AdapterRequest, location: Location) -> Lora:
    head = None if request.lora is None else request.lora.head
    names = () if request.role == "reward_model" else None if head is None else head.names
    lora = peft.lora_of(location.read_json(peft.CONFIG), location.place(peft.CONFIG), names)
    if request.role == "reward_model" and lora.head is None:
        rule = "it is an adapter of a language model, with no head of scalars: a grader wants a reward model"
        raise InvalidInput(rule, location.place(peft.CONFIG))
    if request.lora is not None:
        linears = (*(LINEARS if request.shape is None else request.shape.linears), peft.EMBEDDING)
        peft.check_same(
            peft.with_own_targets(lora, linears),
            peft.with_own_targets(request.lora, linears),
            location.place(peft.CONFIG),
        )
    return lora


def _check_base(location: Location, request: AdapterRequest, host: HostContext) -> None:
    """Refuse an adapter that was made on another base: by hashes if that is found, else by names (docs/models.md)."""
    if request.base is None or request.allow_other_base:
        return
    named = _plain(str(location.read_json(peft.CONFIG).get("base_model_name_or_path") or ""))
    other, theirs = "", _files_of_base(location, named, request, host)
    if theirs is not None:
        _, ours = open_artifact(request.base, host.settings.s3)
        differing = [path for path in _different(theirs, ours) if path.endswith(_OF_BASE)]
        other = f", whose {differing[0]} is another" if differing else ""
    elif None not in (repositories := [_repository(named), _repository(_plain(request.model))]):
        other = ", which is another model" if repositories[0] != repositories[1] else ""
    if other:
        rule = f"the adapter was made on {named or 'a model without a name'}{other}, and not on {request.model}"
        raise InvalidInput(f"{rule}: name its own base, or set allow_other_base to insist", location.place(peft.CONFIG))


def _files_of_base(location: Location, named: str, request: AdapterRequest, host: HostContext) -> Manifest | None:
    """Return the files of the base that an adapter was made on: as the run found them that published it, or as they are
    in the folder that the adapter names. None if neither is here."""
    key = "" if location.artifact is None else OpenPlaces(host.settings).own_key(location.artifact.uri) or ""
    run_id = checkpoint_adapter_run(request.tenant, key)
    with suppress(NotFound):
        if is_published(request.tenant, key):  # its claim names the run
            run_id = json.loads(host.store.get_bytes("/claims/".join(key.rsplit("/", 1)) + ".json"))["run_id"]
        if run_id is not None:
            return read_record(host.store, RunKeys(run_id).began_with("model"), Manifest)
    with suppress(InvalidInput, StoreUnavailable, ValueError, OSError):  # a name of any form, that others wrote
        if named.startswith(("/", "s3://")) and named != _plain(request.model):
            there = locate(named, request.tenant, host.settings, HUB_PATTERNS, lambda _: None)
            if any(name.endswith(".safetensors") for name in there.files):
                return _hash(there, [name for name in there.files if name.endswith(_OF_BASE)])
    return None


def _plain(model: str) -> str:
    return model.removeprefix("file://").rstrip("/")


def _repository(model: str) -> str | None:
    """Return the name of a hub id, or of a snapshot in the hub's cache, without its owner; None for other folders."""
    for folder, inside in pairwise(model.split("/")):
        if folder.startswith("models--") and inside == "snapshots":
            return folder.removeprefix("models--").partition("--")[2].lower() or None
    hub_id = HubId.parse(model)
    return None if hub_id is None else hub_id.repository.rpartition("/")[2].lower()


def _check_weights(location: Location, lora: Lora, request: AdapterRequest) -> None:
    shape = request.shape
    if peft.WEIGHTS not in location.files:
        raise InvalidInput(f"the adapter has no {peft.WEIGHTS}; only safetensors is read", location.store.uri)
    tensors = read_tensors(location, peft.WEIGHTS)
    head = {name: tensors.pop(name) for name in peft.HEAD_TENSORS if lora.head is not None and name in tensors}
    for name in [name for name in tensors if name.endswith(peft.COPIES)]:  # the worker compares them with the model's
        tensors.pop(name)
    check_dtypes(tensors, location.place(peft.WEIGHTS))
    adapted = peft.AdaptedModules(lora)
    is_generic = shape is not None and shape.is_generic  # then the worker checks names and sizes
    for name, tensor in () if is_generic else tensors.items():
        _check_tensor(name, tensor, adapted, shape, location.place(peft.WEIGHTS))
    if request.lora is not None:
        modules = dict.fromkeys(name.removeprefix(peft.PREFIX).partition(".lora_")[0] for name in tensors)
        peft.check_order(lora, request.lora, modules, location.place(peft.CONFIG))
    is_counted = shape is not None and not is_generic and lora.target_pattern is None and lora.layers is None
    ends = len({peft.OUTPUT, peft.EMBEDDING}.intersection(lora.targets))
    expected = 0 if shape is None else len(peft.tensors_of(lora)) * (shape.num_linears(lora.targets) + ends)
    if is_counted and len(tensors) != expected:  # others are counted by the worker
        raise InvalidInput(
            f"{len(tensors)} tensors; this model and these targets need {expected}", location.place(peft.WEIGHTS)
        )
    check_finite(Weights(tensors | head, dict.fromkeys(tensors | head, peft.WEIGHTS)), location, all_of_them=True)


def _reward_model(location: Location, shape: ModelShape | None) -> Lora:
    """Read a reward model, with its scalars' names. Raises InvalidInput for a head that is missing, or does not fit."""
    weight = read_tensors(location, peft.WEIGHTS).get(peft.HEAD_TENSORS[0])
    if weight is None or len(weight.shape) != 2 or (shape is not None and weight.shape[1] != shape.hidden_size):
        found = "it is missing" if weight is None else f"it has the shape {weight.shape}"
        rule = f"tensor {peft.HEAD_TENSORS[0]} has a row of the model's hidden size for each scalar: {found}"
        raise InvalidInput(rule, location.place(peft.WEIGHTS))
    header_bytes = int.from_bytes(location.store.read_range(peft.WEIGHTS, 0, 8), "little")
    header = location.store.read_range(peft.WEIGHTS, 8, header_bytes)  # of a file that was found complete
    told = json_object(header, location.place(peft.WEIGHTS)).get("__metadata__")
    metadata = {k: v for k, v in told.items() if isinstance(v, str)} if isinstance(told, dict) else {}
    try:
        names = peft.scalar_names(metadata, weight.shape[0])
    except (ValueError, TypeError) as error:
        raise InvalidInput("the names of its scalars are no list", location.place(peft.WEIGHTS)) from error
    return peft.lora_of(location.read_json(peft.CONFIG), location.place(peft.CONFIG), names)


def _check_tensor(name: str, tensor: Entry, lora: peft.AdaptedModules, shape: ModelShape | None, place: str) -> None:
    match = _TENSOR.fullmatch(name)
    module = name.removeprefix(peft.PREFIX).rpartition(".lora_")[0]
    dimensions = None if match is None else peft.tensors_of(lora.lora).get(match["kind"])
    if match is None or dimensions is None or (size := lora.of(module)) is None:
        raise InvalidInput(f"tensor {name} belongs to none of the adapter's target_modules", place)
    if shape is not None and int(match["layer"] or 0) >= shape.num_layers:
        raise InvalidInput(f"tensor {name}, but the model has {shape.num_layers} layers", place)
    has, linear = f"tensor {name} has the shape {tensor.shape}", cast(Target, module.rpartition(".")[2])
    found: dict[str, int] = dict(zip(dimensions, tensor.shape, strict=False))
    if len(tensor.shape) != len(dimensions) or found.get("rank", size.rank) != size.rank:
        raise InvalidInput(f"{has}, which does not fit r={size.rank}", place)
    of: Of = "experts" if match["expert"] else "shared" if match["shared"] else ""
    in_size, out_size = (0, 0) if shape is None else shape.linear_size(linear, of, int(match["layer"] or 0))
    for side, fits in (("inputs", in_size), ("outputs", out_size)):
        if fits and found.get(side, fits) != fits:
            raise InvalidInput(f"{has}, and {linear} of the model has {fits} {side}", place)


def import_files(
    location: Location, names: list[str], host: HostContext, request: ModelRequest | AdapterRequest
) -> Artifact:
    """Return the named files as an artifact. They are hashed again only if their size, times or ETag have changed.

    If every host can read the files where they are, the artifact refers to them: files in S3, and files of this machine
    if the store is on it, too. Files of this machine are uploaded if the store is elsewhere, and count as the tenant's.

    Raises InvalidInput: a file changed while it was being hashed, or there is no room for them.
    """
    if location.artifact is not None:
        return location.artifact
    store = host.store
    key = model_import(content_key(location.store.uri, *(_state(location, name) for name in sorted(names))))
    host.use(key)
    found = find_artifact(store, key)
    if found is not None:
        return found
    manifest = _hash(location, sorted(names))
    folder = location.store.root if isinstance(location.store, LocalStore) else None
    if folder is not None and not isinstance(store, LocalStore):
        check_room(request.room, request.tenant, manifest.num_bytes, location.store.uri)
        return upload_files(store, key, folder, manifest, cancellation_check())
    if folder is not None:
        remember_checked(folder, manifest, host.paths.cache)
    return refer(store, key, manifest.model_copy(update={"root": location.store.uri}))


def _state(location: Location, name: str) -> str:
    info = location.files[name]
    return f"{name} {info.size} {info.etag}"


def _hash(location: Location, names: list[str]) -> Manifest:
    entries = []
    for name in names:
        size = location.files[name].size
        sha256 = sha256_object(location.store, name, size, stop_if_cancelled)
        entries.append(FileEntry(path=name, size=size, sha256=sha256))
    again = location.listed_again()
    for name in names:
        if name not in again.files or _state(again, name) != _state(location, name):
            raise InvalidInput("the file changed while it was being read", location.place(name))
    return Manifest(files=tuple(entries))


def check_began_with(what: str, found: Artifact, place: str, run_id: RunId, host: HostContext) -> None:
    """Record the files that a run's first execution found at a place; check that later executions find the same.

    Files are compared by hash, not by location.

    Raises:
        InvalidInput: other files are there now; names them.
        CorruptArtifact: the record is damaged.
    """
    key = RunKeys(run_id).began_with(what)
    _, now = open_artifact(found, host.settings.s3)
    if host.store.put_if_absent(key, now.encoded()):
        return
    if names := _different(read_record(host.store, key, Manifest), now):
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        changed = f"{', '.join(names[:_MOST_NAMES])}{more} changed since"
        advice = "put the former files back and resume, or start a new run"
        kind = what.replace("_", " ")
        raise InvalidInput(f"this {kind} is not the one that the run began with: {changed}; {advice}", place)


def _different(before: Manifest, now: Manifest) -> list[str]:
    """Names of files that differ, are missing, or are new."""
    theirs, ours = ({entry.path: entry.sha256 for entry in manifest.files} for manifest in (before, now))
    return sorted(path for path in theirs.keys() | ours.keys() if theirs.get(path) != ours.get(path))
