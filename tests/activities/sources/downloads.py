"""Downloads, for tests of where they come from."""

from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.sources.download import Download, Downloaded, DownloadRequest
from longshore.accounts import Room
from longshore.dataset_runs import DatasetSource
from shared.errors import InvalidInput
from shared.settings import Settings
from shared.storage.artifacts import stage

ROWS = b'{"prompt": "how many crates?", "completion": "42"}\n' * 50


def download(
    settings: Settings, uri: str, run_id: str = "sft-1", split: str = "train", most: int | None = None
) -> Downloaded:
    """`most`: the bytes that the tenant may store; it stores none yet."""
    source, room = DatasetSource(uri=uri), Room(most=most)
    request = DownloadRequest(run_id=run_id, tenant="default", split=split, source=source, room=room)
    return ActivityEnvironment().run(Download(HostContext(settings)).download, request)


def files_of(settings: Settings, downloaded: Downloaded) -> dict[str, bytes]:
    folder = stage(downloaded.dataset, settings.root_path / "cache", settings.s3)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def scratch_of(settings: Settings) -> list[Path]:
    return [path for path in (settings.root_path / "scratch").rglob("*") if path.is_file()]


def refusal(settings: Settings, uri: str, run_id: str = "sft-1", most: int | None = None) -> str:
    with pytest.raises(InvalidInput) as refused:
        download(settings, uri, run_id, most=most)
    assert scratch_of(settings) == []
    return str(refused.value)


def with_limits(settings: Settings, **limits) -> Settings:
    return settings.model_copy(update={"download": settings.download.model_copy(update=limits)})
