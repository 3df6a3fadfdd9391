"""Options of runs, made from the models of runs. `python -m benchmarks.pages` lists them in docs/runs.md."""

import inspect
import json
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from service.cli.command import USAGE, Stop

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


# --- Make the options of `longshore submit` from the fields of the run models (longshore/runs.py) ---
#
# A field's option has the field's name; nested fields have their own names without those of the models around them.
# Type, default, choices, bounds and help are the field's. The tables below hold the few names that differ.

# Options that are not named as their fields are.
NAMES = {
    "warmup_steps": "warmup",
    "num_samples": "samples",
    "idle_s": "idle",
    "rollouts.epochs": "prompt-epochs",
    "rollouts.environment.source": "environment",
    "rollouts.agent.command": "agent",
    "rollouts.held_out.every_steps": "eval-every",
    "rollouts.held_out.samples_per_prompt": "eval-samples",
    "rollouts.held_out.target": "target",
    "rollouts.held_out.keep": "keep",
    "rollouts.held_out.best_by": "best-by",
    "early_stop.metric": "stop-by",
    "eval_datasets": "eval",
    "rollouts.held_out.sets": "eval",
    "rollouts.held_out.early_stop.metric": "stop-by",
}
# Those of fields whose names other fields of the same run have, too.
_SECOND = {
    "rollouts.held_out.every_steps": "eval-prompts-every",
    "rollouts.held_out.sets": "eval-prompts-set",
    "rollouts.max_lost_fraction": "max-lost-prompts",
}
_PREFIXES = {"held_out": "eval-", "weight_sync": "sync-", "critic": "critic-", "agent": "agent-"}
_WHOLE = ("critic.trainable",)  # objects that one option gives
_FILES = ("rollouts.environment.source",)  # texts that are read from files
_SHORT = {"model": "-m", "dataset": "-d", "learning_rate": "--lr"}
# The value that a submitted run has where neither the option nor its alternative is given.
UNLESS = {"epochs": (1.0, "steps"), "batch_size": (8, "batch_tokens")}
# The headings of `--help`: common options first, others by the field that they are in; the rest comes last.
_FIRST = (
    *(
        "model",
        "dataset",
        "eval_dataset",
        "eval_datasets",
        "rollouts.prompts",
        "rollouts.held_out.prompts",
        "rollouts.held_out.sets",
        "rollouts.grader",
        "rollouts.environment.source",
        "rollouts.agent.command",
        "rollouts.agent.server",
        "teacher",
        "algorithm",
        "objective",
    ),
    *("name", "epochs", "steps", "rollouts.steps", "batch_size", "rollouts.prompts_per_step", "rollouts.group_size"),
    *("learning_rate", "beta", "max_tokens", "rollouts.max_completion_tokens", "trainable.rank", "trainable"),
)
_HEADINGS = {"trainable": "The adapter", "rollouts": "Rollouts", "critic": "The critic", "layout": "Machines"}
_HEADINGS |= dict.fromkeys(("engine", "dtype", "quantize_base", "optimizer_states", "recompute"), "Machines")
_HEADINGS |= dict.fromkeys(("concurrent_runs", "gpu_hours", "spending", "stored_bytes"), "Quotas")
_HEADINGS |= dict.fromkeys(("worker_sharing", "worker_weight"), "Quotas")
_HEADINGS |= dict.fromkeys(("sampler", "trials", "parallel", "metric", "direction"), "Trials")
_HEADINGS |= dict.fromkeys(("cron", "timezone", "overlap", "even_unchanged"), "Times")
_OF_FIRST, _OF_REST = "What is set first", "Training"
# Fields of a DatasetSource that its validators refuse in a kind of run.
_NOT_READ = {
    "dpo": ("assistant_turns", "assistant_pattern"),
    "reward": ("assistant_turns", "assistant_pattern"),
    "rl": ("completion_field", "assistant_turns", "assistant_pattern"),
}
_REFUSED = {"head"}  # fields of `trainable` that these runs refuse, or have by another field
# value: as Typer parses it; names: comma-separated; source: a file or URI of rows; sources: one or several of them,
# with weights; named: several, each behind its name; reading: how sources are read;
# kind: one of a union's kinds, or JSON; json: JSON, or a file of it; file: a file, whose text is the value; layout: a
# label; variant: a flag for a kind.
Form = Literal["value", "names", "source", "sources", "named", "reading", "kind", "json", "file", "layout", "variant"]


@dataclass(frozen=True)
class RunOption:
    """A field as an option.

    Args:
        path: the place of its value in the request.
        flag: its name on the command line, without dashes.
        parsed_as: the type that Typer parses its text to: str, int, float, bool, a Literal, or a list of str.
        kind: the variant of a union that the field belongs to, or that the option selects.
        takes_null: `null` means no value. (For a text option it is text.)
    """

    path: tuple[str, ...]
    flag: str
    parsed_as: Any
    form: Form = "value"
    default: Any = None
    is_required: bool = False
    help: str = ""
    bounds: str = ""
    kind: str | None = None
    takes_null: bool = False

    @property
    def parameter(self) -> str:
        """The name of the command's parameter."""
        return self.flag.replace("-", "_")

    @property
    def field(self) -> str:
        """The dotted name of the field."""
        return ".".join(self.path)

    @property
    def place(self) -> tuple[str, ...]:
        """The field's location in pydantic's errors, which includes the kind of a union's variant."""
        return (*self.path[:-1], self.kind, self.path[-1]) if self.kind else self.path


def options_of(model: "type[BaseModel]", only: Sequence[str] = ()) -> tuple[RunOption, ...]:
    """Return the options of a run model, in the order of its fields.

    `only`: the model's own fields that are wanted; all if empty.
    """
    found = list(_walk(model, (), "", is_required=True, only=only))
    if any(option.form in ("source", "sources") for option in found):
        found += _reading(str(model.model_fields["kind"].default))
    flags = Counter(option.flag for option in found)
    return tuple(
        replace(option, flag=_SECOND.get(option.field, option.flag)) if flags[option.flag] > 1 else option
        for option in found
    )


class HeadedCommand(TyperCommand):
    """Lists options under their headings (Typer's `rich_help_panel`), without Rich, which takes long to load."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        found: dict[str, list[tuple[str, str]]] = {_OF_FIRST: []}
        for each in self.get_params(ctx):
            if (record := each.get_help_record(ctx)) is not None:
                found.setdefault(getattr(each, "rich_help_panel", None) or "This command", []).append(record)
        for heading, records in ((each, records) for each, records in found.items() if records):
            with formatter.section(heading):
                formatter.write_dl(records)


class RunCommand(TyperCommand):
    """A command with the options of a run model. They are made when they are needed, since importing the model is slow:
    the help of a group does without them.

    `make`: the command with its options.
    """

    def __init__(self, make: Callable[[], Any], **attributes: Any) -> None:
        super().__init__(**attributes)
        self._make = cache(make)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._make().make_context(info_name, args, parent, **extra)

    def get_params(self, ctx: Any) -> list[Any]:
        return self._make().get_params(ctx)


def run_command(
    app: typer.Typer, kind: str, name: str, help: str, only: Sequence[str] = ()
) -> Callable[[Callable[..., None]], None]:
    """Add a function to an app as a command that also has the options of a kind of run: `given` reads them.

    `only`: as for `options_of`.
    """

    def add(function: Callable[..., None]) -> None:
        def make() -> Any:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(name=name, help=help, cls=HeadedCommand)(
                _with_options(function, options_of(run_model(kind), only))
            )
            return typer.main.get_command(alone)

        app.command(name=name, help=help, cls=partial(RunCommand, make))(function)  # type: ignore[arg-type]

    return add


def run_model(kind: str) -> "type[BaseModel]":
    """The model that a request of this kind is checked by: a kind of run, `quotas`, `schedule` or `sweep`.

    Its validators are built when a request is checked, and not on import: they are a third of the time of `--help`.
    """
    from longshore.fields import Frozen

    # This changes the config of all models imported from here on, in the process of the command line only. In hosts
    # and the service the first request or workflow would wait for validators to be built, possibly by two threads.
    Frozen.model_config["defer_build"] = True
    from longshore.accounts import QuotaSettings
    from longshore.automation import ScheduledRun, Sweep
    from longshore.dataset_runs import DistillRun, DPORun, RewardRun, SFTRun
    from longshore.runs import RLRun

    models: dict[str, type[BaseModel]] = {"sft": SFTRun, "dpo": DPORun, "distill": DistillRun, "reward": RewardRun}
    return (models | {"rl": RLRun, "quotas": QuotaSettings, "schedule": ScheduledRun, "sweep": Sweep})[kind]


def _with_options(command: Callable[..., None], options: Sequence[RunOption]) -> Callable[..., None]:
    """Add parameters for the options to a function's signature. It is called without them: `given` reads them."""
    context, *own = inspect.signature(command, eval_str=True).parameters.values()
    options = sorted(options, key=lambda each: _FIRST.index(each.field) if each.field in _FIRST else len(_FIRST))
    made = [inspect.Parameter(option.parameter, inspect.Parameter.KEYWORD_ONLY, **_typed(option)) for option in options]
    names = {option.parameter for option in options}

    @wraps(command)
    def called(**values: Any) -> None:
        command(**{name: value for name, value in values.items() if name not in names})

    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    called.__signature__ = inspect.Signature([context, *made, *own])  # type: ignore[attr-defined]
    return called


def given(context: typer.Context) -> dict[str, Any]:
    """Return the values of parameters given on the command line; the models have the others' defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name: context.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def request_fields(
    options: Sequence[RunOption], values: Mapping[str, Any], uri_of: Callable[[str, str], str] = lambda uri, flag: uri
) -> dict[str, Any]:
    """Return the request of the options that were given, not checked.

    Args:
        values: those that were given, by their parameters.
        uri_of: the URI of a file or URI that was given with an option of this name.

    Raises:
        Stop: two options exclude each other, or a value cannot be read.
    """
    told = [option for option in options if option.parameter in values]
    reading = {option.path[-1]: values[option.parameter] for option in told if option.form == "reading"}
    fields: dict[str, Any] = {}
    wholes: dict[tuple[str, ...], RunOption] = {option.path: option for option in told if option.form != "reading"}
    for option in wholes.values():
        into = fields
        for depth, name in enumerate(option.path[:-1], 1):
            if whole := wholes.get(option.path[:depth]):
                raise Stop(f"--{whole.flag} excludes --{option.flag}", USAGE, "--help lists the options")
            into = into.setdefault(name, {})
        if option.kind and option.form != "variant":
            into["kind"] = option.kind
        into[option.path[-1]] = _read(option, values[option.parameter], reading, uri_of)
    return fields


def option_at(options: Sequence[RunOption], place: Sequence[int | str]) -> RunOption | None:
    """Return the option that a place in the request belongs to; None for a place above all options."""
    placed = [option for option in options if option.form != "variant"]
    found = [option for option in placed if tuple(place[: len(option.place)]) == option.place]
    return max(found, key=lambda option: len(option.place), default=None)


def json_of(text: str, flag: str) -> Any:
    """Parse JSON that was given as itself or as the name of a file. Raises Stop where there is none."""
    try:
        return json.loads(text if text.lstrip().startswith(("{", "[")) or text == "null" else Path(text).read_text())
    except OSError as error:
        raise _unreadable(text, flag, error) from None
    except ValueError as error:
        raise Stop(f"{flag}: no JSON: {error}", USAGE) from None


def _unreadable(name: str, flag: str, error: OSError) -> Stop:
    return Stop(f"{flag}: {name}: {error.strerror}", USAGE)


def _walk(
    model: "type[BaseModel]", path: tuple[str, ...], prefix: str, is_required: bool, only: Sequence[str] = ()
) -> Iterator[RunOption]:
    for name, field in model.model_fields.items():
        if name in _REFUSED or (only and name not in only):
            continue
        yield from _options(field, (*path, name), prefix, is_required and field.is_required())


def _options(field: "FieldInfo", path: tuple[str, ...], prefix: str, is_required: bool) -> Iterator[RunOption]:
    from longshore.dataset_runs import DatasetSource
    from longshore.training import Layout

    type_ = _plain_type(field.annotation)
    option = _option(field, path, prefix, is_required)
    variants = [each for each in get_args(type_) if hasattr(each, "model_fields")]
    if get_origin(type_) is Literal and len(get_args(type_)) == 1:
        return
    if type_ is DatasetSource or DatasetSource in get_args(type_):
        words = f"{option.help or 'Rows'}: a file (uploaded), or a file://, s3:// or https:// URI"
        words += ", or a JSON object with `uri` and fields that say how it alone is read"
        if type_ is DatasetSource:
            yield replace(option, form="source", help=words)
        else:
            words += "; several are a mixture, each with :WEIGHT behind it or with `weight` or `epochs` in its object"
            yield replace(option, form="sources", parsed_as=list[str], help=words)
    elif get_origin(type_) is dict:
        words = f"{option.help}: NAME=URI, with a file or an object for the URI as in --dataset"
        yield replace(option, form="named", parsed_as=list[str], default=None, help=words)
    elif field.discriminator == "type" or ".".join(path) in _WHOLE:  # a grader, or such an object
        yield replace(option, form="json", default=None, help=f"{option.help}: JSON, or a file of it")
    elif ".".join(path) in _FILES:
        yield replace(option, form="file", help=f"{option.help}: a file")
    elif field.discriminator and all(
        each.model_fields.keys() - _REFUSED == {"kind"} for each in _others(variants, field.default)
    ):
        yield from _variants(field, variants, path)
    elif field.discriminator:
        kinds = ", ".join(str(each.model_fields["kind"].default) for each in variants)
        words = f"{option.help}. One of {kinds}, or a JSON object with `kind` and its fields"
        yield replace(option, form="kind", default=field.default.kind, help=words)
    elif hasattr(type_, "model_fields"):
        if type_ is Layout:
            yield replace(option, form="layout", default=None, help="All degrees at once, such as tp2-sp-pp2-dp2")
        kind = type_.model_fields.get("kind")
        below = f"{kind.default}-" if kind else _PREFIXES.get(path[-1], "")
        yield from _walk(type_, path, below, is_required)
    else:
        yield option


def _others(models: Sequence[Any], default: object) -> list[Any]:
    return [model for model in models if not isinstance(default, model)]


def _variants(field: "FieldInfo", models: Sequence[Any], path: tuple[str, ...]) -> Iterator[RunOption]:
    """Make the options of a union whose other kinds have no fields: the default's under its kind, flags for others."""
    for option in _walk(type(field.default), path, f"{field.default.kind}-", is_required=False):
        yield replace(option, kind=field.default.kind)
    for model in _others(models, field.default):
        kind = model.model_fields["kind"].default
        yield RunOption(path, kind, bool, "variant", default=False, help=inspect.cleandoc(model.__doc__), kind=kind)


def _option(field: "FieldInfo", path: tuple[str, ...], prefix: str, is_required: bool) -> RunOption:
    name = ".".join(path)
    type_, form = _plain_type(field.annotation), "value"
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if get_origin(type_) is tuple:
        item = _plain_type(get_args(type_)[0])
        if get_origin(item) is tuple:  # pairs, which an object may say, too
            words = f"{field.description}: a JSON object, or a file of it"
            return RunOption(path, prefix + path[-1].replace("_", "-"), str, "json", help=words)
        type_, form = (str, "names") if get_origin(item) is Literal else (list[item], "value")  # type: ignore[valid-type]
        default = ",".join(default or ()) or None if form == "names" else None
    elif type_ not in (int, float, bool) and get_origin(type_) is not Literal:
        type_ = str
    takes_null = type(None) in get_args(field.annotation) and (type_ in (int, float) or default is not None)
    if takes_null and get_origin(type_) is Literal:
        type_ = Literal[(*get_args(type_), "null")]
    return RunOption(
        path,
        NAMES.get(name) or prefix + path[-1].replace("_", "-"),
        type_,
        form,  # type: ignore[arg-type]
        default,
        is_required,
        field.description or "",
        _bounds(field),
        takes_null=takes_null,
    )


def _reading(kind: str) -> Iterator[RunOption]:
    from longshore.dataset_runs import DatasetSource

    for name, field in DatasetSource.model_fields.items():
        if name != "uri" and name not in _NOT_READ.get(kind, ()):
            yield replace(_option(field, ("dataset", name), "", is_required=False), form="reading")


def _plain_type(annotation: Any) -> Any:
    """Return a type without None and without its annotations."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, types.UnionType):
            left = [each for each in get_args(annotation) if each is not type(None)]
            if len(left) > 1:
                return annotation
            annotation = left[0]
        else:
            return annotation


def _bounds(field: "FieldInfo") -> str:
    limits = {
        name: getattr(rule, name) for rule in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(rule, name)
    }
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    if set(limits) == {"ge", "le"}:
        return f"{_number(limits['ge'])} to {_number(limits['le'])}"
    return ", ".join(f"{words[name]} {_number(limit)}" for name, limit in limits.items())


def _number(number: float) -> str:
    if isinstance(number, int) and number >= 2**62 and number & (number - 1) == 0:
        return f"2^{number.bit_length() - 1}"
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _typed(option: RunOption) -> dict[str, Any]:
    """Return the default and the annotation of the option's parameter."""
    words = option.help[:1].upper() + option.help[1:]
    words += f" ({option.bounds})" if option.bounds else ""
    if option.default is None and option.field in UNLESS:
        value, other = UNLESS[option.field]
        words += f"; {value:g} if --{other.replace('_', '-')} is absent too"
    words += "; may be repeated" if option.parsed_as == list[str] else ""
    words = words.removesuffix(".") + "." if words else ""
    flags = [f"--{option.flag}", *([_SHORT[option.field]] if option.field in _SHORT else [])]
    if option.parsed_as is bool and option.default is True:
        flags[0] += f"/--no-{option.flag}"
    parsing: dict[str, Any] = {}
    if option.takes_null and option.parsed_as in (int, float):
        metavar = {int: "INTEGER", float: "FLOAT"}[option.parsed_as] + ("|null" if option.default is not None else "")
        parsing = {"parser": lambda text: text if text == "null" else option.parsed_as(text), "metavar": metavar}
    heading = "Reading rows" if option.form == "reading" else _HEADINGS.get(option.path[0], _OF_REST)
    panel = _OF_FIRST if option.field in _FIRST and option.form != "reading" else heading
    annotation = Annotated[option.parsed_as, typer.Option(*flags, help=words, rich_help_panel=panel, **parsing)]  # type: ignore[name-defined]
    default = inspect.Parameter.empty if option.is_required else option.default
    return {"annotation": annotation, "default": default}


def _read(option: RunOption, value: Any, reading: Mapping[str, Any], uri_of: Callable[[str, str], str]) -> Any:
    flag = f"--{option.flag}"
    if option.takes_null and value == "null":
        return None
    match option.form:
        case "names":
            return value.split(",")
        case "source":
            return _source(value, flag, reading, uri_of)
        case "sources":
            sources = [_weighted(text, flag, reading, uri_of) for text in value]
            is_mixture = len(sources) > 1 or not {"name", "weight", "epochs"}.isdisjoint(sources[0])
            return sources if is_mixture else sources[0]
        case "named":
            if bare := next((text for text in value if "=" not in text), None):
                raise Stop(f"{flag}: {bare}: give NAME=URI", USAGE, "--help lists the options")
            named = [text.partition("=") for text in value]
            return [(name, _source(text, flag, reading, uri_of)) for name, _, text in named]
        case "kind":
            return json_of(value, flag) if value.lstrip().startswith("{") else {"kind": value}
        case "json":
            return json_of(value, flag)
        case "file":
            try:
                return Path(value).read_text()
            except OSError as error:
                raise _unreadable(value, flag, error) from None
            except UnicodeDecodeError as error:
                raise Stop(f"{flag}: {value}: no text: {error}", USAGE) from None
        case "layout":
            return _layout(value)
        case "variant":
            return {"kind": option.kind}
        case _:
            return value


def _source(text: str, flag: str, reading: Mapping[str, Any], uri_of: Callable[[str, str], str]) -> dict[str, Any]:
    own: dict[str, Any] = json_of(text, flag) if text.lstrip().startswith("{") else {"uri": text, **reading}
    return own | {"uri": uri_of(own["uri"], flag)} if "uri" in own else own


def _weighted(text: str, flag: str, reading: Mapping[str, Any], uri_of: Callable[[str, str], str]) -> dict[str, Any]:
    """Read a source with or without a weight behind its last colon. The port of a web server is none."""
    uri, _, end = text.rpartition(":")
    has_path = "://" not in uri or "/" in uri.partition("://")[2]
    if not uri or not has_path or text.lstrip().startswith("{") or Path(text).exists():
        return _source(text, flag, reading, uri_of)
    try:
        weight = float(end)
    except ValueError:
        return _source(text, flag, reading, uri_of)
    return _source(uri, flag, reading, uri_of) | {"weight": weight}


def _layout(label: str) -> dict[str, Any]:
    from shared.errors import InvalidInput
    from shared.jobs.job import layout_of

    try:
        return layout_of(label).model_dump()
    except InvalidInput as error:
        raise Stop(f"--{error}", USAGE) from None
