"""What ranks train with layers that are computed again, and without: `… tests.megatron_worker.recompute_ranks`"""

import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel

from longshore.layout import EngineName, Layout
from longshore.training import Adam, Full, Lora, Quantization
from tests.megatron_worker.driving import LOSS
from tests.megatron_worker.engines import ENGINES
from tests.megatron_worker.rows import bin_of, random_rows, routed
from tests.megatron_worker.trees import as_tree, random_sequences
from tests.megatron_worker.trials import given_trials


class Trial(BaseModel):
    model: Path
    engine: EngineName = "megatron"
    layout: Layout = Layout()
    trainable: Lora | Full
    routes: bool = False
    quantize: Quantization | None = None


def trained(trial: Trial, recompute: bool) -> dict[str, torch.Tensor]:
    """This rank's sums, gradients and weights of three steps, of three bins of rows and one with a prefix tree each."""
    settings = {"quantize": trial.quantize} if trial.quantize else {}
    engine = ENGINES[trial.engine](trial.model, trial.layout, "float32", **settings)
    if isinstance(trial.trainable, Lora):
        engine.add_adapter("run", trial.trainable, seed=3)
    else:
        engine.train_full(trial.trainable)
    engine.recompute = recompute
    optimizer, found = engine.trained.optimizer, {}
    for step in range(3):
        rows = [random_rows([19 + step, 7, 12], seed=3 * step + number) for number in range(3)]
        bins = [*map(bin_of, rows), as_tree(random_sequences(step, num_groups=1))]
        bins = bins[engine.facts.dp_rank :: engine.facts.dp_size]
        if trial.routes:
            bins = [routed(engine.facts.routes, batch, number) for number, batch in enumerate(bins)]
        for number, (_, sums) in enumerate(engine.forward_backward_all(bins, LOSS)):
            found |= {f"{step}.{number}.{name}": value for name, value in sums.items()}
        found |= {f"{step}.{name}": p.grad.clone() for name, p in parameters(engine) if p.grad is not None}
        engine.optim_step(Adam(), 1e-2, 100.0)
    assert optimizer.step_count == 3
    return found | {name: p.detach().clone() for name, p in parameters(engine)}


def parameters(engine):
    owner = engine._model if engine.active is None else engine.adapters[engine.active]
    return [(name, p.to_local() if hasattr(p, "to_local") else p) for name, p in owner.parameters.items()]


def hashes(found: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in found.items()}


def main() -> None:
    results, rank = [], 0
    for trial, out in given_trials(Trial):
        rank = dist.get_rank()
        results.append([hashes(trained(trial, recompute)) for recompute in (False, True)])
        (out / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
