"""Files of commands: JSON, and behind it the data as packed arrays."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from longshore.losses import PPO
from shared.errors import CorruptArtifact, InvalidInput
from shared.jobs.commands import (
    Command,
    CommandHead,
    Datum,
    Forward,
    ForwardBackward,
    OptimStep,
    SaveState,
    check_data,
    read_command,
    stored_form,
)
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
    data = stored_form(asked)
    text, _, arrays = data.partition(b"\0")
    sent, stored = asked.model_dump(mode="json"), json.loads(text)
    assert {name: each for name, each in stored.items() if name != "data"} == {
        name: each for name, each in sent.items() if name != "data"
    }
    assert CommandHead.of(data).kind == asked.kind
    assert bool(arrays) == ("data" in sent) and (not arrays or (len(text) + 1) % 8 == 0)
    assert stored_form(asked) == data, "whoever repeats it sends the same bytes"


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
    kept = found.of_targets(found.columns["weight"] != 0)
    assert [columns(kept, number)["label_N"] for number in (0, 1)] == [[8, 7, 6], [4, 6]]
    assert columns(kept, 1)["hidden_index_N"] == [0, 1]


@pytest.mark.parametrize("asked", COMMANDS)
def test_commands_of_the_release_before_are_read(asked: Command) -> None:
    """Their data is in their JSON: in the store of a session that was begun then, and in archives."""
    (one, of_one), (other, of_other) = read_command(asked.model_dump_json().encode()), read_command(stored_form(asked))
    assert one == other and (of_one is None) == (of_other is None)
    if of_one is not None and of_other is not None:
        assert of_one.columns.keys() == of_other.columns.keys()
        for name, values in of_one.columns.items():
            np.testing.assert_array_equal(values, of_other.columns[name], err_msg=name)


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


def _put(at: int, value: int) -> Callable[[bytearray], object]:
    """Overwrite four bytes, counted from the first array on."""

    def spoil(data: bytearray) -> None:
        begin = data.index(b"\0") + 1 + at
        data[begin : begin + 4] = value.to_bytes(4, "little", signed=True)

    return spoil


def _say(before: bytes, after: bytes) -> Callable[[bytearray], object]:
    def spoil(data: bytearray) -> None:
        assert len(before) == len(after) and before in data
        data[:] = data.replace(before, after)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    {
        "cut off": lambda data: data.pop(),
        "a unit that begins late": _put(0, 1),
        "a unit without tokens": _put(8, 0),
        "units that go back": _put(8, 1000),
        "more tokens than there are": _put(16, 1000),
        "targets of another unit": _put(24 + 8, 9),
        "a target outside its unit": _put(48 + 4 * 7, 7),
        "a target before its unit": _put(48 + 4 * 7, -1),
        "another count": _say(b'"num_targets":6', b'"num_targets":5'),
        "a negative count": _say(b'"num_targets":6,', b'"num_targets":-1'),
        "a tree": _say(b'"label"', b'"paren"'),
    }.items(),
    ids=lambda each: each[0],
)
def test_arrays_that_are_no_data_are_refused(spoil: tuple[str, Callable[[bytearray], object]]) -> None:
    """A child process that a tenant's body has taken over may write any file: nothing outside its arrays is read."""
    data = bytearray(stored_form(Forward(data=(PLAIN, LABELLED))))
    assert units(bytes(data)).header.num_targets == 6
    spoil[1](data)
    with pytest.raises((CorruptArtifact, InvalidInput, ValueError)):
        read_command(bytes(data))


def test_an_answer_is_bounded_by_the_arrays_themselves() -> None:
    data = stored_form(Forward(data=(Datum(tokens=(1,) * 4000),), top_k=100))
    with pytest.raises(InvalidInput, match="1,000,000 at most"):
        read_command(data.replace(b'"top_k":100', b'"top_k":128'))
