"""Offloading leaves nothing on the device but what is declared, and reloading brings every bit back."""

import gc

import pytest
import torch

from megatron_worker.megatron.engine import MegatronEngine
from shared.jobs import Full, Lora
from shared.layout import Layout
from tests.megatron_worker.driving import train
from tests.megatron_worker.rows import distinct_model, random_rows

ROWS = random_rows([40, 17, 90])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("qwen3"))


def storages_alive() -> dict[int, int]:
    """Bytes by address, of every tensor that the process still holds. Small ones (tables, counts) are left out."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            if storage.nbytes() > 2048:
                found[storage.data_ptr()] = storage.nbytes()
    return found


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_training_goes_on_after_a_reload_to_the_bit(model, tmp_path, dtype, kind):
    saved = []
    for rounds in (0, 2):
        engine = start(model, dtype, kind)
        for step in range(3):
            for _ in range(rounds):
                engine.offload()
                engine.reload()
            train(engine, [[ROWS[step:]]])
        engine.save(tmp_path / str(rounds))
        saved.append({p.name: p.read_bytes() for p in (tmp_path / str(rounds)).rglob("*.safetensors")})
    assert saved[0] == saved[1]


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


def test_dropping_a_job_leaves_the_base_alone(model):
    engine = start(model, "float32", "lora")
    base = engine.memory().device_bytes
    train(engine, [[ROWS]])
    engine.drop_training_state()
    assert engine.memory().device_bytes == engine._model.flat.num_bytes < base
    engine.offload()
    assert engine.memory().device_bytes == 0
    assert engine.memory().host_bytes == engine._model.flat.num_bytes


@pytest.mark.parametrize("offloaded_before", [False, True])
def test_full_fine_tuning_uses_the_base_up_and_the_next_job_gets_the_published_one(model, offloaded_before):
    engine = MegatronEngine(model, Layout(), "float32")
    published = engine._model.flat.buffer.clone()
    if offloaded_before:
        engine.offload()
        engine.reload()
    engine.train_full(Full())
    train(engine, [[ROWS]])
    assert not torch.equal(engine._model.flat.buffer, published)
    engine.drop_training_state()
    assert engine.memory().device_bytes == 0
    engine.offload()
    assert engine.memory().device_bytes == 0
    engine.reload()
    engine.add_adapter("next", Lora(rank=2), seed=0)
    assert torch.equal(engine._model.flat.buffer, published)
