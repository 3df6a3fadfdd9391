"""Every layout of some numbers of ranks against one rank, measured: a line of JSON for each, as it is done.

    python -m tests.megatron_worker.layout_table [--worlds 2 4] [--models dense experts] [--skip dense/tp2 ...]

`python -m benchmarks.layouts` runs it, and says what its figures mean. All ranks have the same bins, from one file.
"""

import argparse
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from activities.tokenizing.units import pair_unit
from longshore.training import Layout
from megatron_worker.engine import Batch, Outputs
from megatron_worker.megatron.engine import MegatronEngine
from shared.errors import InvalidInput
from shared.families import read_config
from shared.families.model_slices import shape_of
from shared.jobs.prefix_tree import TreeUnit
from shared.models.shape import ModelShape, check_layout
from tests.megatron_worker.differences import from_one_rank, rounding
from tests.megatron_worker.launch import in_turn, on_ranks
from tests.megatron_worker.parallel_ranks import (
    DATA,
    FIRST,
    KINDS,
    OBJECTIVES,
    Bins,
    Trial,
    begin,
    do_objectives,
    do_rounded,
    rl_bins,
    round_adapter,
    round_weights,
    sft_bins,
)
from tests.megatron_worker.rows import VOCAB_SIZE, distinct_model
from tests.megatron_worker.trees import as_batch

MODELS = {
    "dense": {"num_layers": 4, "num_kv_heads": 4},
    "experts": {"num_layers": 4, "num_kv_heads": 4, "family": "qwen3_moe", "tied": False},
}
_AT_ONCE = 6  # layouts of one launch
NUM_STEPS = 3


def dpo_bins(seed: int) -> Bins:
    """Three bins of two pairs; what both answers begin with stands once."""
    generator = np.random.default_rng(seed)

    def pair() -> TreeUnit:
        prompt, *answers = (generator.integers(3, VOCAB_SIZE, generator.integers(4, 30)) for _ in range(3))
        rows = [np.concatenate([prompt, answer]) for answer in answers]
        masks = [np.arange(len(row)) >= len(prompt) for row in rows]
        return pair_unit(rows[0], masks[0], rows[1], masks[1])

    return [as_batch([pair(), pair()]) for _ in range(3)]


def make_data(model: Path) -> dict[str, list[Bins]]:
    """Steps of each objective. The reference is the model itself; the sampler was near it."""
    engine, generator = MegatronEngine(model, Layout(), "float32"), torch.Generator().manual_seed(0)

    def scored(batch: Batch) -> Batch:
        with torch.no_grad():
            logprob_N = engine.forward(batch, Outputs()).logprob_N
        assert logprob_N is not None
        old_N = logprob_N + 0.1 * torch.randn(logprob_N.shape, generator=generator)
        return dataclasses.replace(batch, ref_logprob_N=logprob_N, old_logprob_N=old_N, sampler_logprob_N=old_N)

    makers = {"sft": sft_bins, "rl": rl_bins, "dpo": dpo_bins}
    return {
        name: [[scored(batch) for batch in make(10 * number)] for number in range(NUM_STEPS)]
        for name, make in makers.items()
    }


def make_single(out: Path, name: str) -> Path:
    """The model, its weights such that bfloat16 can say them, and one rank's results."""
    model, single = distinct_model(out / "models" / name, **MODELS[name]), out / name / "single"
    round_weights(model / "model.safetensors")
    single.mkdir(parents=True)
    torch.save(make_data(model), single / DATA)
    for kind in KINDS:
        begin(model, Layout(), kind, single / kind)
    round_adapter(single / "lora" / FIRST / "weights", single / "rounded")
    one = Trial(model=model, layout=Layout())  # whose name is `single`, too
    do_objectives(one, out)
    do_rounded(one, single, single / "exact", "float32")
    return model


def layouts(world: int, shape: ModelShape) -> Iterator[Layout]:
    """All that hold the model."""
    degrees = [d for d in range(1, world + 1) if world % d == 0]
    for tp, pp, cp, ep, etp in itertools.product(degrees, repeat=5):
        if world % (tp * pp * cp):
            continue
        for sp in (False, True):
            layout = Layout(tp=tp, sp=sp, pp=pp, cp=cp, ep=ep, etp=etp, dp=world // (tp * pp * cp))
            try:
                check_layout(layout, shape)
            except InvalidInput:
                continue
            yield layout


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure every layout against one rank.")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--skip", nargs="*", default=[], help="such as dense/tp2-dp2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for name in options.models:
            model = make_single(out, name)
            for world in options.worlds:
                own = list(layouts(world, shape_of(read_config(model))))
                own = [layout for layout in own if f"{name}/{layout.label}" not in options.skip]
                for some in (own[i : i + _AT_ONCE] for i in range(0, len(own), _AT_ONCE)):
                    trials = [(Trial(model=model, layout=layout), out) for layout in some]
                    on_ranks(world, in_turn, do_objectives, trials, timeout_s=3600)
                    for layout in some:
                        print(json.dumps(row(out, name, layout)), flush=True)


def row(out: Path, name: str, layout: Layout) -> dict[str, object]:
    """All that is known of a layout; kinds within objectives."""
    ours, single = out / name / layout.label, out / name / "single"
    of = {f"{objective} {kind}": Path(kind) / objective for objective in OBJECTIVES for kind in KINDS}
    return {
        "model": name,
        "layout": layout.label,
        "ranks": layout.world_size,
        "float32": {key: from_one_rank(ours / "float32" / p, single / "float32" / p) for key, p in of.items()},
        "bfloat16": {
            key: rounding(layout, ours / "bfloat16" / p, single / "bfloat16" / p, single / "exact" / p)
            for key, p in of.items()
        },
    }


if __name__ == "__main__":
    main()
