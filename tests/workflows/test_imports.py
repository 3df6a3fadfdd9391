"""What a workflow's process must not load, asked of a fresh interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = sorted(Path(__file__).parents[2].joinpath("workflows").rglob("*.py"))
# A replay must find what the run found: no clock, no chance, no files, no threads, no environment.
REPLAYABLE = {
    *("asyncio", "collections", "contextlib", "dataclasses"),
    *("datetime", "functools", "hashlib", "math", "typing"),
}
HEAVY = ("torch", "transformers", "pyarrow", "boto3", "tokenizers", "wandb", "httpx", "megatron")


def test_importing_the_workflows_loads_nothing_heavy() -> None:
    modules = "workflows.sft, workflows.services, workflows.training.run"
    code = f"import sys, {modules}; print(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_workflows_import_nothing_that_a_replay_would_find_otherwise(path: Path) -> None:
    """Hosts let all runs share these modules, where Temporal's sandbox does not look at what they import."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                found = {name.name.partition(".")[0] for name in names}
            case ast.ImportFrom(module=str(module), names=names):
                found = {module.partition(".")[0]}
                assert module != "datetime" or [name.name for name in names] == ["timedelta"]
            case _:
                continue
        assert found & set(sys.stdlib_module_names) <= REPLAYABLE, found
