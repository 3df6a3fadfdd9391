"""vLLM on a CPU as the teacher behind a URL: an adapter that it serves teaches as the same adapter on the worker."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from examples.tiny_model import make_tiny_model
from longshore.losses import Distillation
from longshore.training import Lora
from shared.chat.completions import SamplerReady
from shared.jobs.job import Evaluation, PackedData
from shared.jobs.packed import LIKELIEST_LOGPROBS
from tests.megatron_worker.sampler_process import NAME, write_adapter
from tests.megatron_worker.test_megatron_job import do, plan
from tests.megatron_worker.test_megatron_job import worker as worker  # a fixture
from tests.megatron_worker.test_teacher_by_url import TOP_K, ask, losses
from tests.megatron_worker.workshop import Workshop, sealed, workshop_of_ids
from tests.vllm.environment import ENVIRONMENT, PYTHON, VLLM_COMMAND, needs_vllm

pytestmark = needs_vllm
VOCAB_SIZE, KEY = 512, "a-key-of-the-installation"
TARGETS = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    root = tmp_path_factory.mktemp("teacher")
    make_tiny_model(root / "model", ["hello there"], vocab_size=VOCAB_SIZE, head_dim=32)  # as vLLM's kernels want it
    return workshop_of_ids(root, root / "model", VOCAB_SIZE, 6, [[0, 1], [2, 3]], [5, 6, 7])


@pytest.fixture(scope="module")
def teacher(workshop: Workshop) -> Path:
    """An adapter that is far from the base."""
    folder = write_adapter(workshop.root / "teacher", workshop.root / "model", 3, TARGETS)
    path = folder / "adapter_model.safetensors"
    save_file({n: t * 20 if "lora_B" in n else t for n, t in load_file(path).items()}, path)
    return folder


@pytest.fixture(scope="module")
def server(workshop: Workshop, teacher: Path) -> Iterator[SamplerReady]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--host", "127.0.0.1", "--api-key", KEY, "--dtype", "float32"]
    # One at a time: this build ends where the texts of several are scored by an adapter.
    options += ["--max-model-len", "64", "--max-num-seqs", "1", "--enable-lora", "--max-lora-rank", "8"]
    executable, *own = VLLM_COMMAND.split()
    command = [executable, "serve", str(workshop.root / "model"), *own, *options, "--lora-modules", f"{NAME}={teacher}"]
    deadline, output = time.monotonic() + 900, workshop.root / "vllm.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=file, stderr=file)
    try:
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()[-2000:]
            time.sleep(0.5)
        yield SamplerReady(url=f"http://127.0.0.1:{port}", api_key=KEY, pid=process.pid, model=PYTHON)
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False


def test_an_adapter_that_vllm_serves_teaches_as_it_does_on_the_worker(
    worker, workshop: Workshop, teacher: Path, server: SamplerReady, tmp_path: Path
) -> None:
    artifact, lora = sealed(teacher), Lora(rank=4, alpha=12, targets=TARGETS)
    told = {
        name: sealed(ask(tmp_path, server, data.units, workshop.model))
        for name, data in (("train", workshop.data), ("held-out", workshop.held_out))
    }
    asked = {
        name: PackedData(units=data.units, plan=data.plan, likeliest=told[name])
        for name, data in (("train", workshop.data), ("held-out", workshop.held_out))
    }
    by_url = Distillation(tokens="top_k", top_k=TOP_K)
    fields = {"trainable": lora}
    one = plan(workshop, data=asked["train"], evaluation=Evaluation(data=asked["held-out"]), loss=by_url, **fields)
    loss = Distillation(teacher=artifact, tokens="top_k", top_k=TOP_K)
    other = plan(workshop, evaluation=Evaluation(data=workshop.held_out), loss=loss, **fields)
    found = [losses(do(worker, workshop, name, job)) for name, job in (("by-url", one), ("by-adapter", other))]
    apart = np.abs(np.subtract(*found)).max()
    print(f"losses {apart:.1e} apart, of {found[1][0]:.3f}")
    assert apart < 1e-5 and found[0][0] > 0.003
    drawn = np.load(ask(tmp_path, server, workshop.data.units, workshop.model, top_k=0) / LIKELIEST_LOGPROBS)
    assert np.isfinite(drawn).all() and drawn.shape[1] == 1
