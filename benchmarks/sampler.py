"""Throughput of the sampler over HTTP, as runs use it, against transformers' `generate` on the same model.

    python -m benchmarks.sampler [--family qwen3_moe] [--hidden 64 256] [--slots 32 64] [--groups 8] [--out FILE.json]

A 4-layer model (2 layers at hidden 64, the tests' size) with random weights in float32 on one thread. `--groups`
prompts of 64 tokens, requested at once, `--group-size` samples of 128 tokens each, temperature 1, no end token.
transformers draws all of them as one batch. Rounds are interleaved; the best counts. `cpu` figures are sampled tokens
per CPU second of the sampling process, which a busy machine disturbs less.

With `--sleep` it measures instead the memory that each level of sleep releases, by part and of the process, and the
seconds of sleep and wake, and checks that the samples after it equal those before it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import psutil

from activities.sampling.client import Sampler
from benchmarks.stack_processes import end
from examples.tiny_model import make_tiny_model
from shared.chat.completions import SamplerReady, Sampling
from shared.families import FAMILIES

PROMPT_TOKENS, NEW_TOKENS = 64, 128


def make_model(folder: Path, family: str, hidden: int) -> Path:
    layers, head_dim = (2, 16) if hidden == 64 else (4, 64)
    heads = hidden // head_dim
    return make_tiny_model(
        folder,
        ["a benchmark"],
        family=family,
        vocab_size=512,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=max(1, heads // 2),
        head_dim=head_dim,
    )


def prompts(num: int) -> list[tuple[int, ...]]:
    return [tuple((7 * i + 13 * j) % 250 + 3 for j in range(PROMPT_TOKENS)) for i in range(num)]


class Ours:
    """A sampler process, asked by a thread a group."""

    def __init__(self, model: Path, slots: int, stack: ExitStack, *options: str) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ready = folder / "ready.json"
        command = [sys.executable, "-m", "megatron_worker.sampler", "--model", str(model), "--ready-file", str(ready)]
        process = subprocess.Popen([*command, "--served-model-name", "model", "--slots", str(slots), *options])
        stack.callback(end, process)
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.05)
        found = SamplerReady.model_validate_json(ready.read_bytes())
        self._sampler = stack.enter_context(Sampler(found.url, found.api_key))
        self._process = psutil.Process(process.pid)

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def sleep(self, level: Literal[1, 2]) -> dict[str, Any]:
        """Sleep and wake; returns bytes and seconds. It has drawn before, so that caches have been used."""

        def drawn() -> list[object]:
            sampling = Sampling(max_tokens=16, ignore_eos=True)
            return [self._sampler.sample("model", p, sampling, 2, 5) for p in prompts(4)]

        before, awake, process = drawn(), self._sampler.wake(), self._process.memory_info().rss
        began = time.perf_counter()
        asleep = self._sampler.sleep(level)
        slept = time.perf_counter() - began
        process_asleep = self._process.memory_info().rss
        began = time.perf_counter()
        self._sampler.wake()
        woke = time.perf_counter() - began
        return {
            **{"level": level, "awake_bytes": awake.device_bytes, "asleep_bytes": asleep.device_bytes},
            **{"freed": 1 - asleep.device_bytes / awake.device_bytes, "process_freed_bytes": process - process_asleep},
            **{"process_asleep_bytes": process_asleep, "sleep_s": round(slept, 3), "wake_s": round(woke, 3)},
            "equal_samples": drawn() == before,
        }

    def draw(self, groups: list[tuple[int, ...]], size: int) -> None:
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
        with ThreadPoolExecutor(len(groups)) as pool:
            done = [pool.submit(self._sampler.sample, "model", p, sampling, size, i) for i, p in enumerate(groups)]
            assert all(len(s.token_ids) == NEW_TOKENS for d in done for s in d.result())


class Theirs:
    """transformers' `generate`, here in this process."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()

    def cpu_s(self) -> float:
        return time.process_time()

    def draw(self, groups: list[tuple[int, ...]], size: int) -> None:
        import torch

        rows = torch.tensor([p for p in groups for _ in range(size)])
        options = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "eos_token_id": -1, "top_k": 0}
        with torch.inference_mode():
            self._model.generate(input_ids=rows, do_sample=True, **options)


def measure(contestants: dict[str, Ours | Theirs], num_groups: int, size: int, rounds: int) -> dict[str, dict]:
    groups = prompts(num_groups)
    best: dict[str, dict[str, float]] = {}
    num_tokens = num_groups * size * NEW_TOKENS
    for turn in range(rounds + 1):
        for name, contestant in contestants.items():
            wall, cpu = time.perf_counter(), contestant.cpu_s()
            contestant.draw(groups, size)
            wall, cpu = time.perf_counter() - wall, contestant.cpu_s() - cpu
            if turn:  # the first round warms up
                old = best.setdefault(name, {"wall": 0.0, "cpu": 0.0})
                best[name] = {"wall": max(old["wall"], num_tokens / wall), "cpu": max(old["cpu"], num_tokens / cpu)}
    return best


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sleep", action="store_true", help="measure sleep and wake instead")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures = []
    for hidden in arguments.hidden:
        with ExitStack() as stack:
            model = make_model(Path(stack.enter_context(tempfile.TemporaryDirectory())), arguments.family, hidden)
            if arguments.sleep:
                ours = Ours(model, arguments.slots[0], stack)
                figures += [{"hidden": hidden, **ours.sleep(1)}, {"hidden": hidden, **ours.sleep(2)}]
                print(json.dumps(figures[-2:], indent=1), flush=True)
                continue
            contestants: dict[str, Ours | Theirs] = {f"ours_{n}": Ours(model, n, stack) for n in arguments.slots}
            contestants["transformers"] = Theirs(model)
            speed = measure(contestants, arguments.groups, arguments.group_size, arguments.rounds)
        figures.append({"hidden": hidden, "tokens_per_s": speed})
        print(json.dumps(figures[-1]), flush=True)
    hardware = {"machine": platform.machine(), "cpus": os.cpu_count()}
    result: dict[str, Any] = {"benchmark": "sampler", "family": arguments.family, "commit": commit()}
    result |= {"hardware": hardware, "groups": arguments.groups, "group_size": arguments.group_size, "figures": figures}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
