"""Peak memory and time of the logprob head, compared with naive ways to do the same.

    python -m benchmarks.head_memory [--targets 4096] [--vocabulary 151936] [--hidden 256] [--threads 2]

Each way runs in a separate process; its peak is the growth of that process's resident memory (Linux: VmHWM, reset once
the inputs exist). Prints JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.machine import field, provenance

WAYS = ("longshore", "linear_cross_entropy", "log_softmax")


def measure(way: str, num_targets: int, vocab_size: int, hidden_size: int, dtype: str, threads: int) -> dict:
    """One forward and backward with a frozen output embedding, as LoRA has it."""
    import torch

    from megatron_worker.engine import Outputs
    from megatron_worker.head.logprobs import score_targets, whole_vocabulary

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    hidden_NH = torch.randn(num_targets, hidden_size).to(kind).requires_grad_()
    weight_VH = (torch.randn(vocab_size, hidden_size) * hidden_size**-0.5).to(kind)
    label_N = torch.randint(0, vocab_size, (num_targets,))

    def run() -> torch.Tensor:
        match way:
            case "longshore":
                scores = score_targets(hidden_NH, weight_VH, label_N, Outputs(), whole_vocabulary(vocab_size))
                assert scores.logprob_N is not None
                return -scores.logprob_N.sum()
            case "linear_cross_entropy":
                return torch.nn.functional.linear_cross_entropy(hidden_NH, weight_VH, label_N, reduction="sum")
            case "log_softmax":
                logprob_NV = (hidden_NH @ weight_VH.t()).float().log_softmax(dim=-1)
                return -logprob_NV.gather(1, label_N[:, None]).sum()
        raise AssertionError(way)

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which came from making the inputs
    before = _peak_bytes()
    began = time.perf_counter()
    loss = run()
    loss.backward()
    assert hidden_NH.grad is not None
    return {
        "way": way,
        "torch": torch.__version__,
        "loss": float(loss.detach()),
        "gradient_norm": float(hidden_NH.grad.float().norm()),
        "peak_gb": round((_peak_bytes() - before) / 1e9, 3),
        "seconds": round(time.perf_counter() - began, 2),
    }


def _peak_bytes() -> int:
    return 1024 * int(field("/proc/self/status", "VmHWM").split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help="measure this one, in this process")
    options = parser.parse_args()
    sizes = (options.targets, options.vocabulary, options.hidden, options.dtype, options.threads)
    if options.way:
        print(json.dumps(measure(options.way, *sizes)))
        return
    results = []
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.head_memory", *sys.argv[1:], "--way", way]
        results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print(json.dumps({"options": vars(options), **provenance(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
