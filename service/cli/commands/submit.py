"""`longshore submit`: start a run. Its options are the fields of the run models (service/cli/run_options.py)."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.command import CommandAnswer, Globals, answering, group
from service.cli.render import DONE, USAGE, Stop, say
from service.cli.run_options import (
    UNLESS,
    RunOption,
    given,
    option_at,
    options_of,
    request_fields,
    run_command,
    run_model,
)
from service.cli.run_output import outcome, summary

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    from longshore import Client
    from longshore.accounts import FileView
    from longshore.runs import Run
    from longshore.views import RunView

_EXAMPLES = """\b
Examples:
  longshore submit sft -m org/model -d train.jsonl --epochs 3 --wait
  longshore submit dpo -m org/model -d pairs.jsonl --beta 0.1
  longshore submit dpo -m org/model -d answers.jsonl --objective kto
  longshore submit distill -m org/model -d rows.jsonl --teacher tuned --divergence jsd
  longshore submit reward -m org/model -d pairs.jsonl --epochs 1
  longshore submit rl -m org/model --prompts prompts.jsonl --grader grader.json --algorithm grpo --steps 100
"""
_KINDS = {
    "sft": "Start supervised fine-tuning.",
    "dpo": "Start preference optimisation: DPO or --objective of its kin on pairs of answers, KTO on labelled ones.",
    "distill": "Start distillation on a dataset: the student becomes like --teacher, `base` or an adapter on it.",
    "reward": "Start a reward model: of pairs with a margin or none, or by --objective squared_error of scores.",
    "rl": "Start a reinforcement-learning run: on its own rollouts with --prompts, else it waits for `longshore step`.",
}
# The fields of a request to /validate and /preview that have other names in a run.
_PREVIEWED = {"source": "dataset", "model_uri": "model"}
_EXIT_CODES = (
    "Exit codes: 0 done, 2 usage, 100 failed, 101 not finished within --timeout, 102 not found, 103 cancelled."
)
Wait = Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")]
Timeout = Annotated[float | None, typer.Option(help="With --wait: seconds until the command ends with exit code 101.")]
IdempotencyKey = Annotated[str | None, typer.Option(help="Calls with the same key return the same run.")]
app = group("submit", help="Start a run: sft, dpo, distill, reward or rl.", epilog=_EXAMPLES)


def _submit(
    kind: str,
    context: typer.Context,
    client: "Client",
    wait: Wait = False,
    timeout: Timeout = None,
    idempotency_key: IdempotencyKey = None,
) -> CommandAnswer:
    if timeout is not None and not wait:
        raise Stop("--timeout goes with --wait", USAGE)
    values, options = given(context), options_of(run_model(kind))
    if kind == "rl" and wait and "prompts" not in values:
        raise Stop("--wait goes with --prompts: a run without them waits for you", USAGE)
    checked_run(kind, options, values)  # every option, before a file is sent anywhere
    run = checked_run(kind, options, values, lambda uri, flag: dataset_uri(client, uri, flag))
    taker: Globals = context.obj
    if taker.take_run is not None:
        if wait or idempotency_key:
            raise Stop("--wait and --idempotency-key have no meaning here: nothing is started now", USAGE)
        taker.take_run(run)
        raise typer.Exit
    with naming_options(run.model, options_of(type(run))):
        view = client.runs.submit(run, idempotency_key)
    return finish(client, view, wait=wait, timeout_s=timeout)


for _kind, _words in _KINDS.items():
    run_command(app, _kind, _kind, f"{_words}\n\n{_EXIT_CODES}")(answering(partial(_submit, _kind), patience_s=20))


def checked_run(
    kind: str,
    options: tuple[RunOption, ...],
    values: Mapping[str, Any],
    uri_of: Callable[[str, str], str] = lambda uri, flag: uri,
) -> "Run":
    """Return the run that the options of a command ask for.

    Args:
        values: of the options that were given, by their parameters.
        uri_of: as for `request_fields`.

    Raises:
        Stop: names the first option that is wrong, and its rule.
    """
    fields = request_fields(options, values, uri_of)
    fields["model"] = model_uri(fields["model"])
    for name, (value, other) in UNLESS.items() if kind != "rl" else ():
        if name not in fields and other not in fields:
            fields[name] = value
    return validated_request(run_model(kind), fields, options)  # type: ignore[return-value]


def validated_request(model: "type[BaseModel]", fields: dict[str, Any], options: tuple[RunOption, ...]) -> "BaseModel":
    """Validate a request. Raises Stop, which names the first option that is wrong, and its rule."""
    from pydantic import ValidationError

    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _usage(error, options) from None


def _usage(error: "ValidationError", options: tuple[RunOption, ...]) -> Stop:
    """Turn a validation error into one about an option. A missing option goes before a wrong one."""
    from shared.field_rules import location_of, rule_in_words

    errors = error.errors()
    for each in errors:
        missing = _option_of(options, each["loc"]) if each["type"] == "missing" else None
        if missing and missing.place == each["loc"]:
            return Stop(f"--{missing.flag} is missing", USAGE, "--help lists the options")
    place = location_of(errors[0], {option.path[0] for option in options})
    return _wrong(_option_of(options, place), rule_in_words(errors[0]))


def _option_of(options: tuple[RunOption, ...], place: Sequence[int | str]) -> RunOption | None:
    """Return the option at a place of a run, or of a request to /validate or /preview."""
    names = [_PREVIEWED.get(str(name), name) for name in place[:1]]
    return option_at(options, [*names, *place[1:]])


def _wrong(option: RunOption | None, rule: str) -> Stop:
    return Stop(f"--{option.flag}: {rule}" if option else rule, USAGE, "--help lists the options")


@contextmanager
def naming_options(model: str, options: tuple[RunOption, ...] = ()) -> Iterator[None]:
    """Turn a refusal of the service into an error about an option. `model`: the model of the request."""
    from longshore.client import Invalid

    try:
        yield
    except Invalid as refused:
        # The folder, or a file in it: by its URI or its path.
        if str(refused).startswith((model, model.removeprefix("file://"))):
            raise Stop(f"--model: {refused}", USAGE, "--help lists the options") from None
        if refused.place is None or refused.place == "Idempotency-Key":
            raise
        raise _wrong(_option_of(options, refused.place.split(".")), refused.rule) from None


def run_of(context: typer.Context, arguments: list[str], prog_name: str) -> "Run":
    """Return the run that `longshore submit` would start. Its options are checked, its files uploaded."""
    from dataclasses import replace

    taken: list[Run] = []
    obj = replace(context.obj, take_run=taken.append)
    typer.main.get_group(app).main(args=arguments, prog_name=prog_name, standalone_mode=False, obj=obj)
    if not taken:  # it showed its help
        raise typer.Exit
    return taken[0]


def finish(client: "Client", view: "RunView", *, wait: bool, timeout_s: float | None) -> CommandAnswer:
    """Follow a run if that was asked for. Returns its state, with the exit code of the state."""
    from service.cli.run_output import follow

    def started() -> None:
        print(view.run_id)
        for notice in view.notices:
            say(f"notice: {notice}")
        say(f"started; follow it with: longshore watch {view.run_id}")

    if not wait:
        return CommandAnswer(outcome(view), started, DONE)
    say(f"run {view.run_id}")
    view, code = follow(client, view, timeout_s)
    return CommandAnswer(outcome(view), partial(print, summary(view)), code)


def model_uri(model: str) -> str:
    """Return the file:// URI of a local folder; URIs, hub ids and published names as they are."""
    from shared.storage.artifacts import is_name

    path = Path(model).expanduser()
    if "://" in model:
        return model
    if path.is_dir():
        return path.resolve().as_uri()
    if is_name(model):
        return model
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        advice = "give a folder, a file:// or s3:// URI, a hub id such as org/name, or a published name"
        raise Stop(f"--model: there is no folder {model}", USAGE, advice)
    return model


def dataset_uri(client: "Client", dataset: str, option: str) -> str:
    """Upload a local file, and return its URI; URIs as they are."""
    file = uploaded(client, dataset, option)
    return file[0].uri if file else dataset


def uploaded(client: "Client", dataset: str, option: str) -> "tuple[FileView, bool] | None":
    """Upload a local file, and return its record, and whether it was not in the store before; None for a URI."""
    if "://" in dataset:
        return None
    path = Path(dataset).expanduser()
    if path.is_dir():
        raise Stop(f"{option}: {dataset} is a folder; give a file, or an s3:// prefix", USAGE)
    if not path.is_file():
        raise Stop(f"{option}: there is no file {dataset}", USAGE)
    if not path.stat().st_size:
        raise Stop(f"{option}: {dataset} is empty", USAGE)
    start = time.monotonic()
    record = client.files.put(path)
    if (duration_s := time.monotonic() - start) > 1:
        say(f"uploaded {path.name} in {duration_s:.1f} s")
    return record
