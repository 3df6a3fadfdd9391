"""What the command line makes of the run models, and computes for itself: options, spans of time, time left, views."""

import builtins
import io
import json
import subprocess
import sys
import time
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import typer
from pydantic import BaseModel, Field, TypeAdapter
from pydantic.fields import FieldInfo
from rich.console import Console

from longshore.dataset_runs import DatasetSource, DPORun, SFTRun
from longshore.events import Event, RunEvent, Saved, Step, Succeeded
from longshore.fields import Artifact, Fence
from longshore.runs import RLRun
from longshore.training import Lora
from longshore.views import RunView
from service.cli.command import Stop, seconds_of, span
from service.cli.run_options import NAMES, given, options_of, request_fields, run_command, run_model
from service.cli.run_output import Bar, Lines, phases, summary, took
from service.cli.runs import checked_run
from service.runs.views import seconds_left
from workflows.training.run import StepEta

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["sft", "dpo", "rl"])
def test_every_field_of_a_run_is_an_option(kind: str) -> None:
    model = run_model(kind)
    constant = {"kind", "schema_version"} | ({"too_long"} if kind == "dpo" else set())
    found = {option.path[0] for option in options_of(model) if option.form != "reading"}
    assert found == set(model.model_fields) - constant
    assert all(option.help for option in options_of(model)), "a field without a description"
    flags = [option.flag for option in options_of(model)]
    assert len(flags) == len(set(flags)), "two fields have one option"


def test_names_are_of_fields() -> None:
    fields = {option.field for kind in ("sft", "dpo", "rl") for option in options_of(run_model(kind))}
    assert set(NAMES) <= fields


def test_a_new_field_is_an_option() -> None:
    class Wider(Lora):
        rank_of_experts: int = Field(default=4, ge=1, le=8, description="of each expert's adapter")

    class Newer(SFTRun):
        trainable: Wider = Wider()
        sort_by: Literal["length", "none"] = Field(default="none", description="order of a bin")

    found = {option.flag: option for option in options_of(Newer)}
    assert (found["sort-by"].default, found["sort-by"].help) == ("none", "order of a bin")
    assert found["lora-rank-of-experts"].bounds == "1 to 8"
    fields = request_fields(tuple(found.values()), {"sort_by": "length", "lora_rank_of_experts": 2})
    assert fields == {"sort_by": "length", "trainable": {"rank_of_experts": 2}}


def test_a_request_has_what_was_given_and_the_defaults_of_the_command_line() -> None:
    options = options_of(SFTRun)
    run = checked_run(
        "sft", options, {"model": "org/m", "dataset": ["s3://b/rows.jsonl"], "lora_targets": "q_proj", "pp": 2}
    )
    assert (run.epochs, run.batch_size, run.layout.label) == (1.0, 8, "pp2")
    assert run.trainable.targets == ("q_proj",) and run.trainable.rank == Lora().rank
    full = checked_run(
        "sft", options, {"model": "org/m", "dataset": ["s3://b/rows.jsonl"], "full": True, "layout": "tp2-sp"}
    )
    assert full.trainable.kind == "full" and full.layout.sp and full.layout.tp == 2
    reading = {"format": "preference", "eval_dataset": "s3://b/held-out.jsonl", "samples": 3}
    pairs = checked_run("dpo", options_of(DPORun), {"model": "org/m", "dataset": ["s3://b/rows.jsonl"], **reading})
    assert pairs.dataset.format == pairs.eval_dataset.format == "preference" and pairs.num_samples == 3
    assert (pairs.learning_rate, pairs.eval_dataset.uri) == (1e-5, "s3://b/held-out.jsonl")


CHECK = {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "operation": "eq", "reference": "a"}
A_RUN_OF_PROMPTS = {"model": "org/m", "prompts": ["s3://p"], "grader": json.dumps(CHECK), "steps": 1}


def test_options_mix_prompts_and_name_held_out_ones() -> None:
    given = {"prompts": ["s3://a/x:2", '{"uri": "s3://b", "name": "b"}'], "eval": ["held=s3://h"]}
    run = checked_run("rl", options_of(RLRun), A_RUN_OF_PROMPTS | given)
    assert isinstance(run, RLRun) and run.rollouts is not None and run.held_out is not None
    assert not isinstance(run.rollouts.prompts, DatasetSource)
    assert [(one.uri, one.weight, one.name) for one in run.rollouts.prompts] == [
        ("s3://a/x", 2, None),
        ("s3://b", None, "b"),
    ]
    assert {name: one.uri for name, one in run.held_out.sets.items()} == {"held": "s3://h"}
    with pytest.raises(Stop, match="--prompts: the weights sum to 0"):
        checked_run("rl", options_of(RLRun), A_RUN_OF_PROMPTS | {"prompts": ["s3://a/x:0"]})


def test_the_version_is_printed() -> None:
    program = Path(sys.executable).with_name("longshore")
    done = subprocess.run([program, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("longshore "), done


def _is_model(type_: object) -> bool:
    return isinstance(type_, type) and issubclass(type_, BaseModel)


def _values(annotation: object, name: str) -> Iterator[object]:
    """Yield JSON values that a field takes: null, both booleans, each choice, numbers, lists, pairs; and text."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    match get_origin(annotation), get_args(annotation):
        case ((typing.Union | types.UnionType), parts):
            for part in parts:
                yield from _values(part, name)
        case typing.Literal, choices:
            yield from choices
        case builtins.tuple, (item, *_) if get_origin(item) is tuple:
            yield from ([["q_proj", 1]], [["q_proj", 1], ["v_proj", 2]], [])
        case builtins.tuple, (item, *_):
            found = list(_values(item, name))
            yield from (found[:1], found[:2])
        case _:
            yield from {
                NoneType: [None],
                bool: [False, True],
                int: [2, 3],
                float: [0.5],
                str: ["eval_loss" if name in ("metric", "best_by") else "text"],
                Artifact: [{"uri": "s3://b/adapter", "sha256": "0" * 64}],
            }[annotation]  # type: ignore[index]


def _leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object, Any]]:
    """Yield every place of a request with each value that it takes, through objects and all kinds of unions.

    A kind of a union is a step of the path, as in pydantic's errors. What is below a grader or a critic's adapter is
    JSON of one option, whose values are not walked.
    """
    for name, field in model.model_fields.items():
        type_: Any = field.annotation
        while get_origin(type_) is Annotated or (
            get_origin(type_) in (typing.Union, types.UnionType)
            and len([x for x in get_args(type_) if x is not NoneType]) == 1
        ):
            type_ = next(each for each in get_args(type_) if each is not NoneType)
        variants = [each for each in get_args(type_) if "kind" in getattr(each, "model_fields", {})]
        if name in ("kind", "type", "schema_version", "head") or (name == "too_long" and len(get_args(type_)) == 1):
            continue
        if name in ("grader", "teachers", "eval_datasets", "sets") or (*path, name) == ("critic", "trainable"):
            continue
        if DatasetSource in get_args(type_):  # or a list of them: tests/shared/jobs/test_mixtures.py
            type_ = DatasetSource
        if variants:
            for each in variants:
                kind = each.model_fields["kind"].default
                if not isinstance(field.default, each):
                    yield (*path, name, kind), {}, each
                yield from _leaves(each, (*path, name, kind))
        elif _is_model(type_):
            yield from _leaves(type_, (*path, name))
        else:
            for value in _values(field.annotation, name):
                yield (*path, name), value, field


def _given_on_the_command_line(kind: str, arguments: list[str]) -> dict[str, Any]:
    """Parse arguments as `longshore submit` does, and return the request that they make."""
    asked: list[dict[str, Any]] = []
    options, app = options_of(run_model(kind)), typer.Typer()

    def command(context: typer.Context) -> None:
        asked.append(request_fields(options, given(context)))

    run_command(app, kind, kind, "")(command)
    app.command("other")(lambda: None)
    typer.main.get_command(app).main([kind, *arguments], "longshore", standalone_mode=False)
    return asked[0]


def _as_arguments(kind: str, place: tuple[str, ...], value: Any, folder: Path) -> list[str] | None:
    """Write a value as a user would, in a file of the folder if need be; None where leaving the option out says it."""
    options = options_of(run_model(kind))
    found = [
        option
        for option in options
        if option.place == place or (option.form == "variant" and place == (*option.path, option.kind))
    ]
    if not found:  # below an option that takes JSON
        whole = next(
            option
            for option in options
            if place[: len(option.path)] == option.path and option.form in ("kind", "source", "sources")
        )
        rest = list(place[len(whole.path) :])
        body = {"kind": rest.pop(0)} if whole.form == "kind" else {"uri": "s3://b/rows.jsonl"}
        inner = body
        for step in rest[:-1]:
            inner = inner.setdefault(step, {})
        if rest:
            inner[rest[-1]] = value
        return [f"--{whole.flag}", json.dumps(body)]
    option, flag = found[0], f"--{found[0].flag}"
    if option.form == "variant":
        return [flag]
    if value is None and not option.takes_null:
        assert option.default is None, f"{flag} has no text for null"
        return None
    if isinstance(value, bool):
        if value == option.default:
            return None
        return [flag if value else f"--no-{option.flag}"]
    if option.form == "json":
        return [flag, json.dumps(value)]
    if option.form == "file":
        (folder / "file").write_text(value)
        return [flag, str(folder / "file")]
    if option.form == "names":
        return [flag, ",".join(value)]
    if isinstance(value, list):
        return [text for each in value for text in (flag, str(each))]
    return [flag, "null" if value is None else str(value)]


@pytest.mark.parametrize("kind", ["sft", "dpo", "distill", "reward", "rl"])
def test_whatever_the_api_takes_can_be_given_on_the_command_line(kind: str, tmp_path: Path) -> None:
    """Every place of a request with every kind of value: what options make of it is what JSON would."""
    seen = 0
    for place, value, field in _leaves(run_model(kind)):
        arguments = _as_arguments(kind, place, value, tmp_path)
        if arguments is None:
            continue
        needed = {f"--{option.flag}" for option in options_of(run_model(kind)) if option.is_required} - set(arguments)
        request = _given_on_the_command_line(kind, [*(x for each in needed for x in (each, "org/m")), *arguments])
        found: Any = request
        for step in place:
            if isinstance(found, dict) and step not in found and found.get("kind") == step:
                continue  # the kind of a union
            found = found[step]
        if isinstance(field, FieldInfo):
            check = TypeAdapter(field.annotation)
            assert check.validate_python(found) == check.validate_python(value), (place, arguments, request)
        seen += 1
    assert seen > 60


def sft(**changes: object) -> SFTRun:
    return SFTRun.model_validate({"model": "m", "dataset": {"uri": "file:///rows.jsonl"}, **changes})


def run_event(event: Event) -> RunEvent:
    return RunEvent(cursor="", job_id="000001", fence=Fence(epoch=1), event=event)


def step_event(step: int, time: float, metrics: dict[str, float]) -> RunEvent:
    return run_event(Step(seq=step, time=time, step=step, metrics=metrics))


def test_spans_are_read_and_written() -> None:
    told = [(0, "0s"), (59.4, "59s"), (60, "1m"), (3599.6, "1h"), (3660, "1h 1m"), (90_000, "1d 1h"), (-1, "0s")]
    assert [(seconds, span(seconds)) for seconds, _ in told] == told
    assert [seconds_of(text, "--every") for text in ("90s", "90m", "6h", "2d")] == [90, 5400, 21_600, 172_800]
    with pytest.raises(Stop, match="--every: '1 day' is no time"):
        seconds_of("1 day", "--every")


def view_of(**changes: object) -> RunView:
    asked = {"run_id": "sft-1", "created_at": 0.0, "run": sft(steps=8, batch_size=2)}
    return RunView.model_validate(asked | changes)


def test_an_end_is_told_by_the_time_between_the_ends_of_steps() -> None:
    pace = StepEta()
    pace.take(1, 1000.0, lease=1)  # whatever it took until then: starting and warming up
    assert pace.end(11, 1) is None, "one step says nothing of how long a step takes"
    pace.take(3, 1020.0, lease=1)
    assert pace.end(11, 1) == pytest.approx(1020 + 8 * 10)
    pace.take(6, 1035.0, lease=1)
    assert pace.end(11, 1) == pytest.approx(1035 + 5 * 7)
    assert pace.end(None, 1) is None and pace.end(6, 1) == 1035.0
    assert pace.end(11, 2) is None, "another worker is waited for"
    for step, ended in ((4, 5000.0), (5, 5002.0), (5, 5090.0)):  # from its checkpoint on, steps are done again
        pace.take(step, ended, lease=2)
    assert pace.end(11, 2) == pytest.approx(5002 + 6 * 2)


def test_time_left_has_the_evaluations_in_it() -> None:
    pace = StepEta()
    pace.take(1, 1050.0, 1, evaluations=1, evaluating_s=40.0)  # one before the first step
    pace.take(3, 1070.0, 1, evaluations=1, evaluating_s=40.0)
    assert pace.end(11, 1) == pytest.approx(1070 + 8 * 10 + 40), "one behind the last step"
    pace.take(5, 1130.0, 1, evaluations=2, evaluating_s=80.0)  # one after step 4
    assert pace.end(11, 1, eval_every=4) == pytest.approx(1130 + 6 * 10 + 2 * 40), "after step 8, and at the end"
    assert pace.end(5, 1, eval_every=4) == pytest.approx(1130 + 40)


def test_a_look_at_a_run_that_has_ended_shows_its_losses_and_no_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(view_of(state="succeeded", phase="done", step=1000, num_steps=1000, started_at=0.0, ended_at=400.0))
    for step in range(1, 1001):
        lines.event(step_event(step, 0.4 * step, {"loss": 1000.0 - step}))
        lines.event(run_event(Saved(seq=1, time=0.4 * step, step=step, path="p", manifest_sha256="0" * 64)))
    lines.event(run_event(Succeeded(seq=2, time=400.0, step=1000, device="held")))
    said = capsys.readouterr().err.splitlines()
    assert 35 <= len(said) <= 45 and "checkpoint" not in "".join(said)
    assert "step 1000: loss 0" in said[-2] and "succeeded" in said[-1]


def test_what_is_left_is_told_while_it_lies_ahead() -> None:
    view = view_of(phase="training", step=4, num_steps=10, estimated_end=2000.0)
    assert seconds_left(view, 1940.0) == 60
    assert seconds_left(view, 2001.0) is None
    assert seconds_left(view.model_copy(update={"state": "paused"}), 1940.0) is None
    assert seconds_left(view.model_copy(update={"estimated_end": None}), 1940.0) is None


LONG = {"phase": "training", "step": 919, "num_steps": 1900, "started_at": 0.0}
METRICS = {"loss": 0.5165, "grad_norm": 0.2066, "learning_rate": 0.0008112, "tokens_per_s": 12_070.4}


def lines_of(view: RunView, width: int, *events: RunEvent) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False)
    bar = Bar(view, console)
    bar.status(view)
    for event in events:
        bar.event(event)
    console.print(bar)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("phase", ["training", "waiting_for_sampler"])
def test_steps_times_and_loss_are_whole_at_80_columns(phase: str) -> None:
    now = time.time()
    view = view_of(**LONG | {"phase": phase, "started_at": now - 4300, "estimated_end": now + 4000.9})
    [line] = lines_of(view, 80, step_event(920, now, metrics=METRICS))
    step = 920
    assert len(line) <= 80 and "…" not in line and "grad_norm" not in line and "learning_rate" not in line
    for part in (phase.replace("_", " "), "━━", f" {step}/1900", "1h 11m", "1h 6m left", "loss 0.5165"):
        assert part in line, (part, line)
    [wide] = lines_of(view, 140, step_event(920, now, metrics=METRICS))
    assert wide.endswith("loss 0.5165  12,070 tokens/s")
    [narrow] = lines_of(view, 50, step_event(920, now, metrics=METRICS))
    assert f"{step}/1900" in narrow and "left" in narrow and len(narrow) <= 50


def test_an_ended_run_is_not_shown_as_one_that_waits() -> None:
    view = view_of(**LONG | {"state": "failed", "step": 7, "ended_at": 130.0, "metrics": {"loss": 0.5}})
    [line] = lines_of(view, 80, step_event(3, 0.0, metrics=METRICS))
    assert line.startswith("failed ") and " 7/1900  2m 10s  loss 0.5" in line and "queued" not in line


def test_phases_say_for_which_data_and_leave_out_waits_of_a_moment() -> None:
    spans = [("checking", 0, 1, 0)]
    spans += [(phase, 1 + n, 2 + n, 0) for n, phase in enumerate(["downloading", "tokenizing", "packing"] * 2)]
    spans += [("waiting_for_worker", 7, 7.01, 0), ("waiting_for_worker", 7.01, 60, 1), ("training", 60, 90, 1)]
    spans += [("waiting_for_worker", 90, 90.01, 1), ("publishing", 90.01, 91, 1)]
    timeline = [{"phase": phase, "began": began, "ended": ended, "lease": n} for phase, began, ended, n in spans]
    run = sft(steps=8, batch_size=2, eval_dataset={"uri": "file:///eval.jsonl"})
    found = phases(view_of(run=run, timeline=timeline))
    both = [
        f"{phase} ({split})" for split in ("train", "held out") for phase in ("downloading", "tokenizing", "packing")
    ]
    assert [label for label, _, _ in found] == ["checking", *both, "waiting for worker", "training", "publishing"]
    assert found[7] == ("waiting for worker", 7.0, 60.0)
    resumed = [{"phase": "checking", "began": 150.0, "ended": 151.0}]
    again = view_of(run=run, timeline=timeline + resumed, started_at=0.0, ended_at=151.0)
    assert took(again) == "2m 31s, 59s of it stopped"
    assert took(view_of(timeline=timeline, started_at=0.0, ended_at=91.0)) == "1m 31s"


@pytest.mark.parametrize("kind", ["invalid_input", "corrupt_artifact", "not_finite", "sampler_mismatch"])
def test_resume_is_not_offered_where_it_would_fail_the_same_way(kind: str) -> None:
    view = view_of(state="failed", problem={"kind": kind, "message": "train.jsonl:3: no assistant turn"})
    assert "longshore resume" not in summary(view) and "resume would fail the same way" in summary(view)
    assert "longshore resume sft-1" in summary(view.model_copy(update={"problem": None}))
