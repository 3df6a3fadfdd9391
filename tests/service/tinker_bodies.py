"""Bodies of Tinker's forward_backward, as its SDK makes them, and spoilt ones."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import zstandard

from service.apis.tinker.wire import MESSAGES

FLOAT32, INT64 = 1, 2
Spoil = Callable[[Any], object]


def dense(message: Any, values: list[Any], dtype: int, shape: list[int] | None = None) -> None:
    message.dense = np.asarray(values, "<f4" if dtype == FLOAT32 else "<i8").tobytes()
    message.dtype = dtype
    message.shape.extend([len(values)] if shape is None else shape)


def sparse(message: Any, rows: list[dict[int, float]], num_columns: int, dtype: int) -> None:
    """A CSR matrix of rows that list their columns."""
    values = [value for row in rows for value in row.values()]
    message.sparse_csr.values = np.asarray(values, "<f4" if dtype == FLOAT32 else "<i8").tobytes()
    message.sparse_csr.crow_indices = np.cumsum([0, *map(len, rows)]).astype("<i8").tobytes()
    message.sparse_csr.col_indices = np.asarray([column for row in rows for column in row], "<i8").tobytes()
    message.dtype = dtype
    message.shape.extend([len(rows), num_columns])


def batch(model_id: str = "", seq_id: int = 1, loss_fn: str = "cross_entropy", **inputs: list[Any]) -> Any:
    """One datum of the tokens 5, 6, 7: its targets, and what is named."""
    message = MESSAGES["ForwardBackwardRequest"](model_id=model_id, seq_id=seq_id, loss_fn=loss_fn)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([5, 6, 7], "<i4").tobytes()
    dense(datum.loss_fn_inputs.add(key="target_tokens").value, inputs.pop("target_tokens", [6, 7, 8]), INT64)
    for name, values in inputs.items():
        dense(datum.loss_fn_inputs.add(key=name).value, values, FLOAT32)
    return message


def policy(**changes: Any) -> Any:
    inputs: dict[str, Any] = {"logprobs": [-1.0, -2.0, -3.0], "advantages": [0.0, 1.0, -1.0]}
    return batch(**({"loss_fn": "ppo"} | inputs | changes))


def gspo(**changes: Any) -> Any:
    return policy(**({"loss_fn": "gspo", "sequence_ratio_mask": [0.0, 1.0, 1.0]} | changes))


def sampled(*spans: tuple[str, int], **changes: Any) -> Any:
    """A datum of stable_reinforce, and runs of its targets: `prompt` or `sampled`, and how many."""
    message = policy(**({"loss_fn": "stable_reinforce"} | changes))
    for kind, length in spans:
        span = getattr(message.data[0].loss_fn_input_spans.add(), f"{kind}_tokens")
        span.sequence_id, span.length = "drawn/0", length
    return message


def tensor(message: Any, name: str = "target_tokens") -> Any:
    return next(entry.value for entry in message.data[0].loss_fn_inputs if entry.key == name)


def setting(name: str, number: float = 0.0, text: str = "") -> Spoil:
    def spoil(message: Any) -> None:
        entry = message.loss_fn_config_v2.add(key=name)
        entry.value.number, entry.value.text = number, text

    return spoil


def _shape(*sizes: int) -> Spoil:
    def spoil(message: Any) -> None:
        del tensor(message).shape[:]
        tensor(message).shape.extend(sizes)

    return spoil


def _input(name: str, values: list[Any], dtype: int = FLOAT32) -> Spoil:
    return lambda message: dense(message.data[0].loss_fn_inputs.add(key=name).value, values, dtype)


def _csr(rows: list[dict[int, float]], num_columns: int, **changes: bytes) -> Spoil:
    def spoil(message: Any) -> None:
        found = tensor(message)
        found.Clear()
        sparse(found, rows, num_columns, INT64)
        for name, value in changes.items():
            setattr(found.sparse_csr, name, value)

    return spoil


def _chunk(kind: str) -> Spoil:
    return lambda message: getattr(message.data[0].model_input.add(), kind).SetInParent()


SPOILT: Mapping[str, tuple[Any, Spoil]] = {
    "no data": (batch(), lambda message: message.ClearField("data")),
    "no tokens": (batch(), lambda message: message.data[0].ClearField("model_input")),
    "an image": (batch(), _chunk("image")),
    "audio": (batch(), _chunk("dmel")),
    "half a token": (batch(), lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", b"\1\2\3")),
    "a negative token": (batch(), lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", b"\xff" * 12)),
    "no targets": (batch(), lambda message: message.data[0].ClearField("loss_fn_inputs")),
    "targets of floats": (batch(), lambda message: setattr(tensor(message), "dtype", FLOAT32)),
    "no dtype": (batch(), lambda message: setattr(tensor(message), "dtype", 0)),
    "bfloat16": (batch(), lambda message: setattr(tensor(message), "dtype", 4)),
    "an unknown dtype": (batch(), lambda message: setattr(tensor(message), "dtype", 77)),
    "half a number": (batch(), lambda message: setattr(tensor(message), "dense", b"\1\2\3")),
    "too few targets": (batch(target_tokens=[6, 7]), lambda message: None),
    "too many targets": (batch(target_tokens=[6, 7, 8, 9]), lambda message: None),
    "a negative target": (batch(target_tokens=[6, -7, 8]), lambda message: None),
    "a target beyond 31 bits": (batch(target_tokens=[6, 7, 1 << 40]), lambda message: None),
    "a billion targets": (batch(), _shape(1_000_000_000)),
    "a negative shape": (batch(), _shape(-3)),
    "a shape that overflows": (batch(), _shape(1 << 62, 1 << 62)),
    "three dimensions": (batch(), _shape(1, 1, 3)),
    "129 targets in a place": (batch(target_tokens=[1] * 387), _shape(3, 129)),
    "a sparse billion": (batch(), _csr([{0: 6}, {0: 7}, {0: 8}], 1_000_000_000)),
    "rows that go back": (batch(), _csr([{0: 6}, {0: 7}, {0: 8}], 4, crow_indices=np.array([0, 2, 1, 3]).tobytes())),
    "a column outside": (batch(), _csr([{0: 6}, {0: 7}, {9: 8}], 4)),
    "rows of another matrix": (batch(), _csr([{0: 6}, {0: 7}], 4)),
    "weights of another shape": (batch(weights=[1.0, 1.0]), lambda message: None),
    "weights of integers": (batch(), _input("weights", [1, 1, 1], INT64)),
    "a weight that is no number": (batch(weights=[1.0, float("nan"), 1.0]), lambda message: None),
    "an infinite weight": (batch(weights=[1.0, float("inf"), 1.0]), lambda message: None),
    "an input of another loss": (batch(), _input("advantages", [1.0, 1.0, 1.0])),
    "an unknown input": (batch(), _input("clip_low_threshold", [0.8, 0.8, 0.8])),
    "an unknown loss": (batch(loss_fn="explode"), lambda message: None),
    "no loss": (batch(loss_fn=""), lambda message: None),
    "gspo without a mask": (policy(loss_fn="gspo"), lambda message: None),
    "a mask of nothing": (gspo(sequence_ratio_mask=[0.0, 0.0, 0.0]), lambda message: None),
    "a mask of two places": (gspo(sequence_ratio_mask=[0.0, 1.0]), lambda message: None),
    "a mask that is no number": (gspo(sequence_ratio_mask=[0.0, 1.0, float("nan")]), lambda message: None),
    "a mask without a place that is trained": (gspo(sequence_ratio_mask=[0.0, 1.0, 0.0]), lambda message: None),
    "a mask with another target than follows": (
        gspo(sequence_ratio_mask=[1.0, 1.0, 1.0], target_tokens=[0, 7, 8]),
        lambda message: None,
    ),
    "a mask for another loss": (gspo(loss_fn="ppo"), lambda message: None),
    "stable_reinforce of no provenance": (sampled(), lambda message: None),
    "spans of too few targets": (sampled(("prompt", 1), ("sampled", 1)), lambda message: None),
    "a span of nothing": (sampled(("prompt", 0), ("sampled", 3)), lambda message: None),
    "an advantage outside the sample": (sampled(("prompt", 2), ("sampled", 1)), lambda message: None),
    "a sample of another target": (sampled(("sampled", 3), target_tokens=[0, 7, 8]), lambda message: None),
    "a negative kl_coeff": (sampled(("prompt", 1), ("sampled", 2)), setting("kl_coeff", -0.1)),
    "a loss of the server's": (batch(loss_fn="custom"), lambda message: None),
    "no advantages": (batch(loss_fn="ppo", logprobs=[-1.0, -1.0, -1.0]), lambda message: None),
    "advantages that are no numbers": (policy(advantages=[0.0, float("inf"), 0.0]), lambda message: None),
    "another target than follows": (policy(target_tokens=[6, 99, 8]), lambda message: None),
    "an unknown setting": (policy(), setting("epsilon", 0.2)),
    "a bound that is a word": (policy(), setting("clip_low_threshold", text="low")),
    "a bound above 1": (policy(), setting("clip_low_threshold", 1.5)),
    "an upper bound below 1": (policy(), setting("clip_high_threshold", 0.5)),
    "a bound that is no number": (policy(), setting("clip_high_threshold", float("nan"))),
    "a negative beta": (policy(loss_fn="dro"), setting("beta", -1.0)),
    "a thousand settings": (policy(), lambda m: [setting(f"s{n}", 1.0)(m) for n in range(1000)]),
    "too many data": (batch(), lambda m: m.data.extend([m.data[0]] * 65_536)),
}
"""Requests that are refused, by what is wrong with them."""


def spoilt(name: str, model_id: str, seq_id: int) -> bytes:
    sound, spoil = SPOILT[name]
    message = MESSAGES["ForwardBackwardRequest"]()
    message.CopyFrom(sound)
    message.model_id, message.seq_id = model_id, seq_id
    spoil(message)
    return bytes(message.SerializeToString())


def compressed(body: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(body)
