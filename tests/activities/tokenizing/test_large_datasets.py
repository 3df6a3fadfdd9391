"""Real data, and much of it."""

import os
import subprocess
import sys
from pathlib import Path

from activities.tokenizing.tokenize import write_units
from activities.tokenizing.units import PackRequest, write_plan
from shared.jobs.packed import Units
from tests.activities.templates import open_model
from tests.activities.tokenizing.test_tokenize import ARTIFACT, request_of, rows_in


def test_gsm8k_is_tokenized_and_packed_into_full_bins(tmp_path: Path, gsm8k: Path, tiny_model: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").symlink_to(gsm8k / "train.jsonl")
    tokenizer = open_model(tiny_model_files(tiny_model, tmp_path / "model"))
    request = request_of(prompt_field="question", completion_field="answer", max_tokens=2048)
    report = write_units(tmp_path / "rows", tokenizer, request, tmp_path / "units")
    pack = PackRequest(units=ARTIFACT, seed=0, epochs=1, batch_tokens=16384, bin_tokens=2048)
    header = write_plan(Units.read_lengths(tmp_path / "units"), pack, tmp_path / "plan")
    assert report.num_kept == 7473 and 0.3 < report.trained_fraction < 0.8
    assert header.packing_efficiency >= 0.995


def tiny_model_files(model: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).symlink_to(path)
    return folder


MANY = """
import resource, sys
from pathlib import Path
from tests.activities.tokenizing.test_tokenize import request_of, _texts
from activities.tokenizing.tokenize import write_units
report = write_units(Path(sys.argv[1]), _texts, request_of(max_tokens=2048), Path(sys.argv[2]))
print(report.num_rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = []
    for num_rows in (2_000, 30_000):
        rows = rows_in(tmp_path, *[{"text": "The crane lifts the crate. " * 4}] * num_rows)
        command = [sys.executable, "-c", MANY, str(rows), str(tmp_path / "units")]
        output = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."}
        )
        found, peak_kib = map(int, output.stdout.split())
        assert found == num_rows
        peaks.append(peak_kib)
    assert peaks[1] - peaks[0] < 32 << 10, "28,000 more rows may not take 32 MiB more"
