"""Both kinds of isolation, and a place for a sandbox of each, in which nothing may be left."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from activities import isolation
from tests.activities.grading.sandboxes import Place, processes_of


@pytest.fixture(params=["bubblewrap", "namespaces"])
def bwrap(request: pytest.FixtureRequest) -> str | None:
    """Both kinds of isolation: the path of bubblewrap, or None for namespaces of our own."""
    if request.param == "namespaces":
        return None
    if isolation.INSTALLED is None:
        pytest.skip("bubblewrap (bwrap) is not installed")
    return isolation.INSTALLED


@pytest.fixture
def place(tmp_path: Path, bwrap: str | None) -> Iterator[Place]:
    """A place in which nothing is left and for which nobody works when the test ends."""
    folder = tmp_path / "sandbox"
    folder.mkdir()
    yield Place(folder, bwrap)
    assert list(folder.iterdir()) == []
    assert processes_of(folder) == []
