"""Offload from CUDA: memory goes back to where it began, into pinned host buffers, and every bit comes back."""

import gc

import pytest
import torch

from longshore.training import Layout
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.offload import HostCopy
from tests.gpu.cuda import NEEDS_CUDA
from tests.megatron_worker.rows import distinct_model

pytestmark = NEEDS_CUDA


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("qwen3"))


def pinned_bytes() -> int:
    """Of every tensor on the host that the process holds."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        is_tensor = isinstance(thing, torch.Tensor) and type(thing) in (torch.Tensor, torch.nn.Parameter)
        if is_tensor and thing.device.type == "cpu" and thing.numel() and thing.is_pinned():
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(found.values())


def test_offloading_frees_the_device_and_reloading_brings_every_bit_back(model):
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = MegatronEngine(model, Layout(), "bfloat16")
    weights = {name: tensor.cpu().clone() for name, tensor in engine.named_weights()}
    held = torch.cuda.memory_allocated() - before
    for _ in range(2):
        engine.place("host")
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < held / 20, "tables and scalars at most"
        assert pinned_bytes() == engine.memory().host_bytes > 0
        engine.place("device")
        for name, tensor in engine.named_weights():
            assert torch.equal(tensor.cpu(), weights[name]), name


def test_copies_wait_for_the_device_and_the_device_for_them():
    """Work is queued before an offload and after a reload, and no call in between waits for it."""
    weights = torch.zeros(64 << 20, device="cuda")
    slow = torch.randn(8192, 8192, device="cuda")
    copy = HostCopy([weights], chunk_bytes=1 << 20)
    for number in range(1, 4):
        for _ in range(20):
            slow = (slow @ slow).clamp(-1, 1)
        weights.add_(1)
        copy.offload()
        assert weights.untyped_storage().nbytes() == 0
        filler = torch.full_like(slow, -1.0)  # may lie where the weights were, or where they come back to
        del filler
        copy.reload()
        doubled = weights * 2
        assert bool((doubled == 2 * number).all())
