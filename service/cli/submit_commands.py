"""`longshore submit`: start a run."""

import secrets
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import Json, connect, wants_json
from service.cli.exits import OF_STATE, USAGE, Stop
from service.cli.follow import Detached, attach_again, follow
from service.cli.render import outcome, print_json, say, summary

if TYPE_CHECKING:
    from pydantic import ValidationError

    from service.cli.client import Client
    from service.run_views import RunView
    from shared.runs import SFTRun

# Fields whose option has another name.
_OPTIONS = {
    "warmup_steps": "warmup",
    "num_samples": "samples",
    "rank": "lora-rank",
    "alpha": "lora-alpha",
    "targets": "lora-targets",
    "source": "dataset",
    "model_uri": "model",
}
app = typer.Typer(help="Start a run.", no_args_is_help=True, rich_markup_mode=None)


class ScheduleName(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class DtypeName(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class FormatName(StrEnum):
    auto = "auto"
    chat = "chat"
    prompt_completion = "prompt_completion"
    alpaca = "alpaca"
    sharegpt = "sharegpt"
    text = "text"
    tokenized = "tokenized"


class TooLong(StrEnum):
    drop = "drop"
    truncate = "truncate"


Model = Annotated[str, typer.Option("--model", "-m", help="A folder, a file:// or s3:// URI, or a hub id.")]
Dataset = Annotated[
    str, typer.Option("--dataset", "-d", help="A file (uploaded), or a file://, s3:// or https:// URI.")
]
Format = Annotated[FormatName, typer.Option("--format", help="How rows are written.")]
PromptField = Annotated[str | None, typer.Option("--prompt-field", help="The field that holds the prompt.")]
CompletionField = Annotated[str | None, typer.Option("--completion-field", help="The field that holds the answer.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="The longest example.")]
Truncation = Annotated[TooLong, typer.Option("--too-long", help="What happens to longer examples.")]


@app.callback()
def _group() -> None:
    """`sft` is here, `rl` in rl_commands.py."""


@app.command()
def sft(
    context: typer.Context,
    model: Model,
    dataset: Dataset,
    eval_dataset: Annotated[str | None, typer.Option(help="Held-out examples, like --dataset.")] = None,
    format: Format = FormatName.auto,
    prompt_field: PromptField = None,
    completion_field: CompletionField = None,
    name: Annotated[str | None, typer.Option(help="What the adapter is published as; the run's id if absent.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Train every weight instead of a LoRA adapter.")] = False,
    lora_rank: Annotated[int | None, typer.Option(help="Default 16.")] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="Default 32.")] = None,
    lora_targets: Annotated[
        str | None, typer.Option(help="Comma-separated, such as q_proj,v_proj; default all.")
    ] = None,
    initial_adapter: Annotated[str | None, typer.Option(help="URI of a published adapter to go on from.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data; 1 if --steps is absent too.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of --epochs.")] = None,
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr")] = 1e-4,
    schedule: ScheduleName = ScheduleName.linear,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 0,
    weight_decay: float = 0.0,
    clip_norm: Annotated[float, typer.Option(help="Bound of the global gradient norm; 0 for none.")] = 1.0,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step; 8 if --batch-tokens is absent too.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens a step, instead of --batch-size.")] = None,
    max_tokens: MaxTokens = 2048,
    too_long: Truncation = TooLong.drop,
    bin_tokens: Annotated[int | None, typer.Option(help="Tokens of a micro-batch; --max-tokens if absent.")] = None,
    max_lost_fraction: Annotated[float, typer.Option(help="Refuse when more rows than this are lost.")] = 0.1,
    seed: int = 0,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 1,
    dtype: DtypeName = DtypeName.float32,
    eval_every: Annotated[int, typer.Option(help="Steps; 0: before and after only.")] = 0,
    num_samples: Annotated[int, typer.Option("--samples", help="Greedy completions at each evaluation.")] = 0,
    sample_tokens: Annotated[int, typer.Option(help="Longest greedy completion.")] = 64,
    checkpoint_every: Annotated[int, typer.Option(help="Steps; 0: a tenth of the run.")] = 0,
    keep_checkpoints: int = 2,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
    timeout: Annotated[float | None, typer.Option(help="With --wait: seconds until exit code 101.")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key gives the same run.")] = None,
    as_json: Json = False,
) -> None:
    """Start supervised fine-tuning.

    Exit codes: 0 done, 2 usage, 100 failed, 101 not finished within --timeout, 102 not found, 103 cancelled.
    """
    if timeout is not None and not wait:
        raise Stop("--timeout goes with --wait", USAGE)
    fields: dict[str, Any] = {
        "name": name,
        "model": model_uri(model),
        "trainable": _trainable(full, lora_rank, lora_alpha, lora_targets),
        "initial_adapter": initial_adapter,
        "epochs": 1.0 if epochs is None and steps is None else epochs,
        "steps": steps,
        "learning_rate": learning_rate,
        "schedule": schedule.value,
        "warmup_steps": warmup,
        "weight_decay": weight_decay,
        "clip_norm": clip_norm,
        "batch_size": 8 if batch_size is None and batch_tokens is None else batch_size,
        "batch_tokens": batch_tokens,
        "max_tokens": max_tokens,
        "too_long": too_long.value,
        "bin_tokens": bin_tokens,
        "max_lost_fraction": max_lost_fraction,
        "seed": seed,
        "layout": {"tp": tp, "dp": dp},
        "dtype": dtype.value,
        "eval_every": eval_every,
        "num_samples": num_samples,
        "sample_tokens": sample_tokens,
        "checkpoint_every": checkpoint_every,
        "keep_checkpoints": keep_checkpoints,
    }
    sources = {"dataset": dataset, "eval_dataset": eval_dataset}
    reading = {"format": format.value, "prompt_field": prompt_field, "completion_field": completion_field}
    # Every option is checked before a file is sent anywhere.
    _checked(fields | {name: {"uri": uri, **reading} for name, uri in sources.items() if uri is not None})
    with connect(context, patience_s=20) as client:
        uris = {name: dataset_uri(client, uri, f"--{name.replace('_', '-')}") for name, uri in sources.items() if uri}
        run = _checked(fields | {name: {"uri": uri, **reading} for name, uri in uris.items()})
        view = client.submit_sft(run, idempotency_key or f"cli-{secrets.token_hex(16)}")
        finish(client, view, wait=wait, timeout_s=timeout, as_json=wants_json(context, as_json))


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
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise Stop(f"--model: there is no folder {model}", USAGE)
    return model


def dataset_uri(client: "Client", dataset: str, option: str) -> str:
    """A file of this machine, uploaded; URIs as they are."""
    if "://" in dataset:
        return dataset
    path = Path(dataset).expanduser()
    if path.is_dir():
        raise Stop(f"{option}: {dataset} is a folder; give a file, or an s3:// prefix", USAGE)
    if not path.is_file():
        raise Stop(f"{option}: there is no file {dataset}", USAGE)
    if not path.stat().st_size:
        raise Stop(f"{option}: {dataset} is empty", USAGE)
    start = time.monotonic()
    uri = client.upload(path)
    if (duration_s := time.monotonic() - start) > 1:
        say(f"uploaded {path.name} in {duration_s:.1f} s")
    return uri


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


def _checked(fields: dict[str, Any]) -> "SFTRun":
    from pydantic import ValidationError

    from shared.runs import SFTRun

    try:
        return SFTRun.model_validate(fields)
    except ValidationError as error:
        raise usage(error) from None


def usage(error: "ValidationError") -> Stop:
    """Pydantic's first error in the words of the command line."""
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"] if part not in ("trainable", "lora", "full", "layout")]
    rule = first["msg"].removeprefix("Value error, ")
    option = f"--{_OPTIONS.get(parts[0], parts[0]).replace('_', '-')}: " if parts else ""
    return Stop(f"{option}{rule}", USAGE, "--help lists the options")
