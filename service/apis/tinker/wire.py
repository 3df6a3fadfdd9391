"""The messages of Tinker's protocol buffers that are used here, and zstd-compressed bodies.

Input is checked against limits before it is parsed, and leaves this module as plain dataclasses of numpy arrays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from longshore.commands import MAX_DATA
from shared.errors import InvalidInput

# --- Common parts of all requests below /tinker: the address, the header of the key, the format of errors ---

TINKER = "/tinker/api/v1"
TINKER_FILES = "/tinker/files/"
"""Downloads by signed addresses, which need no key."""
BATCH_PATHS = (f"{TINKER}/forward_backward",)
"""Whose bodies are larger than others."""
_PREFIX = "tml-"
_BY_KIND = {"conflict": 400, "quota_exceeded": 403}  # the SDK repeats 409 and 429 for minutes


def is_tinker(path: str) -> bool:
    return path == "/tinker" or path.startswith("/tinker/")


def tinker_key(path: str, header: str) -> str | None:
    """Return the Authorization header equivalent to Tinker's X-API-Key; None without one.

    Its SDK wants every key to begin with `tml-`; that prefix is removed.
    """
    return f"Bearer {header.removeprefix(_PREFIX)}" if header and is_tinker(path) else None


def error_body(status: int, kind: str, message: str, place: str | None) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error: in the form of a failed future, plus its type and place."""
    category = "server" if status >= 500 else "user"
    text = f"{place}: {message}" if place else message
    return _BY_KIND.get(kind, status), {"error": text, "category": category, "type": kind, "place": place}


PROTOBUF = "application/x-protobuf"
MAX_MESSAGE_BYTES = 16 << 20
"""Of a forward_backward, as sent and decompressed. The SDK is told to send chunks of a fraction of it."""
_MAX_WINDOW_BYTES = 32 << 20
_MAX_RATIO, _FREE_BYTES = 1_000, 4 << 20  # a chunk of the SDK's may be of equal sequences
_MAX_CONFIG = 32
_MAX_INPUTS = 32
_MAX_PARTS = 65_536
"""Chunks of a datum's input, and spans of its targets."""
_PACKAGE = "longshore.tinker"
# Each field as `name=number type`; `*` behind a type: repeated. Maps are repeated entries on the wire. (A .proto, its
# generated code and a test that they agree are more lines than this and `_messages`, and protoc brings grpcio.)
_SCHEMA = {
    "SparseCsr": "values=1 bytes, crow_indices=2 bytes, col_indices=3 bytes",
    "Tensor": "dense=1 bytes, sparse_csr=2 SparseCsr, dtype=3 int32, shape=4 int64*",
    "TensorEntry": "key=1 string, value=2 Tensor",
    "EncodedText": "tokens=1 bytes",
    "Other": "",
    "Chunk": "encoded_text=1 EncodedText, image=2 Other, dmel=3 Other",
    "Span": "sequence_id=1 string, offset=2 int64, length=3 int64",
    "ProvenanceSpan": "prompt_tokens=1 Span, sampled_tokens=2 Span",
    "Datum": "model_input=1 Chunk*, loss_fn_inputs=2 TensorEntry*, loss_fn_input_spans=4 ProvenanceSpan*",
    "NumberEntry": "key=1 string, value=2 double",
    "ConfigValue": "number=1 double, text=2 string",
    "ConfigEntry": "key=1 string, value=2 ConfigValue",
    "Head": "model_id=1 string, seq_id=2 int32",  # what a request begins with; the rest is skipped
    "ForwardBackwardRequest": "model_id=1 string, seq_id=2 int32, data=3 Datum*, loss_fn=4 string, "
    "loss_fn_config=5 NumberEntry*, forward_only=6 bool, loss_fn_config_v2=7 ConfigEntry*",
    "BatchedTensor": "data=1 bytes, offsets=2 bytes, dtype=3 int32, trailing_shape=4 int64*",
    "BatchedEntry": "key=1 string, value=2 BatchedTensor",
    "ArrayRecord": "type_tag=1 string, fields=2 BatchedEntry*, num_datums=3 int64",
    "ForwardBackwardOutput": "loss_fn_output_type=1 string, loss_fn_outputs=2 ArrayRecord*, metrics=3 NumberEntry*",
    "TopkLogprobs": "token_ids=1 bytes, logprobs=2 bytes, k=3 int32, length=4 int32",
    "SampledSequence": "stop_reason=1 int32, tokens=2 bytes, logprobs=3 bytes, topk_sampled_logprobs=4 TopkLogprobs",
    "SampleResponse": "sequences=1 SampledSequence*, prompt_logprobs=2 bytes, topk_prompt_logprobs=3 TopkLogprobs, "
    "prompt_cache_hit_tokens=4 int32",
}
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_DTYPES: "dict[int, np.dtype[Any]]" = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), _INT32: np.dtype("<i4")}
STOP, LENGTH = 0, 1
"""Why a sample ended: by itself, or at its most tokens."""
_NO_TOKEN = (0, -99999.0)
Likely = Sequence[tuple[int, float]]
"""Tokens that are likely in one place, and their log-probabilities."""


@dataclass(frozen=True)
class Tensor:
    """A loss's input. Dense: `values` have the `shape`. Sparse (CSR): rows end at `ends` within `values`, and `columns`
    are their columns; all other cells are 0.
    """

    values: NDArray[Any]
    shape: tuple[int, ...]
    ends: NDArray[np.int64] | None = None
    columns: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class SentDatum:
    """A sequence in a request: the model's input, and the inputs of its loss by name.

    `origins`: runs of its targets, in order: how long each is, and whether its tokens were sampled.
    """

    tokens: NDArray[np.int32]
    inputs: dict[str, Tensor]
    origins: tuple[tuple[int, bool], ...] = ()


@dataclass(frozen=True)
class SentBatch:
    """A forward, or a forward_backward, of one chunk of a call's data."""

    model_id: str
    seq_id: int
    data: tuple[SentDatum, ...]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool


def _messages() -> dict[str, Any]:
    """Make the classes of the schema's messages."""
    field, kinds = descriptor_pb2.FieldDescriptorProto, {}
    for kind in ("bytes", "int32", "int64", "string", "double", "bool"):
        kinds[kind] = field.Type.Value(f"TYPE_{kind.upper()}")
    file = descriptor_pb2.FileDescriptorProto(name="longshore/tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SCHEMA.items():
        made = file.message_type.add(name=name)
        for text in filter(None, fields.split(", ")):
            named, kind = text.split(" ")
            label, number = named.split("=")
            one = made.field.add(name=label, number=int(number))
            one.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            if kind in kinds:
                one.type = kinds[kind]
            else:
                one.type, one.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{_PACKAGE}.{name}")) for name in _SCHEMA}


MESSAGES = _messages()


def plain_body(body: bytes, encoding: str) -> bytes:
    """Undo a body's content encoding. Raises InvalidInput if it is unknown or broken, or if too much is in it."""
    plain = decompressed(body, encoding)
    if len(plain) > max(_FREE_BYTES, _MAX_RATIO * len(body)):
        raise InvalidInput(f"decompressed, it is more than {_MAX_RATIO:,} times as large as it was sent", "body")
    return plain


def plain_bytes(body: bytes, encoding: str) -> int:
    """Return a body's uncompressed size by its own header. Raises the errors of `plain_body`."""
    if encoding in ("", "identity"):
        return len(body)
    if encoding != "zstd":
        raise InvalidInput(f"bodies come plain or under zstd, and this one is said to be {encoding[:40]}", "body")
    try:
        size = zstandard.frame_content_size(body)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"this is no body under zstd: {error}", "body") from None
    if size < 0:
        raise InvalidInput("its zstd frame does not say how many bytes it holds", "body")
    if size > MAX_MESSAGE_BYTES:
        raise InvalidInput(
            f"decompressed, the body has more than the {MAX_MESSAGE_BYTES:,} bytes that are taken", "body"
        )
    return int(size)


def decompressed(body: bytes, encoding: str) -> bytes:
    plain_bytes(body, encoding)
    if encoding in ("", "identity"):
        return body
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        return bytes(decompressor.decompress(body, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise InvalidInput(f"this is no body under zstd: {error}", "body") from None


def head_of(body: bytes) -> tuple[str, int]:
    """Return a request's model and number, which are known though other parts may be broken; 0 of no model if none is.

    The bytes behind them are skipped: no object is made of those.
    """
    head = MESSAGES["Head"]()
    try:
        head.ParseFromString(body)
    except DecodeError:
        return "", 0
    return head.model_id, head.seq_id


def batch_of(body: bytes) -> SentBatch:
    """Read a ForwardBackwardRequest. Raises InvalidInput that names the part which cannot be read."""
    message = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise InvalidInput("this is no ForwardBackwardRequest of protocol buffers", "body") from None
    if not 0 < len(message.data) <= MAX_DATA:  # an empty one takes two bytes here, and hundreds as an object
        raise InvalidInput(f"{len(message.data):,} data; from 1 to {MAX_DATA:,} are taken at once", "data")
    return SentBatch(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=tuple(_datum(datum, f"data[{number}]") for number, datum in enumerate(message.data)),
        loss_fn=message.loss_fn,
        config=_config(message),
        forward_only=message.forward_only,
    )


def _config(message: Any) -> dict[str, float | str]:
    entries = message.loss_fn_config_v2 or message.loss_fn_config
    if len(entries) > _MAX_CONFIG:
        raise InvalidInput(f"{len(entries):,} settings; at most {_MAX_CONFIG} are taken", "loss_fn_config")
    if not message.loss_fn_config_v2:
        return {entry.key: entry.value for entry in entries}
    return {entry.key: entry.value.text or entry.value.number for entry in entries}


def _datum(message: Any, place: str) -> SentDatum:
    pieces = []
    if max(len(message.model_input), len(message.loss_fn_input_spans)) > _MAX_PARTS:
        raise InvalidInput(f"at most {_MAX_PARTS:,} chunks of an input, and spans of its targets", place)
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise InvalidInput("a model's input is of token ids here: no images, no audio", f"{place}.model_input")
        pieces.append(array_of(chunk.encoded_text.tokens, _DTYPES[_INT32], f"{place}.model_input"))
    if len(message.loss_fn_inputs) > _MAX_INPUTS:
        raise InvalidInput(f"at most {_MAX_INPUTS} inputs of a loss", f"{place}.loss_fn_inputs")
    inputs = {
        entry.key: _tensor(entry.value, f"{place}.loss_fn_inputs.{entry.key[:40]}") for entry in message.loss_fn_inputs
    }
    spans = [(each, each.HasField("sampled_tokens")) for each in message.loss_fn_input_spans]
    origins = tuple(((s.sampled_tokens if sampled else s.prompt_tokens).length, sampled) for s, sampled in spans)
    return SentDatum(np.concatenate([np.zeros(0, np.int32), *pieces]), inputs, origins)


def _tensor(message: Any, place: str) -> Tensor:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise InvalidInput(f"its dtype has the number {message.dtype}: float32, int64 and int32 are read", place)
    shape = tuple(message.shape)
    if len(shape) > 2 or any(size < 0 for size in shape):
        raise InvalidInput(f"its shape is {list(shape)[:8]}: one or two dimensions of 0 or more are read", place)
    if message.HasField("sparse_csr"):
        return _sparse(message.sparse_csr, dtype, shape, place)
    values = array_of(message.dense, dtype, place)
    shape = shape or (len(values),)
    if math.prod(shape) != len(values):
        raise InvalidInput(f"{len(values):,} values do not fill the shape {list(shape)}", place)
    return Tensor(values, shape)


def _sparse(message: Any, dtype: "np.dtype[Any]", shape: tuple[int, ...], place: str) -> Tensor:
    values = array_of(message.values, dtype, place)
    ends, columns = (array_of(each, _DTYPES[_INT64], place) for each in (message.crow_indices, message.col_indices))
    is_csr = (
        len(shape) == 2
        and len(ends) == shape[0] + 1
        and ends[0] == 0
        and ends[-1] == len(values) == len(columns)
        and bool(np.all(np.diff(ends) >= 0))
        and bool(np.all((columns >= 0) & (columns < shape[1])))
    )
    if not is_csr:
        raise InvalidInput("its rows, columns and values are no CSR matrix of its shape", place)
    return Tensor(values, shape, ends, columns)


def array_of(data: bytes, dtype: "np.dtype[Any]", place: str) -> NDArray[Any]:
    """Return bytes as an array. Raises InvalidInput if they do not divide into numbers."""
    if len(data) % dtype.itemsize:
        raise InvalidInput(f"{len(data):,} bytes are no whole number of {dtype.name} values", place)
    return np.frombuffer(data, dtype)


@dataclass(frozen=True)
class WireScores:
    """Log-probabilities of one datum's targets, flat, and the shape of one place's (empty: one target a place)."""

    values: NDArray[np.float32]
    trailing_shape: tuple[int, ...] = ()


def output_bytes(scores: Sequence[WireScores], metrics: dict[str, float]) -> bytes:
    """Write a ForwardBackwardOutput: records of neighbours with equally many targets in a place."""
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="TargetScores")
    for name, value in metrics.items():
        output.metrics.add(key=name, value=value)
    begin = 0
    while begin < len(scores):
        shape, end = scores[begin].trailing_shape, begin + 1
        while end < len(scores) and scores[end].trailing_shape == shape:
            end += 1
        _add_record(output, scores[begin:end], shape)
        begin = end
    return bytes(output.SerializeToString())


def _add_record(output: Any, scores: Sequence[WireScores], shape: tuple[int, ...]) -> None:
    sizes = [each.values.nbytes for each in scores]
    record = output.loss_fn_outputs.add(type_tag="TargetScores", num_datums=len(scores))
    field = record.fields.add(key="logprobs").value
    field.data = b"".join(each.values.astype("<f4").tobytes() for each in scores)
    field.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype("<i8").tobytes()
    field.dtype = _FLOAT32
    field.trailing_shape.extend(shape)


def packed(values: Sequence[float | None], dtype: str) -> bytes:
    """Return numbers as the bytes of an array; None is NaN."""
    return np.asarray(values, dtype=dtype).tobytes()


def put_top(message: Any, top: Sequence[Likely], k: int) -> None:
    """Write the likeliest tokens of each position; nothing if k is 0."""
    if k:
        rows = [[*row, *[_NO_TOKEN] * (k - len(row))] for row in top]
        message.token_ids = np.asarray([[token for token, _ in row] for row in rows], dtype="<i4").tobytes()
        message.logprobs = np.asarray([[logprob for _, logprob in row] for row in rows], dtype="<f4").tobytes()
        message.k, message.length = k, len(rows)
