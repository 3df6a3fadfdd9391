"""`models`, `chat`, `download` and `export`: what runs published, asked and fetched."""

import hashlib
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from service.cli.command import CommandAnswer, command, group
from service.cli.exits import DONE, FAILED, NOT_FOUND, USAGE, Stop
from service.cli.output.fetching import Body, fetch_files, fetch_tar, fetched
from service.cli.output.render import ago, plain, print_table, say, size

if TYPE_CHECKING:
    from activities.model_look import ModelLook
    from service.cli.client import CliClient
    from service.inference.published_models import ModelView
    from shared.models.memory import LayoutBytes
    from shared.models.merging import Merger
    from shared.storage.artifacts import FileEntry

_SAFETENSORS = ".safetensors"
app = typer.Typer(rich_markup_mode=None)
models = group(help="What runs published: adapters and models, by name; and a look at a folder before any run.")
app.add_typer(models, name="models")
ModelName = Annotated[str, typer.Argument(metavar="NAME", help="`name`: its newest version; `name:v3`; `run:step-30`.")]
Into = Annotated[Path | None, typer.Option(help="The folder to make; ./NAME if absent.")]


@command(models)
def ls(client: "CliClient") -> CommandAnswer:
    """List what was published: each name with its newest version."""
    from service.inference.published_models import ModelView

    found = client.get("/models", tuple[ModelView, ...])

    def show() -> None:
        rows = ((m.id, m.kind, plain(m.base or ""), m.run_id, ago(m.created_at)) for m in found)
        print_table(("model", "", "trained from", "run", "submitted"), rows)

    return CommandAnswer(
        found, show if found else partial(say, "nothing is published; a run publishes when it succeeds")
    )


@command(models)
def show(client: "CliClient", name: ModelName) -> CommandAnswer:
    """Show what a name stands for, and its files."""
    from shared.storage.artifacts import FileEntry

    view = _view(client, name)
    files = client.get(f"/models/{name}/files", tuple[FileEntry, ...])

    def show() -> None:
        rows = [
            ("model", view.id),
            ("kind", view.kind),
            ("versions", ", ".join(f"v{version}" for version in view.versions)),
            ("trained from", plain(view.base)),
            ("by the run", view.run_id),
            ("size", size(view.num_bytes or 0)),
        ]
        print_table(("", ""), [row for row in rows if row[1]])
        print_table(("file", "bytes"), ((plain(each.path), f"{each.size:,}") for each in files))

    return CommandAnswer(view.model_dump() | {"files": files}, show)


@command(models)
def rm(client: "CliClient", name: ModelName) -> CommandAnswer:
    """Delete one version (`name:v3`), or all of a name. Their numbers are not given again."""
    deleted = client.ask("DELETE", f"/models/{name}")
    return CommandAnswer(deleted, partial(say, f"{name} is deleted"))


@command(models)
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model's folder on this machine.")],
    read_all: Annotated[
        bool, typer.Option("--read-all", help="Read all weights, and look for numbers that are not finite.")
    ] = False,
    lora_rank: Annotated[int, typer.Option(min=1, max=1024, help="Of the adapter whose memory is estimated.")] = 16,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of the weights.")] = "bfloat16",
) -> CommandAnswer:
    """Say what a run would compute of a model, how much memory it wants, and what is refused. Nothing is started.

    Exit code 100 if a run would refuse it.
    """
    from activities.model_look import look_at
    from longshore.training import Lora
    from shared.errors import InvalidInput

    try:
        found = look_at(folder, Lora(rank=lora_rank), dtype, read_all)
    except InvalidInput as error:
        raise Stop(str(error), NOT_FOUND) from None
    return CommandAnswer(found, partial(_show_look, found, lora_rank, dtype), FAILED if found.problems else DONE)


def _show_look(found: "ModelLook", lora_rank: int, dtype: str) -> None:
    if (shape := found.shape) is not None:
        experts = f", {shape.num_experts} experts" if shape.num_experts else ""
        rows = [
            ("family", f"{shape.family}: {shape.num_layers} layers of {shape.hidden_size}{experts}"),
            *([("parameters", f"{found.num_parameters:,}")] if found.num_parameters else ()),
            ("LoRA targets", ", ".join(f"{num} {name}" for name, num in found.targets.items())),
            *([("answers end with", plain(" ".join(found.stops)))] if found.stops else ()),
            *((name, plain(rule or "shown")) for name, rule in found.conversations.items()),
        ]
        print_table(("", ""), rows)
    if found.layouts:
        print_table(("engine", "layout", "frozen", f"LoRA {lora_rank}", "all weights"), map(_layout_row, found.layouts))
        print(f"bytes of a rank in {dtype}, about, and beside them what a micro-batch holds, which a worker measures")
    for problem in found.problems:
        print(f"refused: {plain(problem)}")


def _layout_row(row: "LayoutBytes") -> tuple[str, ...]:
    if row.refused is not None:
        return row.engine, row.layout, f"refused: {row.refused}", "", ""
    return row.engine, row.layout, size(row.base_bytes), size(row.lora_bytes), size(row.full_bytes)


@command(app)
def chat(
    client: "CliClient",
    as_json: bool,
    name: ModelName,
    message: Annotated[
        str | None, typer.Argument(metavar="MESSAGE", help="What is said; absent: lines of stdin, one after another.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: the likeliest tokens.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
) -> CommandAnswer | None:
    """Talk to a published model; its answers are printed as they are drawn."""
    said: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    settings = {"model": name, "temperature": temperature, "max_tokens": max_tokens}
    for text in [message] if message is not None else _lines():
        said.append({"role": "user", "content": text})
        answer = ""
        for part in _texts(client, settings | {"messages": said}):
            answer += part
            if not as_json:
                print(part, end="", flush=True)
        if not as_json:
            print()
        said.append({"role": "assistant", "content": answer})
    return CommandAnswer(said, lambda: None)


def _lines() -> Iterator[str]:
    """What a user says: a line each, until the end of stdin."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.rstrip("\n")


def _texts(client: "CliClient", request: dict[str, Any]) -> Iterator[str]:
    for chunk in client.chat(request):
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""


@command(app)
def download(
    client: "CliClient",
    name: Annotated[
        str,
        typer.Argument(metavar="NAME|RUN", help="A published name, also `name:v3` or `run:step-30`; or a run's id."),
    ],
    into: Into = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="Of a run: its checkpoint of this step, optimizer and all."),
    ] = None,
) -> CommandAnswer:
    """Download an adapter (a PEFT folder), a model, or a checkpoint, and check the hash of every file."""
    target = _free(into or Path(name.replace(":", "-") + ("" if checkpoint is None else f"-step-{checkpoint}")))
    if checkpoint is not None:
        files = _fetch_checkpoint(client, name, checkpoint, target)
    else:
        files = _fetch(client, name, target)
    document = {"name": name, "folder": str(target.resolve()), "files": [each.model_dump() for each in files]}
    return CommandAnswer(document, partial(print, target))


def _fetch(client: "CliClient", name: str, target: Path) -> "tuple[FileEntry, ...]":
    """Fetch what a run of this id published; or what has this name."""
    if ":" not in name:
        try:
            return fetch_tar(client, f"/runs/{name}/download", name, target)
        except Stop as stop:
            if stop.code != NOT_FOUND:
                raise
    try:
        return fetch_files(client, f"/models/{name}", "files", target)
    except Stop as stop:
        if stop.code != NOT_FOUND:
            raise
        advice = "`longshore models ls` shows what is published, `longshore ls` the runs"
        raise Stop(f"there is no run {name}, and nothing is published as {name}", NOT_FOUND, advice) from None


def _fetch_checkpoint(client: "CliClient", run_id: str, step: int, target: Path) -> "tuple[FileEntry, ...]":
    """Fetch a run's checkpoint; of a step that two workers saved, the newer one."""
    from shared.runs.status import CheckpointRef

    found = client.get(f"/runs/{run_id}/checkpoints", tuple[CheckpointRef, ...])
    labels = [each.fence.label for each in found if each.step == step]
    if not labels:
        there = ", ".join(sorted({str(each.step) for each in found}, key=int)) or "none"
        raise Stop(f"--checkpoint: {run_id} keeps no checkpoint of step {step}; it has: {there}", NOT_FOUND)
    folder = f"{run_id}-{max(labels)}-step-{step}"
    return fetch_tar(client, f"/runs/{run_id}/checkpoints/{max(labels)}/{step}/download", folder, target)


@command(app)
def export(
    client: "CliClient",
    name: ModelName,
    merged: Annotated[bool, typer.Option("--merged", help="An adapter merged into its base: a whole model.")] = False,
    into: Into = None,
) -> CommandAnswer:
    """Write a model for other programs: with --merged a whole one, in safetensors, merged as it is downloaded.

    Weights pass through in blocks of a few megabytes: only the adapter is held in memory.
    """
    target = _free(into or Path(name.replace(":", "-") + ("-merged" if merged else "")))
    if merged and _view(client, name).kind == "model":
        say(f"{name} is a whole model already: there is nothing to merge")
        merged = False
    files = _merge(client, name, target) if merged else fetch_files(client, f"/models/{name}", "files", target)
    document = {"name": name, "folder": str(target.resolve()), "files": [each.path for each in files]}
    return CommandAnswer(document, partial(print, target))


def _merge(client: "CliClient", name: str, target: Path) -> "tuple[FileEntry, ...]":
    """Write the base model's files with the adapter in them.

    Raises:
        Stop: a file has another hash than the service says, or the adapter does not fit. Nothing is left behind.
    """
    from shared.errors import InvalidInput
    from shared.storage.artifacts import FileEntry

    entries = client.get(f"/models/{name}/base", tuple[FileEntry, ...])
    try:
        with fetched(target) as folder:
            merger = _merger(client, name, folder.with_name("adapter"))
            folder.mkdir()
            for entry in entries:
                path = f"/models/{name}/base/{entry.path}"
                if entry.path.endswith(_SAFETENSORS):
                    _merge_file(client, path, entry, merger, folder / entry.path)
                else:
                    client.save(path, folder / entry.path)
                    _check(hashlib.sha256((folder / entry.path).read_bytes()).hexdigest(), entry)
            merger.check_used(name)
            _keep_end_tokens(folder.with_name("adapter"), folder)
    except InvalidInput as error:
        raise Stop(str(error)) from None
    return entries


def _keep_end_tokens(adapter: Path, folder: Path) -> None:
    """Give the merged model the adapter's generation config, where it has one: it names what ends trained answers."""
    from shared.models.end_tokens import GENERATION

    if (adapter / GENERATION).exists():
        shutil.copyfile(adapter / GENERATION, folder / GENERATION)


def _merger(client: "CliClient", name: str, folder: Path) -> "Merger":
    from shared.models.merging import Merger
    from shared.models.peft import WEIGHTS, read_config

    fetch_files(client, f"/models/{name}", "files", folder)
    with (folder / WEIGHTS).open("rb") as weights:
        return Merger.of(read_config(folder), weights, WEIGHTS)


def _merge_file(client: "CliClient", path: str, entry: "FileEntry", merger: "Merger", target: Path) -> None:
    with client.body(path) as chunks, target.open("wb") as file:
        body = Body(chunks)
        merger.merge(body, file, entry.path)
        _check(body.sha256(), entry)


def _check(sha256: str, entry: "FileEntry") -> None:
    if sha256 != entry.sha256:
        raise Stop(f"{entry.path}: the SHA-256 is not the manifest's", advice="try it again")


def _view(client: "CliClient", name: str) -> "ModelView":
    from service.inference.published_models import ModelView

    return client.get(f"/models/{name}", ModelView)


def _free(target: Path) -> Path:
    if target.exists():
        raise Stop(f"{target} is there already", USAGE, "name another folder with --into")
    return target
