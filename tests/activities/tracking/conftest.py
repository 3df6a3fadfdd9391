"""Settings below a folder of the test's own, and their store."""

from pathlib import Path

import pytest

from shared.settings import Settings
from shared.storage.store import ObjectStore, open_store


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(root=tmp_path)


@pytest.fixture
def store(settings: Settings) -> ObjectStore:
    return open_store(settings.store, settings.s3)
