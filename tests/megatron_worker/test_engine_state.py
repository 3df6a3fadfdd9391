"""Each engine's state, alone: checkpoints, slots, base weights by value; offload leaves declared buffers only."""

import gc
import shutil
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.training import Full, Lora
from megatron_worker.engine import Outputs
from shared.errors import InvalidInput
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import LORA, start
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows

ROWS = random_rows([40, 17, 90])
STEPS = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25], seed=s % 3) for s in range(6))]
RATES = {"lora": 3e-3, "full": 3e-4}


def logprobs(engine):
    with torch.no_grad():
        return engine.forward(bin_of(ROWS), Outputs()).logprob_N


# Weights and checkpoints.

KINDS = [*product(("lora", "full"), ("float32", "bfloat16"))]


@pytest.mark.parametrize(("family", "tied"), drawn([("qwen3", True), ("qwen2", False), ("llama", True)], 1))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_named_weights_are_those_of_the_folder(tmp_path, engine, family, tied, dtype):
    folder = distinct_model(tmp_path, family, tied)
    published = load_file(folder / "model.safetensors")
    found = dict(start(engine, folder, dtype=dtype).named_weights())
    assert set(found) == set(published)
    for name, weight in found.items():
        assert torch.equal(weight, published[name].to(getattr(torch, dtype))), name


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_damaged_or_foreign_checkpoint_is_refused(model, tmp_path, engine, kind):
    driven = start(engine, model, kind)
    train(driven, STEPS[:1], learning_rate=RATES[kind])
    driven.save(tmp_path / "whole")
    before = logprobs(driven)
    for name in ("weights", "optimizer"):
        broken = shutil.copytree(tmp_path / "whole", tmp_path / name)
        file = next((broken / name).glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(InvalidInput, match="damaged"):
            driven.load(broken)
    shutil.rmtree(tmp_path / "weights" / "optimizer")
    driven.load(tmp_path / "whole")
    assert torch.equal(logprobs(driven), before)
    other = start(engine, model)
    other.add_adapter("run", Lora(rank=2), seed=0)
    with pytest.raises(InvalidInput):
        other.load(tmp_path / "whole")


def test_a_whole_model_is_saved_with_all_templates(model, tmp_path, engine):
    folder = shutil.copytree(model, tmp_path / "model")
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    start(engine, folder, "full").save(tmp_path / "saved")
    assert {path.read_text() for path in (tmp_path / "saved" / "weights").rglob("*.jinja")} == {
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_a_weight_that_is_not_finite_is_refused(model, tmp_path, engine, dtype):
    broken = shutil.copytree(model, tmp_path / "broken")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(broken / "model.safetensors").items()}
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name].view(-1)[7] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=rf"model\.safetensors: tensor {name} holds a number that is not finite"):
        start(engine, broken)


# Adapters.


def test_the_active_adapter_decides(model, tmp_path, engine):
    driven = start(engine, model)
    base = logprobs(driven)
    driven.add_adapter("run", LORA, seed=0)
    assert torch.equal(logprobs(driven), base)  # B begins at zero
    train(driven, STEPS[:1])
    adapted = logprobs(driven)
    assert (adapted - base).abs().max() > 1e-3
    driven.save(tmp_path)
    driven.load_adapter("frozen", tmp_path / "weights", None, trainable=False)
    assert torch.equal(logprobs(driven), adapted)
    driven.set_adapter(None)
    assert torch.equal(logprobs(driven), base)
    driven.set_adapter("run")
    train(driven, STEPS[1:2])
    further = logprobs(driven)
    driven.set_adapter("frozen")
    assert torch.equal(logprobs(driven), adapted)
    assert not torch.equal(further, adapted)


def test_an_adapter_that_does_not_fit_is_refused(model, tmp_path, engine):
    driven = start(engine, model, "lora")
    driven.save(tmp_path)
    driven.drop_slot("run")
    with pytest.raises(InvalidInput, match="rank"):
        driven.load_adapter("other", tmp_path / "weights", Lora(rank=8, alpha=8), trainable=True)
    with pytest.raises(InvalidInput):
        driven.load_adapter("other", tmp_path / "nowhere", LORA, trainable=True)
    (tmp_path / "weights" / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InvalidInput, match="damaged"):
        driven.load_adapter("other", tmp_path / "weights", LORA, trainable=True)
    driven.add_adapter("next", LORA, seed=1)
    train(driven, STEPS[:1])


def test_a_loaded_adapter_is_trained_on_from_its_float32_weights(model, tmp_path, engine):
    """A bfloat16 engine that loads what it saved saves the same bytes."""
    driven = start(engine, model, "lora", "bfloat16")
    train(driven, STEPS[:2])
    driven.save(tmp_path / "one")
    driven.drop_slot("run")
    driven.load_adapter("run", tmp_path / "one" / "weights", LORA, trainable=True)
    driven.save(tmp_path / "two")
    one, two = (tmp_path / name / "weights" / "adapter_model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


# Memory.


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


@pytest.mark.parametrize(("kind", "dtype"), drawn([*KINDS, ("base", "float32"), ("base", "bfloat16")], 3))
def test_offload_leaves_only_declared_host_buffers(model, engine, dtype, kind):
    before = storages_alive()
    driven = start(engine, model, kind, dtype)
    logprobs(driven)
    if kind != "base":
        train(driven, [[ROWS]] * 2)
    base_bytes = sum(weight.nbytes for _, weight in driven.named_weights())
    logprobs(driven)
    driven.place("host")
    alive = {address: size for address, size in storages_alive().items() if address not in before}
    assert sum(alive.values()) == driven.memory().host_bytes >= base_bytes
    assert driven.memory().device_bytes == 0


def test_the_base_is_copied_to_the_host_once_and_comes_back_to_the_bit(model, engine):
    driven = start(engine, model)
    before = logprobs(driven)
    driven.place("host")
    host = driven.memory().host_bytes
    for _ in range(2):
        driven.place("host")
        assert driven.memory().host_bytes == host
        driven.place("device")
        assert driven.memory().host_bytes == host
        assert driven.memory().device_bytes == pytest.approx(host, rel=0.01)
        assert torch.equal(logprobs(driven), before)
        for storage in driven._base.storages:
            storage.zero_()  # the next offload must not copy: frozen weights do not change


@pytest.mark.parametrize("offloaded_before", [False, True])
def test_full_fine_tuning_uses_the_base_up_and_the_next_job_gets_the_published_one(model, engine, offloaded_before):
    before = storages_alive()
    driven = start(engine, model)
    published = {name: weight.clone() for name, weight in driven.named_weights()}
    if offloaded_before:
        driven.place("host")
        driven.place("device")
    driven.train_full(Full())
    train(driven, [[ROWS]], learning_rate=RATES["full"])
    if offloaded_before:
        driven.place("host")
        driven.place("device")
    driven.drop_slot(None)
    assert driven.memory().device_bytes == 0
    driven.place("host")
    assert driven.memory().device_bytes == 0
    driven.place("device")
    driven.add_adapter("next", Lora(rank=2), seed=0)
    assert all(torch.equal(weight, published[name]) for name, weight in driven.named_weights())
    driven.drop_slot("next")
    driven.place("host")
    known = before | {weight.data_ptr(): weight.nbytes for weight in published.values()}
    alive = {address: size for address, size in storages_alive().items() if address not in known}
    assert sum(alive.values()) == driven.memory().host_bytes  # of what was trained, nothing is left
