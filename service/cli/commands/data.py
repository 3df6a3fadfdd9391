"""`validate` and `preview`: a dataset as a model will see it, before any training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.command import Answer, answering
from service.cli.commands.submit import checked, model_uri, naming_options, uploaded
from service.cli.exits import DONE, FAILED
from service.cli.output.render import console, print_table
from service.cli.run_options import fields_of, given, options_of, run_command, run_model

if TYPE_CHECKING:
    from rich.text import Text

    from service.cli.client import Client
    from shared.runs.previews import Preview, PreviewRequest, Span

app = typer.Typer(rich_markup_mode=None)
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
def validate(context: typer.Context, client: "Client") -> Answer:
    with _request(context, client, num_rows=0) as request:
        found = client.preview(request, "/validate")
    document = found.model_dump(mode="json", exclude={"rows"})
    return Answer(document, partial(_print_report, found), FAILED if found.problem else DONE)


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
    client: "Client",
    num_rows: Annotated[int, typer.Option("--rows", min=1, max=100, help="Rows to show.")] = 4,
) -> Answer:
    with _request(context, client, num_rows) as request:
        found = client.preview(request)

    def show() -> None:
        _print_rows(found)
        _print_report(found)

    return Answer(found, show)


@contextmanager
def _request(context: typer.Context, client: "Client", num_rows: int) -> "Iterator[PreviewRequest]":
    """The request of the options; a local dataset is uploaded once they are known to be right.

    What was uploaded for the look alone is deleted after it.
    """
    from shared.runs.previews import PreviewRequest

    options = options_of(run_model("sft"), _FIELDS)
    fields = fields_of(options, given(context)) | {"num_rows": num_rows}
    source = fields.pop("dataset")
    fields["model_uri"] = model_uri(fields.pop("model"))
    checked(PreviewRequest, fields | {"source": source}, options)
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
    for span in spans:
        if in_colour:
            text.append(span.text, style=colour if span.trained else "dim")
        else:
            text.append(f"⟦{span.text}⟧" if span.trained else span.text)
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
        ("tokens", str(report.num_tokens)),
        ("trained", f"{report.num_targets} ({report.trained_fraction:.1%})"),
        ("longest", f"{report.longest_tokens} tokens of at most {report.max_tokens}"),
    ]
