"""What tests of local runs share: a program that is killed and started again, and the files of a published version."""

import subprocess
import sys
from pathlib import Path

from shared.provenance import NAME
from shared.storage.artifacts import sha256_file
from tests.end_to_end.stack import wait_until


def files(uri: str | None) -> dict[str, str]:
    """The SHA-256 of each file of a published folder, except the statement that a service signs."""
    assert uri is not None
    folder = Path(uri.removeprefix("file://"))
    found = {path.name: sha256_file(path) for path in folder.iterdir() if path.name != NAME}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "manifest.json"} <= found.keys()
    return found


def interrupted(program: str, arguments: list[str], folder: Path, until: str) -> list[str]:
    """Kill a program of examples/ once a file of this pattern is in the folder. Returns its lines when it ran again."""
    command = [sys.executable, program, *arguments]
    with (folder.parent / "killed.log").open("wb") as log:
        killed = subprocess.Popen(command, cwd=folder.parent, stdout=log, stderr=log)
        try:
            wait_until(
                lambda: any(folder.glob(until)) or killed.poll() is not None, f"{until} of {program}", every_s=0.02
            )
            assert killed.poll() is None, Path(log.name).read_text()
        finally:
            killed.kill()
            killed.wait()
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
