"""Checks of a model folder before any GPU is asked for: cheap ones, of small files and headers alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from activities.heartbeats import stop_if_cancelled
from activities.host_context import HostContext
from activities.sandbox.child import sign
from activities.sources.models import Location, json_object
from shared.errors import InvalidInput
from shared.families import read_model_config
from shared.families.config import DenseConfig, Fp8, GenericConfig
from shared.families.model_slices import Stored, contents_of, unpacked
from shared.families.tensor_slices import TensorSlice
from shared.models.merging import FLOATS, Entry, parse_header

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


def read_metadata(location: Location, name: str) -> dict[str, str]:
    """The metadata of a safetensors file, once `read_tensors` has found the file complete."""
    header_bytes = int.from_bytes(location.store.read_range(name, 0, 8), "little")
    found = json_object(location.store.read_range(name, 8, header_bytes), location.place(name)).get("__metadata__")
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


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
    try:
        largest = max(_token_ids(json_object(text, place)), default=0)
    except (KeyError, TypeError) as error:
        raise InvalidInput("this is no tokenizer of the tokenizers library", place) from error
    if largest >= vocab_size:
        raise InvalidInput(f"it has the id {largest}, but the model has only {vocab_size} embeddings", place)


def _token_ids(tokenizer: dict[str, Any]) -> list[int]:
    """Return all token ids of a tokenizer.json. Unigram models list their pieces, others map pieces to ids."""
    vocab = tokenizer["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    return ids + [token["id"] for token in tokenizer.get("added_tokens", [])]


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
    place = _file_of_weights(location)
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


def _file_of_weights(location: Location) -> str:
    return location.place(INDEX if INDEX in location.files else WEIGHTS)
