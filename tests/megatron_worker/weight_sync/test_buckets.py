"""Buckets and changes: whatever the shapes, what is put together is what was divided, to the bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_worker.engine import Outgoing, TensorBlock
from megatron_worker.process.ranks import SideRanks
from megatron_worker.weight_sync import buckets
from megatron_worker.weight_sync.buckets import Assembly, Bucket, Digest, checksum, cut_buckets
from megatron_worker.weight_sync.sender import DeltaBase, Gathering
from shared.errors import InvalidInput

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6)


def some_tensors(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {f"t{n}": torch.randn(shape, generator=generator).to(dtype) for n, shape in enumerate(shapes)}


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(400, 2000))
def test_what_is_divided_is_put_together_again(shapes, dtype, bucket_bytes):
    tensors, digest = some_tensors(shapes, dtype), Digest()
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assembly = Assembly(found)
    for filled, buffer in divided(tensors, bucket_bytes):
        bucket = Bucket.model_validate_json(filled.model_dump_json())
        digest.add(bucket)
        assembly.put(bucket, buffer)
    assert assembly.finish() == digest.value
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def divided(tensors, bucket_bytes=512, blocks=None, sent=None, only_changes=False):
    blocks = blocks or [TensorBlock(name, 0, 0, len(one) if one.dim() else 1) for name, one in tensors.items()]
    outgoing = Outgoing(
        lora=None,
        dtype=next(iter(tensors.values())).dtype,
        device=torch.device("cpu"),
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        blocks=blocks,
        held=lambda block: block_of(tensors[block.name], block),
        ranks=SideRanks(0, 1),
        members=[0],
    )
    gathering = Gathering(outgoing, sent)
    for number, pieces in enumerate(cut_buckets(outgoing, bucket_bytes)):
        buffer = torch.zeros(bucket_bytes, dtype=torch.uint8)
        yield gathering.fill(buffer, number, pieces, only_changes), buffer


def block_of(tensor, block):
    if not tensor.dim():
        return tensor
    rows = tensor[block.first_row : block.first_row + block.num_rows]
    if block.num_columns is None:
        return rows
    return rows[:, block.first_column : block.first_column + block.num_columns].contiguous()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(400, 2000),
    st.data(),
)
def test_blocks_of_rows_and_columns_are_put_together_whole_and_as_changes(shapes, dtype, bucket_bytes, data):
    """As ranks hold them; each compares a copy of its own blocks."""
    tensors, sent, blocks = some_tensors(shapes, dtype), DeltaBase(), []
    for name, tensor in tensors.items():
        by_rows = data.draw(st.booleans())
        ends = sorted(data.draw(st.sets(st.integers(1, tensor.shape[1 - by_rows])))) or [0]
        for first, last in itertools.pairwise([0, *[end for end in ends if end], tensor.shape[1 - by_rows]]):
            if first < last:
                own = (first, last - first) if by_rows else (0, tensor.shape[0], first, last - first)
                blocks.append(TensorBlock(name, 0, *own))
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for only_changes in (False, True):
        assembly, digest = Assembly(found), Digest()
        for bucket, buffer in divided(tensors, bucket_bytes, blocks, sent, only_changes):
            digest.add(bucket)
            assembly.put(Bucket.model_validate_json(bucket.model_dump_json()), buffer)
            assert only_changes or all(part.num_changes is None for part in bucket.parts)
        assert assembly.finish() == digest.value
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        for tensor in tensors.values():
            tensor.view(-1)[::7] += 1


def test_columns_that_overlap_or_are_left_out_are_noticed():
    tensors = some_tensors([(3, 8)])
    for blocks, message in (
        ([("t0", 0, 0, 3, 0, 4), ("t0", 0, 0, 3, 3, 5)], "is due"),
        ([("t0", 0, 0, 2, 0, 4), ("t0", 0, 2, 1, 0, 8)], "is due"),
        ([("t0", 0, 0, 3, 4, 4), ("t0", 0, 0, 3, 0, 4)], "is due"),
        ([("t0", 0, 0, 3, 0, 4)], "not complete"),
    ):
        assembly = Assembly({"t0": torch.zeros(3, 8)})
        with pytest.raises(InvalidInput, match=message):
            for bucket, buffer in divided(tensors, blocks=[TensorBlock(*block) for block in blocks]):
                assembly.put(bucket, buffer)
            assembly.finish()


def test_damaged_foreign_missing_and_repeated_rows_are_noticed():
    tensors = some_tensors([(30, 7), (5,)])
    empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    (first, first_bytes), *rest = divided(tensors)
    flipped = first_bytes.clone()
    flipped[100] ^= 1
    with pytest.raises(InvalidInput, match="checksum"):
        Assembly(empty).put(first, flipped)
    assert not empty["t0"].any()
    with pytest.raises(InvalidInput, match="no such tensor"):
        Assembly({"other": empty["t0"]}).put(first, first_bytes)
    with pytest.raises(InvalidInput, match="shape"):
        Assembly({"t0": torch.zeros(30, 8), "t1": empty["t1"]}).put(first, first_bytes)
    with pytest.raises(InvalidInput, match="is due"):
        Assembly(empty).put(rest[0][0], rest[0][1])
    twice = Assembly(empty)
    twice.put(first, first_bytes)
    with pytest.raises(InvalidInput, match="is due"):
        twice.put(first, first_bytes)
    with pytest.raises(InvalidInput, match="not complete"):
        twice.finish()


def test_the_checksum_notices_order_and_single_bits():
    one, other = torch.randn(1000), torch.randn(1003)
    assert checksum([one, other]) == checksum([one.clone(), other.clone()])
    assert checksum([one, other]) != checksum([other, one])
    swapped = one.clone()
    swapped[[3, 700]] = one[[700, 3]]
    assert checksum([swapped, other]) != checksum([one, other])
    assert checksum([other[1:]]) == checksum([other[1:].clone()]), "wherever it lies in memory"


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5000), st.sampled_from([torch.float32, torch.bfloat16]), st.floats(0, 1), st.integers(0, 2**31))
def test_changes_lead_exactly_from_one_version_to_the_next(size, dtype, share, seed):
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(size, generator=generator).to(dtype)
    changed = torch.rand(size, generator=generator) < share
    new = torch.where(changed, old * 1.01 + 1e-3, old)
    out = torch.zeros(old.numel() * old.element_size(), dtype=torch.uint8)
    num = buckets.find_changes(new, old, out)
    if num is None:
        words = (new.view(torch.int16) != old.view(torch.int16)).sum()
        assert 3 * words > 0.9 * len(out) - 3 * (2 * size // 256 + 1)
        return
    assert buckets.num_bytes(num) <= len(out)
    found = old.clone()
    buckets.apply(out, num, found)
    assert torch.equal(found.view(torch.int16), new.view(torch.int16))


def test_changes_far_apart_and_across_chunks(monkeypatch):
    monkeypatch.setattr(buckets, "_CHUNK", 1000)
    old = torch.zeros(10_000, dtype=torch.bfloat16)
    new = old.clone()
    new[[0, 255, 256, 999, 1000, 4321, 9999]] = 1
    out = torch.zeros(20_000, dtype=torch.uint8)
    num = buckets.find_changes(new, old, out)
    assert num is not None and num < 60
    buckets.apply(out, num, old)
    assert torch.equal(old, new)
    with pytest.raises(ValueError, match="of 100"):
        buckets.apply(out, num, torch.zeros(100, dtype=torch.bfloat16))
