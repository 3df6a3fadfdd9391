"""A web server, and settings that let downloads ask it."""

from collections.abc import Iterator

import pytest

from shared.settings import DownloadSettings, Settings
from tests.activities.web_server import WebServer, serve_pages


@pytest.fixture
def web() -> Iterator[WebServer]:
    with serve_pages() as server:
        yield server


@pytest.fixture
def settings(tmp_path) -> Settings:
    (tmp_path / "data").mkdir()
    limits = DownloadSettings(file_roots=(tmp_path / "data",), allow_private_addresses=True, timeout_s=5)
    return Settings(root=tmp_path / "root", download=limits)
