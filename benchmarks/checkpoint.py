"""Cost of saving and reading a fully trained model's state on each rank, against torch.distributed.checkpoint.

python -m benchmarks.checkpoint [--weights 60e6] [--out FILE.json]

Float32 weights and both moments of AdamW, over two ranks. Ours are whole tensors under Hugging Face's names, written by
rank 0 a tensor at a time, so that any layout reads them; torch's are each rank's shards of tensors of the same bytes.
Host memory is the peak growth of a rank's resident memory; for reading it includes mapped pages of the file. Neither
is flushed to the disk.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.machine import PeakMemory, provenance, tell
from benchmarks.random_model import Sizes, write_config
from benchmarks.weight_sync import step
from longshore.training import EngineName, Full, Layout
from megatron_worker.process.ranks import start_group
from megatron_worker.warm_engine import new_engine

LAYOUTS: dict[str, tuple[EngineName, Layout]] = {
    "dp2": ("megatron", Layout(dp=2)),
    "tp2": ("megatron", Layout(tp=2)),
    "fsdp-dp2": ("fsdp", Layout(dp=2)),
}
SIZES = Sizes(hidden=768, layers=1, heads=12, kv_heads=4, head_dim=64, ffn=2304, vocab=8192)
Figures = dict[str, dict[str, float]]


def measured(save: Callable[[], object], load: Callable[[], object]) -> dict[str, float]:
    """Return seconds, and the largest growth of a rank's memory, of both: equal on every rank."""
    found: dict[str, float] = {}
    for name, act in (("save", save), ("load", load)):
        memory = PeakMemory(os.getpid())
        dist.barrier()
        memory.start()
        began = time.perf_counter()
        act()
        dist.barrier()
        both = torch.tensor([time.perf_counter() - began, memory.extra_bytes()], dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        found |= {f"{name}_s": round(float(both[0]), 2), f"{name}_peak_bytes": float(both[1])}
    return found


def of_torch(shapes: list[tuple[int, ...]], folder: Path) -> dict[str, float]:
    """The same for tensors of these shapes, three times, split over the ranks along their first dimension."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(shape: tuple[int, ...]) -> DTensor:
        local = torch.randn(shape[0] // dist.get_world_size(), *shape[1:])
        return DTensor.from_local(local, mesh, [Shard(0)])

    state = {f"{part}.{n}": shard(shape) for part in range(3) for n, shape in enumerate(shapes)}
    return measured(
        lambda: torch_checkpoint.save(state, checkpoint_id=folder),
        lambda: torch_checkpoint.load(state, checkpoint_id=folder),
    )


def on_ranks(name: str, model: Path, folder: Path) -> None:
    start_group("gloo")
    torch.set_num_threads(1)
    kind, layout = LAYOUTS[name]
    engine = new_engine(kind, model, layout, "float32")
    engine.train_full(Full())
    step(engine)
    figures: Figures = {"ours": measured(lambda: engine.save(folder / "ours"), lambda: engine.load(folder / "ours"))}
    shapes = [tuple(tensor.shape) for _, tensor in engine.named_weights()]
    figures["torch.distributed.checkpoint"] = of_torch(shapes, folder / "torch")
    if dist.get_rank() == 0:
        for written, what in (("ours", "ours"), ("torch", "torch.distributed.checkpoint")):
            figures[what]["bytes"] = sum(p.stat().st_size for p in (folder / written).rglob("*") if p.is_file())
        figures["ours"]["largest_tensor_bytes"] = 4 * max(torch.Size(shape).numel() for shape in shapes)
        (folder / "figures.json").write_text(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=float, default=60e6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks:
        on_ranks(arguments.ranks[0], *map(Path, arguments.ranks[1:]))
        return
    sizes = SIZES.with_weights(int(arguments.weights))
    result = {"what": "state of full training over two ranks, saved and read", "weights": sizes.num_weights}
    with tempfile.TemporaryDirectory() as temporary:
        model = write_config(Path(temporary) / "model", sizes)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
        for name in LAYOUTS:
            folder = Path(temporary) / name
            folder.mkdir()
            launcher = [sys.executable, "-m", "megatron_worker.process.launcher", "2", "benchmarks.checkpoint"]
            command = [*launcher, "--ranks", name, str(model), str(folder)]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            result[name] = json.loads((folder / "figures.json").read_text())
            shutil.rmtree(folder)
    tell(result | provenance(), arguments.out)


if __name__ == "__main__":
    main()
