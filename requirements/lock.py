"""Write the locks: every package that constraints.txt names, with its hashes, in the first set that needs it.

    make lock      or: python requirements/lock.py UV      UV: the program of that name

`run.txt` is what the control plane needs, `worker.txt` what workers add, `dev.txt` what tests and linters add;
install.sh takes the first, the first two or all. torch is in none: its local build (+cpu) has other hashes than the
public one, and CUDA's libraries come with the public one. It is installed by its version.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
SETS = {"run": ["server"], "worker": ["worker"], "dev": ["dev"]}
_HEADER = "# Written by requirements/lock.py (make lock). Installed with pip's --require-hashes --no-deps.\n"
_BLOCK = re.compile(r"^[A-Za-z0-9].*(?:\n    --hash.*)+\n", re.MULTILINE)
_OF_TORCH = re.compile(r"torch$|nvidia-|cuda-")


def compiled(uv: str, extras: list[str]) -> dict[str, str]:
    """Resolve for Linux and every supported Python; a package's lines by its name."""
    command = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-annotate", "--no-header"]
    command += ["--constraint", str(FOLDER / "constraints.txt"), "--python-version", least_python()]
    command += ["pyproject.toml", "requirements/build.txt"]
    command += [part for extra in extras for part in ("--extra", extra)]
    text = subprocess.run(command, cwd=FOLDER.parent, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = {re.split(r"[=\[ ]", block, maxsplit=1)[0]: block for block in _BLOCK.findall(text)}
    return {
        name: block
        for name, block in found.items()
        if not _OF_TORCH.match(name) and "; sys_platform == 'win32'" not in block
    }


def least_python() -> str:
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    return str(project["requires-python"]).removeprefix(">=")


def main() -> None:
    taken: set[str] = set()
    for name, extras in SETS.items():
        packages = compiled(sys.argv[1], extras)
        new = {package: block for package, block in packages.items() if package not in taken}
        taken |= new.keys()
        (FOLDER / "locked" / f"{name}.txt").write_text(_HEADER + "".join(new.values()))


if __name__ == "__main__":
    main()
