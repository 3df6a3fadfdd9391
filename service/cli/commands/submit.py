"""`longshore submit`: start a run."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from service.cli.connection import Globals, Json, connect, wants_json
from service.cli.exits import OF_STATE, USAGE, Stop
from service.cli.output.follow import Detached, attach_again, follow
from service.cli.output.render import outcome, print_json, say, summary

if TYPE_CHECKING:
    from pydantic import ValidationError

    from service.cli.client import Client
    from service.runs.views import RunView
    from shared.runs.requests import DPORun, Run, SFTRun

# Fields whose option has another name.
_OPTIONS = {
    "warmup_steps": "warmup",
    "num_samples": "samples",
    "rank": "lora-rank",
    "alpha": "lora-alpha",
    "targets": "lora-targets",
    "source": "dataset",
    "model_uri": "model",
    "held_out.prompts": "eval-prompts",
    "held_out.every_steps": "eval-every",
    "held_out.samples_per_prompt": "eval-samples",
    "held_out.temperature": "eval-temperature",
    "held_out.target": "target",
}
# Parts of a run that are no options, but have them.
_GROUPS = ("trainable", "lora", "full", "layout", "rollouts")
_EXAMPLES = """\b
Examples:
  longshore submit sft -m org/model -d train.jsonl --epochs 3 --wait
  longshore submit dpo -m org/model -d pairs.jsonl --beta 0.1
  longshore submit rl -m org/model --prompts prompts.jsonl --grader grader.json --algorithm grpo --steps 100
"""
app = typer.Typer(help="Start a run: sft, dpo or rl.", no_args_is_help=True, rich_markup_mode=None, epilog=_EXAMPLES)


class ScheduleName(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class DtypeName(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class EngineChoice(StrEnum):
    megatron = "megatron"
    fsdp = "fsdp"


class FormatName(StrEnum):
    auto = "auto"
    chat = "chat"
    prompt_completion = "prompt_completion"
    alpaca = "alpaca"
    sharegpt = "sharegpt"
    text = "text"
    tokenized = "tokenized"
    preference = "preference"
    openai_preference = "openai_preference"


class TooLong(StrEnum):
    drop = "drop"
    truncate = "truncate"


Model = Annotated[str, typer.Option("--model", "-m", help="A folder, a file:// or s3:// URI, or a hub id.")]
Dataset = Annotated[
    str, typer.Option("--dataset", "-d", help="A file (uploaded), or a file://, s3:// or https:// URI.")
]
EvalDataset = Annotated[str | None, typer.Option("--eval-dataset", help="Held-out rows, like --dataset.")]
Format = Annotated[FormatName, typer.Option("--format", help="How rows are written.")]
PromptField = Annotated[str | None, typer.Option("--prompt-field", help="The field that holds the prompt.")]
CompletionField = Annotated[str | None, typer.Option("--completion-field", help="The field that holds the answer.")]
Name = Annotated[str | None, typer.Option("--name", help="What is published; the run's id if absent.")]
IsFull = Annotated[bool, typer.Option("--full", help="Train every weight instead of a LoRA adapter.")]
LoraRank = Annotated[int | None, typer.Option("--lora-rank", help="Default 16.")]
LoraAlpha = Annotated[float | None, typer.Option("--lora-alpha", help="Default 32.")]
LoraTargets = Annotated[
    str | None, typer.Option("--lora-targets", help="Comma-separated, such as q_proj,v_proj; default all.")
]
InitialAdapter = Annotated[
    str | None, typer.Option("--initial-adapter", help="URI of a published adapter to go on from.")
]
Epochs = Annotated[float | None, typer.Option("--epochs", help="Passes over the data; 1 if --steps is absent too.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Optimizer steps, instead of --epochs.")]
LearningRate = Annotated[float, typer.Option("--learning-rate", "--lr")]
Warmup = Annotated[int, typer.Option("--warmup", help="Steps of linear warm-up.")]
ClipNorm = Annotated[float, typer.Option("--clip-norm", help="Bound of the global gradient norm; 0 for none.")]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", help="Examples a step; 8 if --batch-tokens is absent too.")
]
BatchTokens = Annotated[int | None, typer.Option("--batch-tokens", help="Tokens a step, instead of --batch-size.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="The longest example.")]
Truncation = Annotated[TooLong, typer.Option("--too-long", help="What happens to longer examples.")]
BinTokens = Annotated[int | None, typer.Option("--bin-tokens", help="Tokens of a micro-batch; --max-tokens if absent.")]
MaxLostFraction = Annotated[
    float, typer.Option("--max-lost-fraction", help="Refuse when more rows than this are lost.")
]
TensorParallel = Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.")]
DataParallel = Annotated[int, typer.Option("--dp", help="Data-parallel ranks.")]
LayoutLabel = Annotated[
    str | None, typer.Option("--layout", help="All degrees at once, such as tp2-sp-pp2-dp2, instead of --tp and --dp.")
]
Engine = Annotated[EngineChoice, typer.Option(help="What trains; fsdp shards the model over --dp alone.")]
EvalEvery = Annotated[int, typer.Option("--eval-every", help="Steps; 0: before and after only.")]
NumSamples = Annotated[int, typer.Option("--samples", help="Greedy completions at each evaluation.")]
SampleTokens = Annotated[int, typer.Option("--sample-tokens", help="Longest greedy completion.")]
CheckpointEvery = Annotated[int, typer.Option("--checkpoint-every", help="Steps; 0: a tenth of the run.")]
Wait = Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")]
Timeout = Annotated[float | None, typer.Option("--timeout", help="With --wait: seconds until exit code 101.")]
IdempotencyKey = Annotated[str | None, typer.Option("--idempotency-key", help="The same key gives the same run.")]


@app.callback()
def _group() -> None:
    """`sft` and `dpo` are here, `rl` in rl.py."""


@app.command()
def sft(
    context: typer.Context,
    model: Model,
    dataset: Dataset,
    eval_dataset: EvalDataset = None,
    format: Format = FormatName.auto,
    prompt_field: PromptField = None,
    completion_field: CompletionField = None,
    name: Name = None,
    full: IsFull = False,
    lora_rank: LoraRank = None,
    lora_alpha: LoraAlpha = None,
    lora_targets: LoraTargets = None,
    initial_adapter: InitialAdapter = None,
    epochs: Epochs = None,
    steps: Steps = None,
    learning_rate: LearningRate = 1e-4,
    schedule: ScheduleName = ScheduleName.linear,
    warmup: Warmup = 0,
    weight_decay: float = 0.0,
    clip_norm: ClipNorm = 1.0,
    batch_size: BatchSize = None,
    batch_tokens: BatchTokens = None,
    max_tokens: MaxTokens = 2048,
    too_long: Truncation = TooLong.drop,
    bin_tokens: BinTokens = None,
    max_lost_fraction: MaxLostFraction = 0.1,
    seed: int = 0,
    engine: Engine = EngineChoice.megatron,
    tp: TensorParallel = 1,
    dp: DataParallel = 1,
    layout: LayoutLabel = None,
    dtype: DtypeName = DtypeName.float32,
    eval_every: EvalEvery = 0,
    num_samples: NumSamples = 0,
    sample_tokens: SampleTokens = 64,
    checkpoint_every: CheckpointEvery = 0,
    keep_checkpoints: int = 2,
    wait: Wait = False,
    timeout: Timeout = None,
    idempotency_key: IdempotencyKey = None,
    as_json: Json = False,
) -> None:
    """Start supervised fine-tuning.

    Exit codes: 0 done, 2 usage, 100 failed, 101 not finished within --timeout, 102 not found, 103 cancelled.
    """
    _submit("sft", locals())


@app.command()
def dpo(
    context: typer.Context,
    model: Model,
    dataset: Dataset,
    eval_dataset: EvalDataset = None,
    format: Format = FormatName.auto,
    beta: Annotated[float, typer.Option(help="Strength of the pull towards the reference.")] = 0.1,
    label_smoothing: Annotated[float, typer.Option(help="The share of pairs held to be wrong.")] = 0.0,
    reference: Annotated[
        str | None,
        typer.Option(help="`base`, or URI of a published adapter; the model as the run begins with it if absent."),
    ] = None,
    name: Name = None,
    full: IsFull = False,
    lora_rank: LoraRank = None,
    lora_alpha: LoraAlpha = None,
    lora_targets: LoraTargets = None,
    initial_adapter: InitialAdapter = None,
    epochs: Epochs = None,
    steps: Steps = None,
    learning_rate: LearningRate = 1e-5,
    schedule: ScheduleName = ScheduleName.linear,
    warmup: Warmup = 0,
    weight_decay: float = 0.0,
    clip_norm: ClipNorm = 1.0,
    batch_size: Annotated[int | None, typer.Option(help="Pairs a step; 8 if --batch-tokens is absent too.")] = None,
    batch_tokens: BatchTokens = None,
    max_tokens: Annotated[int, typer.Option(help="The longest pair: its prompt and both answers.")] = 2048,
    bin_tokens: BinTokens = None,
    max_lost_fraction: MaxLostFraction = 0.1,
    seed: int = 0,
    engine: Engine = EngineChoice.megatron,
    tp: TensorParallel = 1,
    dp: DataParallel = 1,
    layout: LayoutLabel = None,
    dtype: DtypeName = DtypeName.float32,
    eval_every: EvalEvery = 0,
    num_samples: NumSamples = 0,
    sample_tokens: SampleTokens = 64,
    checkpoint_every: CheckpointEvery = 0,
    keep_checkpoints: int = 2,
    wait: Wait = False,
    timeout: Timeout = None,
    idempotency_key: IdempotencyKey = None,
    as_json: Json = False,
) -> None:
    """Start direct preference optimisation (DPO) on pairs of a chosen and a rejected answer.

    Exit codes: 0 done, 2 usage, 100 failed, 101 not finished within --timeout, 102 not found, 103 cancelled.
    """
    _submit("dpo", locals())


def _submit(kind: Literal["sft", "dpo"], options: dict[str, Any]) -> None:
    """Start a run from a command's options, by their parameters' names: those not named here are the run's fields."""
    options = {name: value.value if isinstance(value, StrEnum) else value for name, value in options.items()}
    take = options.pop
    context, wait, timeout, key = take("context"), take("wait"), take("timeout"), take("idempotency_key")
    as_json = wants_json(context, take("as_json"))
    if timeout is not None and not wait:
        raise Stop("--timeout goes with --wait", USAGE)
    sources = {"dataset": take("dataset"), "eval_dataset": take("eval_dataset")}
    reading = {name: take(name) for name in ("format", "prompt_field", "completion_field") if name in options}
    fields = {
        "model": model_uri(take("model")),
        "trainable": _trainable(take("full"), take("lora_rank"), take("lora_alpha"), take("lora_targets")),
        "warmup_steps": take("warmup"),
        "layout": layout_of(take("layout"), take("tp"), take("dp")),
        **options,
    }
    if fields["epochs"] is None and fields["steps"] is None:
        fields["epochs"] = 1.0
    if fields["batch_size"] is None and fields["batch_tokens"] is None:
        fields["batch_size"] = 8
    # Every option is checked before a file is sent anywhere.
    _checked(kind, fields | {name: {"uri": uri, **reading} for name, uri in sources.items() if uri is not None})
    with connect(context, patience_s=20) as client:
        uris = {name: dataset_uri(client, uri, f"--{name.replace('_', '-')}") for name, uri in sources.items() if uri}
        run = _checked(kind, fields | {name: {"uri": uri, **reading} for name, uri in uris.items()})
        start_run(context, client, run, key, wait=wait, timeout_s=timeout, as_json=as_json)


def start_run(
    context: typer.Context,
    client: "Client",
    run: "Run",
    idempotency_key: str | None,
    *,
    wait: bool,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Start a run, and follow it if that was asked for; or hand it to the command that wants it for later."""
    given: Globals = context.obj
    if given.take_run is not None:
        if wait or idempotency_key:
            raise Stop("--wait and --idempotency-key have no meaning here: nothing is started now", USAGE)
        given.take_run(run)
        return
    with naming_options(run.model):
        view = client.submit(run, idempotency_key or f"cli-{secrets.token_hex(16)}")
    finish(client, view, wait=wait, timeout_s=timeout_s, as_json=as_json)


def layout_of(label: str | None, tp: int, dp: int) -> dict[str, Any]:
    """A run's layout, of what was given of it."""
    from shared.errors import InvalidInput
    from shared.jobs.layout import Layout

    if label is None:
        return {"tp": tp, "dp": dp}
    if tp != 1 or dp != 1:
        raise Stop("--layout has all degrees: give it without --tp and --dp", USAGE)
    try:
        return Layout.from_label(label).model_dump()
    except InvalidInput as error:
        raise Stop(f"--{error}", USAGE) from None


def finish(client: "Client", view: "RunView", *, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Follow a run if that was asked for, print how it stands, and end with the exit code of its state."""
    if not wait:
        if as_json:
            print_json(outcome(view))
        else:
            print(view.run_id)
            say(f"started; follow it with: longshore watch {view.run_id}")
        return
    say(f"run {view.run_id}")
    try:
        view = follow(client, view, timeout_s)
        code = OF_STATE[view.state]
    except Detached as left:
        view, code = left.view, left.code
        say(attach_again(view.run_id))
    if as_json:
        print_json(outcome(view))
    else:
        print(summary(view))
    raise typer.Exit(code)


def model_uri(model: str) -> str:
    """A folder of this machine as file://; URIs and hub ids as they are."""
    path = Path(model).expanduser()
    if "://" in model:
        return model
    if path.is_dir():
        return path.resolve().as_uri()
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        advice = "give a folder, a file:// or s3:// URI, or a hub id such as org/name"
        raise Stop(f"--model: there is no folder {model}", USAGE, advice)
    return model


def dataset_uri(client: "Client", dataset: str, option: str) -> str:
    """The URI of a file of this machine, uploaded; URIs as they are."""
    file = uploaded(client, dataset, option)
    return str(file["uri"]) if file else dataset


def uploaded(client: "Client", dataset: str, option: str) -> dict[str, Any] | None:
    """The record of a file of this machine, uploaded; None for a URI. `is_new`: it did not stand there before."""
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
    record = client.upload_file(path)
    if (duration_s := time.monotonic() - start) > 1:
        say(f"uploaded {path.name} in {duration_s:.1f} s")
    return record


def lora_of(rank: int | None, alpha: float | None, targets: str | None) -> dict[str, Any]:
    """A LoRA of what was given; the rest has its defaults."""
    given = {"rank": rank, "alpha": alpha, "targets": targets.split(",") if targets else None}
    return {"kind": "lora"} | {name: value for name, value in given.items() if value is not None}


def _trainable(full: bool, rank: int | None, alpha: float | None, targets: str | None) -> dict[str, Any]:
    lora = lora_of(rank, alpha, targets)
    if not full:
        return lora
    if given := sorted(set(lora) - {"kind"}):
        raise Stop(f"--full trains every weight: --lora-{given[0]} has no meaning with it", USAGE)
    return {"kind": "full"}


def _checked(kind: Literal["sft", "dpo"], fields: dict[str, Any]) -> "SFTRun | DPORun":
    from pydantic import ValidationError

    from shared.runs.requests import DPORun, SFTRun

    try:
        return SFTRun.model_validate(fields) if kind == "sft" else DPORun.model_validate(fields)
    except ValidationError as error:
        raise usage(error) from None


def usage(error: "ValidationError") -> Stop:
    """Pydantic's first error in the words of the command line."""
    from shared.field_rules import rule_in_words

    first = error.errors()[0]
    return _wrong(_option(first["loc"]), rule_in_words(first))


@contextmanager
def naming_options(model: str) -> Iterator[None]:
    """What the service refuses of a request, in the words of the command line. `model`: the one that was named."""
    from service.cli.exits import Refused

    try:
        yield
    except Refused as refused:
        # The folder, or a file in it: by its URI or its path.
        if str(refused).startswith((model, model.removeprefix("file://"))):
            raise _wrong("--model", str(refused)) from None
        if refused.place is None or refused.place == "Idempotency-Key":
            raise
        raise _wrong(_option(refused.place.split(".")), refused.rule) from None


def _wrong(option: str, rule: str) -> Stop:
    return Stop(f"{option}: {rule}" if option else rule, USAGE, "--help lists the options")


def _option(place: Sequence[int | str]) -> str:
    """The option that a field has; nothing for the whole."""
    parts = [str(part) for part in place if part not in _GROUPS]
    name = ".".join(parts[:2]) if parts[:1] == ["held_out"] else next(iter(parts), "")
    return f"--{_OPTIONS.get(name, name).replace('_', '-')}" if name else ""
