"""The engines that the suite drives, each alone. A new one is one more line of the table."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from longshore.training import Adam, EngineName, Full, Layout, Lora
from megatron_worker.fsdp.engine import FsdpEngine
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.tensors.slot_engine import Engine

ENGINES: dict[EngineName, Callable[..., Engine]] = {"megatron": MegatronEngine, "fsdp": FsdpEngine}
LORA = Lora(rank=4, alpha=8)
LORAS = {
    "lora": LORA,
    "dora": LORA.model_copy(update={"dora": True}),
    "tokens": LORA.model_copy(update={"targets": ("q_proj", "embed_tokens")}),
}


def start(
    engine: EngineName, model: Path, kind: str = "base", dtype: str = "float32", layout: Layout | None = None
) -> Engine:
    """An engine that trains an adapter (of LORAS), every weight ("full"), or nothing yet ("base")."""
    made = ENGINES[engine](model, layout or Layout(), dtype)
    if kind in LORAS:
        made.add_adapter("run", LORAS[kind], seed=3)
    elif kind == "full":
        made.train_full(Full())
    return made


def gradient(engine: Engine, folder: Path, denominator: float = 1.0) -> dict[str, torch.Tensor]:
    """What is accumulated, over `denominator`: the first moment of a step that keeps no other and changes no weight."""
    engine.optim_step(Adam(beta1=0.0, clip_norm=0.0), 0.0, denominator)
    engine.save(folder)
    return moments(folder)


def moments(folder: Path) -> dict[str, torch.Tensor]:
    """The first moments of a checkpoint, by the names of their tensors."""
    saved = load_file(folder / "optimizer" / "optimizer.safetensors")
    return {name.removeprefix("exp_avg."): t for name, t in saved.items() if name.startswith("exp_avg.")}


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of any tensor."""
    assert set(ours) == set(theirs)
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def checkpoint_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a checkpoint."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    assert len(found) >= 3
    return found
