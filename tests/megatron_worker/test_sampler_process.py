"""The sampler's process: it ends when it is told to and with its parent, and says which model it cannot use."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from tests.megatron_worker.sampler_process import NAME, ROOT, post, ready, start


def test_sigterm_ends_it_while_it_works(model, tmp_path):
    process = start(model, tmp_path)
    found = ready(lambda: process.poll() is not None, tmp_path)
    assert (tmp_path / "ready.json").stat().st_mode & 0o777 == 0o600
    body = {"model": NAME, "prompt": [1], "n": 500, "max_tokens": 4000, "ignore_eos": True}
    failures = []

    def ask():
        try:
            post(found, "/v1/completions", body)
        except httpx.HTTPError as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    process.terminate()
    assert process.wait(300) == 0
    asking.join(300)
    assert len(failures) == 1
    assert not (tmp_path / "ready.json").exists()


def test_it_leaves_with_its_parent(model, tmp_path):
    """The parent is killed, not asked."""
    code = "import sys, time; from pathlib import Path; from tests.megatron_worker.sampler_process import start; "
    code += "start(Path(sys.argv[1]), Path(sys.argv[2])); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code, str(model), str(tmp_path)], cwd=ROOT)
    while not psutil.Process(parent.pid).children():
        time.sleep(0.02)
    sampler = psutil.Process(ready(lambda: parent.poll() is not None, tmp_path).pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    sampler.wait(300)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_that_cannot_be_used_is_exit_2(model, tmp_path, missing):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    assert start(tmp_path / "model", tmp_path).wait(150) == 2
    assert missing in (tmp_path / "stderr.txt").read_text()


def test_it_starts_without_megatron():
    modules = "megatron_worker.sampler.answers, megatron_worker.training.evaluation"
    code = f"import sys, {modules}; print('megatron.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
