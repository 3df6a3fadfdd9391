"""Each model family against transformers: results of the engine and the sampler, and the supported layouts.

    python -m benchmarks.families [--families qwen3_5 ...] [--render]

Tiny models in float32 on the CPU, with random weights that differ by layer. Rows go into
benchmarks/results/families.json as they are done, in place of older ones of the same family; docs/families.md is
generated from that file, at the end and by --render alone.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import provenance
from benchmarks.published_layouts import section
from longshore.training import DELTA_NET, LATENT, LATENT_EXPERTS, LINEARS, MAMBA, Full, Layout, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.tensors.slot_engine import Engine
from shared.errors import InvalidInput
from shared.families import FAMILIES, read_architecture, read_config
from shared.families.model_slices import shape_of
from shared.models.shape import ModelShape, check_layout
from tests.megatron_worker.driving import ADAM, LEARNING_RATE, train
from tests.megatron_worker.engines import furthest, gradient
from tests.megatron_worker.rows import (
    EXPERTS_BESIDE,
    GRANITE_DENSE,
    bin_of,
    distinct_model,
    random_rows,
    reference_steps,
)
from tests.megatron_worker.scores import logprobs, logprobs_by_steps, logprobs_in_transformers
from tests.megatron_worker.trees import LOSS, as_chain, as_tree, random_sequences

MODELS: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES}
MODELS["gemma4 with experts"] = "gemma4", EXPERTS_BESIDE
MODELS["granitemoehybrid without experts"] = "granitemoehybrid", GRANITE_DENSE
ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "families.json", ROOT / "docs" / "families.md"
ROWS = random_rows((90, 2, 300, 33))
STEPS = [random_rows([40, 17, 90, 25, 60, 8], seed=step % 4) for step in range(20)]
LAYOUTS = [Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2), Layout(dp=2), Layout(ep=2, dp=2)]
_PAGE = """# Model families, measured

`python -m benchmarks.families` measured this and wrote this page from `benchmarks/results/families.json`: tiny models
with random weights, in float32 on the CPU, against transformers {transformers} and PEFT.

| column | what is compared; the largest difference is given |
|---|---|
| packed | log-probabilities of rows of one bin with transformers' of each row alone (nats) |
| tree | of a prefix tree with each of its sequences' alone (nats) |
| gradient | of a prefix tree with its sequences', by the largest element of any gradient |
| LoRA, full | losses of 20 steps with those of PEFT, and of transformers (relative) |
| saved | log-probabilities of the saved model in transformers with those of the model that was trained (nats) |
| sampler | log-probabilities that its steps draw by with the trainer's (nats) |
| layouts | of two ranks that hold the family; others are refused by name |

LoRA is beside every linear; in mixtures here beside those of attention, delta nets and Mamba-2, and around experts,
as PEFT has its own stacks of experts. It loads what is trained beside experts, too, to 1e-5 nats
([how](models.md#experts-in-peft), `tests/megatron_worker/test_families_in_peft.py`). How far layouts differ from one
rank: [parallel layouts](layouts.md).

"""


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def measure(name: str, folder: Path) -> dict[str, Any]:
    family, config = MODELS[name]
    model = distinct_model(folder / "model", family, tied=False, num_layers=4, config=config)
    engine = MegatronEngine(model, Layout(), "float32")
    sequences = random_sequences(3)
    alone = torch.cat([logprobs(engine, as_chain(one)) for one in sequences])
    return {
        "family": name,
        "packed": _furthest(logprobs(engine, bin_of(ROWS)), logprobs_in_transformers(loaded(model), ROWS)),
        "tree": _furthest(logprobs(engine, as_tree(sequences)), alone),
        "gradient": tree_gradient(model, folder),
        "lora": lora_steps(model, folder),
        **full_steps(model, folder),
        "sampler": sampled(model, engine),
        "layouts": [layout.label for layout in LAYOUTS if _holds(layout, shape_of(read_config(model)))],
    }


def _furthest(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def _holds(layout: Layout, shape: ModelShape) -> bool:
    try:
        check_layout(layout, shape)
    except InvalidInput:
        return False
    return True


def tree_gradient(model: Path, folder: Path) -> float:
    engine = MegatronEngine(model, Layout(), "float32")
    engine.train_full(Full())
    sequences, found = random_sequences(3), []
    for name, bins in (("tree", [as_tree(sequences)]), ("alone", [as_chain(one) for one in sequences])):
        for batch in bins:
            engine.forward_backward(batch, LOSS)
        found.append(gradient(engine, folder / name))
    return furthest(*found) / max(float(each.abs().max()) for each in found[1].values())


def lora_steps(model: Path, folder: Path) -> float:
    from peft import PeftModel

    a = read_architecture(model)
    is_mixture = a.num_experts > 0 and a.family != "granitemoehybrid"  # whose stacks have other names than linears
    of_mixtures = ("q_proj", "k_proj", "v_proj", "o_proj", *DELTA_NET, *LATENT, *MAMBA, *LATENT_EXPERTS)
    targets = of_mixtures if is_mixture else LINEARS
    engine = MegatronEngine(model, Layout(), "float32")
    engine.add_adapter("run", Lora(rank=4, alpha=8, targets=targets), seed=3)
    engine.save(folder / "lora")
    reference = PeftModel.from_pretrained(loaded(model), folder / "lora" / "weights", is_trainable=True)
    return _relative(engine, reference, LEARNING_RATE)


def full_steps(model: Path, folder: Path) -> dict[str, float]:
    engine = MegatronEngine(model, Layout(), "float32")
    engine.train_full(Full())
    relative = _relative(engine, loaded(model), 3e-4)
    engine.save(folder / "full")
    read_again = logprobs_in_transformers(loaded(folder / "full" / "weights"), ROWS)
    return {"full": relative, "saved": _furthest(logprobs(engine, bin_of(ROWS)), read_again)}


def _relative(engine: Engine, reference: Any, rate: float) -> float:
    expected = reference_steps(reference, STEPS, rate, ADAM.weight_decay, ADAM.clip_norm)
    found = train(engine, [[rows[:2], rows[2:]] for rows in STEPS], learning_rate=rate)
    return max(abs(ours / theirs - 1) for (ours, _), (theirs, _) in zip(found, expected, strict=True))


def sampled(model: Path, engine: Engine) -> float:
    decoder = Decoder(model, torch.float32, torch.device("cpu"))
    row = random_rows([120])[0]
    expected = logprobs(engine, bin_of([dataclasses.replace(row, weights=[0.0] + [1.0] * 119)]))
    return _furthest(logprobs_by_steps(decoder, row.ids, range(50, 100), {}), expected[49:99])


def render() -> None:
    result = json.loads(RESULTS.read_text())
    names = ("packed", "tree", "gradient", "lora", "full", "saved", "sampler")
    lines = ["| family | packed | tree | gradient | LoRA | full | saved | sampler | layouts |", "|---" * 9 + "|"]
    for row in result["rows"]:
        figures = " | ".join(f"{row[name]:.0e}" for name in names)
        lines.append(f"| `{row['family']}` | {figures} | {', '.join(row['layouts'])} |")
    PAGE.write_text(_PAGE.format(transformers=result["transformers"]) + "\n".join(lines) + "\n" + section())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--render", action="store_true", help="only write the page")
    options = parser.parse_args()
    import transformers

    for name in [] if options.render else options.families:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(name, Path(folder))
        print(json.dumps(row), flush=True)
        rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
        rows = sorted([*(r for r in rows if r["family"] != name), row], key=lambda r: list(MODELS).index(r["family"]))
        result = {"benchmark": "families", **provenance(), "transformers": transformers.__version__, "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    render()


if __name__ == "__main__":
    main()
