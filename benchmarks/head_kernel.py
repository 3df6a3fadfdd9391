"""The logprob head's kernels against its torch code and against naive ways: time and memory in one run, on CUDA.

    python -m benchmarks.head_kernel [--targets 4096] [--vocabulary 151936] [--hidden 4096] [--repeats 10]

Cases: `score` (no gradients), `frozen` (forward and backward to the hidden states, as LoRA has it) and `trained` (to
the output embedding too). Ways take turns, so that a device that slows down slows all of them. Prints JSON; without
CUDA it prints a note, and measures nothing.
"""

import argparse
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.machine import accelerator, provenance
from megatron_worker.engine import Outputs
from megatron_worker.head.logprobs import policy, score_targets, whole_vocabulary
from shared.settings import KernelPolicy

CASES = ("score", "frozen", "trained")
# Products of [N, H] with [H, V] that each case needs at least: utilisation is computed from these.
PRODUCTS = {"score": 1, "frozen": 2, "trained": 3}

Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]


def ways() -> dict[str, Logprobs]:
    """Installed ways to compute a sum of log-probabilities from hidden states, weight and labels."""
    found: dict[str, Logprobs] = {
        "kernel": functools.partial(_ours, "strict"),
        "torch": functools.partial(_ours, "torch"),
        "log_softmax": _log_softmax,
    }
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        found["linear_cross_entropy"] = _linear_cross_entropy
    if importlib.util.find_spec("liger_kernel"):
        found["liger"] = _liger
    return found


def _ours(which: KernelPolicy, hidden_NH: Tensor, weight_VH: Tensor, label_N: Tensor) -> Tensor:
    with policy(which):
        scores = score_targets(hidden_NH, weight_VH, label_N, Outputs(), whole_vocabulary(len(weight_VH)))
    assert scores.logprob_N is not None
    return scores.logprob_N.sum()


def _log_softmax(hidden_NH: Tensor, weight_VH: Tensor, label_N: Tensor) -> Tensor:
    return (hidden_NH @ weight_VH.t()).float().log_softmax(dim=-1).gather(1, label_N[:, None]).sum()


def _linear_cross_entropy(hidden_NH: Tensor, weight_VH: Tensor, label_N: Tensor) -> Tensor:
    return -torch.nn.functional.linear_cross_entropy(hidden_NH, weight_VH, label_N, reduction="sum")


def _liger(hidden_NH: Tensor, weight_VH: Tensor, label_N: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return -LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight_VH, hidden_NH, label_N)


def run(way: Logprobs, case: str, hidden_NH: Tensor, weight_VH: Tensor, label_N: Tensor) -> Tensor:
    """Once, from nothing; the sum of log-probabilities."""
    hidden = hidden_NH.detach().requires_grad_(case != "score")
    weight = weight_VH.detach().requires_grad_(case == "trained")
    with torch.set_grad_enabled(case != "score"):
        total = way(hidden, weight, label_N)
    if case != "score":
        total.backward()
    return total.detach()


def measure(case: str, num_targets: int, vocab_size: int, hidden_size: int, repeats: int, device: torch.device) -> list:
    """Every way of one case: median, least and greatest milliseconds, peak memory without the inputs."""
    torch.manual_seed(0)
    hidden_NH = torch.randn(num_targets, hidden_size, device=device).bfloat16()
    weight_VH = (torch.randn(vocab_size, hidden_size, device=device) * hidden_size**-0.5).bfloat16()
    label_N = torch.randint(0, vocab_size, (num_targets,), device=device)
    known = ways()
    once = {name: functools.partial(run, way, case, hidden_NH, weight_VH, label_N) for name, way in known.items()}
    results = {name: _first_run(name, go, device) for name, go in once.items()}
    seconds: dict[str, list[float]] = {name: [] for name, result in results.items() if "failed" not in result}
    for _ in range(repeats):
        for name, times in seconds.items():
            times.append(_timed(once[name], device))
    flop = 2 * num_targets * vocab_size * hidden_size * PRODUCTS[case]
    for name, times in seconds.items():
        median = statistics.median(times)
        bounds = {"ms": median, "ms_min": min(times), "ms_max": max(times)}
        results[name] |= {key: round(1e3 * value, 3) for key, value in bounds.items()}
        results[name]["useful_tflop_per_s"] = round(flop / median / 1e12, 1)
    return [{"case": case, "way": name, **result} for name, result in results.items()]


def _first_run(name: str, go: Callable[[], Tensor], device: torch.device) -> dict[str, object]:
    """Compiles, and measures memory. What a way of somebody else's cannot do is a result, too."""
    try:
        go()
        before = _reset_peak(device)
        total = go()
    except (RuntimeError, NotImplementedError) as error:
        if name in ("kernel", "torch"):
            raise
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    return {"logprob_sum": float(total), "peak_gb": None if peak is None else round(peak / 1e9, 3)}


def _reset_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _timed(go: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of one run, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    go()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("not measured: there is no CUDA device here")
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = (options.targets, options.vocabulary, options.hidden, options.repeats)
    results = [row for case in CASES for row in measure(case, *sizes, device)]
    missing = [] if importlib.util.find_spec("liger_kernel") else ["liger: liger_kernel is not installed"]
    page = {"options": vars(options), **provenance(), "accelerator": accelerator(), "not_measured": missing}
    print(json.dumps({**page, "results": results}, indent=1))


if __name__ == "__main__":
    main()
