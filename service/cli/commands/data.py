"""`validate`, `preview` and `estimate`: the tokens that a model gets from a dataset, and a run's size and cost."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.command import CommandAnswer, answering, command
from service.cli.commands.submit import model_uri, naming_options, run_of, uploaded, validated_request
from service.cli.exits import DONE, FAILED, USAGE, Stop
from service.cli.output.render import console, plain, print_table, say, span
from service.cli.output.runs import precision_in_words
from service.cli.run_options import given, options_of, request_fields, run_command, run_model

if TYPE_CHECKING:
    from rich.text import Text

    from service.cli.client import CliClient
    from service.runs.estimates import Estimate
    from shared.runs.previews import Preview, PreviewRequest, Span
    from shared.runs.requests import Run

app = typer.Typer(rich_markup_mode=None)
_EXAMPLES = """\b
Examples:
  longshore estimate sft -m org/model -d train.jsonl --epochs 3
  longshore estimate dpo -m org/model -d pairs.jsonl --batch-tokens 65536
  longshore estimate rl -m org/model --prompts prompts.jsonl --grader grader.json --steps 100
"""
_UNITS = {"sft": "examples", "dpo": "pairs", "distill": "examples", "reward": "examples", "rl": "prompts"}
# The options of `submit sft` that say how a dataset is read.
_FIELDS = ("model", "dataset", "max_tokens", "too_long", "max_lost_fraction")


@run_command(
    app,
    "sft",
    "validate",
    "Check a dataset against a model, and count what its rows become. Exit code 100 if a run would refuse it.",
    _FIELDS,
)
@answering
def validate(context: typer.Context, client: "CliClient") -> CommandAnswer:
    with _request(context, client, num_rows=0) as request:
        found = client.preview(request, "/validate")
    document = found.model_dump(mode="json", exclude={"rows"})
    return CommandAnswer(document, partial(_print_report, found), FAILED if found.problem else DONE)


@run_command(
    app,
    "sft",
    "preview",
    "Show a dataset's first rows, coloured by what is trained. Without colours, what is trained stands in ⟦ ⟧.",
    _FIELDS,
)
@answering
def preview(
    context: typer.Context,
    client: "CliClient",
    num_rows: Annotated[int, typer.Option("--rows", min=1, max=100, help="Rows to show.")] = 4,
) -> CommandAnswer:
    with _request(context, client, num_rows) as request:
        found = client.preview(request)

    def show() -> None:
        _print_rows(found)
        _print_report(found)

    return CommandAnswer(found, show)


@contextmanager
def _request(context: typer.Context, client: "CliClient", num_rows: int) -> "Iterator[PreviewRequest]":
    """Yield the request of the options. A local dataset is uploaded once the options are valid.

    A file uploaded only for the preview is deleted afterwards.
    """
    from shared.runs.previews import PreviewRequest

    options = options_of(run_model("sft"), _FIELDS)
    fields = request_fields(options, given(context)) | {"num_rows": num_rows}
    source = fields.pop("dataset")
    fields["model_uri"] = model_uri(fields.pop("model"))
    validated_request(PreviewRequest, fields | {"source": source}, options)
    file = uploaded(client, source["uri"], "--dataset")
    uri = file["uri"] if file else source["uri"]
    try:
        with naming_options(fields["model_uri"], options):
            yield PreviewRequest.model_validate(fields | {"source": source | {"uri": uri}})
    finally:
        if file and file["is_new"]:
            client.ask("DELETE", f"/files/{file['file_id']}")


def _print_rows(found: "Preview") -> None:
    out = console()
    for row in found.rows:
        fate = "" if row.fate == "kept" else f", {row.fate.replace('_', ' ')}"
        cut = ", not shown to its end" if row.is_cut else ""
        heading = f"{row.place}: {row.num_tokens} tokens, {row.num_targets} trained{fate}{cut}"
        out.print(heading, style="bold", markup=False)
        out.print(_coloured(row.spans, in_colour=out.color_system is not None), soft_wrap=True)
        if row.rejected:
            out.print("rejected:", style="bold", markup=False)
            out.print(_coloured(row.rejected, in_colour=out.color_system is not None, colour="red"), soft_wrap=True)
        out.print()


def _coloured(spans: "Sequence[Span]", in_colour: bool, colour: str = "green") -> "Text":
    from rich.text import Text

    text = Text()
    for each in spans:
        if in_colour:
            text.append(each.text, style=colour if each.trained else "dim")
        else:
            text.append(f"⟦{each.text}⟧" if each.trained else each.text)
    return text


def _print_report(found: "Preview") -> None:
    report = found.report
    print_table(("", ""), _counts(found))
    print_table(
        ("tokens, up to", "rows"), ((str(length.up_to_tokens), str(length.num_rows)) for length in report.lengths)
    )
    for lost in report.lost:
        print(f"{lost.place}: {lost.reason}")
    for warning in report.warnings:
        print(f"warning: {warning}")
    if not found.is_complete:
        print(f"only the first {report.num_rows} rows were counted")
    if found.problem:
        print(f"a run would refuse this dataset: {found.problem}")


def _counts(found: "Preview") -> list[tuple[str, str]]:
    report = found.report
    return [
        ("format", report.format),
        ("rows", str(report.num_rows)),
        ("kept", str(report.num_kept)),
        ("truncated", str(report.num_truncated)),
        ("too long", str(report.num_too_long)),
        ("nothing to train on", str(report.num_fully_masked)),
        *([("refused by the chat template", str(report.num_refused))] if report.num_refused else ()),
        ("tokens", str(report.num_tokens)),
        ("trained", f"{report.num_targets} ({report.trained_fraction:.1%})"),
        ("longest", f"{report.longest_tokens} tokens of at most {report.max_tokens}"),
    ]


@command(
    app,
    patience_s=20,
    epilog=_EXAMPLES,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": True},
)
def estimate(
    context: typer.Context,
    client: "CliClient",
    words: Annotated[
        list[str],
        typer.Argument(metavar="sft|dpo|distill|reward|rl", help="As after `longshore submit`; nothing is started."),
    ],
) -> CommandAnswer:
    """Estimate tokens, steps, time and cost of a run, without starting it.

    A local dataset is uploaded, and its rows are counted, for two minutes at most. Exit code 100 if a run would refuse
    it.
    """
    if words[0] not in _UNITS:
        raise Stop("estimate accepts sft, dpo, distill, reward and rl, with the options of longshore submit", USAGE)
    run = run_of(context, words, "longshore estimate")
    if run.kind == "rl" and run.rollouts is None:
        advice = "`longshore estimate rl --prompts ...` estimates a run of its own rollouts"
        raise Stop("an RL run without --prompts is as long as its client makes it", USAGE, advice)
    with naming_options(run.model, options_of(type(run))):
        found = client.estimate(run)

    def show() -> None:
        _print_estimate(run, found)

    return CommandAnswer(found, show, FAILED if found.problem else DONE)


def _print_estimate(run: "Run", found: "Estimate") -> None:
    about = "" if found.is_exact else "about "
    rows = [(_UNITS[run.kind], f"{found.examples:,} of {found.rows:,} rows")]
    if run.kind == "rl":
        rows += [
            ("tokens of the prompts", f"{found.dataset_tokens:,}"),
            ("passes", f"{found.epochs:.3g}"),
            ("steps", f"{found.steps:,}"),
            ("samples", f"{found.samples:,}"),
            ("tokens", f"at most {found.tokens:,}"),
        ]
    else:
        rows += [
            ("tokens a pass", f"{found.dataset_tokens:,}, {found.trained_fraction or 0:.1%} trained"),
            ("passes", f"{found.epochs:.4g}"),
            ("steps", f"{about}{found.steps:,}"),
            ("tokens", f"{about}{found.tokens:,}"),
        ]
    on = f", measured on {', '.join(found.measured_on)}"
    if found.tokens_per_s is not None:
        rows.append(("tokens a second", f"{found.tokens_per_s:,.0f}{on}"))
    if found.seconds_per_step is not None:
        rows.append(("a step", f"{span(found.seconds_per_step)}{on}"))
    if found.seconds is not None:
        rows.append(("training", f"about {span(found.seconds)}"))
    if (precision := precision_in_words(found.precision)) is not None:
        rows.append(("precision", precision))
    if found.cost is not None:
        rows.append(("cost", f"about {found.cost:,.2f} {found.currency}"))
    print_table(("", ""), [(name, plain(text)) for name, text in rows])
    if found.precision is not None and found.precision.notice is not None:
        say(f"notice: {found.precision.notice}")
    if found.same_layout is False:
        say("those runs had another layout, engine or precision: the time may be far off")
    if not found.is_complete:
        say(f"only the first {found.rows:,} rows were counted: the whole is more")
    if found.problem:
        print(f"a run would refuse this dataset: {found.problem}")
    if found.not_measured is not None:
        advice = "submit a short run (--steps 5), then estimate again"
        say(f"how long: not measured yet, because {found.not_measured}: {advice}")
