"""A sampler as a process of its own, and adapters for it that PEFT itself has written.

`started` is for tests of the process: how it starts, its memory, other packages. `running` forks it (tests/forks.py).
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from megatron_worker.sampler.__main__ import main
from shared.chat.completions import SamplerReady
from tests import forks
from tests.forks import Program

ROOT = Path(__file__).parents[2]
NAME = "tiny"
forks.IMPORTED += ["megatron_worker.sampler.server", "megatron_worker.training.evaluation"]


def start(model: Path, folder: Path, *options: str, **variables: str) -> subprocess.Popen[bytes]:
    """Not ready yet: see `ready`."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_worker.sampler", *_arguments(model, folder, options)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stderr=(folder / "stderr.txt").open("ab"),
    )


def _arguments(model: Path, folder: Path, options: Sequence[str]) -> list[str]:
    own = ["--model", str(model), "--served-model-name", NAME, "--ready-file", str(folder / "ready.json")]
    return [*own, *options]


def ready(has_ended: Callable[[], bool], folder: Path) -> SamplerReady:
    deadline = time.monotonic() + 150
    while not (folder / "ready.json").exists():
        assert not has_ended(), (folder / "stderr.txt").read_text()
        assert time.monotonic() < deadline, "the sampler is not ready after 150 s"
        time.sleep(0.02)
    return SamplerReady.model_validate_json((folder / "ready.json").read_bytes())


@contextmanager
def started(model: Path, folder: Path, *options: str, **variables: str) -> Iterator[SamplerReady]:
    process = start(model, folder, *options, **variables)
    try:
        yield ready(lambda: process.poll() is not None, folder)
    finally:
        process.terminate()
        process.wait(300)


@contextmanager
def running(model: Path, folder: Path, *options: str) -> Iterator[SamplerReady]:
    said, environment = folder / "stderr.txt", {**os.environ, "OMP_NUM_THREADS": "1"}
    call = partial(main, _arguments(model, folder, options))
    with forks.running(Program(call, ["megatron_worker.sampler"], environment, ROOT, said, said)) as process:
        yield ready(lambda: not process.is_alive(), folder)
        process.terminate()
        process.join(300)


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
    with http(ready) as client:
        return client.post(path, json=body)


def http(ready: SamplerReady) -> httpx.Client:
    headers, transport = {"Authorization": f"Bearer {ready.api_key}"}, httpx.HTTPTransport(uds=ready.socket)
    return httpx.Client(transport=transport, base_url=ready.url, headers=headers, timeout=300)
