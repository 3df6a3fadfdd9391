"""The names and encodings of weights in a GGUF file, and the file's header, by the `gguf` package's writer."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from activities.models.gguf_names import PAIRED, gguf_name, pre_tokenizer_name, rope_factors
from activities.publishing.encodings import Ggml, Written
from shared.errors import InvalidInput
from shared.models.dense import DenseConfig
from shared.models.merging import Entry

if TYPE_CHECKING:
    from gguf import GGUFWriter

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
