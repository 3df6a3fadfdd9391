"""Every layout of some numbers of ranks against one rank, measured: a table of the largest differences.

    python -m tests.megatron_worker.layout_table [--worlds 2 4] [--models dense experts] [--out layouts.json]

Columns, each the largest over ranks and over adapters and full training: log-probabilities and entropies (nats); loss
and gradient norm (relative, three steps); gradients on rows (SFT) and on prefix trees (RL), a tensor's difference by
its norm; weights and moments after three steps (absolute); whether a checkpoint goes on to the same bits.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_worker.families import read_architecture
from megatron_worker.megatron.engine import shape_of
from shared.errors import InvalidInput
from shared.layout import Layout, ModelShape, check_layout
from tests.megatron_worker.launch import torchrun
from tests.megatron_worker.parallel_ranks import KINDS, Trial
from tests.megatron_worker.test_parallel import furthest, furthest_gradient, make_single, notes

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


def differences(folder: Path, single: Path) -> dict[str, float | bool]:
    """The largest of a layout's, adapters and full training together."""
    found: dict[str, list[float]] = {}
    is_same = True
    for kind in KINDS:
        ours, theirs = folder / kind, single / kind
        expected = torch.tensor(notes(theirs, "history")[0], dtype=torch.float64)
        for history in notes(ours, "history"):
            relative = (torch.tensor(history, dtype=torch.float64) / expected - 1).abs().amax(0)
            found.setdefault("loss", []).append(float(relative[0]))
            found.setdefault("norm", []).append(float(relative[1]))
        for scores in notes(ours, "scores"):
            for mine, other in zip(scores, notes(theirs, "scores")[0], strict=True):
                found.setdefault("scores", []).append(float((torch.tensor(mine) - torch.tensor(other)).abs().max()))
        for data in ("sft", "rl"):
            path = f"from-single/{data}-gradients.safetensors"
            found.setdefault(f"{data} gradient", []).append(furthest_gradient(ours / path, theirs / path))
        found.setdefault("state", []).append(furthest(ours / "end", theirs / "end"))
        for file in (p for p in (ours / "end").rglob("*") if p.is_file()):
            is_same &= file.read_bytes() == (ours / "resumed" / "end" / file.relative_to(ours / "end")).read_bytes()
    return {name: max(values) for name, values in found.items()} | {"resumes": is_same}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure every layout against one rank.")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for name in options.models:
            model = make_single(out, name, **MODELS[name])
            for world in options.worlds:
                own = list(layouts(world, shape_of(read_architecture(model))))
                for some in (own[i : i + _AT_ONCE] for i in range(0, len(own), _AT_ONCE)):
                    trials = [Trial(model=model, layout=layout).model_dump(mode="json") for layout in some]
                    module = "tests.megatron_worker.parallel_ranks"
                    torchrun(module, str(out), json.dumps(trials), num_ranks=world, timeout_s=3600)
                    for layout in some:
                        found = differences(out / name / layout.label, out / name / "single")
                        rows.append({"model": name, "layout": layout.label, **found})
                        print_row(rows[-1], with_head=len(rows) == 1)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def print_row(row: dict, with_head: bool) -> None:
    if with_head:
        print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
    cells = [f"{value:.1e}" if isinstance(value, float) else str(value) for value in row.values()]
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
