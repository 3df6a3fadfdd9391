"""Options that come from the run models: their names, what they make of a request, and the page that lists them."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import typer
from pydantic import Field

from longshore.training import Lora
from service.cli.commands.submit import checked_run
from service.cli.exits import Stop
from service.cli.main import app
from service.cli.run_options import NAMES, option_at, options_of, request_fields, run_model
from service.cli.run_table import table
from shared.runs.dataset_runs import SFTRun
from shared.runs.requests import RLRun

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
        "sft", options, {"model": "org/m", "dataset": "s3://b/rows.jsonl", "lora_targets": "q_proj", "pp": 2}
    )
    assert (run.epochs, run.batch_size, run.layout.label) == (1.0, 8, "pp2")
    assert run.trainable.targets == ("q_proj",) and run.trainable.rank == Lora().rank
    full = checked_run(
        "sft", options, {"model": "org/m", "dataset": "s3://b/rows.jsonl", "full": True, "layout": "tp2-sp"}
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


def test_an_error_in_a_part_names_the_option_of_the_part() -> None:
    option = option_at(options_of(RLRun), ("rollouts", "grader", "string_check", "operation"))
    assert option is not None and option.flag == "grader"
    assert option_at(options_of(RLRun), ("rollouts",)) is None
    with pytest.raises(Stop, match=r"--eval-prompts is missing"):
        given = {"model": "org/m", "prompts": "p", "grader": "{}", "target": 1.0}
        checked_run("rl", options_of(RLRun), given)


def test_the_page_of_fields_is_printed_from_the_models() -> None:
    assert (ROOT / "docs" / "runs.md").read_text() == table(), "python -m service.cli.run_table > docs/runs.md"


def test_the_version_is_printed() -> None:
    program = Path(sys.executable).with_name("longshore")
    done = subprocess.run([program, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("longshore "), done
