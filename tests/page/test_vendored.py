"""Third-party files of the page are those that its notice names, and its own scripts can be read."""

import hashlib
import re
from pathlib import Path

from service.apis import page as pages

STATIC = Path(pages.__file__).parent / "static"
VENDOR = STATIC / "vendor"


def test_vendored_files_have_the_hashes_of_their_notice() -> None:
    notice = (VENDOR / "THIRD_PARTY.md").read_text()
    told = dict(re.findall(r"^\| `(\S+)` \|.*\| `([0-9a-f]{64})` \|$", notice, re.MULTILINE))
    files = [path for path in VENDOR.iterdir() if path.name != "THIRD_PARTY.md"]
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files} == told
    assert {path.name for path in files if path.name.startswith("LICENSE")} <= set(told)


def test_vendored_scripts_compile_no_text() -> None:
    """The page's policy forbids it, and browsers would stop the page there."""
    for path in VENDOR.glob("*.js"):
        assert not re.search(r"\beval\(|\bFunction\(|document\.write", path.read_text()), path.name


def test_own_scripts_fit_120_columns() -> None:
    wide = [
        f"{path.name}:{number}"
        for path in STATIC.glob("*.js")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert wide == []
