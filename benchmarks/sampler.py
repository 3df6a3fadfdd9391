"""Throughput of the sampler over HTTP, as runs use it, against transformers' `generate` on the same model.

    python -m benchmarks.sampler [--family qwen3_moe] [--hidden 64 256] [--slots 32 64] [--groups 8] [--out FILE.json]
    python -m benchmarks.sampler --families [gemma3 qwen3_5 …] [--hidden 256] [--rounds 3] [--out FILE.json]

A 4-layer model (2 layers at hidden 64, the tests' size) with random weights in float32 on one thread. `--groups`
prompts of 64 tokens, requested at once, `--group-size` samples of 128 tokens each, temperature 1, no end token.
transformers draws all of them as one batch. Rounds are interleaved; the best counts. `cpu` figures are sampled tokens
per CPU second of the sampling process, which a busy machine disturbs less.

With `--families` it compares families in one process instead: by each, 16 sequences in 32 slots of a model of 4 layers,
in tokens a CPU second and as a share of the first family's.

With `--sleep` it measures instead the memory that each level of sleep releases, by part and of the process, and the
seconds of sleep and wake, and checks that the samples after it equal those before it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import psutil
from tokenizers import Tokenizer

from activities.sampling.client import Completion, Sampler
from benchmarks.machine import provenance, tell
from benchmarks.stack_processes import end
from examples.tiny_model import make_tiny_model
from shared.chat.completions import SamplerMemory, SamplerReady, Sampling
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

    def sample(self, prompt: tuple[int, ...], sampling: Sampling, seed: int) -> tuple[Completion, ...]:
        return self._sampler.sample("model", prompt, sampling, 1, seed)

    def memory(self) -> SamplerMemory:
        return self._sampler.wake()  # it is awake

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


def compare_families(folder: Path, families: list[str], hidden: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return each family's tokens a CPU second of steps, in the best of rounds that go over all families in turn."""
    import torch

    from megatron_worker.sampler.adapters import LoadedAdapter
    from megatron_worker.sampler.decoder import Decoder
    from megatron_worker.sampler.generation import Ending, Generator, RequestGroup, Sequence

    torch.set_num_threads(1)
    sampling, best = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True), dict.fromkeys(families, 0.0)
    decoders = {f: Decoder(make_model(folder / f, f, hidden), torch.float32, torch.device("cpu")) for f in families}
    tokenizer = Tokenizer.from_file(str(folder / families[0] / "tokenizer.json"))
    for turn in range(rounds + 1):
        for family, decoder in decoders.items():
            generator, adapter = Generator(decoder, 32), LoadedAdapter("base", "", {})
            asked = [Sequence(p, sampling, 0, Ending(sampling, frozenset(), tokenizer)) for p in prompts(16)]
            loop = threading.Thread(target=generator.run)
            began = time.process_time()
            loop.start()
            generator.submit(group := RequestGroup(adapter, asked))
            group.done.wait()
            spent = time.process_time() - began
            generator.stop()
            loop.join()
            if turn:  # the first round warms up
                best[family] = max(best[family], len(asked) * NEW_TOKENS / spent)
    return {f: {"cpu": round(one), "share": round(one / best[families[0]], 3)} for f, one in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--families", choices=FAMILIES, nargs="*", help="compare these; without names, all")
    parser.add_argument("--sleep", action="store_true", help="measure sleep and wake instead")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.families is not None:
        families = list(dict.fromkeys([arguments.family, *(arguments.families or FAMILIES)]))
        with tempfile.TemporaryDirectory() as folder:
            shares = compare_families(Path(folder), families, arguments.hidden[-1], arguments.rounds)
        tell({"benchmark": "sampler families", "hidden": arguments.hidden[-1], **shares, **provenance()}, arguments.out)
        return
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
    result: dict[str, Any] = {"benchmark": "sampler", "family": arguments.family, "figures": figures, **provenance()}
    tell(result | {"groups": arguments.groups, "group_size": arguments.group_size}, arguments.out)


if __name__ == "__main__":
    main()
