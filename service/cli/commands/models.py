"""`models`, `chat`, `download`, `export` and `verify`: list, ask, fetch and check published models."""

import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from service.cli.command import CommandAnswer, command, group
from service.cli.downloads import deliver, destination, fetch_files, fetch_tar
from service.cli.render import DONE, FAILED, NOT_FOUND, USAGE, Stop, ago, plain, print_table, say, size, waiting

if TYPE_CHECKING:
    from activities.model_look import ModelLook
    from service.cli.client import CliClient
    from service.inference.exports import ExportView
    from service.inference.published_models import ModelView
    from service.inference.retraining import Retrained
    from shared.models.shape import LayoutBytes
    from shared.provenance import PublicKey, Statement
    from shared.storage.artifacts import FileEntry

_LOOK_EVERY_S = 1.0
app = typer.Typer(rich_markup_mode=None)
models = group(help="Published adapters and models, by name; and a check of a model's folder before any run.")
app.add_typer(models, name="models")
ModelName = Annotated[str, typer.Argument(metavar="NAME", help="`name`: its newest version; `name:v3`; `run:step-30`.")]
Into = Annotated[Path | None, typer.Option(help="The folder to write; ./NAME if absent.")]


@command(models)
def ls(client: "CliClient") -> CommandAnswer:
    """List published models: each name with its newest version."""
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
    """Show the version that a name or id refers to, and its files."""
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
        bool, typer.Option("--read-all", help="Read all weights, and report numbers that are not finite.")
    ] = False,
    lora_rank: Annotated[
        int, typer.Option(min=1, max=1024, help="Rank of the adapter whose memory is estimated.")
    ] = 16,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Precision of the weights.")] = "bfloat16",
) -> CommandAnswer:
    """Show what a run would compute for a model, the memory it needs, and unsupported features. Nothing is started.

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
            *((name, plain(rule or _trained(found, name))) for name, rule in found.conversations.items()),
        ]
        print_table(("", ""), rows)
    if found.layouts:
        print_table(("engine", "layout", "frozen", f"LoRA {lora_rank}", "all weights"), map(_layout_row, found.layouts))
        print(f"bytes of a rank in {dtype}, about, and beside them what a micro-batch holds, which a worker measures")
    for problem in found.problems:
        print(f"refused: {plain(problem)}")


def _trained(found: "ModelLook", name: str) -> str:
    return "shown" + ", but trained behind another text than the prompt" * (name in found.unlike_prompts)


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
        str | None, typer.Argument(metavar="MESSAGE", help="The message; if absent, each line of stdin is a message.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the first message.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="Sampling temperature; 0 takes the likeliest tokens.")
    ] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
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
    """The user's messages: a line each, until the end of stdin."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.rstrip("\n")


def _texts(client: "CliClient", request: dict[str, Any]) -> Iterator[str]:
    with waiting(f"waiting for a sampler of {request['model']}, which loads the model if none has it") as has_begun:
        for chunk in client.chat(request):
            has_begun()
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
        typer.Option(metavar="STEP", min=0, help="For a run: its checkpoint of this step, with the optimizer's state."),
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
    """Fetch the published model of a run id, or of a name."""
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
    merged: Annotated[
        bool, typer.Option("--merged", help="Write safetensors like the base model's, with the adapter merged.")
    ] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="Write one file for llama.cpp: Llama, Qwen2, Qwen3.")] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="Write safetensors in block-wise FP8, for vLLM.")] = False,
    mlx: Annotated[
        bool, typer.Option("--mlx", help="Write safetensors quantized in groups of 64, for mlx-lm.")
    ] = False,
    stored_as: Annotated[
        str | None, typer.Option("--type", help="Format of --gguf: q8_0 (default), f16, bf16; of --mlx: q4, q8.")
    ] = None,
    into: Into = None,
    to: Annotated[str | None, typer.Option(help="s3://BUCKET/PREFIX, written with this machine's credentials.")] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="ORG/NAME", help="A repository of the Hugging Face hub; the token is HF_TOKEN or `hf auth login`'s."
        ),
    ] = None,
) -> CommandAnswer:
    """Write a model for other programs: a whole one in their format; without a format the published files.

    The service writes the export, and stores it with the version until either is deleted.
    """
    formats = [word for word, wanted in (("merged", merged), ("gguf", gguf), ("fp8", fp8), ("mlx", mlx)) if wanted]
    if len(formats) > 1 or sum(place is not None for place in (into, to, push)) > 1:
        raise Stop("name one of --merged, --gguf, --fp8, --mlx, and one of --into, --to, --push", USAGE)
    if stored_as and not formats:
        raise Stop("--type is of --gguf or --mlx", USAGE)
    put = destination(to, push)
    path, label = f"/models/{name}", ""
    if merged and _view(client, name).kind == "model":
        say(f"{name} is a whole model already: there is nothing to merge")
    elif formats:
        view = _exported(client, name, {"format": formats[0], "type": stored_as})
        path, label = f"/models/{view.model}/exports/{view.label}", view.label
    if put is not None:
        files, place = deliver(client, path, put), str(to or push)
    else:
        target = _free(into or Path("-".join(filter(None, (name.replace(":", "-"), label)))))
        files, place = fetch_files(client, path, "files", target), str(target.resolve())
    document = {"name": name, "folder": place, "files": [each.path for each in files]}
    return CommandAnswer(document, partial(print, to or push or target))


def _exported(client: "CliClient", name: str, body: dict[str, str | None]) -> "ExportView":
    """Have the service write an export, and wait for it. Raises Stop with the reason if it failed."""
    from service.inference.exports import ExportView

    view = client.post(f"/models/{name}/exports", ExportView, is_repeatable=True, json=body)
    if view.state == "running":
        say(f"the service writes {view.label} of {view.model}; interrupted, the same command goes on with it")
    while view.state == "running":
        time.sleep(_LOOK_EVERY_S)
        view = client.get(f"/models/{view.model}/exports/{view.label}", ExportView)
    if view.error is not None:
        raise Stop(view.error)
    return view


@command(app)
def verify(
    client: "CliClient",
    name: ModelName,
    key: Annotated[
        Path | None,
        typer.Option(help="A file of public keys in PEM to trust, instead of the service's."),
    ] = None,
    retrain: Annotated[
        bool,
        typer.Option(
            "--retrain", help="Repeat some of the run's steps here and compare the results bit by bit. For operators."
        ),
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed for the choice of steps; random if absent.")] = None,
) -> CommandAnswer:
    """Check the signed statement of a version's origin, and all its files. Exit code 100 if a check fails.

    --retrain opens the installation's store with this machine's settings, and trains with its worker: the bits are the
    same if the devices are of the same kind.
    """
    from service.sealing import checked, read_key
    from shared.errors import CorruptArtifact, InvalidInput
    from shared.provenance import Envelope, PublicKey
    from shared.storage.paths import published_version

    view, tenant = _view(client, name), client.ask("GET", "/whoami")["tenant"]
    version, place = view.id, published_version(tenant, f"{view.kind}s", view.name, view.version)
    envelope = client.get(f"/models/{version}/provenance", Envelope)
    try:
        keys = client.get("/provenance/keys", tuple[PublicKey, ...]) if key is None else _keys_in(key)
        statement = checked(envelope, [read_key(each.pem) for each in keys])
    except InvalidInput as error:
        raise Stop(f"--key: {error}" if key else str(error)) from None
    except CorruptArtifact as error:
        raise Stop(f"{version}: {error}") from None
    if not statement.is_of(place):
        raise Stop(f"{version} of tenant {tenant}: the statement was signed for another version, or names none")
    with tempfile.TemporaryDirectory(prefix="longshore-verify-") as folder:
        entries = fetch_files(client, f"/models/{version}", "files", Path(folder) / "files")
        differing = statement.differing(entries)
        if differing:
            raise Stop(f"{version}: differs from the signed statement: {', '.join(differing)}")
        retrained = _retrained(statement, seed, Path(folder)) if retrain else None
    document = {"name": version, "signed_by": envelope.signatures[0].keyid, "statement": statement.model_dump()}
    document |= {} if retrained is None else {"retrained": vars(retrained) | {"equal": retrained.is_equal}}
    code = FAILED if retrained is not None and not retrained.is_equal else DONE
    shown = f"{version} of tenant {tenant}"
    return CommandAnswer(document, partial(_show_statement, shown, statement, key is not None, retrained), code)


def _keys_in(path: Path) -> "list[PublicKey]":
    from service.sealing import read_key

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Stop(f"--key: {error}", NOT_FOUND) from None
    end = "-----END PUBLIC KEY-----"
    return [read_key(f"{part}{end}\n") for part in text.split(end)[:-1]] or [read_key(text)]


def _retrained(statement: "Statement", seed: int | None, folder: Path) -> "Retrained":
    from service.inference.retraining import choose, retrain, stretches
    from shared.errors import LongshoreError
    from shared.settings import Settings
    from shared.storage.store import open_store

    settings, details = Settings(), statement.predicate.run_details
    run_id = details.metadata.invocation_id
    signed_job = next((each.digest.sha256 for each in details.byproducts if each.name == "job"), None)
    store = open_store(settings.store, settings.s3)
    (folder / "retrained").mkdir()
    try:
        chosen = choose(stretches(store, run_id, signed_job), run_id, seed)
        say(f"{chosen} are done again")
        return retrain(chosen, store, folder / "retrained")
    except LongshoreError as error:
        raise Stop(f"--retrain: {error}") from None


def _show_statement(version: str, statement: "Statement", by_own_keys: bool, retrained: "Retrained | None") -> None:
    built, details = statement.predicate.build_definition, statement.predicate.run_details
    rows = [
        ("model", version),
        ("signed", "by a key of the file" if by_own_keys else "by the key that the service says is its own"),
        ("files", f"{len(statement.subject)}, each as signed"),
        ("by the run", details.metadata.invocation_id),
        *((name, value[:16]) for name, value in details.builder.version.items()),
        *((name, plain(value)) for name, value in built.internal_parameters.items()),
        *((each.name, each.digest.sha256[:16]) for each in (*built.resolved_dependencies, *details.byproducts)),
    ]
    if retrained is not None:
        same = "the same bits" if retrained.is_equal else "OTHER BITS"
        rows.append(("done again", f"{retrained.stretch}: {same}"))
        if not retrained.is_equal and len(set(retrained.devices)) > 1:
            rows.append(("devices", "then {}, now {}".format(*map(plain, retrained.devices))))
    print_table(("", ""), rows)


def _view(client: "CliClient", name: str) -> "ModelView":
    from service.inference.published_models import ModelView

    return client.get(f"/models/{name}", ModelView)


def _free(target: Path) -> Path:
    if target.exists():
        raise Stop(f"{target} is there already", USAGE, "name another folder with --into")
    return target
