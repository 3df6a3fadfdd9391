"""Every layout of some numbers of ranks against one rank, measured: a line of JSON for each, as it is done.

    python -m tests.megatron_worker.layout_table [--worlds 2 4] [--models dense experts] [--skip dense/tp2 ...]

`python -m benchmarks.layouts` runs it, and says what its figures mean.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from longshore.training import Layout
from shared.errors import InvalidInput
from shared.families import read_config
from shared.families.model_slices import shape_of
from shared.models.shape import ModelShape, check_layout
from tests.megatron_worker import layout_ranks
from tests.megatron_worker.differences import GRADIENTS, furthest, furthest_gradient, notes, rounding, scores_of
from tests.megatron_worker.launch import on_ranks
from tests.megatron_worker.layout_ranks import OBJECTIVES
from tests.megatron_worker.parallel_ranks import KINDS, Trial, round_weights
from tests.megatron_worker.rows import distinct_model

MODELS = {
    "dense": {"num_layers": 4, "num_kv_heads": 4},
    "experts": {"num_layers": 4, "num_kv_heads": 4, "family": "qwen3_moe", "tied": False},
}
_AT_ONCE = 6  # layouts of one launch


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


def make_single(out: Path, name: str) -> Path:
    """The model, its weights such that bfloat16 can say them, and one rank's results."""
    model, single = distinct_model(out / "models" / name, **MODELS[name]), out / name / "single"
    round_weights(model / "model.safetensors")
    layout_ranks.make_beginning(model, single)
    layout_ranks.measure(model, Layout(), single, single / "float32")
    layout_ranks.measure_rounded(model, Layout(), single, single / "bfloat16")
    layout_ranks.measure_rounded(model, Layout(), single, single / "exact", "float32")
    return model


def differences(ours: Path, theirs: Path) -> dict[str, float | bool]:
    """Of one kind and objective, from one rank in float32: the largest over ranks, tokens, steps and tensors."""
    expected = torch.tensor(notes(theirs, "history")[0], dtype=torch.float64)
    histories = torch.tensor(notes(ours, "history"), dtype=torch.float64)
    loss, norm = (histories / expected - 1).abs().amax((0, 1)).tolist()
    files = [path.relative_to(ours / "end") for path in (ours / "end").rglob("*") if path.is_file()]
    return {
        "logprob": furthest_score(ours, theirs, 0),
        "entropy": furthest_score(ours, theirs, 1),
        "loss": loss,
        "norm": norm,
        "gradient": furthest_gradient(ours / GRADIENTS, theirs / GRADIENTS),
        "weights": furthest(ours / "end" / "weights", theirs / "end" / "weights"),
        "moments": furthest(ours / "end" / "optimizer", theirs / "end" / "optimizer"),
        "resumes": all((ours / "end" / f).read_bytes() == (ours / "again" / f).read_bytes() for f in files),
    }


def furthest_score(ours: Path, theirs: Path, column: int) -> float:
    expected = scores_of(notes(theirs, "scores")[0], column)
    return max(float((scores_of(noted, column) - expected).abs().max()) for noted in notes(ours, "scores"))


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
                    trials = [Trial(model=model, layout=layout) for layout in some]
                    on_ranks(world, layout_ranks.do_trials, trials, out, timeout_s=3600)
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
        "float32": {key: differences(ours / "float32" / p, single / "float32" / p) for key, p in of.items()},
        "bfloat16": {
            key: rounding(layout, ours / "bfloat16" / p, single / "bfloat16" / p, single / "exact" / p)
            for key, p in of.items()
        },
    }


if __name__ == "__main__":
    main()
