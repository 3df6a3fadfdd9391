"""Where these tests find vLLM: in .venv-vllm (`make test-vllm`), or at the executable named by LONGSHORE_TEST_VLLM."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.chat.completions import SamplerReady

_EXECUTABLE = os.environ.get("LONGSHORE_TEST_VLLM", str(Path(__file__).parents[2] / ".venv-vllm/bin/vllm"))
IS_THERE = Path(_EXECUTABLE).exists()
PYTHON = str(Path(_EXECUTABLE).with_name("python"))
VLLM_COMMAND = f"{_EXECUTABLE} --enforce-eager"
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}

needs_vllm = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not IS_THERE, reason="no vLLM here: make test-vllm sets one up"),
]


@contextmanager
def running_vllm(model: Path, folder: Path) -> Iterator[SamplerReady]:
    """A vLLM for adapters, without a host."""
    ready, deadline = folder / "ready.json", time.monotonic() + 900
    options = ["--model", str(model), "--ready-file", str(ready), "--max-model-len", "256", "--max-lora-rank", "8"]
    command = [sys.executable, "-m", "megatron_worker.sampler.vllm", *options, "--", *VLLM_COMMAND.split()]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=output, stderr=output)
    try:
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "output.txt").read_text()[-2000:]
            time.sleep(0.1)
        yield SamplerReady.model_validate_json(ready.read_bytes())
    finally:
        process.terminate()
        process.wait(60)
