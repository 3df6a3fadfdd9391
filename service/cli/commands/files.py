"""`longshore files`: datasets and other files in the store."""

import hashlib
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from service.cli.connection import Json, connect, wants_json
from service.cli.exits import USAGE, Stop
from service.cli.output.render import ago, print_json, print_table, say

_EXAMPLES = """\b
Examples:
  longshore submit sft -m org/model -d $(longshore files upload train.jsonl)
  longshore files download file-0123456789abcdef01234567 --into train.jsonl
"""
FileId = Annotated[str, typer.Argument(metavar="FILE", help="Its id, as `longshore files ls` shows it.")]
app = typer.Typer(
    name="files",
    help="Upload, list, download and delete files in the store.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=_EXAMPLES,
)


@app.command()
def ls(
    context: typer.Context, limit: Annotated[int, typer.Option(min=1, max=1000)] = 50, as_json: Json = False
) -> None:
    """List files, newest first."""
    with connect(context) as client:
        page = client.ask("GET", "/files", params={"limit": limit})
    if wants_json(context, as_json):
        print_json(page["files"])
        return
    rows = ((f["file_id"], f["name"], f"{f['size']:,}", f["purpose"], ago(f["created_at"])) for f in page["files"])
    print_table(("file", "name", "bytes", "purpose", "uploaded"), rows)
    if page["has_more"]:
        say(f"there are more: --limit shows up to 1000, {limit} now")


@app.command()
def upload(
    context: typer.Context,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files of this machine.")],
    as_json: Json = False,
) -> None:
    """Upload files into the store. Prints the URI of each, which --dataset takes; the same file has the same URI."""
    for path in paths:
        if not path.is_file():
            raise Stop(f"there is no file {path}", USAGE)
    with connect(context) as client:
        sent = [client.upload_file(path) for path in paths]
    if wants_json(context, as_json):
        print_json(sent)
    else:
        for record in sent:
            print(record["uri"])


@app.command()
def rm(context: typer.Context, file_id: FileId, as_json: Json = False) -> None:
    """Delete a file. A run that has not read it yet fails."""
    with connect(context) as client:
        deleted = client.ask("DELETE", f"/files/{file_id}")
    if wants_json(context, as_json):
        print_json(deleted)
    else:
        say(f"{file_id} ({deleted['name']}) is deleted")


@app.command()
def download(
    context: typer.Context,
    file_id: FileId,
    into: Annotated[Path | None, typer.Option(help="The file to make; ./NAME if absent.")] = None,
    as_json: Json = False,
) -> None:
    """Download a file, and check its hash."""
    with connect(context) as client:
        record = client.ask("GET", f"/files/{file_id}")
        target = into or Path(record["name"])
        if target.exists():
            raise Stop(f"{target} is there already", USAGE, "name another file with --into")
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            part = Path(folder) / "part"
            client.save(f"/files/{file_id}/content", part)
            with part.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
                    raise Stop(f"{file_id}: the SHA-256 is not the file's", advice="try the download again")
            part.rename(target)
    if wants_json(context, as_json):
        print_json(record | {"path": str(target.resolve())})
    else:
        print(target)
