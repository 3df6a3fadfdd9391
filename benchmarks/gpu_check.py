"""Everything that needs a CUDA device in one command: tests, then benchmarks. Results go to benchmarks/results/.

    make gpu-check      (python -m benchmarks.gpu_check [--into benchmarks/results])

Writes gpu_check.json: every test with its outcome and seconds, and why it was skipped. Then a file for each benchmark:
the head's kernels; LoRA SFT, RL and offload on Qwen3-8B's shape with random weights; TrainerRank against the native
step; weights from a trainer to a sampler on the same device, and the two taking turns there. Each result is written at
once, so that finished ones survive if the device is taken away. Needs no network. The exit status is 0 if everything
that ran succeeded. Without a CUDA device nothing runs, nothing is written, and it is 1.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.machine import accelerator, provenance

ROOT = Path(__file__).parents[1]
# The kernels' own tests run everywhere; here they run compiled.
TESTS = (
    "tests/gpu",
    "tests/megatron_worker/test_head.py",
    "tests/megatron_worker/test_kernels.py",
    "tests/megatron_worker/test_kernel_choice.py",
)
BENCHMARKS = ("head_kernel", "qwen3_8b", "trainer_rank_step", "gpu_weight_sync")
BENCHMARK_S = 1500


def run_tests(paths: tuple[str, ...] = TESTS) -> dict[str, object]:
    """Outcomes by pytest's own report; output goes to the terminal as it comes."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", *paths, "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
        tests = outcomes(report) if report.exists() else []
    counts = {o: sum(test["outcome"] == o for test in tests) for o in ("passed", "failed", "skipped")}
    return {"exit_status": done.returncode, "counts": counts, "tests": tests}


def outcomes(report: Path) -> list[dict[str, object]]:
    rows = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        wrong = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if wrong is None else "skipped" if wrong.tag == "skipped" else "failed"
        row = {
            "test": f"{case.get('classname')}::{case.get('name')}",
            "outcome": outcome,
            "seconds": float(case.get("time", 0)),
        }
        rows.append(row if wrong is None else row | {"reason": (wrong.get("message") or "")[:500]})
    return rows


def run_benchmark(name: str, *options: str) -> tuple[str, str | None]:
    """Return a benchmark's JSON as far as it was printed, and its error if it failed."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=BENCHMARK_S)
    except subprocess.TimeoutExpired:
        return "", f"it took more than {BENCHMARK_S} s"
    return done.stdout, None if done.returncode == 0 else done.stderr[-3000:] or f"exit status {done.returncode}"


def write_page(folder: Path, page: dict[str, object]) -> None:
    (folder / "gpu_check.json").write_text(json.dumps(page, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    device = accelerator()
    if device is None:
        print("not measured: there is no CUDA device here", file=sys.stderr)
        return 1
    options.into.mkdir(parents=True, exist_ok=True)
    page: dict[str, object] = {**provenance(), "accelerator": device, "began": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    tested = run_tests()
    failed: dict[str, str] = {}
    page |= {"tests": tested, "benchmarks": [], "benchmarks_failed": failed}
    write_page(options.into, page)
    for number, name in enumerate(BENCHMARKS, 1):
        text, problem = run_benchmark(name)
        if text:
            (options.into / f"{name}.json").write_text(text)
        if problem is not None:
            failed[name] = problem
        write_page(options.into, page | {"benchmarks": BENCHMARKS[:number]})
    print(json.dumps({"tests": tested["counts"], "benchmarks_failed": failed, "into": str(options.into)}))
    return 0 if tested["exit_status"] == 0 and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
