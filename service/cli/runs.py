"""Commands that list, show, follow and change runs."""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import longshore
from service.cli import command as cli
from service.cli import run_options
from service.cli.run_output import doing, outcome, print_details, print_step_metrics, print_steps, step_line, summary

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    from longshore import Client
    from longshore.accounts import FileView
    from longshore.runs import Run
    from longshore.views import DrawnSample, Metrics, RunView, StepStatus

# --- Start a run: its options are the fields of the run models (service/cli/run_options.py) ---

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
WaitTimeout = Annotated[
    float | None, typer.Option(help="With --wait: seconds until the command ends with exit code 101.")
]
IdempotencyKey = Annotated[str | None, typer.Option(help="Calls with the same key return the same run.")]
submit = cli.group("submit", help="Start a run: sft, dpo, distill, reward or rl.", epilog=_EXAMPLES)


def _submit(
    kind: str,
    context: typer.Context,
    client: "Client",
    wait: Wait = False,
    timeout: WaitTimeout = None,
    idempotency_key: IdempotencyKey = None,
) -> cli.CommandAnswer:
    if timeout is not None and not wait:
        raise cli.Stop("--timeout goes with --wait", cli.USAGE)
    values, options = run_options.given(context), run_options.options_of(run_options.run_model(kind))
    if kind == "rl" and wait and "prompts" not in values:
        raise cli.Stop("--wait goes with --prompts: a run without them waits for you", cli.USAGE)
    run = _uploaded_run(client, kind, options, values)
    taker: cli.Globals = context.obj
    if taker.take_run is not None:
        if wait or idempotency_key:
            raise cli.Stop("--wait and --idempotency-key have no meaning here: nothing is started now", cli.USAGE)
        taker.take_run(run)
        raise typer.Exit
    with naming_options(run.model, run_options.options_of(type(run))):
        view = client.runs.submit(run, idempotency_key)
    return finish(client, view, wait=wait, timeout_s=timeout)


for _kind, _help in _KINDS.items():
    run_options.run_command(submit, _kind, _kind, f"{_help}\n\n{_EXIT_CODES}")(
        cli.answering(partial(_submit, _kind), patience_s=20)
    )


_EVALUATION = ("model", "initial_adapter", "allow_other_base", "rollouts", "temperature", "max_tokens", "dtype", "seed")


def _rollout(
    context: typer.Context,
    client: "Client",
    number: Annotated[int, typer.Option("-n", "--number", help="Samples of each prompt.", min=1)] = 1,
    timeout: Annotated[float | None, typer.Option(help="Seconds until the command ends with exit code 101.")] = None,
) -> cli.CommandAnswer:
    from service.cli.run_output import follow

    values, options = run_options.given(context), run_options.options_of(run_options.run_model("rl"), _EVALUATION)
    if "steps" in values or len(values.get("prompts", ())) != 1:
        raise cli.Stop("nothing is trained here: give --prompts once, and no --steps", cli.USAGE)
    values |= {"steps": 0, "eval_prompts": values["prompts"][0], "eval_samples": number}
    values = {"eval_temperature": values.get("temperature", 1.0)} | values
    run = _uploaded_run(client, "rl", options, values)
    with naming_options(run.model, options):
        view = client.runs.submit(run)
    cli.say(f"run {view.run_id}")
    view, code = follow(client, view, timeout)

    def told() -> None:
        print(summary(view))
        for name, value in sorted(view.metrics.items()):
            if name.startswith("eval_"):
                print(f"{name.removeprefix('eval_')}: {value:.6g}")

    return cli.CommandAnswer(outcome(view), told, code)


def _uploaded_run(
    client: "Client", kind: str, options: tuple[run_options.RunOption, ...], values: Mapping[str, Any]
) -> "Run":
    """Return the run that the options ask for, and upload its files. Raises Stop as `checked_run`."""
    checked_run(kind, options, values)  # every option, before a file is sent anywhere
    return checked_run(kind, options, values, lambda uri, flag: dataset_uri(client, uri, flag))


def checked_run(
    kind: str,
    options: tuple[run_options.RunOption, ...],
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
    fields = run_options.request_fields(options, values, uri_of)
    fields["model"] = model_uri(fields["model"])
    for name, (value, other) in run_options.UNLESS.items() if kind != "rl" else ():
        if name not in fields and other not in fields:
            fields[name] = value
    return validated_request(run_options.run_model(kind), fields, options)  # type: ignore[return-value]


def validated_request(
    model: "type[BaseModel]", fields: dict[str, Any], options: tuple[run_options.RunOption, ...]
) -> "BaseModel":
    """Validate a request. Raises Stop, which names the first option that is wrong, and its rule."""
    from pydantic import ValidationError

    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _usage(error, options) from None


def _usage(error: "ValidationError", options: tuple[run_options.RunOption, ...]) -> cli.Stop:
    """Turn a validation error into one about an option. A missing option goes before a wrong one."""
    from shared.field_rules import location_of, rule_in_words

    errors = error.errors()
    for each in errors:
        missing = _option_of(options, each["loc"]) if each["type"] == "missing" else None
        if missing and missing.place == each["loc"]:
            return cli.Stop(f"--{missing.flag} is missing", cli.USAGE, "--help lists the options")
    place = location_of(errors[0], {option.path[0] for option in options})
    return _wrong(_option_of(options, place), rule_in_words(errors[0]))


def _option_of(options: tuple[run_options.RunOption, ...], place: Sequence[int | str]) -> run_options.RunOption | None:
    """Return the option at a place of a run, or of a request to /validate or /preview."""
    names = [_PREVIEWED.get(str(name), name) for name in place[:1]]
    return run_options.option_at(options, [*names, *place[1:]])


def _wrong(option: run_options.RunOption | None, rule: str) -> cli.Stop:
    return cli.Stop(f"--{option.flag}: {rule}" if option else rule, cli.USAGE, "--help lists the options")


@contextmanager
def naming_options(model: str, options: tuple[run_options.RunOption, ...] = ()) -> Iterator[None]:
    """Turn a refusal of the service into an error about an option. `model`: the model of the request."""
    try:
        yield
    except longshore.Invalid as refused:
        # The folder, or a file in it: by its URI or its path.
        if str(refused).startswith((model, model.removeprefix("file://"))):
            raise cli.Stop(f"--model: {refused}", cli.USAGE, "--help lists the options") from None
        if refused.place is None or refused.place == "Idempotency-Key":
            raise
        raise _wrong(_option_of(options, refused.place.split(".")), refused.rule) from None


def run_of(context: typer.Context, arguments: list[str], prog_name: str) -> "Run":
    """Return the run that `longshore submit` would start. Its options are checked, its files uploaded."""
    from dataclasses import replace

    taken: list[Run] = []
    obj = replace(context.obj, take_run=taken.append)
    typer.main.get_group(submit).main(args=arguments, prog_name=prog_name, standalone_mode=False, obj=obj)
    if not taken:  # it showed its help
        raise typer.Exit
    return taken[0]


def finish(client: "Client", view: "RunView", *, wait: bool, timeout_s: float | None) -> cli.CommandAnswer:
    """Follow a run if that was asked for. Returns its state, with the exit code of the state."""
    from service.cli.run_output import follow

    def started() -> None:
        print(view.run_id)
        for notice in view.notices:
            cli.say(f"notice: {notice}")
        cli.say(f"started; follow it with: longshore watch {view.run_id}")

    if not wait:
        return cli.CommandAnswer(outcome(view), started, cli.DONE)
    cli.say(f"run {view.run_id}")
    view, code = follow(client, view, timeout_s)
    return cli.CommandAnswer(outcome(view), partial(print, summary(view)), code)


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
        raise cli.Stop(f"--model: there is no folder {model}", cli.USAGE, advice)
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
        return _uploaded_tasks(client, path, option)
    if not path.is_file():
        raise cli.Stop(f"{option}: there is no file {dataset}", cli.USAGE)
    if not path.stat().st_size:
        raise cli.Stop(f"{option}: {dataset} is empty", cli.USAGE)
    start = time.monotonic()
    record = client.files.put(path)
    if (duration_s := time.monotonic() - start) > 1:
        cli.say(f"uploaded {path.name} in {duration_s:.1f} s")
    return record


def _uploaded_tasks(client: "Client", folder: Path, option: str) -> "tuple[FileView, bool]":
    """Upload a folder of Harbor's tasks as rows. Raises Stop: there are none, or one cannot be read."""
    from longshore import harbor

    if not harbor.is_task_folder(folder):
        rule = "is a folder without Harbor's tasks; give a file, or an s3:// prefix"
        raise cli.Stop(f"{option}: {folder} {rule}", cli.USAGE)
    with TemporaryDirectory() as here:
        rows = Path(here) / f"{folder.resolve().name}.jsonl"
        try:
            harbor.write_rows(folder, rows, cli.say)
        except ValueError as error:
            raise cli.Stop(f"{option}: {error}", cli.USAGE) from error
        return client.files.put(rows)


# --- `longshore import openai`: start the fine-tuning jobs of an account at OpenAI here ---

_IMPORT_EXAMPLES = """\b
Examples:
  export OPENAI_API_KEY=sk-...
  longshore import openai --dry-run
  longshore import openai --model gpt-4.1-mini-2025-04-14=Qwen/Qwen3-8B
"""
_THEIR_URL = "https://api.openai.com/v1"
imports = cli.group("import", help="Import jobs and data from elsewhere.", epilog=_IMPORT_EXAMPLES)


@imports.callback()
def _group() -> None:
    """Keep `openai` a command of its group, though it is the only one."""


@cli.command(imports)
def openai(
    client: "Client",
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="THEIRS=OURS", help="The model to train here instead of one of OpenAI's."),
    ] = None,
    job: Annotated[list[str] | None, typer.Option(metavar="ftjob-ID", help="Import only these jobs.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show which runs would start, without starting them.")
    ] = False,
    base_url: Annotated[str, typer.Option(envvar="OPENAI_BASE_URL", help="Base URL of OpenAI's API.")] = _THEIR_URL,
    max_file_bytes: Annotated[int, typer.Option(min=1, help="Size of the longest file that is read.")] = 1 << 30,
) -> cli.CommandAnswer:
    """Start the fine-tuning jobs of an account at OpenAI here, with their files, settings and graders.

    The account's key is read from OPENAI_API_KEY. A job that was imported before is not started again.
    """
    from service.cli.openai_import import Account, AccountImport, named_models, notes

    key = os.environ.get("OPENAI_API_KEY")
    if not key:
        raise cli.Stop("OPENAI_API_KEY is not set: the key of the account that is read", cli.USAGE)
    with Account(base_url, key, max_file_bytes) as account:
        found = AccountImport(client, account, named_models(model or ()), dry_run).all(job)

    def show() -> None:
        rows = [(each.job, each.state, each.run or "", cli.plain("; ".join(notes(each)))) for each in found]
        cli.print_table(("job", "", "run", ""), rows)
        if any(each.checkpoints for each in found):
            cli.say("checkpoints stay where they are: OpenAI gives no weights away; --json names them")

    is_partial = any(each.state in ("waits", "no counterpart") for each in found)
    return cli.CommandAnswer(found, show, cli.FAILED if is_partial else 0)


# --- List, show, follow and change runs ---

_LONGEST_REASON = 72
_LONG_POLL_S = 10.0
_LOOK_S = 1.0
State = Literal["running", "paused", "succeeded", "failed", "cancelled"]
RunId = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's id, as `longshore ls` shows it.", autocompletion=cli.run_ids)
]
Timeout = Annotated[float | None, typer.Option(help="Seconds to wait until the command ends with exit code 101.")]
app = typer.Typer(rich_markup_mode=None)
session = cli.group(help="Sessions, which a client trains command by command (longshore.client opens them).")
app.add_typer(submit, name="submit")
app.add_typer(imports, name="import")
app.add_typer(session, name="session")
run_options.run_command(
    *(app, "rl", "rollout", "Sample prompts, or play episodes, and grade them, without training.", _EVALUATION)
)(cli.answering(_rollout, patience_s=20))
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new output until the run ends.")]


@cli.command(app)
def ls(
    client: "Client",
    state: Annotated[State | None, typer.Option(help="Show only runs in this state.")] = None,
    kind: Annotated[
        Literal["sft", "dpo", "distill", "reward", "rl", "session"] | None,
        typer.Option(help="Show only runs of this kind."),
    ] = None,
    words: Annotated[
        str | None, typer.Option("--search", help="Words to find in the id, the name or the model.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    idle: Annotated[bool, typer.Option("--all", help="Include sessions that have waited for a day.")] = False,
) -> cli.CommandAnswer:
    """List runs, newest first."""
    page = client.runs.list(limit, state=state, kind=kind, words=words, idle=idle or None)

    def show() -> None:
        if page.runs:
            places = client.overview().waiting if any(map(_waits, page.runs)) else {}
            rows = (_row(view, places.get(view.run_id), time.time()) for view in page.runs)
            cli.print_table(
                ("run", "state", "phase or error", "step", "left", "loss/reward", "name", "submitted"), rows
            )
        else:
            cli.say("there is none; longshore submit starts one")
        if page.has_more:
            cli.say(f"there are more: --limit shows up to 200, {limit} now")
        if num := page.num_hidden_sessions:
            cli.say(f"{num} idle session{'s are' if num > 1 else ' is'} hidden: --all")

    return cli.CommandAnswer([outcome(view) for view in page.runs], show)


@cli.command(app)
def get(client: "Client", run_id: RunId) -> cli.CommandAnswer:
    """Show a run."""
    view = client.runs.get(run_id)

    def show() -> None:
        print(summary(view, client.overview().waiting.get(run_id) if _waits(view) else None))
        print_details(view)

    return cli.CommandAnswer(outcome(view) | {"run": view.run}, show)


@cli.command(app, patience_s=20)
def watch(client: "Client", run_id: RunId, timeout: Timeout = None) -> cli.CommandAnswer:
    """Follow a run to its end. Ctrl-C leaves; the run continues."""
    return finish(client, client.runs.get(run_id), wait=True, timeout_s=timeout)


@app.command()
def logs(context: typer.Context, run_id: RunId, follow: Follow = False) -> None:
    """Print what happened in a run, in readable lines."""
    from service.runs.views import last_lines, log_line

    with cli.client_of(context, patience_s=20 if follow else 2) as client:
        try:
            for event in client.runs.follow(run_id, None, follow):
                print(log_line(event), flush=True)
            for line in last_lines(client.runs.get(run_id)):
                print(line)
        except KeyboardInterrupt:
            _left(f"longshore logs -f {run_id}")


@app.command()
def events(
    context: typer.Context,
    run_id: RunId,
    follow: Follow = False,
    after: Annotated[str | None, typer.Option(help="Show only events after this cursor.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="No effect: events are JSON anyway.")] = True,
) -> None:
    """Print the workers' events, one JSON object a line."""
    with cli.client_of(context, patience_s=20 if follow else 2) as client:
        try:
            for event in client.runs.follow(run_id, after, follow):
                print(event.model_dump_json(), flush=True)
                after = event.cursor
        except KeyboardInterrupt:
            _left(f"longshore events -f {run_id}" + (f" --after {after}" if after else ""))


@cli.command(app)
def steps(context: typer.Context, run_id: RunId, follow: Follow = False, *, as_json: bool) -> cli.CommandAnswer | None:
    """List the train steps of an RL run: rewards, published versions, errors.

    With --follow, print each step as it ends; with --json, everything that is known; with both, an object a line.
    """
    with cli.client_of(context, patience_s=20 if follow else 2) as client:
        if (kind := client.runs.get(run_id).kind) != "rl":
            message = f"{run_id} is of kind {kind}, and `steps` lists the train steps of RL runs"
            raise cli.Stop(message, cli.USAGE, f"longshore metrics {run_id}")
        if follow:
            try:
                for step in client.runs.follow_steps(run_id):
                    print(step.model_dump_json() if as_json else step_line(step), flush=True)
            except KeyboardInterrupt:
                _left(f"longshore steps -f {run_id}")
            return None
        found = list(client.runs.follow_steps(run_id, until_end=False))
    return cli.CommandAnswer(
        found, partial(print_steps, found) if found else partial(cli.say, f"no step of {run_id} has ended yet")
    )


@cli.command(app)
def metrics(client: "Client", run_id: RunId) -> cli.CommandAnswer:
    """Show the main metrics of every step and evaluation; with --json, all."""
    found = client.runs.metrics(run_id)
    return cli.CommandAnswer(found, partial(_print_metrics, found))


def _print_metrics(found: "Metrics") -> None:
    from service.runs.views import brief, looked_for

    names = looked_for({name for row in found.steps for name in row.metrics})
    cli.print_table(
        ("step", *names),
        ((str(row.step), *(f"{row.metrics[n]:.5g}" if n in row.metrics else "" for n in names)) for row in found.steps),
    )
    for row in found.evaluations:
        print(f"evaluated after step {row.step}: {brief(row.metrics)}")
    if found.train_steps:
        print_step_metrics(found.train_steps)


@cli.command(app)
def compare(
    client: "Client",
    run_ids: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Ids of runs.", autocompletion=cli.run_ids)
    ],
) -> cli.CommandAnswer:
    """Compare runs: the settings that differ, and their newest metrics, side by side."""
    views = [client.runs.get(run_id) for run_id in run_ids]
    settings = _side_by_side([_flat(view.run.model_dump(mode="json")) for view in views])
    settings = {name: row for name, row in settings.items() if any(value != row[0] for value in row)}
    metrics = _side_by_side([view.metrics for view in views])

    def show() -> None:
        rows = [*settings.items(), ("", [""] * len(views)), *metrics.items()]
        cells = ((name, *("" if each is None else cli.plain(str(each)) for each in row)) for name, row in rows)
        cli.print_table(("setting or metric", *run_ids), cells)

    return cli.CommandAnswer({"runs": run_ids, "settings": settings, "metrics": metrics}, show)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the fields of a JSON object, those of objects in it with dotted names."""
    found: dict[str, Any] = {}
    for name, below in value.items():
        found |= _flat(below, f"{path}{name}.") if isinstance(below, dict) else {f"{path}{name}": below}
    return found


def _side_by_side(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row.get(name) for row in rows] for row in rows for name in row}


@cli.command(app)
def checkpoints(client: "Client", run_id: RunId) -> cli.CommandAnswer:
    """List the checkpoints in the store."""
    found = client.runs.checkpoints(run_id)
    rows = ((str(c.step), c.fence.label, c.artifact.uri) for c in found)
    return cli.CommandAnswer(found, partial(cli.print_table, ("step", "written by", "uri"), rows))


@cli.command(app)
def profile(
    client: "Client",
    run_id: RunId,
    steps: Annotated[int, typer.Option(min=1, max=10, help="Most steps to profile; a job may have fewer left.")] = 3,
    into: Annotated[
        Path | None, typer.Option("--into", help="The file to write; RUN-profile.json.gz in this folder if absent.")
    ] = None,
    timeout: Timeout = None,
) -> cli.CommandAnswer:
    """Trace a run's next optimizer steps with torch's profiler, and fetch the trace for https://ui.perfetto.dev.

    Exit codes: 0 done, 2 usage, 100 the run ended without one, 101 not finished within --timeout.
    """
    end = None if timeout is None else time.monotonic() + timeout
    asked = client.runs.profile(run_id, steps)
    while True:
        has_ended = client.runs.get(run_id).state != "running"  # asked first: what is listed next is then complete
        known = {trace.profile_id: trace for trace in client.runs.profiles(run_id).traces}
        if (trace := known.get(asked.profile_id)) is not None:
            break
        if has_ended:
            raise cli.Stop(f"{run_id} ended before a step could be traced", cli.FAILED)
        if end is not None and time.monotonic() > end:
            raise cli.Stop(f"no trace within {timeout:g} s; it is kept below the run when it is done", cli.NOT_FINISHED)
        time.sleep(_LOOK_S)
    target = into or Path(f"{run_id}-profile.json.gz")
    client.runs.save_profile(run_id, trace.job_id, trace.fence, trace.profile_id, target)
    return cli.CommandAnswer(
        trace, partial(cli.say, f"{target}: {trace.num_bytes} bytes, of job {trace.job_id}; open it in Perfetto")
    )


@cli.command(app)
def cancel(client: "Client", run_id: RunId) -> cli.CommandAnswer:
    """Cancel a run: at its next step, with a checkpoint, or at once if it does not train."""
    view = client.runs.cancel(run_id)
    words = f"{_ending(view, 'is cancelled', 'ends')}; `longshore resume {run_id}` goes on from there"
    return cli.CommandAnswer(outcome(view), partial(cli.say, words))


@cli.command(app)
def pause(client: "Client", run_id: RunId) -> cli.CommandAnswer:
    """Pause a run at its next step, with a checkpoint. A paused run does not count in a quota."""
    view = client.runs.pause(run_id)
    words = f"{_ending(view, 'is paused', 'pauses')}; `longshore resume {run_id}` goes on from there"
    return cli.CommandAnswer(outcome(view), partial(cli.say, words))


@cli.command(app)
def rm(client: "Client", run_id: RunId) -> cli.CommandAnswer:
    """Remove a run that has ended: its checkpoints, logs and data. What it published stays."""
    gone = client.runs.remove(run_id)
    words = f"{run_id} is removed: {gone.num_objects} objects, {cli.size(gone.num_bytes)}"
    stays = "; what it published stays, with its request and result" if gone.stays_published else ""
    return cli.CommandAnswer(gone, partial(cli.say, words + stays))


@cli.command(app)
def resume(client: "Client", run_id: RunId, wait: Wait = False, timeout: Timeout = None) -> cli.CommandAnswer:
    """Resume a paused, cancelled or failed run from its last checkpoint."""
    return finish(client, client.runs.resume(run_id), wait=wait, timeout_s=timeout)


@cli.command(app)
def retry(client: "Client", run_id: RunId, wait: Wait = False, timeout: Timeout = None) -> cli.CommandAnswer:
    """Submit the request of a failed or cancelled run again, as a new run. Prints its id."""
    return finish(client, client.runs.retry(run_id), wait=wait, timeout_s=timeout)


def _row(view: "RunView", place: int | None, now: float) -> tuple[str, ...]:
    """Return the cells of a run in the list. `place`: its position in the queue for workers."""
    from service.runs.views import seconds_left

    goal = "reward_mean" if view.kind == "rl" else "loss"  # what a list shows of how runs do
    why = shorten(view.problem.message, _LONGEST_REASON, placeholder=" …") if view.problem else ""
    return (
        view.run_id,
        cli.coloured(view.state),
        cli.plain(doing(view, place) if view.state == "running" else why),
        f"{view.step}/{view.num_steps or '?'}",
        "" if (left_s := seconds_left(view, now)) is None else cli.span(left_s),
        f"{view.metrics[goal]:.4g}" if goal in view.metrics else "",
        cli.plain(view.run.name),
        cli.ago(view.created_at),
    )


def _waits(view: "RunView") -> bool:
    from service.runs.views import IN_QUEUE

    return view.state == "running" and view.phase in IN_QUEUE


def _ending(view: "RunView", done: str, doing: str) -> str:
    """Say when a run ends that was asked to: while it trains, at its next step; else at once."""
    if view.state != "running":
        return f"{view.run_id} {done}"
    when = "at its next step, with a checkpoint" if view.phase == "training" else "at once: no step runs"
    return f"{view.run_id} {doing} {when}"


def _left(command: str) -> None:
    cli.say(f"\nthe run goes on; attach again with: {command}")
    raise typer.Exit(cli.INTERRUPTED)


@cli.command(app, patience_s=20)
def step(
    client: "Client",
    run_id: RunId,
    groups: Annotated[str, typer.Argument(help="Trajectory groups as JSONL: a file (uploaded), or a URI.")],
    key: Annotated[
        str | None, typer.Option(help="Calls with the same key train once; without a key each call is a step.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the step's end.")] = False,
    timeout: Timeout = None,
) -> cli.CommandAnswer:
    """Train one file of trajectory groups, and publish the next version of the policy.

    Exit codes: 0 done (or queued, without --wait), 2 usage, 100 failed, 101 not finished within --timeout.
    """
    if timeout is not None and not wait:
        raise cli.Stop("--timeout goes with --wait", cli.USAGE)
    end = None if timeout is None else time.monotonic() + timeout
    uri = dataset_uri(client, groups, "groups")
    key = key or f"cli-{secrets.token_hex(16)}"
    found = client.runs.train(run_id, uri, key)
    while wait and not found.is_final and (end is None or time.monotonic() < end):
        left = _LONG_POLL_S if end is None else min(_LONG_POLL_S, max(0.0, end - time.monotonic()))
        found = client.runs.step(run_id, found.step, left)
        if found.key != key:  # it was resumed meanwhile, and the number is another's
            raise cli.Stop("the run ended before this step, and was resumed: send it again", cli.FAILED)
    code = cli.FAILED if found.state == "failed" else cli.NOT_FINISHED if wait and not found.is_final else cli.DONE
    return cli.CommandAnswer(found, partial(print, _words(found)), code)


@cli.command(app, "finish")
def finish_run(client: "Client", run_id: RunId) -> cli.CommandAnswer:
    """End an RL run after the steps that are queued."""
    return cli.CommandAnswer(
        outcome(client.runs.finish(run_id)), partial(cli.say, f"{run_id} ends when its steps are done")
    )


def _words(step: "StepStatus") -> str:
    from service.runs.views import dropped

    words = f"step {step.step}: {step.state}"
    if step.state == "done":
        words += f", policy version {step.policy_version}, "
        words += "not published" if step.adapter is None else f"published: {step.adapter}"
    if step.problem is not None:
        words += f": {step.problem.message}"
    if lost := dropped(step.metrics):
        words += f"; {lost}"
    return words


@cli.command(session)
def close(client: "Client", run_id: RunId) -> cli.CommandAnswer:
    """Close a session: it ends after the commands that were sent, and its state stays."""
    words = f"{run_id} ends when its commands are done"
    return cli.CommandAnswer(outcome(client.sessions.close(run_id)), partial(cli.say, words))


# --- `longshore episodes`: those that a run has played in its environment, and its other samples ---

_PLAYED: dict[str, Any] = {
    **{"number": "number", "group": "group", "tokens": "num_tokens"},
    "turns": lambda one: str(one.episode.num_turns if one.episode else 1),
    "reward": lambda one: "" if one.episode is None or one.episode.reward is None else f"{one.episode.reward:g}",
    "end": lambda one: one.finish_reason if one.episode is None else one.episode.end,
    "error": lambda one: shorten((one.episode and one.episode.error) or "", 80),
}


@cli.command(app)
def episodes(
    client: "Client",
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")],
    step: Annotated[int | None, typer.Option(help="Of this train step; by default the newest.")] = None,
    of: Annotated[
        str | None,
        typer.Option(help="train, or of evaluations eval or eval_NAME. Default: train in RL runs, else eval."),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only those without a reward.")] = False,
    number: Annotated[int | None, typer.Option(help="Show what was said in this one.", min=0)] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1, max=256)] = 32,
) -> cli.CommandAnswer:
    """List the episodes, or other samples, of a step of a run that draws its own; with --number show one."""
    is_rl = client.runs.get(run_id).run.kind == "rl" if step is None or of is None else True
    of = of or ("train" if is_rl else "eval")
    if step is None:
        if is_rl:
            with_samples = [one.step for one in client.runs.steps(run_id).steps if of in one.samples]
        else:
            with_samples = [one.step for one in client.runs.metrics(run_id).evaluations if of in one.drawn]
        if not with_samples:
            raise cli.Stop(f"no step of {run_id} has samples of {of}", cli.FAILED, "give --of eval, or wait for a step")
        step = with_samples[-1]
    only = {"first": number, "limit": 1} if number is not None else {"limit": limit}
    found = client.runs.samples(run_id, step, of, failed=failed, **only)
    if number is None:
        return cli.CommandAnswer(found, partial(cli.print_items, found, _PLAYED))
    return cli.CommandAnswer(found, partial(_print_samples, found))


def _print_samples(found: "Sequence[DrawnSample]") -> None:
    for one in found:
        print(f"--- item: {json.dumps(one.item, ensure_ascii=False)}")
        if one.episode is None:
            print(one.text)
            continue
        earned = iter(one.episode.turn_rewards)
        for message in one.episode.messages:
            worth = f" ({next(earned, 0.0):g})" if message.get("role") == "assistant" else ""
            print(f"{message.get('role', '?')}{worth}: {cli.said(message)}")
        told = f"no reward: {one.episode.error}" if one.episode.reward is None else f"reward {one.episode.reward:g}"
        print(f"--- {one.episode.end}, {told}")
        if one.episode.output:
            print(one.episode.output)
