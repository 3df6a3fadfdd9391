"""Buckets and changes: whatever the shapes, what is put together is what was divided, to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_worker.weight_sync import changes
from megatron_worker.weight_sync.buckets import Assembly, Bucket, Digest, Drawn, checksum, cut, fill
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


def divided(tensors, bucket_bytes=512):
    shapes, drawn = {name: tensor.shape for name, tensor in tensors.items()}, Drawn(tensors.items())
    for number, parts in enumerate(cut(shapes, next(iter(tensors.values())).dtype, bucket_bytes)):
        buffer = torch.zeros(bucket_bytes, dtype=torch.uint8)
        yield fill(buffer, number, parts, drawn), buffer


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
@given(
    st.integers(1, 5000),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_changes_lead_exactly_from_one_version_to_the_next(size, dtype, share, seed):
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(size, generator=generator).to(dtype)
    changed = torch.rand(size, generator=generator) < share
    new = torch.where(changed, old * 1.01 + 1e-3, old)
    out = torch.zeros(old.numel() * old.element_size(), dtype=torch.uint8)
    num = changes.find(new, old, out)
    if num is None:
        words = (new.view(torch.int16) != old.view(torch.int16)).sum()
        assert 3 * words > 0.9 * len(out) - 3 * (2 * size // 256 + 1)
        return
    assert changes.num_bytes(num) <= len(out)
    found = old.clone()
    changes.apply(out, num, found)
    assert torch.equal(found.view(torch.int16), new.view(torch.int16))


def test_changes_far_apart_and_across_chunks(monkeypatch):
    monkeypatch.setattr(changes, "_CHUNK", 1000)
    old = torch.zeros(10_000, dtype=torch.bfloat16)
    new = old.clone()
    new[[0, 255, 256, 999, 1000, 4321, 9999]] = 1
    out = torch.zeros(20_000, dtype=torch.uint8)
    num = changes.find(new, old, out)
    assert num is not None and num < 60
    changes.apply(out, num, old)
    assert torch.equal(old, new)
    with pytest.raises(ValueError, match="of 100"):
        changes.apply(out, num, torch.zeros(100, dtype=torch.bfloat16))
