"""What a sync takes of memory beside the weights, on either side: two buckets."""

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
from tests.megatron_worker.launch import REPOSITORY, environment
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.weight_sync.samplers import WAYS
from tests.megatron_worker.weight_sync.test_kills import apart, listen_apart
from tests.megatron_worker.weight_sync.test_sync import sync

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
