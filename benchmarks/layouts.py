"""Every parallel layout of two and four ranks against one rank, for each objective, model and way of training.

    python -m benchmarks.layouts [--worlds 2 4] [--models dense experts] [--missing] [--render]

Measures with the suite's own ranks (tests/megatron_worker/layout_table.py), on the CPU. Rows go into
benchmarks/results/layouts.json as they are done, in the place of older ones of the same model and layout, so that parts
can be run one by one and an interrupted one again with --missing. docs/layouts.md (the conclusions) and
benchmarks/results/layouts.md (a line for each layout) are rendered from that file, at the end and by --render alone.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "layouts.json", ROOT / "docs" / "layouts.md"
TABLES = RESULTS.with_suffix(".md")
TOLERANCE = 1e-5
OBJECTIVES = {"sft": "SFT rows", "rl": "RL on prefix trees", "dpo": "DPO"}
MODELS = {"dense": "Dense (Qwen3)", "experts": "Mixture of experts (Qwen3-MoE)"}
TRAINABLES = {"lora": "LoRA", "full": "full"}
COLUMNS = ("logprob", "entropy", "loss", "norm", "gradient", "weights", "moments")

Row = dict[str, Any]

_INTRODUCTION = """# Parallel layouts, measured

Every layout of two and four ranks computes what one rank computes: in float32 within 1e-5 in every loss, gradient,
weight and moment, in bfloat16 with an error within the bounds of rounding; each resumes from its own checkpoint to the
same bytes. [engines.md](engines.md#parallel-layouts) says what the dimensions mean.

`python -m benchmarks.layouts` measured this and wrote this page from `benchmarks/results/layouts.json`;
`benchmarks/results/layouts.md` has a line for each layout.

Models of 4 layers, hidden size 64, 4 key/value heads and a vocabulary of 301 (odd: tensor-parallel shards are padded),
the one with 4 experts a layer, 2 a token, with random weights that tell layers apart. A rank is a process on the CPU,
gloo between them. SFT trains rows packed into bins, RL trees of shared prefixes (PPO with a divergence from the
reference), DPO pairs; a step is three bins, so that under dp2 one rank has a bin more. Everybody starts from a
checkpoint that **one rank** wrote after a step.

## float32: the largest difference from one rank

| column | of | as |
|---|---|---|
| logprob, entropy | every target of a step's bins, on every rank | nats |
| loss, norm | each of three steps, on every rank; the norm before clipping | relative |
| gradient | every tensor, whole | norm of the difference by the tensor's norm |
| weights, moments | every tensor, whole, of the checkpoint after three steps | absolute |
| resumes | the last two steps again, from the layout's own checkpoint | the same bytes, or not |

The aim is 1e-5. 0 means the same bits.
"""

_BFLOAT16 = """## bfloat16: no worse than one rank

Weights that bfloat16 can say, computed in bfloat16 and, for what is right, by one rank in float32. The error of the
log-probabilities is the root mean square over targets, in nats; that of the gradient the norm of the difference by the
norm, all tensors together. RL's loss is here the unclipped one: rounding carries ratios over PPO's clip, where its
gradient jumps.

What one rank rounds once, n ranks that split a sum round as n parts, whose errors' variances together are as the sum's,
and then as n - 1 partial sums, none with more than the sum's. So the error's variance is at most n times one rank's,
with n = tp * cp * etp (at most all ranks): what dp, pp and ep bring together was rounded on its own before, or is
float32. A root mean square of N errors is known to a part in sqrt(2 N), the quotient of two to one in sqrt(N). **The
bound** on the quotient of errors, layout by one rank, is sqrt(n) * (1 + 3 / sqrt(N)), with N targets: three standard
deviations. Where experts are chosen, rounding turns some choices, on one rank as on many: that is in both errors.
"""


def of_rows(rows: Iterable[Row], model: str) -> list[Row]:
    return [row for row in rows if row["model"] == model]


def key(objective: str, trainable: str) -> str:
    return f"{objective} {trainable}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)) + "\n"


def figure(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def resumes(all_do: bool) -> str:
    return "same bytes" if all_do else "**no**"


def summary(rows: list[Row]) -> str:
    """The worst of all layouts."""
    lines = []
    for model in MODELS:
        for objective, name in OBJECTIVES.items():
            for trainable in TRAINABLES:
                found = [row["float32"][key(objective, trainable)] for row in of_rows(rows, model)]
                if found:
                    worst = [figure(max(x[column] for x in found)) for column in COLUMNS]
                    names = MODELS[model], name, TRAINABLES[trainable], str(len(found))
                    lines.append([*names, *worst, resumes(all(x["resumes"] for x in found))])
    return table(["model", "objective", "trained", "layouts", *COLUMNS, "resumes"], lines)


def details(rows: list[Row], model: str, objective: str) -> str:
    """A line for each layout and trainable."""
    lines = []
    for row in of_rows(rows, model):
        for trainable, name in TRAINABLES.items():
            found = row["float32"][key(objective, trainable)]
            figures = [figure(found[column]) for column in COLUMNS]
            lines.append([str(row["ranks"]), row["layout"], name, *figures, resumes(found["resumes"])])
    return table(["ranks", "layout", "trained", *COLUMNS, "resumes"], lines)


def quotient(what: str, found: dict[str, float]) -> float:
    """A layout's error by one rank's."""
    return found[what] / found[f"one_rank_{what}"]


def rounding_summary(rows: list[Row]) -> str:
    lines = []
    for model in MODELS:
        for objective, name in OBJECTIVES.items():
            for trainable in TRAINABLES:
                found = [row["bfloat16"][key(objective, trainable)] for row in of_rows(rows, model)]
                if found:
                    cells = [MODELS[model], name, TRAINABLES[trainable]]
                    for what in ("logprob", "gradient"):
                        worst = max(found, key=partial(quotient, what))
                        cells += [figure(worst[f"one_rank_{what}"]), figure(worst[what])]
                        cells.append(f"{quotient(what, worst):.2f} of {worst['bound']:.2f}")
                    lines.append(cells)
    head = ["one rank", "layout", "quotient of bound"]
    return table(
        ["model", "objective", "trained", *(f"{w}: {h}" for w in ("logprob", "gradient") for h in head)], lines
    )


def rounding_details(rows: list[Row], model: str) -> str:
    """Quotients of log-probability and gradient for each layout, objective and trainable."""
    keys = [key(objective, trainable) for objective in OBJECTIVES for trainable in TRAINABLES]
    lines = []
    for row in of_rows(rows, model):
        found = row["bfloat16"]
        cells = [f"{quotient('logprob', found[k]):.2f}, {quotient('gradient', found[k]):.2f}" for k in keys]
        lines.append([str(row["ranks"]), row["layout"], f"{min(found[k]['bound'] for k in keys):.2f}", *cells])
    return table(["ranks", "layout", "least bound", *keys], lines)


def page(results: dict[str, Any]) -> str:
    """docs/layouts.md: of each model, objective and way of training the worst layout."""
    rows = results["layouts"]
    worst = "The layout with the greatest quotient:\n"
    return "\n".join([_INTRODUCTION, summary(rows), _BFLOAT16, worst, rounding_summary(rows)])


def tables(results: dict[str, Any]) -> str:
    """benchmarks/results/layouts.md: every layout. docs/layouts.md says what its columns mean."""
    rows = results["layouts"]
    parts = ["# Every parallel layout\n", "What the columns mean: `docs/layouts.md`. From `layouts.json`.\n"]
    for model in (model for model in MODELS if of_rows(rows, model)):
        for objective, name in OBJECTIVES.items():
            parts += [f"## {MODELS[model]}, {name}: every layout, float32\n", details(rows, model, objective)]
        heading = f"## {MODELS[model]}: every layout, bfloat16\n"
        parts += [
            heading,
            "Layout's error by one rank's: log-probabilities, gradient.\n",
            rounding_details(rows, model),
        ]
    return "\n".join(parts)


def read() -> dict[str, Any]:
    if RESULTS.exists():
        found: dict[str, Any] = json.loads(RESULTS.read_text())
        return found
    return {"layouts": []}


def merged(results: dict[str, Any], row: Row) -> dict[str, Any]:
    """Return the results with a row in place of the old one of its model and layout, in the page's order."""
    place = row["model"], row["layout"]
    rows = [old for old in results["layouts"] if (old["model"], old["layout"]) != place] + [row]
    rows.sort(key=lambda x: (list(MODELS).index(x["model"]), x["ranks"], x["layout"].count("-"), x["layout"]))
    return {"hardware": provenance()["hardware"], "layouts": rows}


def as_text(results: dict[str, Any]) -> str:
    """JSON with a line for each layout."""
    rows = ",\n".join(json.dumps(row) for row in results["layouts"])
    return f'{{"hardware": {json.dumps(results["hardware"])},\n"layouts": [\n{rows}\n]}}\n'


def measure(arguments: Sequence[str], take: Callable[[Row], None]) -> int:
    """Pass each row to `take` once it is measured. Returns the exit status."""
    command = [sys.executable, "-m", "tests.megatron_worker.layout_table", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            take(json.loads(line))
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--missing", action="store_true", help="only what has no row yet")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the page")
    options = parser.parse_args()

    def take(row: Row) -> None:
        RESULTS.write_text(as_text(merged(read(), row | {"commit": provenance()["commit"]})))
        print(row["model"], row["layout"], file=sys.stderr, flush=True)

    status = 0
    if not options.render:
        skip = [f"{row['model']}/{row['layout']}" for row in read()["layouts"]] if options.missing else []
        worlds = [str(world) for world in options.worlds]
        status = measure(["--worlds", *worlds, "--models", *options.models, "--skip", *skip], take)
    PAGE.write_text(page(read()))
    TABLES.write_text(tables(read()))
    return status


if __name__ == "__main__":
    sys.exit(main())
