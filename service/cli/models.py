"""`models`, `chat`, `download`, `export`, `verify` and `episode`: list, ask, fetch and check published models."""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import longshore
from service.cli import command as cli

if TYPE_CHECKING:
    from activities.model_look import ModelLook
    from longshore import Client, Export
    from longshore.views import EpisodeTurnView, EpisodeView, ExportView, FileEntry, PublicKey
    from service.inference.retraining import Retrained
    from shared.models.shape import LayoutBytes
    from shared.provenance import Statement

_LOOK_EVERY_S = 1.0
app = typer.Typer(rich_markup_mode=None)
models = cli.group(help="Published adapters and models, by name; and a check of a model's folder before any run.")
app.add_typer(models, name="models")
ModelName = Annotated[str, typer.Argument(metavar="NAME", help="`name`: its newest version; `name:v3`; `run:step-30`.")]
Into = Annotated[Path | None, typer.Option(help="The folder to write; ./NAME if absent.")]


@cli.command(models)
def ls(client: "Client") -> cli.CommandAnswer:
    """List published models: each name with its newest version."""
    found = client.models.list()
    columns = {"model": "id", "": "kind", "trained from": "base", "run": "run_id", "submitted": "created_at"}
    nothing = partial(cli.say, "nothing is published; a run publishes when it succeeds")
    return cli.CommandAnswer(found, partial(cli.print_items, found, columns) if found else nothing)


@cli.command(models)
def show(client: "Client", name: ModelName) -> cli.CommandAnswer:
    """Show the version that a name or id refers to, and its files."""
    view, files = client.models.get(name), client.models.files(name)

    def show() -> None:
        rows = [
            ("model", view.id),
            ("kind", view.kind),
            ("versions", ", ".join(f"v{version}" for version in view.versions)),
            ("trained from", cli.plain(view.base)),
            ("by the run", view.run_id),
            ("size", cli.size(view.num_bytes or 0)),
        ]
        cli.print_table(("", ""), [row for row in rows if row[1]])
        cli.print_items(files, {"file": "path", "bytes": "size"})

    return cli.CommandAnswer(view.model_dump() | {"files": files}, show)


cli.by_id(
    *(models, "rm", ModelName, lambda client, name: client.models.delete(name)),
    lambda name, _: cli.say(f"{name} is deleted"),
    "Delete one version (`name:v3`), or all of a name. Their numbers are not given again.",
)


@cli.command(models)
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model's folder on this machine.")],
    read_all: Annotated[
        bool, typer.Option("--read-all", help="Read all weights, and report numbers that are not finite.")
    ] = False,
    lora_rank: Annotated[
        int, typer.Option(min=1, max=1024, help="Rank of the adapter whose memory is estimated.")
    ] = 16,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Precision of the weights.")] = "bfloat16",
) -> cli.CommandAnswer:
    """Show what a run would compute for a model, the memory it needs, and unsupported features. Nothing is started.

    Exit code 100 if a run would refuse it.
    """
    from activities.model_look import look_at
    from longshore.training import Lora
    from shared.errors import InvalidInput

    try:
        found = look_at(folder, Lora(rank=lora_rank), dtype, read_all)
    except InvalidInput as error:
        raise cli.Stop(str(error), cli.NOT_FOUND) from None
    return cli.CommandAnswer(
        found, partial(_show_look, found, lora_rank, dtype), cli.FAILED if found.problems else cli.DONE
    )


def _show_look(found: "ModelLook", lora_rank: int, dtype: str) -> None:
    if (shape := found.shape) is not None:
        experts = f", {shape.num_experts} experts" if shape.num_experts else ""
        rows = [
            ("family", f"{shape.family}: {shape.num_layers} layers of {shape.hidden_size}{experts}"),
            *([("parameters", f"{found.num_parameters:,}")] if found.num_parameters else ()),
            ("LoRA targets", ", ".join(f"{num} {name}" for name, num in found.targets.items())),
            *([("answers end with", cli.plain(" ".join(found.stops)))] if found.stops else ()),
            *((name, cli.plain(rule or _trained(found, name))) for name, rule in found.conversations.items()),
        ]
        cli.print_table(("", ""), rows)
    if found.layouts:
        cli.print_table(
            ("engine", "layout", "frozen", f"LoRA {lora_rank}", "all weights"), map(_layout_row, found.layouts)
        )
        print(f"bytes of a rank in {dtype}, about, and beside them what a micro-batch holds, which a worker measures")
    for problem in found.problems:
        print(f"refused: {cli.plain(problem)}")


def _trained(found: "ModelLook", name: str) -> str:
    return "shown" + ", but trained behind another text than the prompt" * (name in found.unlike_prompts)


def _layout_row(row: "LayoutBytes") -> tuple[str, ...]:
    if row.refused is not None:
        return row.engine, row.layout, f"refused: {row.refused}", "", ""
    return row.engine, row.layout, cli.size(row.base_bytes), cli.size(row.lora_bytes), cli.size(row.full_bytes)


@cli.command(app)
def chat(
    client: "Client",
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
) -> cli.CommandAnswer | None:
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
    return cli.CommandAnswer(said, lambda: None)


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


def _texts(client: "Client", request: dict[str, Any]) -> Iterator[str]:
    with cli.waiting(f"waiting for a sampler of {request['model']}, which loads the model if none has it") as has_begun:
        for chunk in client.chat(request):
            has_begun()
            for choice in chunk["choices"]:
                yield choice["delta"].get("content") or ""


@cli.command(app)
def download(
    client: "Client",
    name: Annotated[
        str,
        typer.Argument(metavar="NAME|RUN", help="A published name, also `name:v3` or `run:step-30`; or a run's id."),
    ],
    into: Into = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="For a run: its checkpoint of this step, with the optimizer's state."),
    ] = None,
) -> cli.CommandAnswer:
    """Download an adapter (a PEFT folder), a model, or a checkpoint, and check the hash of every file."""
    target = _free(into or Path(name.replace(":", "-") + ("" if checkpoint is None else f"-step-{checkpoint}")))
    if checkpoint is not None:
        files = _fetch_checkpoint(client, name, checkpoint, target)
    else:
        files = _fetch(client, name, target)
    document = {"name": name, "folder": str(target.resolve()), "files": [each.model_dump() for each in files]}
    return cli.CommandAnswer(document, partial(print, target))


def _fetch(client: "Client", name: str, target: Path) -> "tuple[FileEntry, ...]":
    """Fetch the published model of a run id, or of a name."""
    if ":" not in name:
        with suppress(longshore.NotFound):
            return client.runs.download(name, target)
    try:
        return client.models.download(name, target)
    except longshore.NotFound:
        advice = "`longshore models ls` shows what is published, `longshore ls` the runs"
        raise cli.Stop(f"there is no run {name}, and nothing is published as {name}", cli.NOT_FOUND, advice) from None


def _fetch_checkpoint(client: "Client", run_id: str, step: int, target: Path) -> "tuple[FileEntry, ...]":
    """Fetch a run's checkpoint, and check it against its manifest; of a step that two workers saved, the newer one.

    Raises Stop: a file is missing, or has another hash than in the manifest. Nothing is left behind.
    """
    from shared.storage.artifacts import Manifest, sha256_file
    from shared.storage.paths import MANIFEST

    found = client.runs.checkpoints(run_id)
    labels = [each.fence.label for each in found if each.step == step]
    if not labels:
        there = ", ".join(sorted({str(each.step) for each in found}, key=int)) or "none"
        raise cli.Stop(f"--checkpoint: {run_id} keeps no checkpoint of step {step}; it has: {there}", cli.NOT_FOUND)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        folder = Path(temporary) / f"{run_id}-{max(labels)}-step-{step}"
        tar = client.runs.save_checkpoint(run_id, max(labels), step, Path(temporary) / "download.tar")
        try:
            with tarfile.open(tar) as archive:
                archive.extractall(temporary, filter="data")
            manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
            for entry in manifest.files:
                if sha256_file(folder / entry.path) != entry.sha256:
                    raise cli.Stop(f"{entry.path}: the SHA-256 is not the manifest's", advice="try the download again")
        except (tarfile.TarError, FileNotFoundError) as error:
            raise cli.Stop(f"the download is incomplete: {error}", advice="try it again") from None
        folder.rename(target)
    return manifest.files


@cli.command(app)
def export(
    client: "Client",
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
) -> cli.CommandAnswer:
    """Write a model for other programs: a whole one in their format; without a format the published files.

    The service writes the export, and stores it with the version until either is deleted.
    """
    formats = [word for word, wanted in (("merged", merged), ("gguf", gguf), ("fp8", fp8), ("mlx", mlx)) if wanted]
    if len(formats) > 1 or sum(place is not None for place in (into, to, push)) > 1:
        raise cli.Stop("name one of --merged, --gguf, --fp8, --mlx, and one of --into, --to, --push", cli.USAGE)
    if stored_as and not formats:
        raise cli.Stop("--type is of --gguf or --mlx", cli.USAGE)
    with _told():
        put = _s3(to) if to is not None else None if push is None else _hub(push)
    of, label = name, None
    if merged and client.models.get(name).kind == "model":
        cli.say(f"{name} is a whole model already: there is nothing to merge")
    elif formats:
        view = _exported(client, name, cli.checked(longshore.Export, {"format": formats[0], "type": stored_as}))
        of, label = view.model, view.label
    if put is not None:
        files, place = _deliver(client, of, label, put), str(to or push)
    else:
        target = _free(into or Path("-".join(filter(None, (name.replace(":", "-"), label)))))
        files, place = client.models.download(of, target, label), str(target.resolve())
    document = {"name": name, "folder": place, "files": [each.path for each in files]}
    return cli.CommandAnswer(document, partial(print, to or push or target))


def _exported(client: "Client", name: str, asked: "Export") -> "ExportView":
    """Have the service write an export, and wait for it. Raises Stop with the reason if it failed."""
    view = client.models.export(name, asked)
    if view.state == "running":
        cli.say(f"the service writes {view.label} of {view.model}; interrupted, the same command goes on with it")
    while view.state == "running":
        time.sleep(_LOOK_EVERY_S)
        view = client.models.get_export(view.model, view.label)
    if view.error is not None:
        raise cli.Stop(view.error)
    return view


@cli.command(app)
def verify(
    client: "Client",
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
) -> cli.CommandAnswer:
    """Check the signed statement of a version's origin, and all its files. Exit code 100 if a check fails.

    --retrain opens the installation's store with this machine's settings, and trains with its worker: the bits are the
    same if the devices are of the same kind.
    """
    from service.sealing import checked as signed_statement
    from service.sealing import read_key
    from shared.errors import CorruptArtifact, InvalidInput
    from shared.storage.paths import published_version

    view, tenant = client.models.get(name), client.whoami().tenant
    version, place = view.id, published_version(tenant, f"{view.kind}s", view.name, view.version)
    envelope = client.models.provenance(version)
    try:
        keys = client.models.public_keys() if key is None else _keys_in(key)
        statement = signed_statement(envelope, [read_key(each.pem) for each in keys])
    except InvalidInput as error:
        raise cli.Stop(f"--key: {error}" if key else str(error)) from None
    except CorruptArtifact as error:
        raise cli.Stop(f"{version}: {error}") from None
    if not statement.is_of(place):
        raise cli.Stop(f"{version} of tenant {tenant}: the statement was signed for another version, or names none")
    with tempfile.TemporaryDirectory(prefix="longshore-verify-") as folder:
        entries = client.models.download(version, Path(folder) / "files")
        differing = statement.differing(entries)
        if differing:
            raise cli.Stop(f"{version}: differs from the signed statement: {', '.join(differing)}")
        retrained = _retrained(statement, seed, Path(folder)) if retrain else None
    document = {"name": version, "signed_by": envelope.signatures[0].keyid, "statement": statement.model_dump()}
    document |= {} if retrained is None else {"retrained": vars(retrained) | {"equal": retrained.is_equal}}
    code = cli.FAILED if retrained is not None and not retrained.is_equal else cli.DONE
    shown = f"{version} of tenant {tenant}"
    return cli.CommandAnswer(document, partial(_show_statement, shown, statement, key is not None, retrained), code)


def _keys_in(path: Path) -> "list[PublicKey]":
    from service.sealing import read_key

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise cli.Stop(f"--key: {error}", cli.NOT_FOUND) from None
    end = "-----END PUBLIC KEY-----"
    return [read_key(f"{part}{end}\n") for part in text.split(end)[:-1]] or [read_key(text)]


def _retrained(statement: "Statement", seed: int | None, folder: Path) -> "Retrained":
    from service.inference.retraining import choose, retrain, stretches
    from shared.errors import LongshoreError
    from shared.settings import Settings
    from shared.storage.store import open_store

    settings, run_id = Settings(), statement.run_id
    store = open_store(settings.store, settings.s3)
    (folder / "retrained").mkdir()
    try:
        chosen = choose(stretches(store, run_id, dict(statement.causes).get("job")), run_id, seed)
        cli.say(f"{chosen} are done again")
        return retrain(chosen, store, folder / "retrained")
    except LongshoreError as error:
        raise cli.Stop(f"--retrain: {error}") from None


def _show_statement(version: str, statement: "Statement", by_own_keys: bool, retrained: "Retrained | None") -> None:
    rows = [
        ("model", version),
        ("signed", "by a key of the file" if by_own_keys else "by the key that the service says is its own"),
        ("files", f"{len(statement.subject)}, each as signed"),
        ("by the run", statement.run_id),
        *((name, value[:16] if len(value) == 64 else cli.plain(value)) for name, value in statement.causes),  # a hash
    ]
    if retrained is not None:
        same = "the same bits" if retrained.is_equal else "OTHER BITS"
        rows.append(("done again", f"{retrained.stretch}: {same}"))
        if not retrained.is_equal and len(set(retrained.devices)) > 1:
            rows.append(("devices", "then {}, now {}".format(*map(cli.plain, retrained.devices))))
    cli.print_table(("", ""), rows)


def _free(target: Path) -> Path:
    if target.exists():
        raise cli.Stop(f"{target} is there already", cli.USAGE, "name another folder with --into")
    return target


# --- Delivering ---
# Copies files from the service to S3 or the Hugging Face hub, with this machine's credentials, one at a time.
#
# boto3 and huggingface_hub find the credentials themselves. These are never sent to the service, nor passed as process
# arguments.

Put = Callable[[Path, str], object]
"""Takes a file here, and its path at the destination."""


def _deliver(client: "Client", name: str, export: str | None, put: Put) -> "tuple[FileEntry, ...]":
    """Pass on the files that `path/files` lists, each checked against its hash. One file at a time is on this disk."""
    entries = client.models.files(name) if export is None else client.models.export_files(name, export)
    from shared.storage.artifacts import sha256_file

    for entry in entries:
        with tempfile.TemporaryDirectory(prefix="longshore-export-") as folder:
            file = Path(folder) / entry.path
            file.parent.mkdir(parents=True, exist_ok=True)
            if export is None:
                client.models.save_file(name, entry.path, file)
            else:
                client.models.save_export_file(name, export, entry.path, file)
            if sha256_file(file) != entry.sha256:
                raise cli.Stop(f"{entry.path}: the SHA-256 is not the manifest's", advice="try it again")
            with _told():
                put(file, entry.path)
        cli.say(f"{entry.path} is there")
    return entries


def _s3(uri: str) -> Put:
    from shared.storage.store import S3Store, open_store

    store = open_store(uri, cli.read_settings().s3)
    if not isinstance(store, S3Store):
        raise cli.Stop(f"--to: {uri} is no s3:// URI; a folder is named with --into", cli.USAGE)
    return lambda file, path: store.put_file(path, file)


def _hub(repository: str) -> Put:
    from huggingface_hub import HfApi, get_token

    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", repository, re.ASCII):
        raise cli.Stop(
            "--push: a repository of the hub is ORG/NAME: letters, digits, dots, dashes, underscores", cli.USAGE
        )
    if (token := get_token()) is None:
        raise cli.Stop(
            "--push: there is no token for the hub", cli.USAGE, "set HF_TOKEN, or sign in with `hf auth login`"
        )
    api = HfApi(token=token)
    api.create_repo(repository, private=True, exist_ok=True)
    return lambda file, path: api.upload_file(path_or_fileobj=file, path_in_repo=path, repo_id=repository)


@contextmanager
def _told() -> Iterator[None]:
    """Raise the errors of S3 and of the hub as Stop, without the content of their requests."""
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError

    from shared.errors import LongshoreError

    try:
        yield
    except LongshoreError as error:
        raise cli.Stop(f"--to: {error}") from None
    except HfHubHTTPError as error:
        problem = f"the hub answers {error.response.status_code} to {error.response.url.path}"
        raise cli.Stop(f"--push: {problem}") from None
    except (HTTPError, ValueError) as error:
        raise cli.Stop(f"--push: {type(error).__name__} from the hub's library") from None


# --- `longshore episode`: addresses at which agents ask a model, and what was said there ---

_AGENT_EXAMPLES = """\b
Examples:
  longshore episode run harbour -- claude -p "How many crates are on quay 3?"
  longshore episode run harbour --temperature 0.7 -- python my_agent.py
  longshore episode show ep-…
"""
episode = cli.group(help="Let agents ask a model at addresses of their own, to be trained on.", epilog=_AGENT_EXAMPLES)
app.add_typer(episode, name="episode")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A published model, or a base model, by name.")]
EpisodeId = Annotated[str, typer.Argument(metavar="EPISODE", help="The episode's id.")]
Temperature = Annotated[float, typer.Option(help="Of every answer, whatever the agent asks for.")]
MaxTokens = Annotated[int | None, typer.Option(help="Of an answer; the agent may ask for fewer.")]
Lasts = Annotated[str, typer.Option(metavar="TIME", help="Until it ends by itself, such as 90m.")]
Seed = Annotated[int | None, typer.Option(help="Of its answers; by default a random one.")]
_EPISODE_COLUMNS: dict[str, Any] = {
    **{"episode": "episode_id", "model": "model", "state": "state"},
    "turns": lambda one: _num_turns(one),
}


@cli.command(episode)
def begin(
    client: "Client",
    model: Model,
    temperature: Temperature = 1.0,
    max_tokens: MaxTokens = None,
    lasts: Lasts = "1h",
    seed: Seed = None,
) -> cli.CommandAnswer:
    """Make an episode. Its address is shown only once: an agent's base URL, for OpenAI's clients with /v1 behind it."""
    made = _begun(client, model, temperature, max_tokens, lasts, seed)
    return cli.CommandAnswer(made, lambda: print(made.episode_id, made.url, sep="\n"))


@cli.command(episode, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    client: "Client",
    context: typer.Context,
    model: Model,
    temperature: Temperature = 1.0,
    max_tokens: MaxTokens = None,
    lasts: Lasts = "1h",
    seed: Seed = None,
) -> cli.CommandAnswer:
    """Run a program as an agent, and end its episode when it ends: longshore episode run MODEL -- PROGRAM …

    The program finds the address and the model in OPENAI_BASE_URL, ANTHROPIC_BASE_URL, OPENAI_MODEL, ANTHROPIC_MODEL
    and the variables of Claude Code. Its output goes to stderr. The exit code is the program's.
    """
    if not context.args:
        raise cli.Stop("name the program behind --: longshore episode run MODEL -- python my_agent.py", cli.USAGE)
    made = _begun(client, model, temperature, max_tokens, lasts, seed)
    from longshore.environments import agent_variables

    assert made.url is not None
    variables = {**os.environ, **agent_variables(made.url, model)}
    try:
        code = subprocess.run(context.args, env=variables, stdout=2, check=False).returncode
    except OSError as error:
        raise cli.Stop(f"{context.args[0]}: {error.strerror}") from error
    finally:
        ended = client.episodes.end(made.episode_id)
    return cli.CommandAnswer(ended, lambda: cli.say(f"{ended.episode_id}: {_num_turns(ended)}"), code=code)


@cli.command(episode, name="ls")
def list_episodes(
    client: "Client", limit: Annotated[int, typer.Option(help="At most so many.")] = 20
) -> cli.CommandAnswer:
    """List episodes, newest first."""
    found = client.episodes.list(limit)
    return cli.CommandAnswer(found, partial(cli.print_items, found, _EPISODE_COLUMNS))


@cli.command(episode, name="show")
def show_episode(client: "Client", episode_id: EpisodeId) -> cli.CommandAnswer:
    """Show what was said in an episode: of each turn what was new in the question, and the answer."""
    turns = client.episodes.turns(episode_id)
    return cli.CommandAnswer(turns, partial(_print_turns, turns))


cli.by_id(
    *(episode, "end", EpisodeId, lambda client, id: client.episodes.end(id)),
    lambda id, ended: cli.say(f"{id}: {_num_turns(ended)}"),
    "End an episode, so that it can be trained.",
)


def _begun(
    client: "Client", model: str, temperature: float, max_tokens: int | None, lasts: str, seed: int | None
) -> "EpisodeView":
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    asked = {"model": model, "sampling": sampling, "lasts_s": cli.seconds_of(lasts, "--lasts"), "seed": seed}
    return client.episodes.begin(cli.checked(longshore.EpisodeRequest, asked))


def _num_turns(one: "EpisodeView") -> str:
    if one.end is None:
        return ""
    side = f", and {one.end.num_side_turns} that are not trained" if one.end.num_side_turns else ""
    return f"{one.end.num_turns} turns{side}"


def _print_turns(turns: "Sequence[EpisodeTurnView]") -> None:
    numbers = {turn.answer_id: number for number, turn in enumerate(turns, 1)}
    for number, turn in enumerate(turns, 1):
        after = f", after turn {numbers.get(turn.after, '?')}" if turn.after else ""
        kept = " by its ids" if turn.continues else ""
        side = ", not trained" if turn.is_side else ""
        print(f"--- turn {number}{after}{kept}{side}: {turn.num_tokens} tokens, {turn.finish_reason}")
        for message in (*turn.messages, turn.answer):
            print(f"{message.get('role', '?')}: {cli.said(message)}")
