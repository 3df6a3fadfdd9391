"""Samplers in processes of their own, and how long a trainer's weights are on their way to them."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from activities.sampling.client import Sampler
from benchmarks.machine import PeakMemory
from benchmarks.stack_processes import end
from longshore.training import SyncOutcome
from megatron_worker.tensors.safetensors_files import WrittenTensor, write_model
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.weight_sync.sender import DeltaBase, Sending, send
from shared.chat.completions import SamplerReady
from shared.jobs.job import SyncAccess, SyncTarget, secret_of_run

TEXT = tuple(range(3, 67))
_RUN = "benchmark"
_KEY = secrets.token_bytes(32)


@dataclass(frozen=True)
class Receiver:
    """A sampler process: a client of it, the addresses where it receives weights, and its memory."""

    client: Sampler
    socket: str
    address: str | None
    memory: PeakMemory


@dataclass(frozen=True)
class Seconds:
    """`blocked_s`: until the trainer can continue with passes; `update_s`: until its next update; `serving_s`: until
    all samplers use the weights.
    """

    blocked_s: float
    update_s: float
    serving_s: float


@contextmanager
def sampler(model: Path, folder: Path, device: str = "cpu", threads: int = 1) -> Iterator[Receiver]:
    """Start a sampler that computes in bfloat16, and end it after the `with` block. `folder` is made for its files."""
    folder.mkdir()
    (folder / "key").write_text(_KEY.hex())
    options = ["--weights-socket", str(folder / "weights.sock"), "--ready-file", str(folder / "ready"), "--slots", "1"]
    options += ["--weights-address", "127.0.0.1", "--weights-key-file", str(folder / "key"), "--device", device]
    command = [sys.executable, "-m", "megatron_worker.sampler", "--model", str(model), "--dtype", "bfloat16", *options]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, stdout=sys.stderr)
    try:
        while not (folder / "ready").exists():
            assert process.poll() is None, "the sampler has ended"
            time.sleep(0.05)
        ready = SamplerReady.model_validate_json((folder / "ready").read_bytes())
        with Sampler(ready.url, ready.api_key) as client:
            yield Receiver(client, str(folder / "weights.sock"), ready.weights_address, PeakMemory(process.pid))
    finally:
        end(process)


def target_of(samplers: Sequence[Receiver], way: str, version: int, bucket_bytes: int) -> SyncTarget:
    """`way`: a backend; or `delta by tcp`, which delta uses if no sampler's socket is on this machine."""
    elsewhere = "-elsewhere" if way == "delta by tcp" else ""
    return SyncTarget(
        sockets=tuple(one.socket + elsewhere for one in samplers),
        addresses=tuple(one.address for one in samplers),
        version=version,
        backend=way.partition(" ")[0],
        bucket_bytes=bucket_bytes,
    )


def timed_sync(
    engine: Engine, samplers: Sequence[Receiver], target: SyncTarget, sent: DeltaBase | None = None
) -> tuple[Seconds, SyncOutcome]:
    """Send an engine's weights to samplers, which then serve them as `v<version>`."""
    access = SyncAccess(secret=secret_of_run(_KEY, _RUN).hex())
    began = time.perf_counter()
    sending = send(engine.outgoing(None), target, _RUN, sent, access)
    assert isinstance(sending, Sending)
    blocked_s = time.perf_counter() - began
    done = sending.result()
    update_s = time.perf_counter() - began
    assert not done.problems, "; ".join(done.problems.values())
    assert done.digest is not None
    for one in samplers:
        assert one.client.name_weights(f"v{target.version}", done.digest)
    return Seconds(blocked_s, update_s, time.perf_counter() - began), done


def follow_sync(engine: Engine, way: str, version: int, bucket_bytes: int, sent: DeltaBase | None = None) -> float:
    """Take part in `timed_sync` on a rank other than 0. Returns the seconds until it can continue with passes."""
    target = SyncTarget(
        sockets=("rank 0's",), version=version, backend=way.partition(" ")[0], bucket_bytes=bucket_bytes
    )
    began = time.perf_counter()
    sending = send(engine.outgoing(None), target, _RUN, sent)
    blocked_s = time.perf_counter() - began
    if sending is not None:
        sending.result()
    return blocked_s


def write_weights(engine: Engine, folder: Path) -> None:
    """Write an engine's weights as a Hugging Face folder has them."""
    outgoing = engine.outgoing(None)
    entries = [WrittenTensor(name, outgoing.dtype, tuple(shape)) for name, shape in outgoing.shapes.items()]
    write_model(folder, entries, (tensor for _, tensor in engine.named_weights()), max_bytes=5 << 30)
