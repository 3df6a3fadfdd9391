"""Every combination of places, on each rank of several engines, for tensors/test_residency.py.

python -m megatron_worker.process.launcher N tests.megatron_worker.residency_ranks MODEL OUT LAYOUTS
"""

import sys
from itertools import product
from pathlib import Path

from pydantic import TypeAdapter

from longshore.layout import EngineName, Layout
from longshore.training import Full, Lora
from megatron_worker.engine import PartBytes
from megatron_worker.process.ranks import start_group
from megatron_worker.tensors.slot_engine import Engine
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import LORA, start
from tests.megatron_worker.rows import random_rows

BINS = [[row] for row in random_rows([40, 17, 90])]
RATES = {"lora": 3e-3, "full": 3e-4}
PARTS = ("weights", "gradients", "optimizer")
PLACES = [dict(zip(PARTS, places, strict=True)) for places in product(("device", "host"), repeat=3)]

Layouts = TypeAdapter(dict[EngineName, list[Layout]])


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


def main() -> None:
    model, out, layouts = Path(sys.argv[1]), Path(sys.argv[2]), Layouts.validate_json(sys.argv[3])
    start_group("gloo")
    for name, chosen in layouts.items():
        for number, layout in enumerate(chosen):
            for kind, moves in product(RATES, (False, True)):
                if not moves:
                    check_slot_bytes(start(name, model, layout=layout), LORA if kind == "lora" else Full())
                engine = start(name, model, kind, layout=layout)
                train_everywhere(engine, kind, moves)
                engine.save(out / f"{name}-{number}-{kind}" / ("moved" if moves else "plain"))


if __name__ == "__main__":
    main()
