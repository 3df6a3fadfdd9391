"""What one does before a run: `longshore validate`, `preview`, `estimate`, `grader` and `files`."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import longshore
from service.cli import command as cli
from service.cli.run_options import given, json_of, options_of, request_fields, run_command, run_model
from service.cli.run_output import number, precision_in_words
from service.cli.runs import model_uri, naming_options, run_of, uploaded, validated_request

if TYPE_CHECKING:
    from rich.text import Text

    from longshore import Client
    from longshore.grading import Grader, SampledItem
    from longshore.runs import Run
    from longshore.views import Estimate, Preview, PreviewRequest, Span


# --- `longshore files`: datasets and other files in the store ---

_FILES_EXAMPLES = """\b
Examples:
  longshore submit sft -m org/model -d $(longshore files upload train.jsonl)
  longshore files download file-0123456789abcdef01234567 --into train.jsonl
"""
FileId = Annotated[str, typer.Argument(metavar="FILE", help="The file's id, as `longshore files ls` shows it.")]
files = cli.group("files", help="Upload, list, download and delete files in the store.", epilog=_FILES_EXAMPLES)


@cli.command(files)
def ls(client: "Client", limit: Annotated[int, typer.Option(min=1, max=1000)] = 50) -> cli.CommandAnswer:
    """List files, newest first."""
    page = client.files.list(limit)
    columns = {"file": "file_id", "name": "name", "bytes": "size", "purpose": "purpose", "uploaded": "created_at"}

    def show() -> None:
        cli.print_items(page.files, columns)
        if page.has_more:
            cli.say(f"there are more: --limit shows up to 1000, {limit} now")

    return cli.CommandAnswer(page.files, show)


@cli.command(files)
def upload(
    client: "Client", paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files on this machine.")]
) -> cli.CommandAnswer:
    """Upload files into the store. Prints the URI of each, which --dataset takes; the same file has the same URI."""
    for path in paths:
        if not path.is_file():
            raise cli.Stop(f"there is no file {path}", cli.USAGE)
    sent = [client.files.put(path) for path in paths]
    document = [{**record.model_dump(), "is_new": is_new} for record, is_new in sent]
    return cli.CommandAnswer(document, partial(print, *(record.uri for record, _ in sent), sep="\n"))


cli.by_id(
    *(files, "rm", FileId, lambda client, file_id: client.files.delete(file_id)),
    lambda file_id, deleted: cli.say(f"{file_id} ({deleted.name}) is deleted"),
    "Delete a file. A run that has not read it yet fails.",
)


@cli.command(files)
def download(
    client: "Client",
    file_id: FileId,
    into: Annotated[Path | None, typer.Option(help="The file to write; ./NAME if absent.")] = None,
) -> cli.CommandAnswer:
    """Download a file, and check its hash."""
    record = client.files.get(file_id)
    target = into or Path(record.name)
    if target.exists():
        raise cli.Stop(f"{target} is there already", cli.USAGE, "name another file with --into")
    client.files.download(file_id, target)
    return cli.CommandAnswer(record.model_dump() | {"path": str(target.resolve())}, partial(print, target))


# --- `longshore grader`: try a grader on samples before a run ---

_MOST = 100
_GRADER_EXAMPLES = """\b
Examples:
  longshore grader run grader.json samples.jsonl
  longshore grader run grader.json --text "12 sacks" --item '{"answer": "12"}'
  longshore grader check grader.json
"""
GraderFile = Annotated[
    str,
    typer.Argument(
        metavar="GRADER", help="The grader in OpenAI's fields: a JSON file, or the JSON itself (docs/graders.md)."
    ),
]
grader = cli.group("grader", help="Try a grader on samples, before a run.", epilog=_GRADER_EXAMPLES)


@cli.command(grader)
def run(
    client: "Client",
    grader: GraderFile,
    samples: Annotated[
        typer.FileText | None,
        typer.Argument(metavar="SAMPLES", help='JSONL of {"sample": {"output_text": ...}, "item": {...}}; - is stdin.'),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The model's output to grade, instead of SAMPLES.")] = None,
    item: Annotated[str | None, typer.Option(help="With --text: the dataset's row, as JSON.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=_MOST, help="Number of samples to grade, from the first.")] = 20,
) -> cli.CommandAnswer:
    """Grade samples as a run would. Exit code 100 if one has no grade."""
    checked = _checked(grader)
    rows = list(_rows(samples, text, item, limit))
    grades = [{"place": place, **client.grade(checked, sample).model_dump()} for place, sample in rows]
    code = cli.FAILED if any(each["grade"] is None for each in grades) else cli.DONE
    return cli.CommandAnswer(grades, partial(_print, grades), code)


@cli.command(grader)
def check(client: "Client", grader: GraderFile) -> cli.CommandAnswer:
    """Check a grader: parse its fields, templates and formula, and load its source."""
    checked = _checked(grader)
    client.grade(checked)
    return cli.CommandAnswer(checked, partial(cli.say, f"{checked.name} can be used"))


def _checked(given: str) -> "Grader":
    from shared.errors import InvalidInput
    from shared.runs.acceptance import parse_grader

    try:
        return parse_grader(json_of(given, "GRADER"))
    except InvalidInput as error:
        raise cli.Stop(str(error), cli.USAGE, "docs/graders.md has the fields of each kind") from None


def _rows(
    samples: typer.FileText | None, text: str | None, item: str | None, limit: int
) -> "Iterator[tuple[str, SampledItem]]":
    if (samples is None) == (text is None):
        raise cli.Stop("give either SAMPLES or --text", cli.USAGE, "longshore grader run --help has examples")
    if samples is None:
        row = {"sample": {"output_text": text}, "item": json_of(item or "{}", "--item")}
        yield "--text", _sample(json.dumps(row), "--text")
        return
    if item is not None:
        raise cli.Stop("--item goes with --text: SAMPLES have items of their own", cli.USAGE)
    filled = ((f"{samples.name}:{at}", line) for at, line in enumerate(samples, 1) if line.strip())
    found = list(islice(filled, limit + 1))
    if not found:
        raise cli.Stop(f"{samples.name} has no samples", cli.USAGE)
    if len(found) > limit:
        cli.say(f"only the first {limit} samples are graded: --limit takes up to {_MOST}")
    for place, line in found[:limit]:
        yield place, _sample(line, place)


def _sample(row: str, place: str) -> "SampledItem":
    from pydantic import ValidationError

    from longshore.grading import SampledItem

    try:
        return SampledItem.model_validate_json(row)
    except ValidationError as error:
        rule = error.errors()[0]["msg"].removeprefix("Value error, ")
        advice = 'a sample is {"sample": {"output_text": ...}, "item": {...}}'
        raise cli.Stop(f"{place}: {rule}", cli.USAGE, advice) from None


def _print(grades: list[dict[str, Any]]) -> None:
    parts = list(grades[0]["parts"]) if grades else []
    rows = (
        (
            cli.plain(each["place"]),
            number(each["grade"]),
            *(number(each["parts"].get(part)) for part in parts),
            f"{each['duration_s']:.2f}",
            cli.plain(each["error"] or ""),
        )
        for each in grades
    )
    cli.print_table(("sample", "grade", *parts, "seconds", ""), rows)
    found = [each["grade"] for each in grades if each["grade"] is not None]
    if len(grades) > 1 and found:
        cli.say(f"mean {sum(found) / len(found):.4g} of {len(found)} grades; {len(grades) - len(found)} without one")


# --- `validate`, `preview` and `estimate` ---
# The tokens that a model gets from a dataset, and a run's size and cost.

app = typer.Typer(rich_markup_mode=None)
app.add_typer(files, name="files")
app.add_typer(grader, name="grader")
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
@cli.answering
def validate(context: typer.Context, client: "Client") -> cli.CommandAnswer:
    with _request(context, client, num_rows=0) as request:
        found = client.validate(request)
    document = found.model_dump(mode="json", exclude={"rows"})
    return cli.CommandAnswer(document, partial(_print_report, found), cli.FAILED if found.problem else cli.DONE)


@run_command(
    app,
    "sft",
    "preview",
    "Show a dataset's first rows, coloured by what is trained. Without colours, what is trained stands in ⟦ ⟧.",
    _FIELDS,
)
@cli.answering
def preview(
    context: typer.Context,
    client: "Client",
    num_rows: Annotated[int, typer.Option("--rows", min=1, max=100, help="Number of rows to show.")] = 4,
) -> cli.CommandAnswer:
    with _request(context, client, num_rows) as request:
        found = client.preview(request)

    def show() -> None:
        _print_rows(found)
        _print_report(found)

    return cli.CommandAnswer(found, show)


@contextmanager
def _request(context: typer.Context, client: "Client", num_rows: int) -> "Iterator[PreviewRequest]":
    """Yield the request of the options. A local dataset is uploaded once the options are valid.

    A file uploaded only for the preview is deleted afterwards.
    """
    options = options_of(run_model("sft"), _FIELDS)
    fields = request_fields(options, given(context)) | {"num_rows": num_rows}
    if isinstance(source := fields.pop("dataset"), list):
        raise cli.Stop("--dataset: give one without a weight: sources of a mixture are looked at one by one", cli.USAGE)
    fields["model_uri"] = model_uri(fields.pop("model"))
    validated_request(longshore.PreviewRequest, fields | {"source": source}, options)
    file = uploaded(client, source["uri"], "--dataset")
    uri = file[0].uri if file else source["uri"]
    try:
        with naming_options(fields["model_uri"], options):
            yield longshore.PreviewRequest.model_validate(fields | {"source": source | {"uri": uri}})
    finally:
        if file and file[1]:
            client.files.delete(file[0].file_id)


def _print_rows(found: "Preview") -> None:
    out = cli.console()
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
    cli.print_table(("", ""), _counts(found))
    cli.print_table(
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


@cli.command(
    app,
    patience_s=20,
    epilog=_EXAMPLES,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": True},
)
def estimate(
    context: typer.Context,
    client: "Client",
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="sft|dpo|distill|reward|rl",
            help="The same options as after `longshore submit`; nothing is started.",
        ),
    ],
) -> cli.CommandAnswer:
    """Estimate tokens, steps, time and cost of a run, without starting it.

    A local dataset is uploaded, and its rows are counted, for two minutes at most. Exit code 100 if a run would refuse
    it.
    """
    if words[0] not in _UNITS:
        raise cli.Stop(
            "estimate accepts sft, dpo, distill, reward and rl, with the options of longshore submit", cli.USAGE
        )
    run = run_of(context, words, "longshore estimate")
    if run.kind == "rl" and run.rollouts is None:
        advice = "`longshore estimate rl --prompts ...` estimates a run of its own rollouts"
        raise cli.Stop("an RL run without --prompts is as long as its client makes it", cli.USAGE, advice)
    with naming_options(run.model, options_of(type(run))):
        found = client.estimate(run)
    return cli.CommandAnswer(found, partial(_print_estimate, run, found), cli.FAILED if found.problem else cli.DONE)


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
        rows.append(("a step", f"{cli.span(found.seconds_per_step)}{on}"))
    if found.seconds is not None:
        rows.append(("training", f"about {cli.span(found.seconds)}"))
    if (precision := precision_in_words(found.precision)) is not None:
        rows.append(("precision", precision))
    if found.cost is not None:
        rows.append(("cost", f"about {found.cost:,.2f} {found.currency}"))
    cli.print_table(("", ""), [(name, cli.plain(text)) for name, text in rows])
    if found.precision is not None and found.precision.notice is not None:
        cli.say(f"notice: {found.precision.notice}")
    if found.same_layout is False:
        cli.say("those runs had another layout, engine or precision: the time may be far off")
    if not found.is_complete:
        cli.say(f"only the first {found.rows:,} rows were counted: the whole is more")
    if found.problem:
        print(f"a run would refuse this dataset: {found.problem}")
    if found.not_measured is not None:
        advice = "submit a short run (--steps 5), then estimate again"
        cli.say(f"how long: not measured yet, because {found.not_measured}: {advice}")
