"""`longshore files`: datasets and other files in the store."""

import hashlib
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.command import CommandAnswer, command, group
from service.cli.exits import USAGE, Stop
from service.cli.output.render import ago, print_table, say

if TYPE_CHECKING:
    from service.cli.client import CliClient

_EXAMPLES = """\b
Examples:
  longshore submit sft -m org/model -d $(longshore files upload train.jsonl)
  longshore files download file-0123456789abcdef01234567 --into train.jsonl
"""
FileId = Annotated[str, typer.Argument(metavar="FILE", help="Its id, as `longshore files ls` shows it.")]
app = group("files", help="Upload, list, download and delete files in the store.", epilog=_EXAMPLES)


@command(app)
def ls(client: "CliClient", limit: Annotated[int, typer.Option(min=1, max=1000)] = 50) -> CommandAnswer:
    """List files, newest first."""
    page = client.ask("GET", "/files", params={"limit": limit})

    def show() -> None:
        rows = ((f["file_id"], f["name"], f"{f['size']:,}", f["purpose"], ago(f["created_at"])) for f in page["files"])
        print_table(("file", "name", "bytes", "purpose", "uploaded"), rows)
        if page["has_more"]:
            say(f"there are more: --limit shows up to 1000, {limit} now")

    return CommandAnswer(page["files"], show)


@command(app)
def upload(
    client: "CliClient", paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files of this machine.")]
) -> CommandAnswer:
    """Upload files into the store. Prints the URI of each, which --dataset takes; the same file has the same URI."""
    for path in paths:
        if not path.is_file():
            raise Stop(f"there is no file {path}", USAGE)
    sent = [client.upload_file(path) for path in paths]
    return CommandAnswer(sent, partial(print, *(record["uri"] for record in sent), sep="\n"))


@command(app)
def rm(client: "CliClient", file_id: FileId) -> CommandAnswer:
    """Delete a file. A run that has not read it yet fails."""
    deleted = client.ask("DELETE", f"/files/{file_id}")
    return CommandAnswer(deleted, partial(say, f"{file_id} ({deleted['name']}) is deleted"))


@command(app)
def download(
    client: "CliClient",
    file_id: FileId,
    into: Annotated[Path | None, typer.Option(help="The file to make; ./NAME if absent.")] = None,
) -> CommandAnswer:
    """Download a file, and check its hash."""
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
    return CommandAnswer(record | {"path": str(target.resolve())}, partial(print, target))
