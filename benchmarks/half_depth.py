"""A real model distilled into a copy of itself with every other layer: how far held-out KL falls.

    python -m benchmarks.half_depth [--model FOLDER] [--steps 100] [--batch 8] [--out FILE.json]

The model is SmolLM2-135M-Instruct (examples/real_model.py), in float32. Its copy is another base than it, so a sampler
serves it, as any teacher behind a URL: it names the 20 likeliest ids of every token of the rows, before the student is
asked for. All weights of the student are trained, on rows of examples/data/harbour_train.jsonl. KL(teacher, student)
is by transformers, over the whole vocabulary, at the answers' tokens of 64 rows of harbour_eval.jsonl, before and
after.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.control_plane import LONGSHORE, stack
from benchmarks.machine import provenance, tell
from examples.real_model import make_real_model

DATA = Path(__file__).parents[1] / "examples" / "data"
HELD_OUT, TOP_K, LONGEST = 64, 20, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="another model's folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="rows a step")
    parser.add_argument("--rows", type=int, default=400, help="rows to train on, over and over")
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    options = parser.parse_args()
    teacher = (options.model or make_real_model()).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student = half_depth(teacher, folder / "student")
        (folder / "held_out.jsonl").write_text("\n".join(_held_out()) + "\n")
        rows = (DATA / "harbour_train.jsonl").read_text().splitlines()[: options.rows]
        (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
        before, began = held_out_kl(teacher, student), time.monotonic()
        with served(teacher, folder) as (url, key):
            settings = {"LONGSHORE_GRADING__SCORE_MODEL_URL": url, "LONGSHORE_GRADING__SCORE_MODEL_KEY": key}
            with stack(folder / "stack", **settings):
                command = [
                    *(LONGSHORE, "submit", "distill", "--wait", "--json", "--full", "--dtype", "float32"),
                    *("--model", student.as_uri(), "--teacher", url, "--teacher-model", "teacher"),
                    *("--tokens", "top_k", "--top-k", str(TOP_K), "--dataset", str(folder / "train.jsonl")),
                    *("--eval-dataset", str(folder / "held_out.jsonl"), "--max-tokens", str(LONGEST)),
                    *("--steps", str(options.steps), "--batch-size", str(options.batch), "--learning-rate", "3e-4"),
                    *("--warmup", str(options.steps // 10), "--checkpoint-every", str(options.steps)),
                ]
                environment = {**os.environ, "LONGSHORE_ROOT": str(folder / "stack")}
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                run = json.loads(done.stdout)
        after = held_out_kl(teacher, Path(run["adapter"].removeprefix("file://")))
        result: dict[str, Any] = {
            "what": "KL(teacher, student) in nats a token, held out",
            "before": round(before, 4),
            "after": round(after, 4),
            "fell_by": round(1 - after / before, 3),
            "seconds": round(time.monotonic() - began, 1),
            "of_run": {name: value for name, value in run["metrics"].items() if "loss" in name},
            **provenance(),
        }
    tell(result, options.out)


def half_depth(model: Path, folder: Path) -> Path:
    """Write a copy of a model with layers 0, 2, 4, … alone."""
    import torch
    from transformers import AutoModelForCausalLM

    copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    copy.model.layers = copy.model.layers[::2]
    for place, layer in enumerate(copy.model.layers):
        layer.self_attn.layer_idx = place
    copy.config.num_hidden_layers = len(copy.model.layers)
    if getattr(copy.config, "layer_types", None):
        copy.config.layer_types = copy.config.layer_types[::2]
    copy.save_pretrained(folder)
    for path in [*model.glob("*token*"), *model.glob("*chat_template*")]:
        shutil.copy(path, folder)
    return folder


def held_out_kl(teacher: Path, student: Path) -> float:
    """Return the mean over the answers' tokens of held-out rows."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(teacher)
    models = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (teacher, student)]
    total = tokens = 0.0
    for line in _held_out():
        messages = json.loads(line)["messages"]
        asked, whole = (
            tokenizer(tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=asks))["input_ids"]
            for m, asks in ((messages[:-1], True), (messages, False))
        )
        with torch.no_grad():
            theirs, own = (m(torch.tensor([whole])).logits[0, len(asked) - 1 : -1].log_softmax(1) for m in models)
        total += float((theirs.exp() * (theirs - own)).sum())
        tokens += len(own)
    return total / tokens


def _held_out() -> list[str]:
    return (DATA / "harbour_eval.jsonl").read_text().splitlines()[:HELD_OUT]


@contextmanager
def served(model: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Serve a model on loopback as `teacher`. Yields the server's URL and its key."""
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "megatron_worker.sampler", "--model", str(model), "--ready-file", str(ready)]
    process = subprocess.Popen([*command, "--served-model-name", "teacher"])
    try:
        while not ready.exists():
            assert process.poll() is None, "the sampler has ended"
            time.sleep(0.2)
        told = json.loads(ready.read_text())
        yield f"{told['url']}/v1", told["api_key"]
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
