"""Host copies. What engines make of them is in test_engine_state.py."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from benchmarks import offload as benchmark
from benchmarks.random_model import TINY
from megatron_worker.offload import HostCopy


def make_tensors(*lengths, dtype=torch.float32):
    return [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in lengths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 7, 100, 10_000])
def test_tensors_come_back_to_the_bit_whatever_the_chunks(dtype, chunk):
    tensors = make_tensors(13, 1, 100, 7, 0, 250, dtype=dtype)
    views, before = [t[1:] for t in tensors if len(t)], [t.clone() for t in tensors]
    copy = HostCopy(tensors, chunk * tensors[0].itemsize)
    num_bytes = copy.device_bytes
    for round_ in range(2):
        copy.offload()
        assert copy.device_bytes == 0
        assert all(view.untyped_storage().nbytes() == 0 for view in views)
        assert copy.host_bytes == num_bytes
        assert max(c.nbytes for c in copy._host) <= chunk * tensors[0].itemsize
        assert len(copy._host) == -(-371 // chunk)
        copy.offload()  # a second time changes nothing
        copy.reload()
        copy.reload()
        assert all(torch.equal(t, x + round_) for t, x in zip(tensors, before, strict=True))
        assert all(torch.equal(v, t[1:]) for v, t in zip(views, [t for t in tensors if len(t)], strict=True))
        for x, t in zip(before, tensors, strict=True):
            t.add_(1)  # what changed is copied anew
            x.copy_(t - round_ - 1)


def test_tensors_of_two_dtypes_come_back():
    tensors = [*make_tensors(13, 100), *make_tensors(7, 50, dtype=torch.bfloat16)]
    before, copy = [t.clone() for t in tensors], HostCopy(tensors, chunk_bytes=30)
    copy.offload()
    copy.reload()
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


def test_what_is_frozen_is_copied_once():
    [weights] = make_tensors(1000)
    before, copy = weights.clone(), HostCopy([weights])
    copy.offload(frozen=True)
    for _ in range(2):
        copy.reload()
        assert torch.equal(weights, before)
        weights.zero_()
        copy.offload(frozen=True)


def test_the_hosts_buffers_are_kept_until_they_are_forgotten():
    copy = HostCopy(make_tensors(1000, 2000), chunk_bytes=2048)
    copy.offload()
    places = [chunk.data_ptr() for chunk in copy._host]
    for _ in range(2):
        copy.reload()
        assert copy.host_bytes == 12_000
        copy.offload()
        assert [chunk.data_ptr() for chunk in copy._host] == places
    copy.reload()
    copy.forget()
    assert copy.host_bytes == 0


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or "[never]" in benchmark.huge_pages(), reason="no huge pages on this machine"
)
def test_memory_that_is_taken_again_comes_in_huge_pages():
    tensor = torch.ones(16 << 20)
    copy = HostCopy([tensor])
    copy.offload()
    copy.reload()
    assert all(huge_bytes(memory) > 32 << 20 for memory in (tensor, copy._host[0]))


def huge_bytes(tensor):
    """Of the mapping that the tensor's middle lies in."""
    inside, address = False, tensor[tensor.numel() // 2 :].data_ptr()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.parametrize("engine", benchmark.ENGINES)
@pytest.mark.parametrize("state", benchmark.BYTES_A_WEIGHT)
def test_the_benchmark_measures_an_engine_that_lets_go_of_everything(engine, state):
    figures = benchmark.measure(engine, state, 4_000_000, 1, torch.device("cpu"), wide=TINY)
    assert figures["device_bytes_after_offload"] == 0
    assert figures["host_bytes"] == pytest.approx(1e9 * figures["state_gb"])
    assert figures["state_gb"] == pytest.approx(4e-3, rel=0.2)
    assert figures["ratio"]["wall"] > 0
