"""ART's clients as requirements/clients.sh installs them: a folder of packages, and the Python that they are for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSIONS = ("0.5.18", "0.5.23")
_FOLDERS = {"0.5.18": "art", "0.5.23": "art-0.5.23"}
_NEEDS_ITS_OWN_PYTHON = ("0.5.23",)


def client_of(version: str) -> Path:
    """The folder of a version. Skips the test where the machine lacks the Python that the version needs."""
    client = ROOT / ".venv" / "clients" / _FOLDERS[version]
    if version in _NEEDS_ITS_OWN_PYTHON and not client.is_dir():
        pytest.skip(f"openpipe-art {version} needs Python 3.12, and there was none when requirements/clients.sh ran")
    assert client.is_dir(), "the clients are not installed: requirements/clients.sh"
    return client


def run_with_art(
    version: str, command: list[str], cwd: Path, timeout_s: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with a version of ART's client, which finds no key of W&B's in its environment. Skips as above."""
    client = client_of(version)
    python = (client / ".python").read_text().strip() if version in _NEEDS_ITS_OWN_PYTHON else sys.executable
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    done = subprocess.run(
        [python, "-P", *command],
        env=inherited | {"PYTHONPATH": os.pathsep.join([str(client), str(ROOT)])} | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done
