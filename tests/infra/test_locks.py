"""The locks with hashes against the versions they are made from (`make lock` writes both)."""

import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "requirements"
SETS = ("run", "worker", "dev")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes by package."""
    text = (FOLDER / "locked" / f"{name}.txt").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        package, _, rest = line.partition("==")
        found[normal(package)] = (rest.split()[0], len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", rest)))
    return found


def constraints() -> dict[str, str]:
    lines = (FOLDER / "constraints.txt").read_text().splitlines()
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_locks_have_every_version_but_torch_once() -> None:
    versions: dict[str, str] = {}
    for name in SETS:
        for package, (version, hashes) in locked(name).items():
            assert hashes, f"{package} has no hash"
            assert package not in versions, f"{package} is in two sets"
            versions[package] = version
    wanted = {package: version for package, version in constraints().items() if package != "torch"}
    assert versions.pop("setuptools"), "it builds the editable install"
    assert versions == wanted, "make lock"


def test_a_set_of_the_control_plane_has_no_torch() -> None:
    assert not {"torch", "triton", "transformers", "megatron-core"} & locked("run").keys()
    assert not {"pytest", "ruff", "mkdocs"} & (locked("run") | locked("worker")).keys()


@pytest.mark.parametrize("extra", ["server", "worker", "dev"])
def test_install_takes_the_sets_of_its_extra(extra: str) -> None:
    text = (FOLDER / "install.sh").read_text()
    [sets] = re.findall(rf"^    {extra}\) sets=\((.+)\) ;;$", text, re.MULTILINE)
    assert sets.split() == list(SETS[: ["server", "worker", "dev"].index(extra) + 1])
    assert "--require-hashes --no-deps" in text


def test_install_refuses_a_set_that_is_none() -> None:
    done = subprocess.run([FOLDER / "install.sh", "everything"], capture_output=True, text=True)
    assert done.returncode == 2 and "no such set of packages: everything" in done.stderr
