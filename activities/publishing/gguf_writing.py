"""The head of a GGUF file, and what it calls and how it holds each weight: by the `gguf` package's writer."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from activities.models.gguf_names import PAIRED, gguf_name, pre_tokenizer_name
from activities.publishing.encodings import Ggml
from shared.errors import InvalidInput
from shared.models.config import DenseConfig, RopeConfig
from shared.models.merging import Entry
from shared.runs.exports import Export

if TYPE_CHECKING:
    from gguf import GGUFWriter

ROPE_FACTORS = "rope_freqs.weight"
_TYPES = {"q8_0": "Q8_0", "f16": "F16", "bf16": "BF16"}
_Q8_GROUP = 32


def ggml_of(entry: Entry, config: DenseConfig, export: Export, place: str) -> tuple[str, Ggml] | None:
    """Return a tensor's name and type in a GGUF file; None for an output layer that the embedding stands for.

    Norms and biases stay float32, as llama.cpp wants them; so do no weights but those that Q8_0 cannot hold: F16.

    Raises:
        InvalidInput: GGUF has no name for it, or it is of no type that can be written.
    """
    if config.tie_word_embeddings and entry.name == "lm_head.weight":
        return None
    name = gguf_name(entry.name)
    if name is None or entry.dtype not in ("F32", "F16", "BF16"):
        raise InvalidInput(f"tensor {entry.name} of {entry.dtype} has no place in a GGUF file of this family", place)
    is_paired = config.model_type == "llama" and any(f".{part}." in name for part in PAIRED)
    head_size = config.size_of_heads if is_paired else 0
    if len(entry.shape) == 1:
        return name, Ggml("F32")
    wanted = _TYPES[str(export.stored_as)]
    return name, Ggml("F16" if wanted == "Q8_0" and entry.shape[-1] % _Q8_GROUP else wanted, head_size)


def gguf_writer(folder: Path, path: Path | None, config: DenseConfig, export: Export, title: str) -> "GGUFWriter":
    """Return a writer that has everything but tensors.

    Args:
        folder: the model's, with its tokenizer.
        path: the file; None: nothing is written.

    Raises:
        InvalidInput: names the file and the key that llama.cpp has no name for.
    """
    from gguf import GGUFWriter, LlamaFileType

    writer = GGUFWriter(path, config.model_type)
    file_types = {"q8_0": "MOSTLY_Q8_0", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16"}
    raw: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    writer.add_name(title)
    writer.add_file_type(LlamaFileType[file_types[str(export.stored_as)]])
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
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(config.rope.rope_theta or 10_000.0)
    if config.rope.rope_type not in ("default", "llama3"):
        rule = "GGUF files are written for default and llama3"
        raise InvalidInput(f"rope_parameters of type {config.rope.rope_type!r} are not exported: {rule}", "config.json")
    _add_tokenizer(writer, folder, config.vocab_size)
    return writer


def rope_factors(rope: RopeConfig, head_size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return by what llama.cpp divides the frequency of each pair, for Llama 3's scaling: `rope_freqs.weight`."""
    assert rope.factor is not None and rope.original_max_position_embeddings is not None
    theta = rope.rope_theta or 10_000.0
    factors = []
    for pair in range(head_size // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_size)
        turns = rope.original_max_position_embeddings / wavelength
        share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        share = min(max(share, 0.0), 1.0)
        factors.append(1 / ((1 - share) / rope.factor + share))
    return np.array(factors, np.float32)


def _add_tokenizer(writer: "GGUFWriter", folder: Path, vocab_size: int) -> None:
    """Write a vocabulary of bytes with merges, as GPT-2, Llama 3 and Qwen have it."""
    from gguf import TokenType
    from tokenizers import Tokenizer

    place = "tokenizer.json"
    raw: dict[str, Any] = json.loads((folder / place).read_bytes())
    model = raw.get("model") or {}
    name = pre_tokenizer_name(raw.get("pre_tokenizer"))
    if model.get("type") != "BPE" or model.get("byte_fallback") or name is None:
        rule = "llama.cpp has no name for it that is known here: byte-level BPE as of GPT-2, Llama 3, Qwen or SmolLM"
        raise InvalidInput(f"pre_tokenizer, or model of type {model.get('type')!r}: {rule}", place)
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, TokenType.NORMAL
    for added in raw.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = (one if isinstance(one, str) else " ".join(one) for one in model["merges"])
    writer.add_token_merges(list(merges))
    settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_bytes())
    ids = {token: number for number, token in enumerate(tokens)}
    bos, eos, pad = (ids.get(_content(settings.get(f"{which}_token"))) for which in ("bos", "eos", "pad"))
    if bos is not None:
        writer.add_bos_token_id(bos)
    if eos is not None:
        writer.add_eos_token_id(eos)
    if pad is not None:
        writer.add_pad_token_id(pad)
    begun = Tokenizer.from_file(str(folder / place)).encode("a").ids
    writer.add_add_bos_token(bos is not None and begun[:1] == [bos])
    if (template := _chat_template(folder, settings)) is not None:
        writer.add_chat_template(template)


def _content(token: Any) -> str:
    return str(token.get("content") if isinstance(token, dict) else token)


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text()
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None
