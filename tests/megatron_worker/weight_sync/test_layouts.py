"""Under every layout, samplers get every tensor to the bit by its Hugging Face or PEFT name, in two buckets' memory."""

import ctypes
import gc
import json
import os
import sys
from functools import partial
from itertools import product
from typing import get_args

import pytest

from benchmarks.machine import PeakMemory
from examples.tiny_model import make_tiny_model
from longshore.training import EngineName
from megatron_worker.weight_sync.sender import DeltaBase
from tests import forks
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.launch import REPOSITORY, environment, fork_ranks
from tests.megatron_worker.rows import distinct_model, random_rows
from tests.megatron_worker.weight_sync.samplers import WAYS
from tests.megatron_worker.weight_sync.sync_ranks import LAYOUTS, NUM_SAMPLERS
from tests.megatron_worker.weight_sync.test_in_flight import apart, listen_apart
from tests.megatron_worker.weight_sync.test_sync import sync

CASES = [
    (f"{name}-{engine}-{layout.label}", kind)
    for name, layouts in LAYOUTS.items()
    for engine, layout in layouts
    for kind in ("full", "lora")
]
SCALARS = 1 << 10
pytestmark = pytest.mark.drawn


@pytest.fixture(scope="module")
def synced(model, tmp_path_factory):
    """The folder in which ranks have said what each sync took."""
    folder = tmp_path_factory.mktemp("synced")
    families = {"experts": "qwen3_moe", "hybrid": "qwen3_5"}
    made = {name: str(distinct_model(folder / name, family, False)) for name, family in families.items()}
    models = {"dense": str(model)} | made
    module = "tests.megatron_worker.weight_sync.sync_ranks"
    fork_ranks(module, str(folder), json.dumps(models), num_ranks=2, timeout_s=500)
    return folder


def test_samplers_get_the_weights_of_every_layout(synced):
    """Beside passes and checkpoints; also after a sync that broke on some rank."""
    done = {f"{layout}-{kind}" for layout, kind in CASES} | {f"{layout}-saved" for layout, _ in CASES}
    assert done <= {path.name for path in synced.iterdir()}


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_a_sync_takes_two_buckets_on_either_side(synced, layout, kind):
    """And what these tiny ones are not small beside: a block as it is read, and the master of an adapter that it is of,
    each twice, as communication may not have let go of the last one; what a checksum is computed with, twice the bytes
    that it takes at a time. A sampler holds a new adapter as it came, too.
    """
    for rank in range(2):
        lines = map(json.loads, (synced / f"memory-{rank}.jsonl").read_text().splitlines())
        found = [one for one in lines if (one["layout"], one["kind"]) == (layout, kind)]
        assert [one["way"] for one in found] == ["shared_memory", "tcp"]
        for one in found:
            assert 2 * one["gathered"] < one["weights"] / 2, "or more than a tensor would not be seen"
            if rank:
                print(f"{layout} {kind}, {one['way']}: {one['sent'] / one['largest']:.2f} of a tensor on rank 1")
                assert one["sent"] <= 2 * one["gathered"] + SCALARS
            else:
                check_rank_0(one)


def check_rank_0(one):
    buffers = 2 * one["buffer"]
    mapped = one["mapped"] / (1 + NUM_SAMPLERS)
    sender, sampler = one["sent"] + mapped, one["received"] / NUM_SAMPLERS + mapped
    print(
        f"{one['layout']} {one['kind']}, {one['way']}, beside two buckets of {one['buffer']} bytes: sender "
        f"{sender - buffers:g}, sampler {sampler - buffers:g}; the largest tensor has {one['largest']}"
    )
    assert buffers < sender <= buffers + 2 * one["gathered"] + 2 * min(one["buffer"], one["largest"]) + SCALARS
    kept = 0 if one["kind"] == "full" else one["kept"] + one["weights"]
    assert buffers < sampler <= buffers + kept + 2 * one["hashed"] + SCALARS


BUCKET = 32 << 20
SLACK = 20 << 20  # whatever the bucket's size: a tensor, what checksums and changes are computed with, threads' heaps
_M_MMAP_THRESHOLD = -3


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory):
    """128 MB of weights: four buckets. No tensor has a tenth of one."""
    folder = tmp_path_factory.mktemp("larger")
    return make_tiny_model(folder, ["hello"], hidden_size=512, num_layers=10, num_heads=8, num_kv_heads=4, head_dim=64)


def return_at_once():
    """Have what this process frees go back to the kernel: free memory of before would hide what a sync takes."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    libc.malloc_trim(0)


def listen_and_return_at_once(model, folder):
    return_at_once()
    listen_apart(model, folder)


def measure(engine, model, way, sampler, pid):
    """The trainer, in a process of its own: free memory that earlier tests have left would hide what a sync takes."""
    driven, backends = start(engine, model, "full"), (way, way, f"delta by {way}", f"delta by {way}")
    for number in range(2):  # the first time loads code, too
        sent = DeltaBase()
        return_at_once()  # also the last one's copy
        for place, backend in enumerate(backends):
            version = len(backends) * number + place
            train(driven, [[random_rows([17], seed=version)]], learning_rate=1e-4)
            trainer, receiver = PeakMemory(os.getpid()), PeakMemory(pid)
            trainer.start()
            receiver.start()
            done = sync(driven, None, [sampler], version, backend, sent, bucket_bytes=BUCKET)
            assert done.problems == {} and done.weight_bytes > 3.5 * BUCKET
            copy = done.weight_bytes if place == 2 else 0  # of the weights, which the first `delta` makes
            print(json.dumps([trainer.extra_bytes() - copy, receiver.extra_bytes()]))


@pytest.mark.parametrize(("engine", "way"), drawn([*product(get_args(EngineName), WAYS)], 1))
def test_a_sync_takes_two_buckets_beside_the_weights(larger_model, tmp_path, engine, way):
    with apart(larger_model, tmp_path / "sampler", listen_and_return_at_once) as (sampler, pid):
        call = partial(measure, engine, larger_model, way, sampler, pid)
        done = forks.captured(call, sys.argv, environment(), REPOSITORY, timeout_s=300)
    assert done.code == 0, done.stderr
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(measured) == 8
    # The fifth frees what the ones before have kept, which hides what it takes; so may what a later one finds free.
    for side in zip(*measured[5:], strict=True):
        print(", ".join(f"{taken / BUCKET:.2f} buckets" for taken in side))
        assert max(side) <= 2 * BUCKET + SLACK
        assert max(side) > 1.5 * BUCKET, "both buffers are seen once, or this shows nothing"
