"""Weights from a trainer to two samplers: by shared memory and as changes, beside the way through the store.

    python -m benchmarks.weight_sync [--gigabytes 0.5] [--rounds 3] [--out FILE.json]

A Qwen3 model in bfloat16 whose weights have so many bytes is trained in full, one step of AdamW at 1e-6 before each
sync; two samplers are processes of their own. `blocked_s`: seconds before the trainer can go on with passes (its next
update waits until the weights have been read). `serving_s`: until both samplers answer from the new weights. Through
the store the trainer is blocked while it writes its weights, without the optimizer's state; then they are uploaded,
published (copied within the store) and loaded, without the activities that do this in a run. After every sync both
samplers must give the same log-probabilities of a text.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from activities.sampling.client import Sampler
from benchmarks.machine import provenance
from benchmarks.random_model import Sizes
from examples.tiny_model import make_tiny_model
from megatron_worker.engine import Batch
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.tensors.safetensors_files import Entry, write_model
from megatron_worker.weight_sync.sender import Sent, send
from shared.chat.completions import SamplerReady
from shared.jobs.job import Adam, CrossEntropy, Full
from shared.jobs.layout import Layout
from shared.jobs.weight_sync import SyncTarget
from shared.storage.artifacts import seal, upload
from shared.storage.store import LocalStore

SIZES = Sizes(hidden=1024, layers=1, heads=16, kv_heads=8, head_dim=64, ffn=3072, vocab=512, tied=True)
NUM_SAMPLERS = 2
TEXT = tuple(range(3, 67))
BUCKET_BYTES = 64 << 20


@contextmanager
def sampler(model: Path, folder: Path) -> Iterator[tuple[Sampler, str, str]]:
    """A sampler process: a client of it, its model's name, and its socket."""
    folder.mkdir()
    options = ["--weights-socket", str(folder / "weights.sock"), "--ready-file", str(folder / "ready"), "--slots", "1"]
    command = [sys.executable, "-m", "megatron_worker.sampler", "--model", str(model), "--dtype", "bfloat16", *options]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while not (folder / "ready").exists():
            assert process.poll() is None, "the sampler has ended"
            time.sleep(0.05)
        ready = SamplerReady.model_validate_json((folder / "ready").read_bytes())
        with Sampler(ready.url, ready.api_key) as client:
            yield client, ready.model, str(folder / "weights.sock")
    finally:
        process.terminate()
        process.wait()


def measure(model: Path, folder: Path, rounds: int) -> dict[str, object]:
    engine = MegatronEngine(model, Layout(), "bfloat16")
    engine.train_full(Full())
    step(engine)  # the first makes the optimizer's state
    found: dict[str, list[dict[str, float]]] = {}
    sent, version = Sent(), 0
    with ExitStack() as stack:
        samplers = [stack.enter_context(sampler(model, folder / f"sampler-{n}")) for n in range(NUM_SAMPLERS)]
        sockets = tuple(socket for _, _, socket in samplers)
        for _ in range(rounds + 1):  # the first fills the copies that changes are found against
            for backend in ("store", "shared_memory", "delta"):
                step(engine)
                version += 1
                if backend == "store":
                    measured = by_store(engine, model, samplers, folder, version)
                else:
                    target = SyncTarget(
                        sockets=sockets,
                        version=version,
                        backend="delta" if backend == "delta" else "shared_memory",
                        bucket_bytes=BUCKET_BYTES,
                    )
                    measured = by_sync(engine, samplers, target, sent)
                found.setdefault(backend, []).append(measured)
                if backend == "shared_memory":  # so that only one step lies between what a delta is found against
                    target = target.model_copy(update={"backend": "delta"})
                    by_sync(engine, samplers, target, sent)
    return {
        backend: {name: statistics.median(one[name] for one in measured[1:]) for name in measured[0]}
        for backend, measured in found.items()
    }


def step(engine: MegatronEngine) -> None:
    """One step of AdamW; its gradients touch every weight."""
    batch = Batch.chain(TEXT, engine.facts.device)
    batch = replace(batch, weight_N=torch.ones_like(batch.weight_N))
    engine.forward_backward(batch, loss_function(CrossEntropy()))
    norms = engine.optim_step(Adam(clip_norm=0.0), 1e-6, len(TEXT) - 1)
    assert norms.grad_norm > 0


def by_sync(
    engine: MegatronEngine, samplers: list[tuple[Sampler, str, str]], target: SyncTarget, sent: Sent
) -> dict[str, float]:
    began = time.perf_counter()
    sending = send(engine.outgoing(None), target, "benchmark", 0, 1, sent)
    assert sending is not None
    blocked = time.perf_counter() - began
    done = sending.wait()
    assert not done.problems, done.problems
    assert done.digest is not None
    for client, _, _ in samplers:
        assert client.name_weights(f"v{target.version}", done.digest)
    serving = time.perf_counter() - began
    check(samplers, f"v{target.version}")
    return {"blocked_s": blocked, "serving_s": serving, "bytes": done.num_bytes, "weight_bytes": done.weight_bytes}


def by_store(
    engine: MegatronEngine, model: Path, samplers: list[tuple[Sampler, str, str]], folder: Path, version: int
) -> dict[str, float]:
    store, saved = LocalStore(folder / "store"), folder / "checkpoint"
    began = time.perf_counter()
    save_weights(engine, model, saved)
    blocked = time.perf_counter() - began
    upload(store, f"checkpoints/{version}", saved)
    published = shutil.copytree(saved, folder / "published")
    artifact = upload(store, f"models/{version}", published)
    path = Path(artifact.uri.removeprefix("file://"))
    for client, _, _ in samplers:
        client.load_weights(f"v{version}", str(path))
    serving = time.perf_counter() - began
    check(samplers, f"v{version}")
    num_bytes = sum(one.stat().st_size for one in saved.rglob("*.safetensors"))
    for used in (saved, published, folder / "store"):
        shutil.rmtree(used)
    return {"blocked_s": blocked, "serving_s": serving, "bytes": float(num_bytes), "weight_bytes": float(num_bytes)}


def save_weights(engine: MegatronEngine, model: Path, folder: Path) -> None:
    """Write what a checkpoint has of weights, durably, as a checkpoint does."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    outgoing = engine.outgoing(None)
    entries = [Entry(name, outgoing.dtype, tuple(shape)) for name, shape in outgoing.shapes.items()]
    write_model(folder, entries, (tensor for _, tensor in outgoing.tensors), max_bytes=5 << 30)
    seal(folder)


def check(samplers: list[tuple[Sampler, str, str]], name: str) -> None:
    told = [client.score(name, TEXT) for client, _, _ in samplers]
    assert all(one == told[0] for one in told), "the samplers differ"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.5, help="of weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = SIZES.with_weights(int(options.gigabytes * 1e9 / 2))
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        make_tiny_model(
            model,
            ["hello there"],
            vocab_size=sizes.vocab,
            hidden_size=sizes.hidden,
            num_layers=sizes.layers,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
        )
        figures = measure(model, Path(name), options.rounds)
    result = {"benchmark": "weight_sync", **provenance(), "torch": torch.__version__, "figures": figures}
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
