"""What is said of a run's length before its plan is made is what the plan has."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities.packing import PackRequest, write_plan
from activities.sampling.completions import Rows, numbers_of
from longshore.fields import Artifact
from shared.jobs import bins
from shared.jobs.bins import Cut, length_of, length_of_draws

UNITS = Artifact(uri="file:///units", sha256="0" * 64)


@settings(deadline=None, max_examples=100)
@given(
    num_tokens=st.lists(st.integers(2, 64), min_size=1, max_size=60),
    length=st.one_of(
        st.builds(lambda n: {"epochs": n}, st.floats(0.01, 4)), st.builds(lambda n: {"steps": n}, st.integers(1, 30))
    ),
    batch=st.one_of(
        st.builds(lambda n: {"batch_size": n}, st.integers(1, 20)),
        st.builds(lambda n: {"batch_tokens": n}, st.integers(64, 300)),
    ),
    seed=st.integers(0, 9),
)
def test_a_length_is_its_plan_s_to_the_token(
    num_tokens: list[int],
    length: dict[str, Any],
    batch: dict[str, Any],
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tokens_U = np.array(num_tokens)
    cut = {"seed": seed, **length, **batch}
    found = length_of(tokens_U, Cut(**cut))
    request = PackRequest(units=UNITS, bin_tokens=64, **cut)
    header = write_plan(tokens_U, request, tmp_path_factory.mktemp("plan"))
    assert found.is_exact and (found.steps, found.tokens) == (header.num_steps, header.num_tokens)


@settings(deadline=None, max_examples=50)
@given(
    num_tokens=st.lists(st.integers(2, 64), min_size=1, max_size=40),
    num_steps=st.integers(1, 12),
    per_step=st.integers(1, 50),
    seed=st.integers(0, 9),
)
def test_the_prompts_of_an_estimate_are_those_that_rollouts_draw(
    num_tokens: list[int], num_steps: int, per_step: int, seed: int
) -> None:
    tokens_U = np.array(num_tokens)
    found = length_of_draws(tokens_U, Cut(seed=seed, steps=num_steps, batch_size=per_step))
    drawn = [
        number
        for step in range(num_steps)
        for number in numbers_of(Rows(first=step * per_step, count=per_step, seed=seed), len(tokens_U))
    ]
    assert (found.steps, found.tokens) == (num_steps, tokens_U[drawn].sum())
    assert found.epochs == pytest.approx(len(drawn) / len(tokens_U))


@pytest.mark.parametrize("length", [{"epochs": 3.5}, {"steps": 90}])
def test_beyond_what_is_counted_one_by_one_steps_of_tokens_are_about(
    length: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_U = np.random.default_rng(0).integers(8, 64, 800)
    cut = Cut(seed=1, batch_tokens=1024, **length)
    exact = length_of(tokens_U, cut)
    monkeypatch.setattr(bins, "_MOST_COUNTED", 300)
    found = length_of(tokens_U, cut)
    assert exact.is_exact and not found.is_exact
    assert found.steps == pytest.approx(exact.steps, rel=0.06) and found.tokens == pytest.approx(exact.tokens, rel=0.06)
    assert "epochs" not in length or found.tokens == exact.tokens


def test_of_nothing_there_is_no_step() -> None:
    nothing = length_of(np.array([], dtype=np.int64), Cut(seed=0, epochs=1, batch_size=1))
    assert (nothing.steps, nothing.tokens) == (0, 0)
