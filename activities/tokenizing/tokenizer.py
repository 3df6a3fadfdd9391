"""A model's tokenizer and chat template, from its folder's small files; texts in, ids and trained weights out; and the
tokens that end its answers."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from unicodedata import is_normalized

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from activities.formats.rows import Chat, Question
from activities.host_context import HostContext
from activities.sandbox.calls import CodeProcess, Limits
from activities.sandbox.child import sign
from activities.tokenizing.chat_template import Rendered, WeightedSpan, one_of
from longshore.fields import Artifact, Frozen
from shared.chat.completions import CompletionRequest, Sampling
from shared.errors import InvalidInput
from shared.models.end_tokens import GENERATION, end_ids_in, read_end_ids, with_decoder
from shared.serving import SamplerPlace, ServedSampler

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# --- Renders chat templates, which are untrusted code, in a child process under limits of time and memory ---

_MEMORY_BYTES = 1 << 30
_START_S = 30.0


@dataclass(frozen=True)
class TemplateSource:
    """A chat template and the tokens that it may name. `control_tokens`: those that can end or open a turn.

    `tool_source`: the template for conversations with tools, if the model has a separate one. `end_tokens`: those that
    the model's files name as its end. `file`: the template's file, for errors.
    """

    source: str
    special_tokens: dict[str, str]
    control_tokens: list[str]
    tool_source: str | None = None
    end_tokens: tuple[str, ...] = ()
    file: str = ""

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches any control token."""
        return one_of(self.control_tokens)

    @property
    def text(self) -> str:
        """The source of both templates, to search for keys."""
        return f"{self.source} {self.tool_source}"


class TemplateProcess:
    """Renders conversations in a child process, which ends with the `with` block, or if a batch exceeds its limits."""

    def __init__(self, template: TemplateSource, place: str, row_limit_s: float = 10.0) -> None:
        """`place` names the template in errors."""
        self._place = place
        self._file = f" ({template.file})" if template.file else ""
        described = {name: value for name, value in asdict(template).items() if name != "file"}
        # The child itself stops a slow row and reports it; this limit is for a row that cannot be interrupted.
        limit_s = _START_S + 8 * row_limit_s
        limits = Limits(_MEMORY_BYTES, step_cpu_s=int(limit_s), silence_s=limit_s)
        self._child = CodeProcess("render", json.dumps([described, row_limit_s]).encode(), limits)
        answer = self._ask(None)
        if "error" in answer:
            self.close()
            raise InvalidInput(answer["error"] + self._file, place)
        self.stops: tuple[str, ...] = tuple(answer["stops"])

    def spans(self, chats: Sequence[Chat], *, prompts: bool = False, tells_refusals: bool = False) -> list[Rendered]:
        """The text and trained spans of each conversation; with `prompts` also the text that asks for the last answer.

        `tells_refusals`: of a row at which the template raises an error that error is returned, and not raised.

        Raises InvalidInput: the template refuses a conversation, or takes too long, or too much memory.
        """
        rows = [[chat.messages, chat.tools, chat.weights] for chat in chats]
        return self._rendered([rows, prompts], [chat.place for chat in chats], tells_refusals)

    def asked(self, questions: Sequence[Question], *, tells_refusals: bool = False) -> list[Rendered]:
        """Return the text of each prompt: its messages, and the header of the turn that answers.

        `tells_refusals`: as in `spans`.

        Raises:
            InvalidInput: the template refuses a question or leaves a part out, or takes too long, or too much memory.
        """
        rows = [[question.messages, question.tools, None] for question in questions]
        return self._rendered([rows, True], [question.place for question in questions], tells_refusals)

    def _rendered(self, batch: list[Any], places: list[str], tells_refusals: bool) -> list[Rendered]:
        found = list[Rendered]()
        for place, answer in zip(places, self._ask(batch)["rows"], strict=False):
            if isinstance(answer, str):
                raise InvalidInput(answer + self._file, place)
            spans = [WeightedSpan(*span) for span in answer["spans"]]
            found.append(Rendered(**answer | {"spans": spans}))
            if found[-1].refusal is not None and not tells_refusals:
                raise InvalidInput(found[-1].refusal + self._file, place)
        return found

    def kill(self) -> None:
        """End the child now; a call in another thread raises."""
        self._child.kill()

    def close(self) -> None:
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: Any) -> Any:
        try:
            return json.loads(self._child.answer(json.dumps(question).encode()))
        except (InvalidInput, ValueError) as error:
            self.close()
            what = error.message if isinstance(error, InvalidInput) else "it answers what is no JSON"
            raise InvalidInput(f"the chat template ended its process: {what}{self._file}", self._place) from error


AskedT = TypeVar("AskedT", Sampling, CompletionRequest)
_KEPT = 256  # models whose end tokens a host remembers
MAX_CHARACTERS = 4 << 20
_MAX_FILE_BYTES = 128 << 20
TEMPLATE, TOOL_TEMPLATE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
"""Files of chat templates, as transformers writes them. Nothing here asks for templates of other names."""
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE, TOOL_TEMPLATE),
    *("config.json", GENERATION),
)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The byte of each character of byte-level vocabularies: printable ones are themselves, others count from 256 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + k): byte for k, byte in enumerate(_OTHERS)}


@dataclass(frozen=True)
class Encoded:
    """Encoded texts, concatenated: ids [T], loss weights [T] (0: not trained), and the tokens of each text [R].

    `is_joined_R`: texts with a token that begins outside of all spans and reaches into one.
    """

    id_T: NDArray[np.uint32]
    weight_T: NDArray[np.float32]
    num_tokens_R: NDArray[np.int64]
    is_joined_R: NDArray[np.bool_]


class ModelTokenizer:
    """The tokenizer of one model. `template` is None for a model without a chat template."""

    def __init__(self, files: dict[str, bytes], place: str) -> None:
        """Raises InvalidInput when there is no tokenizer.json, or a file cannot be used."""
        self.place = place
        if "tokenizer.json" not in files:
            raise InvalidInput("the model has no tokenizer.json", place)
        described = _json(files["tokenizer.json"], f"{place}/tokenizer.json")
        config = _json(files.get("tokenizer_config.json", b"{}"), f"{place}/tokenizer_config.json")
        legacy = _json(files.get("special_tokens_map.json", b"{}"), f"{place}/special_tokens_map.json")
        self._tokenizer = _tokenizer(files["tokenizer.json"], f"{place}/tokenizer.json")
        special = {name: (legacy | config).get(name) for name in _SPECIAL}  # bos_token and the like, for templates
        texts = {name: value["content"] if isinstance(value, dict) else value for name, value in special.items()}
        self.special_tokens = {name: text for name, text in texts.items() if isinstance(text, str)}
        declared = with_decoder(_json(files.get("config.json", b"{}"), "config.json")).get("vocab_size")
        in_tokenizer = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.vocab_size = declared if isinstance(declared, int) else in_tokenizer
        self.prefix_ids = _ids_before_text(self._tokenizer)
        self._widths = _token_bytes(described, self._tokenizer)
        self._normalizer = (described.get("normalizer") or {}).get("type")
        self._added = {token["id"] for token in described.get("added_tokens", [])}
        control = {t["content"] for t in described.get("added_tokens", []) if t.get("special")}
        control |= {self.special_tokens[name] for name in ("eos_token",) if name in self.special_tokens}
        self.template = self._template(files, config, sorted(control))

    @property
    def eos(self) -> str:
        """The id of the end-of-text token. Raises InvalidInput for a tokenizer without an eos_token."""
        if "eos_token" not in self.special_tokens:
            raise InvalidInput("the tokenizer names no eos_token, with which texts must end", self.place)
        return self.special_tokens["eos_token"]

    def _template(self, files: dict[str, bytes], config: dict[str, Any], control: list[str]) -> TemplateSource | None:
        source, tool_source = _templates(files, config, self.place)
        if not source:
            return None
        file = TEMPLATE if TEMPLATE in files else "chat_template of tokenizer_config.json"
        place = f"{self.place}/{GENERATION}"
        named = end_ids_in(_json(files.get(GENERATION, b"{}"), place), place)
        ends = tuple(text for one in named if (text := self._tokenizer.id_to_token(one)) is not None)
        return TemplateSource(source, self.special_tokens, control, tool_source, ends, file)

    def end_ids(self, stops: Sequence[str] = ()) -> tuple[int, ...]:
        """Return the ids that end trained texts: the end-of-text token, and the tokens that end an answer."""
        eos = self.special_tokens.get("eos_token")
        ids = (self._tokenizer.token_to_id(text) for text in (*stops, *([eos] if eos else ())))
        return tuple(dict.fromkeys(one for one in ids if one is not None))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def spoken(self, ids: Sequence[int]) -> str:
        """Decode ids to text without special tokens, as servers send an answer to their clients."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes; if the vocabulary is not byte-level, those of its text when it is decoded alone."""
        piece = self._tokenizer.id_to_token(token_id)
        if self._widths is None or piece is None or token_id in self._added:
            return self.decode([token_id]).encode()
        return bytes(_BYTE_OF[character] for character in piece)

    def tokens_of(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode(self, texts: list[str], spans: list[list[WeightedSpan]]) -> Encoded:
        """Encode whole texts on all cores. A token gets the weight of the span that it shares a character with.

        A token that straddles the beginning or end of a span is trained: the model has to write its trained part. One
        in two spans has the greater weight.
        """
        if self._widths is not None:
            fast = self._by_bytes(texts, spans, self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
            if fast is not None:
                return fast
        return self._by_offsets(spans, self._tokenizer.encode_batch(texts, add_special_tokens=False), texts)

    def _by_bytes(
        self, texts: list[str], spans: list[list[WeightedSpan]], encodings: "list[Encoding]"
    ) -> Encoded | None:
        """Weigh tokens of a byte-level vocabulary, whose positions follow from their lengths in bytes.

        Returns None if the tokens do not add up to the text (a normalizer, or a token that swallows space).
        """
        assert self._widths is not None
        ids_by_text = [encoding.ids for encoding in encodings]
        num_tokens_R = np.array([len(ids) for ids in ids_by_text], dtype=np.int64)
        id_T = np.fromiter(chain.from_iterable(ids_by_text), dtype=np.uint32, count=int(num_tokens_R.sum()))
        end_T = np.cumsum(self._widths[id_T])
        end_R = np.concatenate([[0], end_T])[np.cumsum(num_tokens_R)]
        sizes_R = np.array([len(t) if t.isascii() else len(t.encode()) for t in texts])
        is_normal = self._normalizer is None or all(t.isascii() or is_normalized("NFC", t) for t in texts)
        if not is_normal or not np.array_equal(end_R, np.cumsum(sizes_R)):
            return None
        byte_spans = [[_in_bytes(span, text) for span in each] for text, each in zip(texts, spans, strict=True)]
        return Encoded(id_T, *_weights(byte_spans, end_R - sizes_R, end_T - self._widths[id_T], end_T, num_tokens_R))

    def _by_offsets(self, spans: list[list[WeightedSpan]], encodings: "list[Encoding]", texts: list[str]) -> Encoded:
        """Weigh tokens by the tokenizer's character offsets: slower, but right for every kind of tokenizer."""
        num_tokens_R = np.array([len(encoding) for encoding in encodings], dtype=np.int64)
        id_T = np.array([i for encoding in encodings for i in encoding.ids], dtype=np.uint32)
        offsets_T2 = np.array([o for e in encodings for o in e.offsets], dtype=np.int64).reshape(-1, 2)
        sizes_R = np.array([len(text) for text in texts], dtype=np.int64)
        start_R = np.cumsum(sizes_R) - sizes_R
        begin_T, end_T = (offsets_T2 + np.repeat(start_R, num_tokens_R)[:, None]).T
        return Encoded(id_T, *_weights(spans, start_R, begin_T, end_T, num_tokens_R))


def _weights(
    spans: list[list[WeightedSpan]],
    start_R: NDArray[np.int64],
    begin_T: NDArray[np.int64],
    end_T: NDArray[np.int64],
    num_tokens_R: NDArray[np.int64],
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """Return each token's weight, that of the span which overlaps its characters [begin, end) or 0, and the next fields
    of `Encoded`.
    """
    weight_T = np.zeros(len(begin_T), dtype=np.float32)
    flat = [(start, span) for start, each in zip(start_R.tolist(), spans, strict=True) for span in each]
    first_S = np.searchsorted(end_T, [start + span.start for start, span in flat], side="right")
    last_S = np.searchsorted(begin_T, [start + span.end for start, span in flat], side="left")
    row_S = np.repeat(np.arange(len(spans)), [len(each) for each in spans])
    begin_S, end_S = (
        np.array([(start + span.start, start + span.end) for start, span in flat], np.int64).reshape(-1, 2).T
    )
    is_joined_S = (np.append(begin_T, 1 << 62)[first_S] < begin_S) & (begin_S != np.append(-1, end_S)[:-1])
    for first, last, (_, span) in zip(first_S.tolist(), last_S.tolist(), flat, strict=True):
        before = weight_T[first:last][:1].copy()  # if the previous span reaches into its first token
        weight_T[first:last] = span.weight
        weight_T[first : first + len(before)] = before if abs(before) > abs(span.weight) else span.weight
    return weight_T, num_tokens_R, np.bincount(row_S[is_joined_S], minlength=len(spans)) > 0


def _in_bytes(span: WeightedSpan, text: str) -> WeightedSpan:
    if text.isascii():
        return span
    start = len(text[: span.start].encode())
    return WeightedSpan(start, start + len(text[span.start : span.end].encode()), span.weight)


class TokenizerFiles(Frozen):
    """The files of a model's tokenizer on this machine. They are untrusted, so load them in a confined process."""

    folder: Path
    place: str = Field(description="what errors call it")

    def load(self) -> ModelTokenizer:
        """Load the tokenizer and chat template. Raises InvalidInput when the tokenizer is missing or cannot be used."""
        sign(f"{self.place}/tokenizer.json")
        files = {}
        for name in _FILES:
            if (path := self.folder / name).is_file():
                if (size := path.stat().st_size) > _MAX_FILE_BYTES:
                    rule = f"{size:,} bytes; a file of a tokenizer has up to {_MAX_FILE_BYTES:,}"
                    raise InvalidInput(rule, f"{self.place}/{name}")
                files[name] = path.read_bytes()
        return ModelTokenizer(files, self.place)


def tokenizer_files(host: HostContext, model: Artifact) -> TokenizerFiles:
    """Stage a model's tokenizer, without touching the weights. Raises CorruptArtifact as `stage` does."""
    return TokenizerFiles(folder=host.stage(model, only=_FILES), place=model.uri)


def check_loading(files: TokenizerFiles) -> None:
    """Load a tokenizer, to see in a confined process whether that works. Raises InvalidInput as `load` does."""
    files.load()


def check_characters(text: str, place: str) -> None:
    """Raise InvalidInput for a text that is too long, since tokenizers take hundreds of bytes for each character."""
    if len(text) > MAX_CHARACTERS:
        raise InvalidInput(f"a text of {len(text):,} characters; a row may have up to {MAX_CHARACTERS:,}", place)


def _json(data: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"invalid JSON: {error}", place) from error
    if not isinstance(value, dict):
        raise InvalidInput("the file must hold a JSON object", place)
    return value


def _tokenizer(data: bytes, place: str) -> "Tokenizer":
    """The Rust tokenizer, for whole texts: it does not truncate or pad."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidInput(f"the tokenizer cannot be read: {error}", place) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _ids_before_text(tokenizer: "Tokenizer") -> list[int]:
    """Return the ids that the tokenizer puts before a text (BOS), and make it keep leading space in offsets."""
    from tokenizers import processors

    bare = tokenizer.encode("x", add_special_tokens=False).ids
    dressed = tokenizer.encode("x", add_special_tokens=True).ids
    at = next((k for k in range(len(dressed)) if dressed[k : k + len(bare)] == bare), 0)
    # With trimming, a token's offsets, and so its span, would lack leading space. The post-processor's other work,
    # special tokens, is not needed.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return dressed[:at]


def _token_bytes(described: dict[str, Any], tokenizer: "Tokenizer") -> NDArray[np.int64] | None:
    """Bytes of each token's text, [vocabulary]; None unless this is byte-level BPE that adds nothing."""
    pre = described.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    is_plain = (
        (described.get("model") or {}).get("type") == "BPE"
        and (described.get("normalizer") or {"type": "NFC"}).get("type") == "NFC"
        and len(byte_level) == 1
        and not byte_level[0].get("add_prefix_space", False)
        and all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
    )
    if not is_plain:
        return None
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    widths = np.zeros(max(vocab.values()) + 1, dtype=np.int64)
    for text, index in vocab.items():
        widths[index] = len(text)  # byte-level vocabularies spell each byte as one character
    for added in described.get("added_tokens", []):
        widths[added["id"]] = len(added["content"].encode())
    return widths


def _templates(files: dict[str, bytes], config: dict[str, Any], place: str) -> tuple[str | None, str | None]:
    """The chat template, and the one for conversations with tools if there are several (`tool_use`, as transformers).

    They are in separate files, or else in tokenizer_config.json, as a text or a list of named ones.
    """
    in_files = {"default": TEMPLATE, "tool_use": TOOL_TEMPLATE}
    by_name = {name: files[path].decode() for name, path in in_files.items() if path in files}
    match config.get("chat_template"):
        case str() as source if not by_name:
            by_name = {"default": source}
        case list() as named if not by_name:
            by_name = {each["name"]: each["template"] for each in named}
    if by_name and "default" not in by_name:
        raise InvalidInput("there are several chat templates and none is the default", place)
    return by_name.get("default"), by_name.get("tool_use")


# The end tokens of a model's answers: those that its files name, and those that training adds. A base model's files
# name the end of a text, but its chat template ends turns with another token.


def end_ids_of(host: HostContext, model: Artifact) -> tuple[int, ...]:
    """Return the ids that end a model's answers. Raises CorruptArtifact if its files have changed."""
    named = read_end_ids(host.stage(model, only=(GENERATION, "config.json")))
    return tuple(dict.fromkeys([*named, *_trained(host, model)]))


def stops_of(place: SamplerPlace, host: HostContext, model: Artifact) -> tuple[int, ...]:
    """Return the stop tokens that a sampler must be asked for. One that we start knows the model's end tokens."""
    return end_ids_of(host, model) if isinstance(place, ServedSampler) else ()


def stopping_at(asked: AskedT, end_ids: tuple[int, ...]) -> AskedT:
    """Return a request with these stop tokens added, unless it asks to continue after the model's end tokens."""
    if asked.ignore_eos or not end_ids:
        return asked
    return asked.model_copy(update={"stop_token_ids": [*dict.fromkeys([*(asked.stop_token_ids or ()), *end_ids])]})


@lru_cache(maxsize=_KEPT)
def _trained(host: HostContext, model: Artifact) -> tuple[int, ...]:
    """Return the ids that training puts at the ends of answers; none without a tokenizer or template to learn from."""
    try:
        files = tokenizer_files(host, model)
        return host.confined(trained_end_ids, files, reads=[files.folder])
    except InvalidInput:  # such a model answers too: with texts, or to token ids
        return ()


def trained_end_ids(files: TokenizerFiles) -> tuple[int, ...]:
    """Load a tokenizer and its template in a confined process. Raises InvalidInput if they cannot be used."""
    tokenizer = files.load()
    if tokenizer.template is None:
        return tokenizer.end_ids()
    with TemplateProcess(tokenizer.template, tokenizer.place) as process:
        return tokenizer.end_ids(process.stops)
