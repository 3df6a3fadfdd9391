"""A pair becomes a unit that the loss accepts: shared prompt once, both answers whole, signs in place."""

from pathlib import Path

import numpy as np
import pytest

from activities.preference_pairs import pair_unit
from megatron_worker.losses.columns import check_columns
from shared.errors import InvalidInput
from shared.jobs import DPO
from shared.packed import TARGET_COLUMNS, TOKEN_COLUMNS, Units, UnitsWriter


def test_the_prompt_stands_once_and_each_answer_is_a_branch():
    unit = pair_unit([5, 6, 7], [10, 11], [12])
    assert sorted(unit.token_id_T.tolist()) == [5, 6, 7, 10, 11, 12]
    assert unit.label_N.tolist() == [10, 11, 12]
    assert unit.advantage_N.tolist() == [1.0, 1.0, -1.0]
    assert unit.sequence_N.tolist() == [0, 0, 1]
    assert unit.token_id_T[unit.hidden_index_N].tolist() == [7, 10, 7]


def test_a_beginning_that_both_answers_share_is_scored_for_both():
    unit = pair_unit([5], [10, 11], [10, 12])
    assert len(unit.token_id_T) == 4
    assert unit.label_N.tolist() == [10, 11, 10, 12]
    assert unit.advantage_N.tolist() == [1.0, 1.0, -1.0, -1.0]


def test_the_loss_accepts_what_is_written(tmp_path: Path):
    writer = UnitsWriter(tmp_path, (*TOKEN_COLUMNS, *TARGET_COLUMNS))
    for pair in (pair_unit([5, 6], [10, 11], [12]), pair_unit([5], [3], [4, 3, 2])):
        writer.append(**pair.columns())
    writer.close()
    with Units(tmp_path) as units:
        check_columns(units, DPO())
        packed = units.read_bin(np.array([1, 0]))
        assert packed.sequence_N.tolist() == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "place"),
    [([], [1], [2], "prompt"), ([1], [], [2], "chosen"), ([1], [2], [], "rejected"), ([1], [2, 3], [2, 3], "rejected")],
)
def test_what_is_no_pair_is_refused(prompt, chosen, rejected, place: str):
    with pytest.raises(InvalidInput) as refused:
        pair_unit(prompt, chosen, rejected)
    assert refused.value.place == place
