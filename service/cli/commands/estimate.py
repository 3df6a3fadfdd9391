"""`longshore estimate`: the tokens, steps and time of a run on a dataset, before it is started.

Tokens and steps are counted, as the run would count them. Time is what the tenant's own ended runs of the same model
took for a token: where there is none, nothing is guessed.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.command import Answer, command
from service.cli.exits import DONE, FAILED, USAGE, Stop
from service.cli.output.render import plain, print_table, say, span

if TYPE_CHECKING:
    from service.cli.client import Client
    from service.runs.views import RunView
    from shared.runs.previews import Preview, PreviewRequest
    from shared.runs.requests import DatasetRun, Run

_EXAMPLES = """\b
Examples:
  longshore estimate sft -m org/model -d train.jsonl --epochs 3
  longshore estimate dpo -m org/model -d pairs.jsonl --batch-tokens 65536
"""
app = typer.Typer(rich_markup_mode=None)
_MEASURED_RUNS = 3
_LOOKED_AT = 100


@dataclass(frozen=True)
class RunLength:
    """The length of a run. `is_exact`: False with batch_tokens, where the number of steps is approximate."""

    epochs: float
    steps: int
    tokens: int
    is_exact: bool


@dataclass(frozen=True)
class Throughput:
    """The median tokens per second of some runs. `is_alike`: they had the same layout, engine and precision."""

    tokens_per_s: float
    run_ids: tuple[str, ...]
    is_alike: bool


@command(
    app,
    patience_s=20,
    epilog=_EXAMPLES,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": True},
)
def estimate(
    context: typer.Context,
    client: "Client",
    command: Annotated[
        list[str], typer.Argument(metavar="sft|dpo", help="As after `longshore submit`; nothing is started.")
    ],
) -> Answer:
    """Estimate tokens, steps and time of a run, without starting it.

    A local dataset is uploaded, and its rows (the first 100,000) are counted. Exit code 100 if a run would refuse it.
    """
    run = _run_of(context, command)
    from service.cli.commands.submit import naming_options

    with naming_options(run.model):
        counted = client.preview(_request(run), "/validate")
    found = measured_throughput(client, run)
    length = length_of(run, counted.report.num_kept, counted.report.num_tokens)
    measured, why_not = (None, found) if isinstance(found, str) else (found, None)
    seconds = length.tokens / measured.tokens_per_s if measured else None
    document = {
        "problem": counted.problem,
        "is_complete": counted.is_complete,
        "examples": counted.report.num_kept,
        "dataset_tokens": counted.report.num_tokens,
        **vars(length),
        "tokens_per_s": measured.tokens_per_s if measured else None,
        "measured_on": list(measured.run_ids) if measured else [],
        "same_layout": measured.is_alike if measured else None,
        "not_measured": why_not,
        "seconds": seconds,
    }

    def show() -> None:
        _print(run, counted, length, measured, seconds)
        if why_not is not None:
            advice = "submit a short run (--steps 5), then estimate again"
            say(f"how long: not measured yet, because {why_not}: {advice}")

    return Answer(document, show, FAILED if counted.problem else DONE)


def length_of(run: "DatasetRun", num_examples: int, tokens: int) -> RunLength:
    """Compute the steps and tokens of a run on so many examples and tokens, as activities/packing does."""
    if not num_examples:
        return RunLength(0.0, 0, 0, True)
    if run.batch_size is not None:
        per_epoch = math.ceil(num_examples / run.batch_size)
    else:
        per_epoch = max(1, math.ceil(tokens / (run.batch_tokens or 1)))
    is_exact = run.batch_size is not None
    if run.epochs is not None:
        whole, part = int(run.epochs), run.epochs - int(run.epochs)
        rest = round(part * num_examples)
        if not whole:
            rest = max(1, rest)
        partly = math.ceil(rest / run.batch_size) if run.batch_size else math.ceil(per_epoch * rest / num_examples)
        return RunLength(
            run.epochs, whole * per_epoch + partly, round(tokens * (whole + rest / num_examples)), is_exact
        )
    steps = run.steps or 0
    whole, left = divmod(steps, per_epoch)
    share = min(1.0, left * run.batch_size / num_examples) if run.batch_size else left / per_epoch
    return RunLength(whole + share, steps, round(tokens * (whole + share)), is_exact)


def measured_throughput(client: "Client", run: "DatasetRun") -> Throughput | str:
    """Measure the newest succeeded runs of the same kind and model: those of the same layout, if there are any.

    Returns:
        The throughput, or the reason why there is none.
    """
    from statistics import median

    page = client.runs(_LOOKED_AT, "succeeded", kind=run.kind, words=run.model[-128:])
    same = [view for view in page.runs if view.run.model == run.model and view.run.trainable.kind == run.trainable.kind]
    alike = [view for view in same if _machine(view.run) == _machine(run)]
    for views, is_alike in ((alike, True), (same, False)):
        if found := _speeds(client, views):
            return Throughput(median(found.values()), tuple(found), is_alike)
    if same:
        return f"{same[0].run_id} and others like it succeeded, but their events have no tokens_per_s"
    of_model = [view for view in page.runs if view.run.model == run.model]
    if of_model:
        return f"{of_model[0].run_id} trained {of_model[0].run.trainable.kind}, this one trains {run.trainable.kind}"
    return f"no {run.kind} run of yours with {run.model} has succeeded"


def _machine(run: "Run") -> tuple[object, ...]:
    return run.engine, run.layout, run.dtype


def _speeds(client: "Client", views: "list[RunView]") -> dict[str, float]:
    """Return the median tokens per second of each of the newest runs that measured any."""
    from statistics import median

    from service.runs.views import Metrics

    found: dict[str, float] = {}
    for view in views:
        rates = [
            row.metrics["tokens_per_s"]
            for row in client.get(f"/runs/{view.run_id}/metrics", Metrics).steps
            if "tokens_per_s" in row.metrics
        ]
        if rates:
            found[view.run_id] = median(rates)
        if len(found) == _MEASURED_RUNS:
            break
    return found


def _run_of(context: typer.Context, command: list[str]) -> "DatasetRun":
    """Return the run that the command would start. Its options are checked, its files uploaded."""
    from service.cli.commands.submit import run_of

    if command[0] not in ("sft", "dpo"):
        advice = "an RL run takes as long as its rollouts: `longshore steps RUN` shows what its steps take"
        raise Stop("estimate knows runs on a dataset: sft and dpo, with the options of longshore submit", USAGE, advice)
    run = run_of(context, command, "longshore estimate")
    assert run.kind in ("sft", "dpo")
    return run


def _request(run: "DatasetRun") -> "PreviewRequest":
    from shared.runs.previews import PreviewRequest

    return PreviewRequest(
        source=run.dataset,
        model_uri=run.model,
        max_tokens=run.max_tokens,
        too_long=run.too_long,
        max_lost_fraction=run.max_lost_fraction,
        num_rows=0,
    )


def _print(
    run: "DatasetRun", counted: "Preview", length: RunLength, measured: Throughput | None, seconds: float | None
) -> None:
    report, about = counted.report, "" if length.is_exact else "about "
    unit = "pairs" if run.kind == "dpo" else "examples"
    rows = [
        (unit, f"{report.num_kept:,} of {report.num_rows:,} rows"),
        ("tokens a pass", f"{report.num_tokens:,}, {report.trained_fraction:.1%} trained"),
        ("passes", f"{length.epochs:g}" if length.is_exact else f"{about}{length.epochs:.3g}"),
        ("steps", f"{about}{length.steps:,}"),
        ("tokens", f"{length.tokens:,}"),
    ]
    if measured is not None and seconds is not None:
        rows.append(("tokens a second", f"{measured.tokens_per_s:,.0f}, measured on {', '.join(measured.run_ids)}"))
        rows.append(("training", f"about {span(seconds)}"))
    print_table(("", ""), [(name, plain(text)) for name, text in rows])
    if measured is not None and not measured.is_alike:
        say("those runs had another layout, engine or precision: the time may be far off")
    if not counted.is_complete:
        say(f"only the first {report.num_rows:,} rows were counted: the whole is more")
    if counted.problem:
        print(f"a run would refuse this dataset: {counted.problem}")
