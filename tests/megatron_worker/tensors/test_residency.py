"""Which parts of an engine are where: every combination, on every engine, on one rank and on several."""

from itertools import product
from pathlib import Path

import pytest
import torch

from longshore.training import EngineName, Full, Layout, Lora
from megatron_worker.engine import Memory, Outputs, PartBytes
from megatron_worker.tensors.slot_engine import Engine
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import LORA, checkpoint_bytes, start
from tests.megatron_worker.launch import on_ranks
from tests.megatron_worker.rows import bin_of, random_rows

ROWS = random_rows([40, 17, 90])
BINS = [[row] for row in random_rows([40, 17, 90])]
RATES = {"lora": 3e-3, "full": 3e-4}
PARTS = ("weights", "gradients", "optimizer")
PLACES = [dict(zip(PARTS, places, strict=True)) for places in product(("device", "host"), repeat=3)]


def placed(engine: Engine) -> dict[str, str]:
    """Which part is where, by the bytes that it holds on the device."""
    return {part: "device" if held.device else "host" for part, held in engine.memory().parts.items()}


def check_slot_bytes(engine: Engine, trainable: Lora | Full) -> None:
    """What a slot is said to take is what the device has more by part, to the byte, once it is there."""
    before = engine.memory()
    said = engine.slot_bytes(trainable)
    assert engine.memory() == before, "nothing was made"
    if isinstance(trainable, Lora):
        engine.add_adapter("counted", trainable, seed=0)
    else:
        engine.train_full(trainable)
    after = engine.memory().parts
    assert said == {part: after[part].device - before.parts.get(part, PartBytes()).device for part in PARTS}
    assert said["gradients"] > 0 and said["optimizer"] > 0


def train_everywhere(engine: Engine, kind: str, moves: bool) -> None:
    """A step for each combination, and gradients that lie there between their backward and their update."""
    whole = engine.memory().parts
    for place in PLACES:
        if moves:
            engine.place(**place)
            assert placed(engine) == place
            for part, held in engine.memory().parts.items():
                assert held.device in (0, whole[part].device)
                assert place[part] == "device" or held.host >= whole[part].device
        with engine.training():
            assert placed(engine) == dict.fromkeys(PARTS, "device")
            train(engine, [BINS], learning_rate=RATES[kind])
        assert not moves or placed(engine) == place
    engine.place("device")


def train_in_both_ways(engine: EngineName, layout: Layout, model: Path, out: Path) -> None:
    for kind, moves in product(RATES, (False, True)):
        if not moves:
            check_slot_bytes(start(engine, model, layout=layout), LORA if kind == "lora" else Full())
        driven = start(engine, model, kind, layout=layout)
        train_everywhere(driven, kind, moves)
        driven.save(out / kind / str(moves))


@pytest.mark.parametrize(("kind", "dtype"), drawn([*product(("lora", "full"), ("float32", "bfloat16"))], 2))
def test_every_combination_comes_back_to_the_bit(model: Path, tmp_path: Path, engine, kind, dtype):
    for moves in (False, True):
        driven = start(engine, model, kind, dtype)
        train_everywhere(driven, kind, moves)
        driven.save(tmp_path / str(moves))
    assert checkpoint_bytes(tmp_path / "True") == checkpoint_bytes(tmp_path / "False")


@pytest.mark.parametrize(
    ("name", "layout"),
    drawn(
        [
            *(("megatron", Layout(**each)) for each in ({"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2})),
            *(("fsdp", Layout(dp=each)) for each in (2, 4)),
        ],
        2,
    ),
)
def test_several_ranks_come_back_to_the_bit(model: Path, tmp_path: Path, name, layout: Layout):
    on_ranks(layout.world_size, train_in_both_ways, name, layout, model, tmp_path)
    for kind in RATES:
        assert checkpoint_bytes(tmp_path / kind / "True") == checkpoint_bytes(tmp_path / kind / "False"), kind


def test_bytes_by_part_are_exact(model: Path, engine):
    driven = start(engine, model)
    weights = driven.memory().parts["weights"].device
    assert weights == pytest.approx(sum(w.nbytes for _, w in driven.named_weights()), rel=0.05)
    driven.add_adapter("run", LORA, seed=0)
    parts = driven.memory().parts
    adapter = parts["weights"].device - weights
    assert parts["gradients"] == PartBytes(adapter, 0)
    assert parts["optimizer"] == PartBytes(2 * adapter, 0)
    driven.place(optimizer="host")
    assert driven.memory().parts["optimizer"] == PartBytes(0, 2 * adapter)
    driven.place("host")
    assert driven.memory().device_bytes == 0
    assert driven.memory().host_bytes == sum(part.host for part in driven.memory().parts.values())
    driven.place(gradients="dropped")
    assert driven.memory().parts["gradients"] == PartBytes(0, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "trainable", [LORA, Lora(rank=3, targets=("q_proj", "down_proj")), Full()], ids=["all linears", "two", "full"]
)
def test_a_slot_s_bytes_are_known_before_it_is_made(model: Path, engine, dtype: str, trainable: Lora | Full):
    check_slot_bytes(start(engine, model, dtype=dtype), trainable)


def test_each_slot_s_bytes_come_move_and_go_by_themselves(model: Path, engine):
    driven = start(engine, model)
    base = driven.memory().parts["weights"].device
    loras = {"small": Lora(rank=2, targets=("q_proj", "down_proj")), "large": LORA}
    taken = {name: driven.slot_bytes(lora) for name, lora in loras.items()}
    assert 0 < sum(taken["small"].values()) < sum(taken["large"].values())

    def on_device() -> dict[str, int]:
        held = {part: bytes_.device for part, bytes_ in driven.memory().parts.items()}
        return held | {"weights": held["weights"] - base}

    both = {part: taken["small"][part] + taken["large"][part] for part in taken["small"]}
    for name, lora in loras.items():
        driven.add_adapter(name, lora, seed=0)
    assert on_device() == both
    driven.place("host", slots=["small"])
    assert on_device() == taken["large"]
    assert driven.memory().parts["optimizer"].host == taken["small"]["optimizer"]
    driven.place("device", slots=["small"])
    assert on_device() == both
    driven.drop_slot("large")
    assert on_device() == taken["small"]


def test_scoring_holds_neither_optimizer_nor_gradients_and_leaves_things_where_they_were(model: Path, engine):
    driven = start(engine, model, "lora")
    driven.add_adapter("other", Lora(rank=2), seed=1)
    before = driven.memory()
    with torch.no_grad(), driven.training(), driven.scoring():
        assert {driven.memory().parts[part].device for part in ("optimizer", "gradients")} == {0}
        driven.forward(bin_of(ROWS), Outputs())
        with driven.training():  # of the active slot alone
            assert 0 < driven.memory().parts["optimizer"].device < before.parts["optimizer"].device
        assert driven.memory().parts["optimizer"].device == 0
    assert driven.memory().device_bytes == before.device_bytes


def test_an_error_leaves_things_where_they_were(model: Path, engine):
    driven = start(engine, model, "lora")
    driven.place("host")
    with pytest.raises(ZeroDivisionError), driven.training(), driven.scoring():
        raise ZeroDivisionError
    assert driven.memory().device_bytes == 0


def test_dropped_gradients_are_zero_and_a_dropped_base_is_read_again(model: Path, tmp_path: Path, engine):
    plain, moved = (start(engine, model, "lora") for _ in range(2))
    for driven in (plain, moved):
        train(driven, [[ROWS]])
    moved.place(gradients="dropped")
    for driven in (plain, moved):
        with driven.training():
            train(driven, [[ROWS]])
        driven.save(tmp_path / ("plain" if driven is plain else "moved"))
    assert checkpoint_bytes(tmp_path / "moved") == checkpoint_bytes(tmp_path / "plain")
    moved.drop_slot("run")
    published = {name: weight.clone() for name, weight in moved.named_weights()}
    moved.place(weights="dropped")
    assert moved.memory() == Memory(0, 0, {"weights": PartBytes(0, 0)})
    moved.place(weights="device")
    assert all(torch.equal(weight, published[name]) for name, weight in moved.named_weights())


@pytest.mark.parametrize(("kind", "part"), [("lora", "weights"), ("lora", "optimizer"), ("full", "weights")])
def test_what_nothing_else_holds_is_not_dropped(model: Path, engine, kind, part):
    driven = start(engine, model, kind)
    before = driven.memory()
    with pytest.raises(ValueError, match=f"the {part} of .* cannot be dropped"):
        driven.place(**{part: "dropped"})
    assert driven.memory() == before
