"""Offload from CUDA: memory goes back to where it began, into pinned host buffers, and every bit comes back."""

import gc

import pytest
import torch

from megatron_worker.megatron.engine import MegatronEngine
from shared.layout import Layout
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
        engine.offload()
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < held / 20, "tables and scalars at most"
        assert pinned_bytes() == engine.memory().host_bytes > 0
        engine.reload()
        for name, tensor in engine.named_weights():
            assert torch.equal(tensor.cpu(), weights[name]), name
