"""The measured table of layouts that is committed: whole, within its tolerances, and the pages made from it."""

import json

import pytest

from benchmarks import layouts
from shared.families import read_config
from shared.families.model_slices import shape_of
from tests.megatron_worker import layout_table
from tests.megatron_worker.rows import distinct_model

ROWS = json.loads(layouts.RESULTS.read_text())["layouts"]


@pytest.mark.parametrize("model", layout_table.MODELS)
def test_every_layout_of_two_and_four_ranks_is_there(tmp_path, model):
    shape = shape_of(read_config(distinct_model(tmp_path, **layout_table.MODELS[model])))
    expected = [(world, layout.label) for world in (2, 4) for layout in layout_table.layouts(world, shape)]
    assert sorted((row["ranks"], row["layout"]) for row in layouts.of_rows(ROWS, model)) == sorted(expected)


def test_float32_is_within_the_tolerance():
    for row in ROWS:
        assert len(row["float32"]) == len(layouts.OBJECTIVES) * len(layouts.TRAINABLES)
        for key, found in row["float32"].items():
            assert found["resumes"], (row["model"], row["layout"], key)
            for column in layouts.COLUMNS:
                assert found[column] <= layouts.TOLERANCE, (row["model"], row["layout"], key, column)


def test_bfloat16_is_within_its_bounds():
    for row in ROWS:
        for key, found in row["bfloat16"].items():
            for what in ("logprob", "gradient"):
                assert layouts.quotient(what, found) <= found["bound"], (row["model"], row["layout"], key, what)


def test_the_pages_are_made_from_the_figures():
    assert layouts.PAGE.read_text() == layouts.page(layouts.read())
    assert layouts.TABLES.read_text() == layouts.tables(layouts.read())


def test_a_layout_measured_again_takes_its_row_s_place():
    old = layouts.read()
    again = ROWS[3] | {"commit": "another"}
    new = layouts.merged(old, again)["layouts"]
    assert [row for row in new if row["commit"] == "another"] == [again]
    assert [(r["model"], r["layout"]) for r in new] == [(r["model"], r["layout"]) for r in ROWS]
