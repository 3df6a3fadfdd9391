"""Models in their published layouts against transformers: checked, trained, merged, saved and sampled from.

    python -m benchmarks.published_layouts [--models NAME ...] [--render]

Tiny models with the names, types and settings of ../shared/layouts, which this command needs. Rows go into
benchmarks/results/published_layouts.json as they are done; docs/families.md shows them.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from temporalio.testing import ActivityEnvironment
from torch import Tensor
from transformers import conversion_mapping

from activities.host_context import HostContext
from activities.model_look import look_at
from activities.models.resolve import Resolve
from activities.publishing.export import ExportSource, write_export
from activities.publishing.publish import REGISTERING
from benchmarks.machine import provenance
from longshore.training import DELTA_NET, LATENT, LATENT_EXPERTS, LINEARS, MAMBA, Full, Layout, Lora
from longshore.views import Export
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder
from shared.errors import InvalidInput
from shared.models.merging import FP8_SCALES, read_header
from shared.runs.start import ModelRequest
from shared.settings import DownloadSettings, Settings
from tests.megatron_worker.driving import ADAM, LEARNING_RATE, train
from tests.megatron_worker.published import LAYOUTS, VARIANTS, Published, build
from tests.megatron_worker.rows import bin_of, random_rows, reference_steps
from tests.megatron_worker.scores import logprobs, logprobs_by_steps, logprobs_in_transformers, transformers_model

MODELS = (*sorted(path.stem for path in LAYOUTS.glob("*.json")), *VARIANTS)
RESULTS = Path(__file__).parent / "results" / "published_layouts.json"
ROWS, STEPS = random_rows((60, 2, 90)), [random_rows([40, 17], seed=step) for step in range(2)]
_ALL = Lora(rank=4, alpha=8)
_COLUMNS = ("read", "steps", "PEFT", "merged", "full", "sampler")
_ABOUT = """
## As they are published

`python -m benchmarks.published_layouts` built a tiny model of each layout in `../shared/layouts` and compared: what is
read with transformers' reading (nats); the losses of two LoRA steps with PEFT's (relative), beside experts' linears
none, as PEFT trains stacks of its own; an adapter beside every linear with PEFT's reading of it (nats); a merged
export with PEFT's merged model, and all weights after a step as they are saved with transformers' reading (nats); what
the sampler's steps draw by with the trainer's (nats). Exports and saved models have the names that were read. A merged
export of an adapter beside a base in FP8 is refused. A model that is refused is refused by `longshore models check`,
by a run's checking phase and by the worker, in the same words.

"""


def compare(name: str, folder: Path) -> dict[str, Any]:
    """Build a model and compare all operations on it.

    Returns: the largest difference in each column (None: refused, see docs/models.md), or why the model is refused.
    """
    built = build(folder / "model", name)
    model = built.folder
    told = [*look_at(model, _ALL, "float32").problems, *_checked(model, folder / "root")]
    if told:
        try:
            MegatronEngine(model, Layout(), "float32")
        except InvalidInput as error:
            told.append(error.message)
        reasons = {each.removeprefix(f"{Path(model).as_uri()}/").removeprefix("config.json: ") for each in told}
        assert len(told) == 3 and len(reasons) == 1, told
        return {"model": name, "refused": reasons.pop()}
    with _registered():
        return {"model": name, **_figures(built, folder)}


@contextmanager
def _registered() -> Iterator[None]:
    """Within the block, register models with towers in transformers, as docs/models.md and adapters' READMEs say."""
    conversion_mapping.get_checkpoint_conversion_mapping("qwen2_moe")  # which makes the table
    known = conversion_mapping._checkpoint_conversion_mapping_cache
    conversion_mapping._checkpoint_conversion_mapping_cache = dict(known)
    try:
        exec(REGISTERING)
        yield
    finally:
        conversion_mapping._checkpoint_conversion_mapping_cache = known


def _figures(built: Published, folder: Path) -> dict[str, float | None]:
    model, rows = built.folder, bin_of(ROWS)
    engine = MegatronEngine(model, Layout(), "float32")
    found: dict[str, float | None] = {"read": _furthest(logprobs(engine, rows), _of(built, built.plain))}
    found["sampler"] = _sampled(model, engine)
    found["steps"] = _two_steps(built, folder)
    engine.add_adapter("all", _ALL, seed=3)
    train(engine, [[step] for step in STEPS], learning_rate=3e-2)
    engine.save(folder / "trained")
    found["PEFT"], found["merged"] = _beside_and_merged(built, folder, logprobs(engine, rows))
    found["full"] = _saved(built, folder)
    return found


def _furthest(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def _of(built: Published, folder: Path) -> Tensor:
    return logprobs_in_transformers(transformers_model(folder, built.kind, torch.float32), ROWS)


def _checked(model: Path, root: Path) -> list[str]:
    """Return the problems that a run's checking phase finds."""
    host = HostContext(Settings(root=root, download=DownloadSettings(file_roots=(Path("/"),))))
    request = ModelRequest(uri=str(model), tenant="default", layout=Layout(), dtype="bfloat16", trainable=_ALL)
    try:
        ActivityEnvironment().run(Resolve(host).resolve_model, request)
    except InvalidInput as error:
        return [str(error)]
    return []


def _two_steps(built: Published, folder: Path) -> float:
    from peft import PeftModel

    has_experts = any(".experts." in name for name in headers(built.folder))
    of_mixtures = ("q_proj", "k_proj", "v_proj", "o_proj", *DELTA_NET, *LATENT, *MAMBA, *LATENT_EXPERTS)
    engine = MegatronEngine(built.folder, Layout(), "float32")
    engine.add_adapter("run", Lora(rank=4, alpha=8, targets=of_mixtures if has_experts else LINEARS), seed=3)
    engine.save(folder / "begun")
    theirs = transformers_model(built.plain, built.kind, torch.float32)
    theirs = PeftModel.from_pretrained(theirs, folder / "begun" / "weights", is_trainable=True)
    expected = reference_steps(theirs, STEPS, LEARNING_RATE, ADAM.weight_decay, ADAM.clip_norm)
    found = train(engine, [[step] for step in STEPS], learning_rate=LEARNING_RATE)
    of_losses = max(abs(ours / theirs - 1) for (ours, _), (theirs, _) in zip(found, expected, strict=True))
    return max(of_losses, _furthest(logprobs(engine, bin_of(ROWS)), logprobs_in_transformers(theirs.eval(), ROWS)))


def _beside_and_merged(built: Published, folder: Path, expected: Tensor) -> tuple[float, float | None]:
    from peft import PeftModel

    adapter = folder / "trained" / "weights"
    theirs = PeftModel.from_pretrained(transformers_model(built.plain, built.kind, torch.float32), adapter).eval()
    beside = _furthest(logprobs_in_transformers(theirs, ROWS), expected)
    if any(name.endswith(FP8_SCALES) for name in headers(built.folder)):
        _check_not_merged(built.folder, adapter, folder / "export")
        return beside, None
    base = dict(transformers_model(built.plain, built.kind, torch.float32).named_parameters())
    merged = theirs.merge_and_unload()
    with torch.no_grad():  # as the export rounds them
        for name, weight in merged.named_parameters():
            if not torch.equal(weight, base[name]):
                weight.copy_(weight.bfloat16())
    export = _exported(built.folder, adapter, folder / "export")
    assert headers(export) == headers(built.folder)
    found = logprobs(MegatronEngine(export, Layout(), "float32"), bin_of(ROWS))
    if headers(built.plain) == headers(built.folder):
        assert _furthest(_of(built, export), found) <= 1e-4
    return beside, _furthest(found, logprobs_in_transformers(merged, ROWS))


def _check_not_merged(model: Path, adapter: Path, folder: Path) -> None:
    try:
        _exported(model, adapter, folder)
    except InvalidInput as error:
        assert "is F8_E4M3" in error.message, error
    else:
        raise AssertionError("an adapter is merged with a base in FP8")


def _exported(model: Path, adapter: Path, folder: Path) -> Path:
    others = tuple(path.name for path in sorted(model.iterdir()) if path.suffix != ".safetensors")
    files = {"model": str(model), "weights": ("model.safetensors",), "others": others, "adapter": str(adapter)}
    folder.mkdir()
    write_export(ExportSource(**files, export=Export(format="merged"), title="tiny"), str(folder))
    return folder


def _saved(built: Published, folder: Path) -> float:
    engine = MegatronEngine(built.folder, Layout(), "float32")
    engine.train_full(Full())
    train(engine, [[STEPS[0]]])
    engine.save(folder / "full")
    saved = folder / "full" / "weights"
    *shapes, in_files = (
        {name: shape for name, (_, shape) in headers(each).items()} for each in (saved, built.plain, built.folder)
    )
    for each in shapes:
        each.pop("lm_head.weight", None)  # which may be there twice
    scales = {name for name in shapes[0] if name.endswith(FP8_SCALES)}  # of tensors that are copied unchanged
    assert {name: shapes[0].pop(name) for name in scales}.items() <= in_files.items()
    assert shapes[0] == shapes[1]
    engine.load(folder / "full")
    return _furthest(logprobs(engine, bin_of(ROWS)), _of(built, saved))


def _sampled(model: Path, engine: MegatronEngine) -> float:
    decoder = Decoder(model, torch.float32, torch.device("cpu"))
    row = random_rows([40])[0]
    expected = logprobs(engine, bin_of([dataclasses.replace(row, weights=[0.0] + [1.0] * 39)]))
    return _furthest(logprobs_by_steps(decoder, row.ids, range(20, 36), {}), expected[19:35])


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and shape of each tensor of a model in one file."""
    with (folder / "model.safetensors").open("rb") as file:
        return {entry.name: (entry.dtype, entry.shape) for entry in read_header(file, str(folder))[1]}


def section() -> str:
    """Return the section of docs/families.md with the results."""
    if not RESULTS.exists():
        return ""
    lines = [f"| model | {' | '.join(_COLUMNS)} |", "|---" * (len(_COLUMNS) + 1) + "|"]
    for row in json.loads(RESULTS.read_text())["rows"]:
        found = [row[column] for column in _COLUMNS] if "refused" not in row else []
        figures = ["refused" if figure is None else f"{figure:.0e}" for figure in found]
        refused = None if figures else f"refused: {shorten(row['refused'], 110, placeholder=' …')}"
        lines.append(f"| {row['model']} | " + (refused or " | ".join(figures)) + " |" + " |" * 5 * (not figures))
    return _ABOUT + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--render", action="store_true", help="only write the page")
    options = parser.parse_args()
    import transformers

    from benchmarks.families import render

    for name in [] if options.render else options.models:
        with tempfile.TemporaryDirectory() as folder:
            row = compare(name, Path(folder))
        print(json.dumps(row), flush=True)
        rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
        rows = sorted([*(r for r in rows if r["model"] != name), row], key=lambda r: MODELS.index(r["model"]))
        result = {
            "benchmark": "published_layouts",
            **provenance(),
            "transformers": transformers.__version__,
            "rows": rows,
        }
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    render()


if __name__ == "__main__":
    main()
