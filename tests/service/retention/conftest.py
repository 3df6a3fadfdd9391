"""Databases for the stores of these tests."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.database import engine
from service.database.engine import Database


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an empty database."""
    file = tmp_path_factory.mktemp("database") / "empty.db"
    database = Database(f"sqlite:///{file}")
    engine.upgrade(database)
    database.close()
    return file


@pytest.fixture
def url_of(migrated: Path) -> Callable[[Path], str]:
    """The URL of a database at a path; a new one is empty."""

    def url(path: Path) -> str:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(migrated, path)
        return f"sqlite:///{path}"

    return url


@pytest.fixture
def database(url_of: Callable[[Path], str], tmp_path: Path) -> Iterator[Database]:
    database = Database(url_of(tmp_path / "rows.db"))
    yield database
    database.close()
