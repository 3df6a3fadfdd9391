"""How fast a dataset becomes units: read, rendered, encoded, masked, written.

    python -m benchmarks.tokenize [--rows FILE --prompt-field question --completion-field answer]

Prints one JSON object with the hardware. The tokenizer is a byte-level BPE of 32k tokens, trained on these rows.
`--copies 134 --repeats 1` makes a million rows of GSM8K.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

from activities.tokenizing.tokenize import TokenizeRequest, write_units
from activities.tokenizing.tokenizer import ModelTokenizer
from benchmarks.machine import provenance
from examples.tiny_model import CHAT_TEMPLATE, train_tokenizer
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k" / "train.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=GSM8K)
    parser.add_argument("--prompt-field", default="question")
    parser.add_argument("--completion-field", default="answer")
    parser.add_argument("--copies", type=int, default=4, help="of the rows, for a file long enough to measure")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    source = DatasetSource(
        uri=options.rows.as_uri(), prompt_field=options.prompt_field, completion_field=options.completion_field
    )
    print(json.dumps(measure(options.rows, source, options.copies, options.repeats), indent=1))


def measure(rows: Path, source: DatasetSource, copies: int, repeats: int) -> dict[str, object]:
    tokenizer = make_tokenizer(rows.read_text().splitlines())
    unused = Artifact(uri="file:///", sha256="0" * 64)
    request = TokenizeRequest(dataset=unused, source=source, model=unused, max_tokens=2048)
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as dataset:
            for k in range(copies):
                (Path(dataset) / f"{k}-{rows.name}").symlink_to(rows.resolve())
            started, cpu_before = time.perf_counter(), sum(os.times()[:4])
            report = write_units(Path(dataset), tokenizer, request, Path(folder))
            seconds.append(time.perf_counter() - started)
            cpu_seconds.append(sum(os.times()[:4]) - cpu_before)
    return {
        "rows": report.num_rows,
        "tokens": report.num_tokens,
        "seconds": [round(s, 3) for s in seconds],
        "cpu_seconds": [round(s, 3) for s in cpu_seconds],
        "tokens_per_s_best": round(report.num_tokens / min(seconds)),
        "tokens_per_s_median": round(report.num_tokens / sorted(seconds)[len(seconds) // 2]),
        "tokens_per_cpu_s": round(report.num_tokens / min(cpu_seconds)),
        "peak_rss_gb": round(_peak_rss_bytes() / 1e9, 3),
        **provenance(),
    }


def _peak_rss_bytes() -> int:
    """Peak memory of this process plus that of its largest child: an upper bound (Linux counts KiB)."""
    return 1024 * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def make_tokenizer(corpus: list[str], vocab_size: int = 32_000) -> ModelTokenizer:
    """A tokenizer of a real one's size and kind, with the tiny model's chat template."""
    tokenizer = train_tokenizer(corpus, vocab_size)
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return ModelTokenizer(files, "benchmark")


if __name__ == "__main__":
    main()
