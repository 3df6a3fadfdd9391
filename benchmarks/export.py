"""Peak memory of an export, against the largest file of weights: `python -m benchmarks.export [--hidden 1024 ...]`.

The model is a tiny-vocabulary Llama with wide layers in bfloat16, with an adapter of zeros. A separate process writes
each format; its memory is the peak (sampled 200 times a second) minus what it had before.
"""

import argparse
import json
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path

import psutil

from activities.publishing.export import ExportSource, write_export
from examples.tiny_model import make_tiny_model
from longshore.views import Export
from shared.runs.start import LABELS

CORPUS = ["the quay at low tide", "a crate of rope and tar"]


def source_of(folder: Path, label: str) -> ExportSource:
    names = sorted(path.name for path in folder.iterdir())
    form, _, stored_as = label.partition("-")
    return ExportSource(
        model=str(folder),
        weights=tuple(name for name in names if name.endswith(".safetensors")),
        others=tuple(name for name in names if not name.endswith((".safetensors", "index.json"))),
        adapter=str(folder.parent / "adapter"),
        export=Export.model_validate({"format": form, "type": stored_as or None}),
        title="t",
    )


def measured(source: ExportSource, target: str, answers: "multiprocessing.Queue[tuple[int, float]]") -> None:
    import gguf  # noqa: F401
    import safetensors  # noqa: F401

    own, ended = psutil.Process(), threading.Event()
    seen = [own.memory_info().rss]

    def look() -> None:
        while not ended.wait(0.005):
            seen.append(own.memory_info().rss)

    watching = threading.Thread(target=look)
    watching.start()
    begun = time.perf_counter()
    write_export(source, target)
    took = time.perf_counter() - begun
    ended.set()
    watching.join()
    answers.put((max(seen) - seen[0], took))


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """A model in bfloat16 shards of at most 200 MB, and an adapter on one linear of each layer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    whole, head_dim = folder / "whole", hidden // 4
    tiny = make_tiny_model(whole, CORPUS, family="llama", hidden_size=hidden, num_layers=layers, head_dim=head_dim)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model", max_shard_size="200MB")
    for path in tiny.iterdir():
        if not path.name.endswith(".safetensors") and not (folder / "model" / path.name).exists():
            (folder / "model" / path.name).write_bytes(path.read_bytes())
    get_peft_model(model, LoraConfig(r=8, target_modules=["up_proj"])).save_pretrained(folder / "adapter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        make_model(Path(root), options.hidden, options.layers)
        shards = [path.stat().st_size for path in Path(root, "model").glob("*.safetensors")]
        found = {}
        spawn = multiprocessing.get_context("spawn")
        for label in LABELS:
            with tempfile.TemporaryDirectory() as target:
                answers: multiprocessing.Queue[tuple[int, float]] = spawn.Queue()
                child = spawn.Process(target=measured, args=(source_of(Path(root, "model"), label), target, answers))
                child.start()
                peak, seconds = answers.get(timeout=3600)
                child.join()
            share = round(peak / max(shards), 3)
            found[label] = {"peak_mb": round(peak / 1e6, 1), "of_largest": share, "s": round(seconds, 1)}
        sizes = {"shards": len(shards), "largest_mb": round(max(shards) / 1e6, 1)}
        print(json.dumps(sizes | {"formats": found}, indent=1))


if __name__ == "__main__":
    main()
