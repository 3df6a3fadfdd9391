"""Makes a model folder of a GGUF file: config, tokenizer, and weights in safetensors. A confined call.

The file is a stranger's, so everything that it says is bounded by the bytes that it has. Numbers that are quantized
become float32, exactly as transformers' reader makes them of the same file, by the same function of the `gguf` package;
others keep their type. (That reader needs torch, which control hosts have not.)
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from activities.sandbox.child import sign
from shared.errors import InvalidInput
from shared.families import read_model_config
from shared.families.architecture import RopeConfig
from shared.families.model_slices import Stored, contents_of
from shared.models.merging import FLOATS, Floats, header_of

if TYPE_CHECKING:
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor


# --- GGUF's names for the parts of Llama, Qwen2 and Qwen3, as llama.cpp reads and writes them ---

GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
"""The names of these architectures in GGUF files, and the `model_type` of their configs."""

_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_THEIRS = {theirs: ours for ours, theirs in {**_WHOLE, **_OF_LAYER}.items()}
PAIRED = ("attn_q", "attn_k")
"""Weights and biases whose rotated pairs Llama's files hold side by side."""


def gguf_name(name: str) -> str | None:
    """Return a tensor's name in GGUF files; None for one that they have none for."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{match[1]}.{_OF_LAYER[match[2]]}.{kind}" if match and match[2] in _OF_LAYER else None


def hugging_face_name(name: str) -> str | None:
    """Return the Hugging Face name of a tensor of a GGUF file; None for one that is not known."""
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    ours = _THEIRS.get(match[2] if match else stem)
    if ours is None or (match is not None) != (ours in _OF_LAYER):
        return None
    return f"model.layers.{match[1]}.{ours}.{kind}" if match else f"{ours}.{kind}"


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**_BYTES, "trim_offsets": False, "use_regex": False}]}


_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": {**_BYTES, "use_regex": True},
    "llama-bpe": _split_by(_SPLIT % "{1,3}"),
    "qwen2": _split_by(_SPLIT % ""),
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}],
    },
}
"""How a tokenizer of bytes cuts text, by llama.cpp's name (`tokenizer.ggml.pre`): as in a tokenizer.json."""


def pre_tokenizer_name(found: Any) -> str | None:
    """Return llama.cpp's name of a tokenizer.json's `pre_tokenizer`; None for one that it has none for."""
    return next((name for name, known in PRE_TOKENIZERS.items() if _plain(known) == _plain(found)), None)


def _plain(value: Any) -> Any:
    """Return a pre-tokenizer without settings that do not change its pieces."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if key != "trim_offsets"}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def rope_factors(rope: RopeConfig, head_size: int) -> Floats:
    """Return llama.cpp's divisor of each pair's frequency, for Llama 3's scaling."""
    assert rope.factor is not None and rope.original_max_position_embeddings is not None
    frequencies = (rope.rope_theta or 10_000.0) ** (-np.arange(0, head_size, 2) / head_size)
    turns = rope.original_max_position_embeddings * frequencies / (2 * np.pi)
    share = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 / ((1 - share) / rope.factor + share)).astype(np.float32)


def swapped(rows_OI: NDArray[Any], outer: int, head_size: int) -> NDArray[Any]:
    """Return the rows of whole heads, each a table of `outer` rows, with these tables transposed; for 0 as they are."""
    if not head_size:
        return rows_OI
    tables = rows_OI.reshape(-1, outer, head_size // outer, rows_OI.shape[-1]).swapaxes(1, 2)
    return np.ascontiguousarray(tables).reshape(rows_OI.shape)


_BLOCK_BYTES = 8 << 20
_TRAINED = range(8, 21)  # powers of two: how many positions a Llama was trained on before its rotation was scaled
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_TOKENS = "tokenizer.ggml.tokens"
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_UNUSED_OF_ROPE = {"default": {"low_freq_factor", "high_freq_factor", "truncate"}, "llama3": {"truncate"}}
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


def convert_gguf(path: str, place: str, target: str | None) -> int:
    """Write a model's files into the folder `target`; None: only look. Returns about how many bytes they have.

    Raises InvalidInput: names the file, and the key or tensor that is missing, cut, or cannot be used.
    """
    with _as_damaged(place):
        reader = _open(path, place)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        family = fields.get("general.architecture")
        if family not in GGUF_FAMILIES:
            rule = f"general.architecture {family!r:.40} is not read: {', '.join(GGUF_FAMILIES)} are"
            raise InvalidInput(rule, place)
        config = _config(family, _Fields(fields, place), {tensor.name: tensor for tensor in reader.tensors})
        folder = None if target is None else Path(target)
        if folder is not None:
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            _write_tokenizer(_Fields(fields, place), folder)
        return reader.data_offset + _write_weights(reader, config, place, folder and folder / "model.safetensors")


@contextmanager
def _as_damaged(place: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"this is no GGUF file that can be read: {error}", place) from error


def _open(path: str, place: str) -> "GGUFReader":
    """Open a file. The package's own reader takes a cut one for one with empty arrays."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

    class Bounded(GGUFReader):
        """Refuses anything that reaches beyond the file's end."""

        key = "the head"

        def _push_field(self, field: Any, skip_sum: bool = False) -> int:
            self.key = f"what follows the key {field.name}"
            sign()
            return super()._push_field(field, skip_sum)

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise InvalidInput(f"cut: {self.key} reaches to byte {end:,} of {len(self.data):,}", place)
            return super()._get(offset, dtype, count, override_order)

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            spans = []
            for field in fields:
                _, name, _, dims, kind, offset = field.parts
                self.key = f"tensor {bytes(name).decode()}"
                items, item_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(int(kind[0]))]
                end = int(start_offs) + int(offset[0]) + prod(map(int, dims)) // items * item_bytes
                if end > len(self.data):
                    raise InvalidInput(f"cut: {self.key} reaches to byte {end:,} of {len(self.data):,}", place)
                if 0 in dims:
                    raise InvalidInput(f"{self.key} has a dimension of 0", place)
                spans.append((int(start_offs) + int(offset[0]), end, self.key))
            for (_, end, one), (start, _, other) in pairwise(sorted(spans)):
                if start < end:  # reading the same few bytes many times has no bound
                    raise InvalidInput(f"{one} and {other} share bytes", place)
            super()._build_tensors(start_offs, fields)

    return Bounded(path)


class _Fields:
    """The keys and values of a file. A missing key, or a value of another type, is refused by name."""

    def __init__(self, fields: dict[str, Any], place: str) -> None:
        self._fields = fields
        self._place = place

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        found = self._fields.get(key, default)
        if not isinstance(found, kind) or isinstance(found, bool) != (kind is bool):
            problem = "is missing" if found is None else f"has a value of the type {type(found).__name__}"
            raise InvalidInput(f"the key {key} {problem}", self._place)
        return found

    def behind(self, prefix: str) -> list[str]:
        """Return the rest of each key that begins with the prefix."""
        return [key.removeprefix(prefix) for key in self._fields if key.startswith(prefix)]

    def refuse(self, problem: str) -> NoReturn:
        raise InvalidInput(problem, self._place)


def _config(family: str, fields: _Fields, tensors: Mapping[str, "ReaderTensor"]) -> dict[str, Any]:
    for key in (f"{family}.rope.scaling.type", f"{family}.expert_count"):
        if fields.get(key, object, "") != "":
            fields.refuse(f"the key {key} asks for what is not read from a GGUF file")
    config = {ours: fields.get(f"{family}.{theirs}", (int, float)) for theirs, ours in _SIZES.items()}
    heads, bos = config["num_attention_heads"], fields.get("tokenizer.ggml.bos_token_id", int, -1)
    head_size = fields.get(f"{family}.attention.key_length", int, int(config["hidden_size"] // max(1, heads)))
    rope = RopeConfig(rope_theta=fields.get(f"{family}.rope.freq_base", (int, float), 10_000.0))
    if "rope_freqs.weight" in tensors:
        found = np.asarray(tensors["rope_freqs.weight"].data)
        update = {"rope_type": "llama3", "factor": float(found.max())}
        known = (rope.model_copy(update=update | {"original_max_position_embeddings": 2**n}) for n in _TRAINED)
        matching = [one for one in known if np.allclose(rope_factors(one, head_size), found, rtol=1e-4)]
        rope = matching[0] if matching else fields.refuse("tensor rope_freqs.weight is not that of a Llama 3")
    return config | {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": len(fields.get(_TOKENS, list)),
        "num_key_value_heads": fields.get(f"{family}.attention.head_count_kv", int, heads),
        "head_dim": head_size,
        "rope_parameters": rope.model_dump(exclude_none=True, exclude=_UNUSED_OF_ROPE[rope.rope_type]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "bos_token_id": bos if bos >= 0 else None,
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id", int),
    }


def _write_tokenizer(fields: _Fields, folder: Path) -> None:
    """Write a vocabulary of bytes with merges. Others, such as SentencePiece's, are refused."""
    tokens, kind = fields.get(_TOKENS, list), fields.get("tokenizer.ggml.model", str)
    pre = fields.get("tokenizer.ggml.pre", str, "default")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        fields.refuse(
            f"tokenizer.ggml.model {kind!r:.40} with tokenizer.ggml.pre {pre!r:.40}: of gpt2, {known} are read"
        )
    types = fields.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        fields.refuse(f"the key {_TOKENS} holds a token twice, or tokenizer.ggml.token_type is of another length")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": token, **flags, "special": kind == _CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    vocab = {token: number for number, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    merges = [merge.split(" ") for merge in fields.get("tokenizer.ggml.merges", list)]
    special = {which: fields.get(f"tokenizer.ggml.{key}_token_id", int, -1) for which, key in _SPECIAL.items()}
    settings = {f"{which}_token": tokens[number] for which, number in special.items() if 0 <= number < len(tokens)}
    begins = "bos_token" in settings and fields.get("tokenizer.ggml.add_bos_token", bool, pre == "llama-bpe")
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": _begun_by(settings["bos_token"], special["bos"]) if begins else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": pre == "llama-bpe", "vocab": vocab, "merges": merges},
    }
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    if template := fields.get("tokenizer.chat_template", str, ""):
        (folder / "chat_template.jinja").write_text(template)
    for name in fields.behind("tokenizer.chat_template."):
        if not re.fullmatch(r"\w{1,64}", name, re.ASCII):
            fields.refuse(f"the key tokenizer.chat_template.{name:.80}: a template's name is of letters, digits and _")
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        template = fields.get(f"tokenizer.chat_template.{name}", str)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(template)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _begun_by(token: str, number: int) -> dict[str, Any]:
    first, rest = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    known = {token: {"id": token, "ids": [number], "tokens": [token]}}
    pair = [first, rest, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": [first, rest], "pair": pair, "special_tokens": known}


def _write_weights(reader: "GGUFReader", config: dict[str, Any], place: str, path: Path | None) -> int:
    """Write the tensors in the order of the file, a few megabytes at a time. Returns how many bytes they have.

    `path`: None: only check all of them against the file's keys.
    """
    entries, tensors = [], [tensor for tensor in reader.tensors if tensor.name != "rope_freqs.weight"]
    for tensor in tensors:
        if (name := hugging_face_name(tensor.name)) is None:
            raise InvalidInput(f"tensor {tensor.name:.100} is none of the architecture {config['model_type']}", place)
        kind = tensor.tensor_type.name if tensor.tensor_type.name in FLOATS else "F32"
        shape = tuple(int(size) for size in reversed(tensor.shape))
        entries.append((name, kind, shape, prod(shape) * FLOATS[kind]))
    found = {name: Stored(kind, shape) for name, kind, shape, _ in entries}
    contents_of(read_model_config(config, place).architecture().slices(tp=1), (), found, place)
    if path is not None:
        with path.open("wb") as file:
            file.write(header_of(entries))
            for tensor in tensors:
                with _as_damaged(f"{place}: tensor {tensor.name}"):
                    file.writelines(_numbers(tensor, config))
    return sum(num_bytes for *_, num_bytes in entries)


def _numbers(tensor: "ReaderTensor", config: dict[str, Any]) -> Iterator[bytes]:
    """Yield a tensor's numbers, of rotated pairs in Hugging Face's order."""
    from gguf import dequantize

    head_size = (
        config["head_dim"] if config["model_type"] == "llama" and f"{tensor.name.split('.')[-2]}" in PAIRED else 0
    )
    data = tensor.data if tensor.data.ndim > 1 else tensor.data[None]
    heads = max(1, _BLOCK_BYTES // (data[0].nbytes * max(1, head_size)))
    step = heads * max(1, head_size)
    for start in range(0, len(data), step):
        sign(tensor.name)
        rows = swapped(data[start : start + step], head_size // 2, head_size)
        yield (rows if tensor.tensor_type.name in FLOATS else dequantize(rows, tensor.tensor_type)).tobytes()
