"""Which places a tenant may read, where the installation itself lies below a file root."""

from pathlib import Path

import pytest

from shared.errors import InvalidInput
from shared.places import Places
from shared.settings import DownloadSettings, Settings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The operator's home, which is open to tenants and holds the installation."""
    for name in (
        "root/seal.key", "root/.seal.key.x", "root/hosts/h.json", "root/new.json", "root/data/rows.jsonl",
        "root/data/service/x", "root/store/tenants/eve/x", "root/store/tenants/bob/x", "root/store/runs/x", "rows.jsonl",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def places(home: Path, **changes: object) -> Places:
    roots = (home, home / "root", home / "root/data", home / "root/hosts")
    return Places(Settings(root=home / "root", download=DownloadSettings(file_roots=roots), **changes))


def is_open(found: Places, path: Path) -> bool:
    """To eve; and the service says of its URI what a host says of the path."""
    try:
        found.check_file("eve", path, "uri")
    except InvalidInput:
        with pytest.raises(InvalidInput):
            found.check_named("eve", path.as_uri(), "uri")
        return False
    found.check_named("eve", path.as_uri(), "uri")
    return True


@pytest.mark.parametrize("name", ["seal.key", ".seal.key.x", "hosts/h.json", "new.json", "later/x", "store/runs/x", "store/tenants/bob/x"])  # fmt: skip
def test_nothing_of_the_root_is_data(home: Path, name: str) -> None:
    (home / "link.txt").symlink_to(home / "root" / name)
    assert not is_open(places(home), home / "root" / name)
    assert not is_open(places(home), home / "link.txt")


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "root/data/rows.jsonl", "root/data/service/x", "root/store/tenants/eve/x"]
)
def test_what_is_open_is_read(home: Path, name: str) -> None:
    assert is_open(places(home), home / name)


def test_a_folder_of_ours_that_is_a_link_to_another_disk_is_ours(home: Path) -> None:
    (home / "disk").mkdir()
    (home / "root/cache").symlink_to(home / "disk")
    assert not is_open(places(home), home / "disk/x")
