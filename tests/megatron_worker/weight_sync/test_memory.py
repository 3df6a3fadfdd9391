"""What a sync takes of memory beside the weights, on either side: two buckets."""

import ctypes
import os

import pytest

from benchmarks.machine import PeakMemory
from examples.tiny_model import make_tiny_model
from megatron_worker.weight_sync.gathering import Sent
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.weight_sync.test_kills import apart
from tests.megatron_worker.weight_sync.test_sync import sync

BUCKET = 32 << 20
SLACK = 20 << 20  # whatever the bucket's size: a tensor, what checksums and changes are computed with, threads' heaps
_M_MMAP_THRESHOLD = -3
# NIXL and Mooncake have buffers of their own, which depend on what they travel by.
WAYS = ("shared_memory", "collective")


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory):
    """128 MB of weights: four buckets. No tensor has a tenth of one."""
    folder = tmp_path_factory.mktemp("larger")
    return make_tiny_model(folder, ["hello"], hidden_size=512, num_layers=10, num_heads=8, num_kv_heads=4, head_dim=64)


@pytest.fixture
def returned_at_once():
    """Has what is freed go back to the kernel: earlier tests' free memory would hide what a sync takes."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    libc.malloc_trim(0)


@pytest.mark.parametrize("way", WAYS)
def test_a_sync_takes_two_buckets_beside_the_weights(larger_model, tmp_path, engine, way, returned_at_once):
    """With `delta` the trainer also keeps a copy of the weights, which its first sync makes."""
    driven, sent = start(engine, larger_model, "full"), Sent()
    with apart(larger_model, tmp_path / "sampler") as (sampler, pid):
        for version, backend in enumerate((way, way, f"delta by {way}", f"delta by {way}")):
            train(driven, [[random_rows([17], seed=version)]], learning_rate=1e-4)
            trainer, receiver = PeakMemory(os.getpid()), PeakMemory(pid)
            trainer.start()
            receiver.start()
            done = sync(driven, None, [sampler], version, backend, sent, bucket_bytes=BUCKET)
            assert done.problems == {} and done.weight_bytes > 3.5 * BUCKET
            copy = done.weight_bytes if version == 2 else 0
            taken = trainer.extra_bytes() - copy, receiver.extra_bytes()
            print(f"{backend}: {taken[0] / BUCKET:.2f} and {taken[1] / BUCKET:.2f} buckets")
            if version:  # the first loads code too
                assert max(taken) <= 2 * BUCKET + SLACK
                assert min(taken) > 1.5 * BUCKET, "both buffers are seen, or this shows nothing"
