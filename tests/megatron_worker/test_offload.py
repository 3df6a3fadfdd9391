"""Inside the Megatron engine's offload. What every engine's must do is in test_engine_state.py."""

import pytest
import torch

from megatron_worker.megatron.engine import MegatronEngine
from shared.jobs import Full, Lora
from shared.layout import Layout
from tests.megatron_worker.driving import train
from tests.megatron_worker.rows import distinct_model, random_rows
from tests.megatron_worker.test_engine_state import storages_alive

ROWS = random_rows([40, 17, 90])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("qwen3"))


def start(model, dtype, kind):
    engine = MegatronEngine(model, Layout(), dtype)
    if kind == "full":
        engine.train_full(Full())
    elif kind == "lora":
        engine.add_adapter("run", Lora(rank=4), seed=0)
    return engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["base", "lora", "full"])
def test_only_declared_host_buffers_live(model, dtype, kind):
    before = storages_alive()
    engine = start(model, dtype, kind)
    if kind != "base":
        train(engine, [[ROWS]] * 2)
    base_bytes = engine._model.flat.num_bytes
    engine.offload()
    alive = {address: size for address, size in storages_alive().items() if address not in before}
    assert sum(alive.values()) == engine.memory().host_bytes >= base_bytes
    assert engine.memory().device_bytes == 0
    for parameter in engine._model.parameters.values():
        assert parameter.untyped_storage().nbytes() == 0
        assert parameter.grad is None or parameter.grad.untyped_storage().nbytes() == 0
    for adapter in engine._adapters.values():
        assert all(p.untyped_storage().nbytes() == 0 for p in adapter.parameters.values())


def test_the_base_is_copied_to_the_host_once_and_comes_back_to_the_bit(model):
    engine = start(model, "float32", "base")
    before = engine._model.flat.buffer.clone()
    engine.offload()
    buffer = engine._host._kept["base"]
    engine.offload()
    engine.reload()
    assert torch.equal(engine._model.flat.buffer, before)
    engine._model.flat.buffer.zero_()  # a second offload must not copy: frozen weights do not change
    engine.offload()
    engine.reload()
    assert engine._host._kept["base"] is buffer
    assert torch.equal(engine._model.flat.buffer, before)
