"""Copies files from the service to S3 or the Hugging Face hub, with this machine's credentials, one at a time.

boto3 and huggingface_hub find the credentials themselves. These are never sent to the service, nor passed as process
arguments.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from service.cli.connection import read_settings
from service.cli.exits import USAGE, Stop
from service.cli.output.fetching import check_files
from service.cli.output.render import say

if TYPE_CHECKING:
    from service.cli.client import CliClient
    from shared.storage.artifacts import FileEntry


Put = Callable[[Path, str], object]
"""Takes a file here, and its path at the destination."""


def destination(to: str | None, push: str | None) -> Put | None:
    """Return the function that uploads files to the destination of `--to` or `--push`; None without either.

    Raises Stop: it is none, or there is no token for it.
    """
    with _told():
        if to is not None:
            return _s3(to)
        return None if push is None else _hub(push)


def deliver(client: "CliClient", path: str, put: Put) -> "tuple[FileEntry, ...]":
    """Pass on the files that `path/files` lists, each checked against its hash. One file at a time is on this disk."""
    from shared.storage.artifacts import FileEntry

    entries = client.get(f"{path}/files", tuple[FileEntry, ...])
    for entry in entries:
        with tempfile.TemporaryDirectory(prefix="longshore-export-") as folder:
            file = Path(folder) / entry.path
            file.parent.mkdir(parents=True, exist_ok=True)
            client.save(f"{path}/files/{entry.path}", file)
            check_files(Path(folder), (entry,))
            with _told():
                put(file, entry.path)
        say(f"{entry.path} is there")
    return entries


def _s3(uri: str) -> Put:
    from shared.storage.store import S3Store, open_store

    store = open_store(uri, read_settings().s3)
    if not isinstance(store, S3Store):
        raise Stop(f"--to: {uri} is no s3:// URI; a folder is named with --into", USAGE)
    return lambda file, path: store.put_file(path, file)


def _hub(repository: str) -> Put:
    from huggingface_hub import HfApi, get_token

    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", repository, re.ASCII):
        raise Stop("--push: a repository of the hub is ORG/NAME: letters, digits, dots, dashes, underscores", USAGE)
    if (token := get_token()) is None:
        raise Stop("--push: there is no token for the hub", USAGE, "set HF_TOKEN, or sign in with `hf auth login`")
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
        raise Stop(f"--to: {error}") from None
    except HfHubHTTPError as error:
        problem = f"the hub answers {error.response.status_code} to {error.response.url.path}"
        raise Stop(f"--push: {problem}") from None
    except (HTTPError, ValueError) as error:
        raise Stop(f"--push: {type(error).__name__} from the hub's library") from None
