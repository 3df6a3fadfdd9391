"""Weights from a trainer to a sampler of another process on the same CUDA device."""

from pathlib import Path

import pytest
import torch

from longshore.training import Transport
from tests.gpu.cuda import NEEDS_CUDA
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.weight_sync.two_processes import BUCKET, STEPS, apart, check_sleep, check_syncs

pytestmark = NEEDS_CUDA


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distinct_model(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory"])
def test_one_device_has_the_same_weights_twice_awake_and_after_sleep(
    model: Path, tmp_path: Path, transport: Transport
) -> None:
    with apart(model, tmp_path, "cuda") as sampler:
        check_syncs(sampler, model, tmp_path, transport)
        check_sleep(sampler)


def test_the_trainers_buffers_are_its_own_again_after_a_sync(model: Path, tmp_path: Path) -> None:
    """Opened by another process and given back, they take no more of the device with every sync."""
    engine = start("megatron", model, "full", "bfloat16")
    held = []
    with apart(model, tmp_path, "cuda") as sampler:
        for version in range(1, 6):
            assert sampler.sent(engine, None, version, "cuda_ipc").problems == {}
            held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[0] + 2 * BUCKET, "those of one sync at most wait for the sampler to let them go"


def test_nccl_between_two_processes_of_one_device_goes_as_far_as_nccl_lets_it(model: Path, tmp_path: Path) -> None:
    """NCCL refuses two ranks on one device: the sync says so in bounded time, and the store's way works afterwards."""
    engine = start("megatron", model, "full", "bfloat16")
    train(engine, STEPS[:1], learning_rate=1e-3)
    engine.save(tmp_path / "saved")
    with apart(model, tmp_path, "cuda") as sampler:
        done = sampler.sent(engine, None, 1, "collective")
        print(f"NCCL on one device: {done.problems or 'the weights have arrived'}")
        assert (done.digest is None) == bool(done.problems)
        sampler.client.load_weights("stored", str(tmp_path / "saved" / "weights"))
        check_sleep(sampler)
