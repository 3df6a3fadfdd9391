"""Files of commands: JSON, and behind it the data as packed arrays."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors.numpy import load, save

from longshore.client import Session
from longshore.commands import EFFECTS, Asked, Datum, Forward, ForwardBackward, OptimStep, SaveState
from longshore.losses import PPO
from shared.errors import CorruptArtifact, InvalidInput
from shared.field_rules import first_error
from shared.jobs.commands import Command, CommandHead, check_data, read_command, stored_form
from shared.jobs.packed import Units

POLICY = Datum(tokens=(5, 6, 7), weights=(1.0, 0.0), advantages=(0.5, -1.0), logprobs=(-0.1, -0.2))
PLAIN = Datum(tokens=(9, 8, 7, 6))
LABELLED = Datum(tokens=(1, 2, 3), labels=((4, 5), (6,)), label_weights=((0.25, 0.0), (1.0,)))
COMMANDS: tuple[Command, ...] = (
    Forward(data=(PLAIN, LABELLED), top_k=3, temperature=0.5),
    ForwardBackward(data=(POLICY,) * 2, loss=PPO()),
    ForwardBackward(data=(PLAIN, POLICY), share_prefixes=True),
    OptimStep(learning_rate=0.1),
    SaveState(publish=True),
)


def test_a_client_has_a_method_for_every_command() -> None:
    assert EFFECTS and all(hasattr(Session, kind) for kind in EFFECTS)


def units(data: bytes) -> Units:
    _, found = read_command(data)
    assert found is not None
    return found


def columns(found: Units, number: int) -> dict[str, list[float]]:
    packed = found.read_bin(np.array([number]))
    names = ("token_id_T", "hidden_index_N", "label_N", "weight_N", "advantage_N", "old_logprob_N")
    return {name: getattr(packed, name).tolist() for name in names}


@pytest.mark.parametrize("asked", COMMANDS)
def test_a_file_says_all_that_was_sent(asked: Command) -> None:
    data, sent = stored_form(asked), asked.model_dump(exclude={"data"})
    stored, found = read_command(data)
    assert stored.model_dump() == sent and CommandHead.of(data).kind == asked.kind
    assert (found is not None) == isinstance(asked, Forward | ForwardBackward)
    assert stored_form(asked) == data, "whoever repeats it sends the same bytes"
    if not found:
        assert json.loads(data) == asked.model_dump(mode="json")


@pytest.mark.parametrize(
    ("bad", "place", "rule"),
    [
        ({"kind": "forward_backward", "data": [{"tokens": [1]}]}, "data.0.tokens", "at least 2"),
        ({"kind": "forward_backward", "data": [{"tokens": [1, 2], "weights": [1, 1]}]}, "data.0", "weights has 2"),
        ({"kind": "forward_backward", "data": [{"tokens": [1, 2], "weights": ["NaN"]}]}, "weights", "finite"),
        ({"kind": "forward", "data": [{"tokens": [1, 2], "labels": [[3], [4]]}]}, "data.0", "labels has 2"),
        (
            {"kind": "forward", "data": [{"tokens": [1, 2], "labels": [[3, 4]], "label_weights": [[1]]}]},
            "data.0",
            "one number for each label",
        ),
        (
            {"kind": "forward", "data": [{"tokens": [1, 2], "labels": [[3]], "weights": [1]}]},
            "data.0",
            "label_weights alone",
        ),
        (
            {"kind": "forward", "share_prefixes": True, "data": [{"tokens": [1, 2], "labels": [[3]]}]},
            "share_prefixes",
            "not computed as trees",
        ),
        ({"kind": "forward", "data": [{"tokens": [1] * 5000}], "top_k": 128}, "top_k", "1,000,000 at most"),
        (
            {"kind": "forward_backward", "data": [{"tokens": [1, 2]}], "loss": {"kind": "ppo"}},
            "data[0].advantages",
            "needs it",
        ),
    ],
)
def test_a_command_that_cannot_be_is_refused_where_it_arrives(bad: dict[str, object], place: str, rule: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter[object](Asked).validate_json(json.dumps(bad))
    found, words = first_error(caught.value)
    assert place in f"{found} {words}" and rule in words


def test_what_is_no_command_has_no_head() -> None:
    for data in (
        b"",
        b"no",
        b"\x10" + b"\0" * 7 + b'{"a":1}  ' * 2,
        b"\xff" * 100,
        save({}, {"a": "b"}),
        b"[" * 99_999,
    ):
        with pytest.raises(ValidationError):
            CommandHead.of(data)


def test_a_unit_is_a_datum() -> None:
    found = units(stored_form(ForwardBackward(data=(POLICY, PLAIN))))
    old = np.array([-0.1, -0.2], dtype=np.float32).tolist()
    assert columns(found, 0) == {
        "token_id_T": [5, 6, 7],
        "hidden_index_N": [0, 1],
        "label_N": [6, 7],
        "weight_N": [1.0, 0.0],
        "advantage_N": [0.5, -1.0],
        "old_logprob_N": old,
    }
    plain = columns(found, 1)
    assert (plain["label_N"], plain["weight_N"], plain["advantage_N"]) == ([8, 7, 6], [1.0] * 3, [0.0] * 3)
    assert np.isnan(plain["old_logprob_N"]).all(), "nobody knows it"
    found = units(stored_form(Forward(data=(PLAIN, LABELLED))))
    assert columns(found, 0)["label_N"] == [8, 7, 6] and columns(found, 0)["hidden_index_N"] == [0, 1, 2]
    labelled = columns(found, 1)
    assert (labelled["label_N"], labelled["hidden_index_N"]) == ([4, 5, 6], [0, 0, 1])
    assert labelled["weight_N"] == [0.25, 0.0, 1.0] and labelled["token_id_T"] == [1, 2, 3]
    assert columns(units(stored_form(Forward(data=(Datum(tokens=(1, 2), labels=((),)),)))), 0)["label_N"] == []
    kept = found.of_targets(found.columns["weight"] != 0)
    assert [columns(kept, number)["label_N"] for number in (0, 1)] == [[8, 7, 6], [4, 6]]
    assert columns(kept, 1)["hidden_index_N"] == [0, 1]


def test_wrong_tokens_are_named() -> None:
    data = units(stored_form(Forward(data=(PLAIN, LABELLED))))
    check_data(data, vocab_size=10, max_tokens=4)
    for vocab_size, max_tokens, place in ((10, 3, "data[0].tokens"), (9, 4, "data[0].tokens[0]")):
        with pytest.raises(InvalidInput) as caught:
            check_data(data, vocab_size, max_tokens)
        assert caught.value.place == place
    labels = units(stored_form(Forward(data=(Datum(tokens=(1, 2)), LABELLED))))
    for vocab_size, place in ((6, "data[1].labels[1][0]"), (5, "data[1].labels[1][0]")):
        with pytest.raises(InvalidInput) as caught:
            check_data(labels, vocab_size, 4)
        assert caught.value.place == place


OFFSETS = ("token_offsets", "target_offsets")


def _put(name: str, at: int, value: int) -> Callable[[dict[str, NDArray]], object]:
    return lambda arrays: arrays[name].__setitem__(at, value)


@pytest.mark.parametrize(
    "spoil",
    {
        "units that begin late": _put("token_offsets", 0, 1),
        "a unit without tokens": lambda arrays: [arrays[name].__setitem__(1, 0) for name in OFFSETS],
        "units that go back": _put("token_offsets", 1, 1000),
        "more tokens than there are": _put("token_offsets", 2, 1000),
        "targets that go back": _put("target_offsets", 1, 9),
        "a target behind its unit": _put("hidden_index", 5, 3),
        "a target before its unit": _put("hidden_index", 3, -1),
        "too few weights": lambda arrays: arrays.update(weight=arrays["weight"][1:]),
        "another type": lambda arrays: arrays.update(label=arrays["label"].astype("<i8")),
        "a matrix": lambda arrays: arrays.update(label=arrays["label"][None]),
        "a tree": lambda arrays: arrays.update(parent=arrays["token_id"].astype("<i4")),
    }.items(),
    ids=lambda each: each[0],
)
def test_arrays_that_are_no_data_are_refused(spoil: tuple[str, Callable[[dict[str, NDArray]], object]]) -> None:
    """A child process that a tenant's body has taken over may write any file: nothing outside its arrays is read."""
    data = stored_form(Forward(data=(PLAIN, LABELLED)))
    arrays, text = load(data), {"command": Forward(data=(PLAIN,)).model_dump_json(exclude={"data"})}
    assert read_command(save(arrays, text))[1] is not None
    spoil[1](arrays)
    with pytest.raises(CorruptArtifact):
        read_command(save(arrays, text))


def test_an_answer_is_bounded_by_the_arrays_themselves() -> None:
    data = stored_form(Forward(data=(Datum(tokens=(1,) * 4000),), top_k=100))
    with pytest.raises(ValueError, match="1,000,000 at most"):
        read_command(data.replace(rb"\"top_k\":100", rb"\"top_k\":128"))
