"""What a workflow's process must not load, asked of a fresh interpreter."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "pyarrow", "boto3", "tokenizers", "wandb", "httpx", "megatron")


def test_importing_the_workflows_loads_nothing_heavy() -> None:
    modules = "workflows.sft, workflows.preview, workflows.track, workflows.training"
    code = f"import sys, {modules}; print(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
