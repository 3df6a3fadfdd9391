"""Mixtures of datasets: the share of each source is met to the example, and what is refused is named by its field."""

import json
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from activities.sampling.completions import Rows, numbers_of
from activities.tokenizing.tokenize import mixed_report
from activities.tokenizing.units import PackRequest, write_plan
from longshore.dataset_runs import DPORun, SFTRun
from longshore.fields import Artifact
from longshore.runs import RLRun
from longshore.views import Cut, LengthCount, Report, SourceShare
from service.apis.bodies import judged
from service.apis.native import runs
from service.cli.command import Stop
from service.cli.run_options import options_of, run_model
from service.cli.runs import checked_run
from shared.errors import InvalidInput
from shared.field_rules import first_error
from shared.jobs.bins import epoch_order, interleaved, length_of_mixture, shares_of, steps_of
from shared.jobs.packed import Plan, Units, UnitsWriter, mix_units

UNITS = Artifact(uri="file:///units", sha256="0" * 64)
A_RUN = {"model": "org/m", "epochs": 1, "batch_size": 2}


def drawn(sources: list[SourceShare], steps: int, batch_size: int, seed: int = 0) -> list[int]:
    """The units of a run's steps on a mixture, one after another."""
    num_units = sum(source.num_units for source in sources)
    cut = Cut(seed=seed, steps=steps, batch_size=batch_size, sources=tuple(sources))
    return [int(unit) for step in steps_of(np.ones(num_units, dtype=np.int64), cut) for unit in step]


def source_of(unit: int, sources: list[SourceShare]) -> int:
    return int(np.searchsorted(np.cumsum([source.num_units for source in sources]), unit, side="right"))


weighted = st.builds(
    lambda n, w: SourceShare(num_units=n, weight=w),
    st.integers(1, 40),
    st.integers(0, 1000).map(lambda w: w / 100) | st.just(0.123456789),
)
repeated = st.builds(
    lambda n, e: SourceShare(num_units=n, epochs=e), st.integers(1, 40), st.sampled_from([0.3, 1, 2.5])
)
mixtures = st.one_of(
    st.lists(weighted, min_size=1, max_size=7).filter(lambda sources: any(source.weight for source in sources)),
    st.lists(repeated, min_size=1, max_size=7),
    st.lists(st.builds(SourceShare, num_units=st.integers(1, 40)), min_size=1, max_size=7),
)


@settings(deadline=None, max_examples=150)
@given(sources=mixtures, batch_size=st.integers(1, 30), seed=st.integers(0, 9))
def test_every_beginning_of_a_run_has_each_source_s_share_to_less_than_one_example(
    sources: list[SourceShare], batch_size: int, seed: int
) -> None:
    units = drawn(sources, 20, batch_size, seed)
    if any(source.weight is not None for source in sources):
        wanted = [Fraction(str(1 if source.weight is None else source.weight)) for source in sources]
    else:
        wanted = [Fraction(max(1, round((source.epochs or 1) * source.num_units))) for source in sources]
    counts = [0] * len(sources)
    for number, unit in enumerate(units, 1):
        counts[source_of(unit, sources)] += 1
        for count, share in zip(counts, wanted, strict=True):
            assert abs(count - number * share / sum(wanted)) < 1
    # No unit of a source comes again before all of its units have come.
    times = Counter(units)
    for source, (first, last) in enumerate(
        np.cumsum([0, *(s.num_units for s in sources)])[[(i, i + 1) for i in range(len(sources))]]
    ):
        seen = [times[unit] for unit in range(first, last)]
        assert max(seen) - min(seen) <= 1, (source, seen)
    # The run that goes on from a step draws what the whole one does.
    assert drawn(sources, 20, batch_size, seed)[7 * batch_size :] == units[7 * batch_size :]


@settings(deadline=None, max_examples=100)
@given(sources=mixtures, per_step=st.integers(1, 30), seed=st.integers(0, 9), last=st.integers(1, 400))
def test_prompts_of_rollouts_are_drawn_in_the_order_of_a_mixture_and_each_step_alone(
    sources: list[SourceShare], per_step: int, seed: int, last: int
) -> None:
    def step(number: int) -> list[int]:
        rows = Rows(first=(number - 1) * per_step, count=per_step, seed=seed, sources=tuple(sources))
        return numbers_of(rows, sum(source.num_units for source in sources))

    order = drawn(sources, 20, per_step, seed)  # the test above is of its shares
    steps = [unit for number in range(1, 21) for unit in step(number)]
    assert steps[: len(order)] == order
    # A run that is resumed asks for a late step alone: none before it is drawn.
    late = [unit for number in (last, last + 1) for unit in step(number)]
    whole = islice(_every_draw(sources, seed), (last - 1) * per_step, (last + 1) * per_step)
    assert late == list(whole)


def _every_draw(sources: list[SourceShare], seed: int) -> Iterator[int]:
    """The units of a mixture, one after another, by `steps_of` in steps of one."""
    num_units = sum(source.num_units for source in sources)
    cut = Cut(seed=seed, steps=10**6, batch_size=1, sources=tuple(sources))
    for units in steps_of(np.ones(num_units, dtype=np.int64), cut):
        yield from units.tolist()


def test_an_epoch_passes_over_each_source_as_often_as_it_says() -> None:
    sources = (SourceShare(num_units=5, epochs=2), SourceShare(num_units=3), SourceShare(num_units=4, epochs=0.5))
    steps = list(steps_of(np.ones(12, dtype=np.int64), Cut(seed=3, epochs=2, batch_size=4, sources=sources)))
    times = Counter(int(unit) for step in steps for unit in step)
    assert [times[unit] for unit in range(12)] == [4] * 5 + [2] * 3 + [1] * 4
    assert [len(step) for step in steps] == [4, 4, 4, 3] * 2


@pytest.mark.parametrize("share", [{}, {"weight": 0.3}, {"epochs": 1}])
def test_one_source_is_drawn_as_the_dataset_alone(share: dict[str, float], tmp_path: Path) -> None:
    tokens_U = np.random.default_rng(0).integers(2, 64, 50)
    plans = []
    for name, sources in (("alone", ()), ("mixture", (SourceShare(num_units=50, **share),))):
        cut = {"seed": 5, "epochs": 2.5, "batch_tokens": 256, "sources": sources}
        write_plan(tokens_U, PackRequest(units=UNITS, bin_tokens=64, **cut), tmp_path / name)
        plans.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert plans[0] == plans[1]


def test_sources_of_one_size_are_shuffled_differently() -> None:
    units = drawn([SourceShare(num_units=30)] * 2, 1, 60)
    assert [unit for unit in units if unit < 30] == epoch_order(30, 0, 0).tolist()
    assert [unit for unit in units if unit < 30] != [unit - 30 for unit in units if unit >= 30]


def test_a_request_without_a_mixture_has_the_key_that_it_had() -> None:
    request = PackRequest(units=UNITS, seed=1, epochs=1, batch_size=2, bin_tokens=64)
    assert "sources" not in request.model_dump_json()
    mixed = request.model_copy(update={"sources": (SourceShare(num_units=3),)})
    assert request.key != mixed.key
    assert "eval_datasets" not in SFTRun(**A_RUN, dataset="file:///d").model_dump_json()


def test_units_of_sources_are_read_as_they_were(tmp_path: Path) -> None:
    folders = {}
    for name, first, num_units in (("a", 0, 3), ("b", 100, 2)):
        writer = UnitsWriter(tmp_path / name)
        for unit in range(num_units):
            ids = np.arange(first + 10 * unit, first + 10 * unit + 4 + unit)
            writer.append(
                token_id=ids, hidden_index=np.arange(len(ids) - 1), label=ids[1:], weight=np.ones(len(ids) - 1)
            )
        writer.close()
        folders[name] = tmp_path / name
    (tmp_path / "mixed").mkdir()
    header = mix_units(folders, tmp_path / "mixed")
    assert [(source.name, source.num_units) for source in header.sources] == [("a", 3), ("b", 2)]
    with Units(tmp_path / "mixed") as mixed, Units(tmp_path / "a") as one, Units(tmp_path / "b") as two:
        for unit in range(5):
            own, whole = (one.read_bin([unit]) if unit < 3 else two.read_bin([unit - 3])), mixed.read_bin([unit])
            for name, values in vars(own).items():
                assert np.array_equal(values, getattr(whole, name), equal_nan=name == "old_logprob_N"), name


def test_a_mixture_s_report_adds_those_of_its_sources() -> None:
    def report(kept: int, format_: Any, notice: str) -> Report:
        return Report(
            format=format_, num_rows=kept + 1, num_kept=kept, num_tokens=10 * kept, num_targets=5 * kept,
            trained_fraction=0.5, max_tokens=64, longest_tokens=kept, num_truncated=0, num_too_long=1,
            num_fully_masked=0, lengths=(LengthCount(up_to_tokens=16, num_rows=kept),), lost=(), notices=(notice,),
        )  # fmt: skip

    found = mixed_report({"1": report(3, "chat", "odd"), "code": report(4, "text", "even")})
    assert (found.format, found.num_rows, found.num_kept, found.num_tokens, found.longest_tokens) == (
        "auto",
        9,
        7,
        70,
        4,
    )
    assert found.lengths == (LengthCount(up_to_tokens=16, num_rows=7),) and found.trained_fraction == 0.5
    assert found.notices == ("source 1: odd", "source code: even")
    assert [(source.name, source.num_kept, source.num_lost) for source in found.sources] == [
        ("1", 3, 1),
        ("code", 4, 1),
    ]


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 60}])
@pytest.mark.parametrize("batch", [{"batch_size": 8}, {"batch_tokens": 512}])
def test_an_estimate_of_a_mixture_is_about_its_plan(length: dict, batch: dict, tmp_path: Path) -> None:
    sizes, random = (800, 400), np.random.default_rng(0)
    parts = [random.integers(2, 18, sizes[0]), random.integers(10, 30, sizes[1])]
    tokens_U = np.concatenate(parts)
    sources = tuple(SourceShare(num_units=n, weight=w) for n, w in zip(sizes, (1, 3), strict=True))
    cut = {"seed": 0, **length, **batch, "sources": sources}
    header = write_plan(tokens_U, PackRequest(units=UNITS, bin_tokens=64, **cut), tmp_path / "plan")
    found = length_of_mixture([float(part.mean()) for part in parts], Cut(**cut))
    about = 0.05 if "batch_size" in batch else 0.1  # steps of tokens are seldom full
    assert not found.is_exact and found.steps == pytest.approx(header.num_steps, rel=about)
    assert found.tokens == pytest.approx(header.num_tokens, rel=about)
    assert Plan(tmp_path / "plan").header == header


@pytest.mark.parametrize(("epochs", "steps"), [(2, 7), (0.1, 1)])
def test_an_estimate_of_mixed_prompts_has_the_steps_of_the_run(epochs: float, steps: int) -> None:
    sources = (SourceShare(num_units=10, epochs=2), SourceShare(num_units=5, epochs=1))
    cut = Cut(seed=0, epochs=epochs, batch_size=7, sources=sources)
    found = length_of_mixture([3.0, 6.0], cut, are_prompts=True)
    assert (found.steps, found.tokens) == (steps, round(7 * steps * (20 * 3 + 5 * 6) / 25))
    assert found.epochs == pytest.approx(7 * steps / 25)


def test_weights_of_very_different_sizes_are_drawn() -> None:
    shares, num_draws = shares_of([SourceShare(num_units=4, weight=1e-300), SourceShare(num_units=4, weight=1e6)])
    assert num_draws == 8 and set(islice(interleaved(shares), 100)) <= {0, 1}
    assert length_of_mixture([1.0, 1.0], Cut(seed=0, epochs=1, batch_size=1, sources=(
        SourceShare(num_units=4, weight=1e-300), SourceShare(num_units=4, weight=1e6)
    ))).tokens == 8  # fmt: skip


A, B = {"uri": "file:///a"}, {"uri": "file:///b"}


@pytest.mark.parametrize(
    ("fields", "place", "rule"),
    [
        ({"dataset": [A | {"weight": 0}, B | {"weight": 0}]}, "dataset", "the weights sum to 0"),
        ({"dataset": [A, B | {"weight": -1}]}, "dataset.1.weight", "greater than or equal to 0"),
        ({"dataset": [A | {"weight": float("inf")}]}, "dataset.0.weight", "finite"),
        ({"dataset": [A | {"weight": float("nan")}]}, "dataset.0.weight", "finite"),
        ({"dataset": [A | {"weight": "2"}]}, "dataset.0.weight", "valid number"),
        ({"dataset": [A | {"epochs": 0}]}, "dataset.0.epochs", "greater than 0"),
        ({"dataset": [A | {"weight": 1}, B | {"epochs": 1}]}, "dataset", "give one of both"),
        ({"dataset": [A | {"name": "b"}, B | {"name": "b"}]}, "dataset", "two sources have the name b"),
        ({"dataset": [A | {"name": "2"}, B]}, "dataset", "two sources have the name 2"),
        ({"dataset": [A, B | {"name": "B_"}]}, "dataset.1.name", "lower-case letters, digits and dashes"),
        ({"dataset": [A, B | {"format": "preference"}]}, "dataset.1", "which dpo learns from"),
        ({"dataset": [A, B | {"share": 1}]}, "dataset.1.share", "no such field"),
        ({"dataset": []}, "dataset", "must not be empty"),
        ({"dataset": A, "eval_datasets": {"a_b": A}}, "eval_datasets.a_b.[key]", "letters, digits and dashes"),
        ({"dataset": A, "eval_datasets": {"eval": A}}, "eval_datasets.eval.[key]", "give another name"),
        ({"dataset": A, "eval_datasets": [("a", A), ("a", B)]}, "eval_datasets", "two evaluations have the name a"),
        ({"dataset": A, "eval_dataset": A, "eval_datasets": {"b": B}}, "", "eval_datasets: give the data"),
        (
            {"dataset": A, "eval_datasets": {"a": B}, "eval_every": 1, "keep": "best", "best_by": "eval_b_loss"},
            "",
            "best_by: eval_datasets have no eval_b_loss; they have eval_a_loss",
        ),
        (
            {"dataset": A, "eval_datasets": {"a": B}, "eval_every": 1, "keep": "best"},
            "",
            "best_by: eval_datasets have no eval_loss",
        ),
        (
            {"dataset": A, "eval_datasets": {"a": B}, "eval_every": 1, "early_stop": {"patience": 1}},
            "",
            "early_stop.metric: eval_datasets have no eval_loss",
        ),
    ],
)
def test_what_is_wrong_with_a_mixture_or_an_evaluation_is_named(fields: dict, place: str, rule: str) -> None:
    with pytest.raises(ValidationError) as raised:
        SFTRun.model_validate(A_RUN | fields)
    found = first_error(raised.value)
    assert found[0] == place and rule in found[1], found


GRADER = {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "operation": "eq", "reference": "a"}
KEPT = {"every_steps": 1, "keep": "best"}


@pytest.mark.parametrize(
    ("fields", "place", "rule"),
    [
        ({"prompts": [A | {"weight": 0}]}, "rollouts.prompts", "the weights sum to 0"),
        ({"prompts": [A | {"name": "2"}, B]}, "rollouts.prompts", "two sources have the name 2"),
        ({"prompts": [A, B | {"format": "text"}]}, "rollouts.prompts.1", "ask nothing"),
        ({"prompts": [A, B | {"completion_field": "x"}]}, "rollouts.prompts.1", "completion_field has no meaning"),
        ({"prompts": [A | {"weight": 1}, B | {"epochs": 1}]}, "rollouts.prompts", "give one of both"),
        ({"held_out": {"prompts": [A, B]}}, "rollouts.held_out.prompts", "valid dictionary"),
        ({"held_out": {"prompts": A, "sets": {"b": B}}}, "rollouts.held_out", "sets: give the data of prompts a name"),
        ({"held_out": {}}, "rollouts.held_out.prompts", "required"),
        ({"held_out": {"sets": [("a", A), ("a", B)]}}, "rollouts.held_out.sets", "two evaluations have the name a"),
        ({"held_out": {"sets": {"a_b": A}}}, "rollouts.held_out.sets.a_b.[key]", "letters, digits and dashes"),
        ({"held_out": {"sets": {"a": A | {"format": "text"}}}}, "rollouts.held_out.sets.a", "ask nothing"),
        (
            {"held_out": {"sets": {"a": A}, **KEPT, "best_by": "eval_b_reward_mean"}},
            "rollouts.held_out",
            "eval_b_reward_mean is no metric of held-out prompts; they have eval_reward_mean, eval_a_reward_mean",
        ),
    ],
)
def test_what_is_wrong_with_prompts_of_rollouts_is_named(fields: dict, place: str, rule: str) -> None:
    rollouts = {"prompts": A, "grader": GRADER, "steps": 1} | fields
    with pytest.raises(ValidationError) as raised:
        RLRun.model_validate({"model": "org/m", "rollouts": rollouts})
    found = first_error(raised.value)
    assert found[0] == place and rule in found[1], found


def test_a_name_that_a_body_has_twice_is_refused() -> None:
    body = json.dumps({"model": "org/m", "rollouts": {"prompts": A, "grader": GRADER, "steps": 1}})
    twice = body[:-2] + ', "held_out": {"sets": {"a": "file:///a", "a": "file:///b"}}}}'
    with pytest.raises(InvalidInput, match=r"^sets: two evaluations have one name$"):
        judged(f"{runs.__name__}:submit_rl", twice)


def test_held_out_sets_decide_by_their_own_mean_or_that_of_all() -> None:
    for best_by in (None, "eval_a_reward_mean"):
        held_out = {"sets": {"a": "file:///a", "b": "file:///b"}, **KEPT, "best_by": best_by}
        rollouts = {"prompts": [A, B], "grader": GRADER, "steps": 1, "held_out": held_out}
        run = RLRun.model_validate({"model": "org/m", "rollouts": rollouts})
        assert run.held_out is not None and run.held_out.keeps_by == (best_by or "eval_reward_mean")
        assert RLRun.model_validate_json(run.model_dump_json()) == run
    alone = RLRun.model_validate({"model": "org/m", "rollouts": rollouts | {"prompts": A, "held_out": {"prompts": B}}})
    assert "sets" not in alone.model_dump_json()


def test_sources_are_read_as_one_dataset_is() -> None:
    run = SFTRun.model_validate(
        A_RUN | {"dataset": ["file:///a", B | {"epochs": 2}], "eval_datasets": {"x": "file:///x"}}
    )
    assert [source.uri for source in run.sources] == ["file:///a", "file:///b"]
    assert run.evaluations["x"].uri == "file:///x"
    assert SFTRun.model_validate_json(run.model_dump_json()) == run
    alone = SFTRun.model_validate(A_RUN | {"dataset": "file:///a"})
    assert alone == SFTRun.model_validate(A_RUN | {"dataset": A}) and alone.sources == (alone.dataset,)
    with pytest.raises(ValidationError, match="dpo learns from preference pairs"):
        DPORun.model_validate(A_RUN | {"dataset": [A, B | {"format": "chat"}]})


def test_options_give_weights_and_names() -> None:
    def run_of(*datasets: str, **values: Any) -> SFTRun:
        run = checked_run("sft", options_of(run_model("sft")), {"model": "org/m", "dataset": list(datasets), **values})
        assert isinstance(run, SFTRun)
        return run

    mixed = run_of("s3://a/x:2", "https://host:8080/y", '{"uri": "s3://a/z", "name": "z"}', format="chat").dataset
    assert isinstance(mixed, tuple)
    assert [(source.uri, source.weight, source.format) for source in mixed] == [
        ("s3://a/x", 2.0, "chat"), ("https://host:8080/y", None, "chat"), ("s3://a/z", None, "auto"),
    ]  # fmt: skip
    assert run_of("https://host:8080").dataset == SFTRun(**A_RUN, dataset="https://host:8080").dataset
    assert run_of("s3://a/x", eval=["math=s3://m", "code=s3://c?a=b"]).evaluations["code"].uri == "s3://c?a=b"
    for values, message in (
        ({"eval": ["math=s3://m", "math=s3://n"]}, "--eval: two evaluations have the name math"),
        ({"eval": ["s3://m"]}, "--eval: s3://m: give NAME=URI"),
    ):
        with pytest.raises(Stop, match=message):
            run_of("s3://a/x", **values)
    with pytest.raises(Stop, match="--dataset: the weights sum to 0"):
        run_of("s3://a/x:0")
