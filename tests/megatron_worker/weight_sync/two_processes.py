"""A trainer in this process and a sampler in another, on one device: what is sent is what the store would bring."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from activities.sampling.client import Sampler
from longshore.training import SyncOutcome, Transport
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.weight_sync.buckets import weights_sha256
from megatron_worker.weight_sync.sender import send
from shared.chat.completions import Sampling
from shared.jobs.job import SyncAccess, SyncTarget, secret_of_run
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.sampler_process import started

BUCKET = 1 << 14  # the tiny model needs many
STEPS = [[random_rows([40, 17], seed=s)] for s in range(2)]
PROMPT = (10, 20, 30, 40, 50)
HOW = Sampling(max_tokens=16, ignore_eos=True)


class Apart(NamedTuple):
    """A sampler's process: a client of it, where it takes weights, and what its trainers know."""

    client: Sampler
    socket: str
    address: str | None
    access: SyncAccess

    def sent(self, engine: Engine, slot: str | None, version: int, transport: Transport) -> SyncOutcome:
        target = SyncTarget(
            sockets=(self.socket,), addresses=(self.address,), version=version, backend=transport, bucket_bytes=BUCKET
        )
        sending = send(engine.outgoing(slot), target, "run", None, self.access)
        assert sending is not None
        return sending.result()


@contextmanager
def apart(model: Path, folder: Path, device: str, dtype: str = "bfloat16") -> Iterator[Apart]:
    key, file, path = secrets.token_bytes(32), folder / "weights.key", str(folder / "weights.sock")
    file.write_text(key.hex())
    options = ("--dtype", dtype, "--device", device, "--weights-socket", path, "--max-model-len", "128")
    remote = ("--weights-address", "127.0.0.1", "--weights-key-file", str(file))
    with started(model, folder, *options, *remote) as ready, Sampler(ready.url, ready.api_key) as client:
        yield Apart(client, path, ready.weights_address, SyncAccess(secret=secret_of_run(key, "run").hex()))


def check_syncs(sampler: Apart, model: Path, folder: Path, transport: Transport) -> None:
    """Two versions of an adapter and of all weights, which samplers serve to the bit, by every tensor's name."""
    for kind in ("lora", "full"):
        slot, engine = ("run" if kind == "lora" else None), start("megatron", model, kind, "bfloat16")
        for version, rows in enumerate(STEPS, 1):
            train(engine, [rows], learning_rate=1e-3)
            saved, name = folder / f"{kind}-{version}", f"{kind}-{version}"
            engine.save(saved)
            done = sampler.sent(engine, slot, version, transport)
            assert done.problems == {} and done.transport == transport, done
            assert done.digest is not None and sampler.client.name_weights(name, done.digest)
            sent = sampler.client.models()[name].weights_sha256
            if kind == "lora":
                sampler.client.load_adapter("stored", str(saved / "weights"))
            else:
                assert sent == weights_sha256(engine.named_weights())
                sampler.client.load_weights("stored", str(saved / "weights"))
            assert sent is not None and sampler.client.models()["stored"].weights_sha256 == sent
            if kind == "lora":
                sampler.client.unload_adapter("stored")


def check_sleep(sampler: Apart) -> None:
    """A sampler gives at least 95 % of its device's memory back, and is what it was when it is woken."""
    client = sampler.client
    [(name, before)] = client.models().items()
    drawn, awake = client.sample(name, PROMPT, HOW, 2, 5), client.wake()
    asleep = client.sleep(1)
    assert awake.asleep == 0 and asleep.asleep == 1
    assert asleep.device_bytes <= 0.05 * awake.device_bytes
    client.wake()
    assert client.models()[name].weights_sha256 == before.weights_sha256
    again = client.sample(name, PROMPT, HOW, 2, 5)
    assert [(one.token_ids, one.logprobs) for one in again] == [(one.token_ids, one.logprobs) for one in drawn]
