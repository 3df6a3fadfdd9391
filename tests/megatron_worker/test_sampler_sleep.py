"""Sleep of a sampler, which draws the same bits when it is awake again; and how its process ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from activities.sampling.client import Sampler
from examples.tiny_model import make_tiny_model
from megatron_worker.sampler.models import RequestRefused, Sleep
from shared.chat.completions import SamplerMemory, SamplerReady, Sampling
from shared.errors import InvalidInput, SamplerUnavailable
from tests.conftest import CORPUS
from tests.megatron_worker.engines import start as start_engine
from tests.megatron_worker.sampler_process import NAME, ROOT, http, post, ready, start, started, write_adapter
from tests.megatron_worker.weight_sync.samplers import listening
from tests.megatron_worker.weight_sync.test_sync import sync

PROMPT = tuple(range(3, 40))
HOW = Sampling(temperature=1.0, max_tokens=24)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """83 MB of weights: what the process has besides them does not hide them."""
    folder = tmp_path_factory.mktemp("large") / "model"
    return make_tiny_model(folder, CORPUS, hidden_size=512, num_layers=7, num_heads=8, head_dim=64)


@pytest.fixture(scope="module")
def sampler(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SamplerReady]:
    folder = tmp_path_factory.mktemp("sampler")
    with started(large, folder, "--slots", "4", "--socket", str(folder / "sampler.sock")) as ready:
        yield ready


@pytest.fixture(scope="module")
def adapter(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), large, 1, ("q_proj", "down_proj"), rank=16)


def memory(sampler: SamplerReady) -> SamplerMemory:
    with http(sampler) as client:
        return SamplerMemory.model_validate_json(client.get("/v1/memory").content)


@pytest.mark.parametrize("level", [1, 2])
def test_it_gives_its_memory_back_and_draws_the_same_bits_again(sampler: SamplerReady, adapter: Path, level) -> None:
    """On the CPU the host's memory is the device: both levels drop what the folders have."""
    process = psutil.Process(sampler.pid)
    with Sampler(sampler.url, sampler.api_key, attempts=1, socket_path=sampler.socket) as client:
        name = f"adapter-{level}"
        client.load_adapter(name, str(adapter))
        before = [client.sample(model, PROMPT, HOW, n=6, seed=5) for model in (NAME, name)]
        assert before[0] != before[1]
        awake, awake_rss = memory(sampler), process.memory_info().rss
        assert awake.weights.device > 80_000_000 and awake.adapters.device > 1_000_000 and awake.asleep == 0
        for _ in range(2):  # the second time it is asleep already
            asleep = client.sleep(level)
            assert asleep == memory(sampler) and asleep.asleep == level
            assert asleep.device_bytes == 0 and asleep.weights.host == 0
        freed = awake_rss - process.memory_info().rss
        print(f"level {level}: {awake.device_bytes:,} bytes by part, {freed:,} of the process")
        assert freed >= 0.95 * awake.device_bytes
        with pytest.raises(SamplerUnavailable, match=r"503: the sampler is asleep: POST /v1/wake first"):
            client.sample(NAME, PROMPT, HOW, n=1, seed=5)
        with pytest.raises(SamplerUnavailable, match="asleep"):
            client.load_adapter("other", str(adapter))
        with pytest.raises(InvalidInput, match="level"):
            client.sleep(3)
        for _ in range(2):
            assert client.wake() == awake
        assert [client.sample(model, PROMPT, HOW, n=6, seed=5) for model in (NAME, name)] == before
        client.unload_adapter(name)


def test_sequences_under_way_end_first(sampler: SamplerReady) -> None:
    long = Sampling(temperature=1.0, max_tokens=150, ignore_eos=True)
    drawn = []
    with Sampler(sampler.url, sampler.api_key, attempts=1, socket_path=sampler.socket) as client:
        asking = threading.Thread(target=lambda: drawn.append(client.sample(NAME, PROMPT, long, n=2, seed=1)))
        asking.start()
        while not memory(sampler).caches.device:
            assert asking.is_alive()
        assert client.sleep(2).device_bytes == 0
        asking.join(60)
        assert [len(one.token_ids) for one in drawn[0]] == [150, 150]
        client.wake()


def test_weights_that_came_by_a_sync_have_to_come_again(model, tmp_path) -> None:
    """Nothing is sent to a sampler that is asleep. Awake it serves what was its model's, or nothing."""
    full, lora = start_engine("megatron", model, "full"), start_engine("megatron", model, "lora")
    with listening(model, tmp_path, 1) as [one]:
        sleep = Sleep(one.decoder, one.models, one.generator)
        digest = sync(lora, "run", [one], 1).digest
        one.models.name_weights(json.dumps({"name": "a", "digest": digest}).encode())
        sleep.sleep(b"")
        assert "asleep" in sync(lora, "run", [one], 1).problems[one.path]
        assert "asleep" in sync(full, None, [one], 1).problems[one.path]
        sleep.wake()
        assert [card.id for card in one.models.cards().data] == [NAME], "the adapter was no folder's"
        assert sync(full, None, [one], 1).problems == {}
        sleep.sleep(b"")
        sleep.wake()
        assert one.models.cards().data == []
        with pytest.raises(RequestRefused, match="not complete"):
            one.models.find(NAME)
        whole = {"name": "again", "path": str(model)}
        one.models.load_weights(json.dumps(whole).encode())
        assert one.models.find("again")
        norm_H = one.decoder.named_weights()["model.norm.weight"].zero_()
        one.models.load_weights(json.dumps(whole).encode())
        assert not norm_H.any(), "what is served is not read"
        one.models.load_weights(json.dumps(whole | {"again": True}).encode())
        assert norm_H.all(), "but for who asks for it"


def test_all_of_an_adapter_sleeps(model, tmp_path) -> None:
    """DoRA's factors of rows, too."""
    dora = start_engine("megatron", model, "dora")
    with listening(model, tmp_path, 1) as [one]:
        sync(dora, "run", [one], 1)
        [adapter] = one.models.adapters()
        held = [x for own in adapter.lora_weights.values() for x in vars(own).values() if isinstance(x, torch.Tensor)]
        assert len(held) == 3 * len(adapter.lora_weights)
        memory = Sleep(one.decoder, one.models, one.generator).memory()
        assert memory.adapters.device == sum(tensor.nbytes for tensor in held)


def test_a_sampler_whose_folder_is_gone_sleeps_on(model, tmp_path) -> None:
    shutil.copytree(model, tmp_path / "model")
    with listening(tmp_path / "model", tmp_path, 1) as [one]:
        sleep = Sleep(one.decoder, one.models, one.generator)
        sleep.sleep(b'{"level": 2}')
        (tmp_path / "model" / "model.safetensors").rename(tmp_path / "away")
        with pytest.raises(RequestRefused, match="cannot wake") as refused:
            sleep.wake()
        assert refused.value.status == 503
        assert sleep.memory().asleep == 2 and sleep.memory().device_bytes == 0
        (tmp_path / "away").rename(tmp_path / "model" / "model.safetensors")
        assert sleep.wake().asleep == 0
        assert one.models.find(NAME)


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
