"""Under every layout, samplers get every tensor to the bit, by its Hugging Face or PEFT name, at two buckets' cost."""

import json

import pytest

from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.weight_sync.sync_ranks import LAYOUTS, NUM_SAMPLERS

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
