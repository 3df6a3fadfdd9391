"""A fine-tuning in this process, without a server: `python examples/local_sft.py MODEL ROWS.jsonl FOLDER`.

Prints a line for each step, and then the folder of the adapter (docs/local.md). The same command again continues.
"""

import argparse
from pathlib import Path

from longshore import DatasetSource, Lora, SFTRun
from longshore.local import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder, or an id of the hub")
    parser.add_argument("rows", type=Path, help="a dataset: docs/datasets.md has the formats")
    parser.add_argument("folder", type=Path, help="where results and caches are kept")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, help="CPU threads of the worker, which decide the bits")
    given = parser.parse_args()
    run = request(given.model, given.rows, given.steps)
    status = train(
        run, given.folder, on_metrics=lambda step, told: print(step, told, flush=True), threads=given.threads
    )
    print(status.adapter)


def request(model: str, rows: Path, steps: int) -> SFTRun:
    """Return the run. A service takes the same object."""
    uri = Path(model).resolve().as_uri() if Path(model).is_dir() else model
    source = DatasetSource(uri=rows.resolve().as_uri())
    return SFTRun(model=uri, dataset=source, trainable=Lora(rank=8), steps=steps, batch_size=8, max_tokens=512)


if __name__ == "__main__":
    main()
