"""A sampler as a process of its own, and adapters for it that PEFT itself has written."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from shared.chat.completions import SamplerReady

ROOT = Path(__file__).parents[2]
NAME = "tiny"


def start(model: Path, folder: Path, *options: str, **variables: str) -> subprocess.Popen[bytes]:
    """Not ready yet: see `ready`."""
    command = [sys.executable, "-m", "megatron_worker.sampler", "--model", str(model), "--served-model-name", NAME]
    return subprocess.Popen(
        [*command, "--ready-file", str(folder / "ready.json"), *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stderr=(folder / "stderr.txt").open("ab"),
    )


def ready(process: subprocess.Popen[bytes], folder: Path) -> SamplerReady:
    deadline = time.monotonic() + 150
    while not (folder / "ready.json").exists():
        assert process.poll() is None, (folder / "stderr.txt").read_text()
        assert time.monotonic() < deadline, "the sampler is not ready after 150 s"
        time.sleep(0.02)
    return SamplerReady.model_validate_json((folder / "ready.json").read_bytes())


@contextmanager
def running(model: Path, folder: Path, *options: str, **variables: str) -> Iterator[SamplerReady]:
    process = start(model, folder, *options, **variables)
    try:
        yield ready(process, folder)
    finally:
        process.terminate()
        process.wait(300)


def write_adapter(folder: Path, model: Path, seed: int, targets: tuple[str, ...], rank: int = 4) -> Path:
    """By PEFT, with B matrices that are not zero."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=12, target_modules=list(targets), init_lora_weights=False)
        get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)
    return folder


def post(ready: SamplerReady, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {ready.api_key}"}
    return httpx.post(f"{ready.url}{path}", json=body, headers=headers, timeout=300, trust_env=False)
