"""Weight sync from a trainer to two samplers: a row for each way that this machine supports, and for the store.

    python -m benchmarks.weight_sync [--gigabytes 0.5 2] [--backend NAME ...] [--rounds 3] [--out FILE.json]
    python -m benchmarks.weight_sync --layout [dp2 ...] [--gigabytes 0.084] [--rounds 3] [--out FILE.json]

By default the trainer has one rank. With `--layout` it has two, with one row for each way that they share the weights
(sync_layouts.py), by shared memory in full and as deltas: `blocked_s` is then that of the rank blocked longest.

The model is a Qwen3 in bfloat16 of `--gigabytes`; the two samplers are separate processes. Before each sync comes one
step of AdamW at 1e-6. Above 1 GB there is no room for the optimizer's state, eight times the weights: the step is then
drawn at random (`drift`), and changes as many weights as late steps of Adam do: twice as many as the first ones, whose
masters are still near the weights that they were rounded to.

`blocked_s`: seconds before the trainer can continue with passes. `update_s`: before its next update, which waits until
the weights have been read. `serving_s`: until both samplers use the new weights. `bytes`: sent to each sampler.
Medians over the rounds. Through the store the trainer is blocked while it writes its weights, without the
optimizer's state; then they are uploaded, published (copied within the store) and loaded, without the activities that
do this in a run. `tcp` and `collective`, which is gloo here, go over the loopback interface.

`trainer_extra_bytes`, `sampler_extra_bytes`: growth of a process's peak resident memory during a sync, the
maximum over all rounds and both samplers. Shared buffers count in every process that has read or written them.
`buckets`: the larger of the two in buckets; with `delta` minus the copy of the weights that the trainer keeps.

After every sync both samplers must give the same log-probabilities of a text.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import torch

from benchmarks.machine import PeakMemory, provenance, tell
from benchmarks.random_model import Sizes
from benchmarks.timed_sync import TEXT, Receiver, sampler, target_of, timed_sync, write_weights
from examples.tiny_model import make_tiny_model
from longshore.losses import CrossEntropy
from longshore.training import Adam, EngineName, Full, Layout, Transport
from megatron_worker.engine import Batch
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.weight_sync.sender import DeltaBase
from megatron_worker.weight_sync.transports.table import why_not
from shared.jobs.job import SyncTarget
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.store import LocalStore

SIZES = Sizes(hidden=1024, layers=1, heads=16, kv_heads=8, head_dim=64, ffn=3072, vocab=512, tied=True)
NUM_SAMPLERS = 2
BUCKET_BYTES = 64 << 20
LEARNING_RATE = 1e-6
MOST_TRAINED = 1e9  # bytes of weights
LAYOUTS: dict[str, tuple[EngineName, Layout]] = {
    "dp2": ("megatron", Layout(dp=2)),
    "tp2": ("megatron", Layout(tp=2)),
    "pp2": ("megatron", Layout(pp=2)),
    "ep2": ("megatron", Layout(dp=2, ep=2)),
    "fsdp-dp2": ("fsdp", Layout(dp=2)),
}
BACKENDS = (
    *("store", "shared_memory", "tcp", "collective", "delta by shared_memory", "delta by tcp"),
    *("delta by store", "cuda_ipc"),
)


def why_not_here(backend: str, device: torch.device) -> str | None:
    if backend == "delta by store":
        return "there is no such way: what is published is whole, and samplers load it from its folder"
    transport = next((one for one in get_args(Transport) if one == backend), None)
    return why_not(transport, device) if transport is not None else None


def measure(model: Path, folder: Path, weight_bytes: float, backends: list[str], rounds: int) -> dict[str, object]:
    engine = Untrained(model, Layout(), "bfloat16")
    is_trained = weight_bytes <= MOST_TRAINED
    if is_trained:
        engine.train_full(Full())
        step(engine)  # the first makes the optimizer's state
    found: dict[str, object] = {"step": "AdamW" if is_trained else "drift"}
    version = 0
    with ExitStack() as stack:
        samplers = [stack.enter_context(sampler(model, folder / f"sampler-{n}")) for n in range(NUM_SAMPLERS)]
        for backend in backends:
            if (reason := why_not_here(backend, engine.facts.device)) is not None:
                found[backend] = f"not possible here: {reason}"
                continue
            sent, measured = DeltaBase(), list[dict[str, float]]()
            for _ in range(rounds + 1):  # the first fills the copies that changes are found against
                step(engine) if is_trained else engine.drift()
                version += 1
                if backend == "store":
                    measured.append(by_store(engine, model, samplers, folder, version))
                else:
                    measured.append(
                        by_sync(engine, samplers, target_of(samplers, backend, version, BUCKET_BYTES), sent)
                    )
                print(f"{backend}: {measured[-1]}", file=sys.stderr, flush=True)
            found[backend] = summary(backend, measured)
    return found


def summary(backend: str, measured: list[dict[str, float]]) -> dict[str, float]:
    """Medians of all rounds but the first; of memory the most of all."""
    figures = {
        name: max(one[name] for one in measured)
        if name.endswith("_extra_bytes")
        else statistics.median(one[name] for one in measured[1:])
        for name in measured[0]
    }
    copy = figures["weight_bytes"] if backend.startswith("delta") else 0
    most = max(figures["trainer_extra_bytes"] - copy, figures["sampler_extra_bytes"])
    return {**figures, "buckets": round(most / BUCKET_BYTES, 2)}


def step(engine: Engine) -> None:
    """One step of AdamW; its gradients touch every weight."""
    batch = Batch.chain(TEXT, engine.facts.device)
    batch = replace(batch, weight_N=torch.ones_like(batch.weight_N))
    engine.forward_backward(batch, loss_function(CrossEntropy()))
    norms = engine.optim_step(Adam(clip_norm=0.0), LEARNING_RATE, len(TEXT) - 1)
    assert norms.grad_norm > 0


class Untrained(MegatronEngine):
    """One whose weights change without gradients or an optimizer's state."""

    @torch.no_grad()
    def drift(self) -> None:
        """Change weights as a step of Adam does that moves each float32 master by the learning rate.

        After many steps a master lies anywhere in the interval that is rounded to its bfloat16 weight; where the move
        leaves the interval the weight becomes its neighbour.
        """
        for part in self._model.flat.buffer.split(1 << 22):
            exact = part.float()
            spacing = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 8)
            master = exact + (torch.rand_like(exact) - 0.5) * spacing
            part.copy_(master + LEARNING_RATE * torch.randn_like(exact).sign_())


def by_sync(engine: MegatronEngine, samplers: list[Receiver], target: SyncTarget, sent: DeltaBase) -> dict[str, float]:
    own = PeakMemory(os.getpid())
    for memory in (own, *(one.memory for one in samplers)):
        memory.start()
    seconds, done = timed_sync(engine, samplers, target, sent)
    extra = {"trainer_extra_bytes": own.extra_bytes(), "sampler_extra_bytes": extra_of(samplers)}
    check(samplers, f"v{target.version}")
    return {**asdict(seconds), "bytes": done.num_bytes, "weight_bytes": done.weight_bytes, **extra}


def by_store(
    engine: MegatronEngine, model: Path, samplers: list[Receiver], folder: Path, version: int
) -> dict[str, float]:
    store, saved = LocalStore(folder / "store"), folder / "checkpoint"
    own = PeakMemory(os.getpid())
    for memory in (own, *(one.memory for one in samplers)):
        memory.start()
    began = time.perf_counter()
    save_weights(engine, model, saved)
    blocked = time.perf_counter() - began
    trainer_extra = own.extra_bytes()  # in a run, a host does the rest
    upload_artifact(store, f"checkpoints/{version}", saved)
    published = shutil.copytree(saved, folder / "published")
    artifact = upload_artifact(store, f"models/{version}", published)
    path = Path(artifact.uri.removeprefix("file://"))
    for one in samplers:
        one.client.load_weights(f"v{version}", str(path))
    serving = time.perf_counter() - began
    extra = {"trainer_extra_bytes": trainer_extra, "sampler_extra_bytes": extra_of(samplers)}
    check(samplers, f"v{version}")
    num_bytes = float(sum(one.stat().st_size for one in saved.rglob("*.safetensors")))
    for used in (saved, published, folder / "store"):
        shutil.rmtree(used)
    times = {"blocked_s": blocked, "update_s": blocked, "serving_s": serving}
    return {**times, "bytes": num_bytes, "weight_bytes": num_bytes, **extra}


def extra_of(samplers: list[Receiver]) -> int:
    return max(one.memory.extra_bytes() for one in samplers)


def save_weights(engine: MegatronEngine, model: Path, folder: Path) -> None:
    """Write the weights of a checkpoint, durably, as a checkpoint does."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    write_weights(engine, folder)
    seal(folder)


def check(samplers: list[Receiver], name: str) -> None:
    told = [one.client.score(name, TEXT) for one in samplers]
    assert all(one == told[0] for one in told), "the samplers differ"


def measured_with(gigabytes: float, backends: list[str], rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model", gigabytes)
        return measure(model, Path(name), gigabytes * 1e9, backends, rounds)


def layout_with(gigabytes: float, layout: str, rounds: int) -> dict[str, object]:
    """Measure a trainer of two ranks. A model with experts has about as many bytes."""
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model", gigabytes, "qwen3_moe" if layout == "ep2" else "qwen3")
        launcher = [sys.executable, "-m", "megatron_worker.process.launcher", str(LAYOUTS[layout][1].world_size)]
        arguments = ["benchmarks.sync_layouts", layout, str(model), name, str(rounds)]
        subprocess.run([*launcher, *arguments], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        figures: dict[str, object] = json.loads((Path(name) / "figures.json").read_text())
        return figures


def make_model(folder: Path, gigabytes: float, family: str = "qwen3") -> Path:
    sizes = SIZES.with_weights(int(gigabytes * 1e9 / 2))
    return make_tiny_model(
        folder,
        ["hello there"],
        family=family,
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        num_layers=max(2, sizes.layers),
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", help="of weights, one after another")
    parser.add_argument("--layout", nargs="*", choices=LAYOUTS, help="of a trainer with two ranks; all unless named")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="this one alone; may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = provenance()
    figures: dict[str, object]
    if options.layout is None:
        backends = options.backend or list(BACKENDS)
        sizes = options.gigabytes or [0.5, 2.0]
        figures = {f"{one:g} GB": measured_with(one, backends, options.rounds) for one in sizes}
    else:
        layouts, sizes = options.layout or list(LAYOUTS), options.gigabytes or [0.084]
        figures = {f"{one:g} GB": {name: layout_with(one, name, options.rounds) for name in layouts} for one in sizes}
    settings = {"bucket_bytes": BUCKET_BYTES, "samplers": NUM_SAMPLERS, "rounds": options.rounds}
    result = {"benchmark": "weight_sync", **started, "torch": torch.__version__, **settings, "figures": figures}
    tell(result, options.out)


if __name__ == "__main__":
    main()
