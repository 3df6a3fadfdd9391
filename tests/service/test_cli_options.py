"""Options that come from the run models: their names, what they make of a request, and the page that lists them."""

import builtins
import json
import subprocess
import sys
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

from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.fields import Artifact
from longshore.runs import RLRun
from longshore.training import Lora
from service.cli.command import Stop
from service.cli.main import app
from service.cli.run_options import NAMES, given, option_at, options_of, request_fields, run_command, run_model, table
from service.cli.runs import checked_run

ROOT = Path(__file__).parents[2]
# Options as they were when each was typed by hand. They go on working.
_ALL = """--bin-tokens --clip-norm --dp --dtype --engine --epochs --initial-adapter --layout --learning-rate
--lora-alpha --lora-rank --lora-targets --lr --max-tokens --model --name --seed --steps --tp --warmup --weight-decay -m
--idempotency-key --json --timeout --wait"""
_DATASET = """--batch-size --batch-tokens --checkpoint-every --dataset -d --eval-dataset --eval-every --format --full
--keep-checkpoints --max-lost-fraction --sample-tokens --samples --schedule"""
_READ = "--completion-field --dataset -d --format --json --max-tokens --model -m --prompt-field --too-long"
HISTORICAL = {
    "submit sft": f"{_ALL} {_DATASET} --completion-field --prompt-field --too-long",
    "submit dpo": f"{_ALL} {_DATASET} --beta --label-smoothing --reference",
    "submit rl": f"""{_ALL} --advantages --algorithm --between-steps --broken --equal-rewards --eval-every
--eval-prompts --eval-samples --eval-temperature --grader --group-size --idle --loss --max-completion-tokens
--max-staleness --mini-batches --off-policy-steps --prompt-epochs --prompt-field --prompts --prompts-per-step
--sampler-url --shuffle-rewards
--stop --target --temperature""",
    "validate": _READ,
    "preview": f"{_READ} --rows",
}


@pytest.mark.parametrize("path", HISTORICAL)
def test_options_keep_their_names(path: str) -> None:
    command = typer.main.get_command(app)
    for name in path.split():
        command = command.get_command(None, name)  # type: ignore[attr-defined]
    context = command.make_context(path, [], resilient_parsing=True)
    names = [name for parameter in context.command.get_params(context) for name in parameter.opts]
    assert set(HISTORICAL[path].split()) <= set(names)
    assert len(names) == len(set(names)), "two fields have one option"


@pytest.mark.parametrize("kind", ["sft", "dpo", "rl"])
def test_every_field_of_a_run_is_an_option(kind: str) -> None:
    model = run_model(kind)
    constant = {"kind", "schema_version"} | ({"too_long"} if kind == "dpo" else set())
    found = {option.path[0] for option in options_of(model) if option.form != "reading"}
    assert found == set(model.model_fields) - constant
    assert all(option.help for option in options_of(model)), "a field without a description"


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


@pytest.mark.parametrize(
    ("place", "flag"),
    [
        (("trainable", "lora", "targets", 1), "lora-targets"),
        (("layout", "dp"), "dp"),
        (("dataset", "uri"), "dataset"),
        (("warmup_steps",), "warmup"),
        (("trainable",), None),
    ],
)
def test_an_error_names_its_option(place: tuple[str | int, ...], flag: str | None) -> None:
    option = option_at(options_of(SFTRun), place)
    assert (option.flag if option else None) == flag


CHECK = {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "operation": "eq", "reference": "a"}
A_RUN_OF_PROMPTS = {"model": "org/m", "prompts": ["s3://p"], "grader": json.dumps(CHECK), "steps": 1}


def test_an_error_in_a_part_names_the_option_of_the_part() -> None:
    option = option_at(options_of(RLRun), ("rollouts", "grader", "string_check", "operation"))
    assert option is not None and option.flag == "grader"
    assert option_at(options_of(RLRun), ("rollouts",)) is None
    with pytest.raises(Stop, match=r"--eval-prompts is missing"):
        checked_run("rl", options_of(RLRun), A_RUN_OF_PROMPTS | {"target": 1.0})


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
    with pytest.raises(Stop, match="--eval: two evaluations have the name a"):
        checked_run("rl", options_of(RLRun), A_RUN_OF_PROMPTS | {"eval": ["a=s3://x", "a=s3://y"]})
    with pytest.raises(Stop, match="--prompts: the weights sum to 0"):
        checked_run("rl", options_of(RLRun), A_RUN_OF_PROMPTS | {"prompts": ["s3://a/x:0"]})


def test_the_page_of_fields_is_printed_from_the_models() -> None:
    assert (ROOT / "docs" / "runs.md").read_text() == table(), "python -m service.cli.run_options > docs/runs.md"


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
        if name in ("kind", "schema_version", "head") or (name == "too_long" and len(get_args(type_)) == 1):
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


def _as_arguments(kind: str, place: tuple[str, ...], value: Any) -> list[str] | None:
    """Write a value as a user would; None where leaving the option out says it."""
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
    if option.form == "names":
        return [flag, ",".join(value)]
    if isinstance(value, list):
        return [text for each in value for text in (flag, str(each))]
    return [flag, "null" if value is None else str(value)]


@pytest.mark.parametrize("kind", ["sft", "dpo", "distill", "reward", "rl"])
def test_whatever_the_api_takes_can_be_given_on_the_command_line(kind: str) -> None:
    """Every place of a request with every kind of value: what options make of it is what JSON would."""
    seen = 0
    for place, value, field in _leaves(run_model(kind)):
        arguments = _as_arguments(kind, place, value)
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
