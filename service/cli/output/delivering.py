"""Files that go on from the service to S3 or the Hugging Face hub, with this machine's credentials, one at a time.

Credentials are those that boto3 and huggingface_hub find for themselves. They are never sent to the service, and are in
no argument of a process.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from service.cli.connection import read_settings
from service.cli.exits import USAGE, Stop
from service.cli.output.fetching import check_files
from service.cli.output.render import say

if TYPE_CHECKING:
    from service.cli.client import CliClient
    from shared.storage.artifacts import FileEntry


@dataclass(frozen=True)
class Destination:
    """Where files go. `put` takes a file here and its path there."""

    place: str
    put: Callable[[Path, str], None]


def destination(to: str | None, push: str | None) -> Destination | None:
    """Return the destination of `--to` or `--push`; None if there is neither.

    Raises:
        Stop: it is none, or there is no token for it.
    """
    if to is not None:
        return _s3(to)
    return None if push is None else _hub(push)


def deliver(client: "CliClient", path: str, target: Destination) -> "tuple[FileEntry, ...]":
    """Pass on the files that `path/files` lists, each checked against its hash. One file at a time is on this disk."""
    from shared.storage.artifacts import FileEntry

    entries = client.get(f"{path}/files", tuple[FileEntry, ...])
    for entry in sorted(entries, key=lambda entry: (entry.path == "config.json", entry.path)):
        with tempfile.TemporaryDirectory(prefix="longshore-export-") as folder:
            file = Path(folder) / entry.path
            file.parent.mkdir(parents=True, exist_ok=True)
            client.save(f"{path}/files/{entry.path}", file)
            check_files(Path(folder), (entry,))
            target.put(file, entry.path)
        say(f"{target.place}: {entry.path}")
    return entries


def _s3(uri: str) -> Destination:
    from shared.errors import LongshoreError
    from shared.storage.store import S3Store, open_store

    try:
        store = open_store(uri, read_settings().s3)
    except LongshoreError as error:
        raise Stop(f"--to: {error}", USAGE) from None
    if not isinstance(store, S3Store):
        raise Stop(f"--to: {uri} is no s3:// URI; a folder is named with --into", USAGE)

    def put(file: Path, path: str) -> None:
        try:
            store.put_file(path, file)
        except LongshoreError as error:
            raise Stop(f"--to: {error}") from None

    return Destination(store.uri, put)


def _hub(repository: str) -> Destination:
    from httpx import HTTPError
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except ValueError:
        repository = ""
    if "/" not in repository:
        raise Stop(
            "--push: a repository of the hub is ORG/NAME, of letters, digits, dots, dashes and underscores", USAGE
        )
    if (token := get_token()) is None:
        raise Stop("--push: there is no token for the hub", USAGE, "set HF_TOKEN, or sign in with `hf auth login`")
    api = HfApi(token=token)

    def put(file: Path, path: str) -> None:
        try:
            api.create_repo(repository, private=True, exist_ok=True)
            api.upload_file(path_or_fileobj=file, path_in_repo=path, repo_id=repository)
        except HfHubHTTPError as error:  # whose own text has headers of the request
            status = error.response.status_code if error.response is not None else "no answer"
            raise Stop(f"--push: the hub refuses {path} for {repository}: {status}") from None
        except HTTPError as error:
            raise Stop(f"--push: the hub cannot be reached ({type(error).__name__})") from None

    return Destination(f"{api.endpoint}/{repository}", put)
