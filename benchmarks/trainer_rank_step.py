"""A training step written on TrainerRank against the engine's native step on the same rows, in one process.

    python -m benchmarks.trainer_rank_step [--rounds 7] [--bin-tokens 1024] [--out FILE.json]

Both train LoRA r=16 on all linears from the same start, in slots of one engine; that they do the same is checked by the
first step's loss and norm. Cases:

    sft             rows of lognormal lengths that share nothing; every token but the first is a target
    sft, one prompt the same rows behind one system prompt, whose tokens are no targets
    rl              groups of completions of one prompt each; importance-weighted REINFORCE, entropies reported

The native step has its bins as a job packs them (SFT rows in chains; groups in prefix trees; best fit into bins of
`bin-tokens`), made before the clock runs. TrainerRank's step begins with the rows: `forward_micro_batches`, which
packs, shares prefixes and plans by the memory that is free, a loss in torch, `backward`, `optim_step`. Steps take
turns, so that a machine that slows down slows both. `ratio` is native / TrainerRank, of medians: above 1 TrainerRank
is faster. By the clock on the wall, and by CPU seconds, which other processes disturb less.

On CUDA the model is Qwen3-8B's shape in bfloat16, on the CPU 4 layers of hidden size 256 in float32; weights are drawn.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import accelerator, provenance, tell
from benchmarks.prefix_sharing import as_batch
from benchmarks.random_model import QWEN3_8B, TINY, RandomMegatron, Sizes, described, write_config
from longshore.losses import CrossEntropy, Reinforce
from longshore.trainer_rank import ForwardInput, ForwardOutput, TrainerRank
from longshore.training import Adam, Dtype, Layout, Lora
from megatron_worker.engine import Batch, LossFunction, Norms
from megatron_worker.losses import loss_function
from shared.jobs import bins as packing
from shared.jobs.prefix_tree import SequenceRow, build_tree, split_tree

SMALL = Sizes(hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, ffn=768, vocab=32_000)
LORA = Lora(rank=16, alpha=32)
CASES = ("sft", "sft, one prompt", "rl")
RATE = 1e-4
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Losses = Callable[[Sequence[SequenceRow], Sequence[ForwardOutput]], Tensor]
Step = Callable[[], tuple[float, Norms]]


@dataclass(frozen=True)
class Amount:
    """Sizes of the work: SFT rows, their longest and common prompt; groups, and tokens of prompt and completion."""

    rows: int
    longest: int
    system: int
    groups: int
    prompt: int
    completions: int
    completion: int


LARGE = Amount(rows=48, longest=4096, system=512, groups=4, prompt=2048, completions=16, completion=256)
MEDIUM = Amount(rows=32, longest=1024, system=96, groups=2, prompt=256, completions=8, completion=64)
LITTLE = Amount(rows=8, longest=40, system=20, groups=2, prompt=20, completions=3, completion=8)


def make_groups(case: str, amount: Amount, vocab_size: int) -> list[list[SequenceRow]]:
    """Groups of rows; of SFT each is one row."""
    generator = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return generator.integers(3, vocab_size, length)

    if case == "rl":
        prompts = [ids(amount.prompt) for _ in range(amount.groups)]
        size, length = amount.completions, amount.completion
        return [[_row(np.concatenate([p, ids(length)]), len(p), generator) for _ in range(size)] for p in prompts]
    typical = np.log(amount.longest / 4)
    lengths = np.clip(generator.lognormal(typical, 0.7, amount.rows), 8, amount.longest).astype(int)
    system = ids(amount.system if case == "sft, one prompt" else 0)
    rows = [np.concatenate([system, ids(length)])[: amount.longest] for length in lengths]
    return [[_row(token_ids, max(1, len(system)), generator)] for token_ids in rows]


def _row(token_ids: np.ndarray, start: int, generator: np.random.Generator) -> SequenceRow:
    """Tokens from `start` on are targets, sampled by a policy that knew as little."""
    ones, advantage_L = np.ones(len(token_ids)), np.full(len(token_ids), generator.standard_normal())
    old_L = np.full(len(token_ids), -np.log(token_ids.max()))
    return SequenceRow(token_ids, np.arange(len(token_ids)) >= start, ones, advantage_L, old_L, old_L)


def native_bins(groups: Sequence[Sequence[SequenceRow]], bin_tokens: int, device: torch.device) -> list[Batch]:
    """As a job has them."""
    rows = [row for group in groups for row in group]
    if len(groups) < len(rows):
        units = split_tree(rows, bin_tokens)
    else:
        units = [build_tree([row]) for row in rows]
    bins = packing.pack_bins([unit.num_tokens for unit in units], bin_tokens)
    return [as_batch([units[place] for place in each], device) for each in bins]


def native_step(rank: TrainerRank, name: str, bins: list[Batch], loss: LossFunction) -> tuple[float, Norms]:
    """What the runner does in a step."""
    engine, total, weight = rank.engine, *(torch.zeros((), dtype=torch.float64) for _ in range(2))
    with rank.dispatcher.resident(rank.slot(name)):
        for _batch, sums in engine.forward_backward_all(bins, loss):
            total, weight = total + sums["loss"].double(), weight + sums["weight"].double()
        reduced = engine.reduce({"loss": total, "weight": weight})
        return reduced["loss"], engine.optim_step(Adam(), RATE, reduced["weight"])


def trainer_rank_step(
    rank: TrainerRank, name: str, groups: Sequence[Sequence[SequenceRow]], entropy: bool, losses: Losses
) -> tuple[float, Norms]:
    """What a user writes."""
    items = [[_input(row, entropy) for row in group] for group in groups]
    total, weight = torch.zeros((), dtype=torch.float64), float(sum(row.target_mask.sum() for g in groups for row in g))
    with rank.adapter(name):
        for micro_batch in rank.forward_micro_batches(items):
            rows = [row for place in micro_batch.indices for row in groups[place]]
            loss = losses(rows, [output for item in micro_batch.outputs for output in item])
            rank.backward(loss)
            total = total + loss.detach().double().cpu()
        norms = rank.optim_step(Adam(), RATE, weight)[name]
    return rank.reduce({"loss": total})["loss"], norms


def _input(row: SequenceRow, entropy: bool) -> ForwardInput:
    positions = np.flatnonzero(row.target_mask) - 1
    return ForwardInput(row.token_ids, positions, target_logprobs=True, entropy=entropy)


def _logprobs(outputs: Sequence[ForwardOutput]) -> Tensor:
    return torch.cat([output.target_logprob_P for output in outputs])


def cross_entropy(_: Sequence[SequenceRow], outputs: Sequence[ForwardOutput]) -> Tensor:
    return -_logprobs(outputs).sum()


def reinforce(rows: Sequence[SequenceRow], outputs: Sequence[ForwardOutput]) -> Tensor:
    logprob_N = _logprobs(outputs)
    old_N, advantage_N = (
        torch.from_numpy(np.concatenate([column[row.target_mask] for column, row in columns])).to(logprob_N)
        for columns in ([(row.old_logprob, row) for row in rows], [(row.advantage, row) for row in rows])
    )
    return -((logprob_N - old_N).exp() * advantage_N).sum()


def measure(rank: TrainerRank, case: str, amount: Amount, bin_tokens: int, rounds: int) -> dict[str, object]:
    """Seconds of both steps by turns, after one of each that is not timed but compared."""
    facts, adapters = rank.facts, {"native": f"native {case}", "trainer_rank": f"trainer_rank {case}"}
    groups = make_groups(case, amount, facts.vocab_size)
    bins = native_bins(groups, bin_tokens, facts.device)
    for name in adapters.values():
        rank.create_adapter(name, LORA, seed=0)
    loss, losses = (Reinforce(), reinforce) if case == "rl" else (CrossEntropy(), cross_entropy)
    steps: dict[str, Step] = {
        "native": partial(native_step, rank, adapters["native"], bins, loss_function(loss)),
        "trainer_rank": partial(trainer_rank_step, rank, adapters["trainer_rank"], groups, case == "rl", losses),
    }
    first = {name: step() for name, step in steps.items()}
    tolerance = 0.05 if facts.dtype == "bfloat16" else 1e-3
    for ours, theirs in zip(*([total, norms.grad_norm] for total, norms in first.values()), strict=True):
        assert abs(ours - theirs) <= tolerance * max(abs(theirs), 1e-2), (case, first)
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in steps} for clock in CLOCKS}
    for _ in range(rounds):
        for name, step in steps.items():
            for clock, elapsed in _timed(step, facts.device).items():
                seconds[clock][name].append(elapsed)
    for name in adapters.values():
        rank.drop_adapter(name)
    rows = [row for group in groups for row in group]
    tokens = {"logical": sum(len(r.token_ids) for r in rows), "native": sum(len(b.token_id_T) for b in bins)}
    return {
        "case": case,
        "ratio": {clock: round(_ratio(own, statistics.median), 3) for clock, own in seconds.items()},
        "ratio_of_least": {clock: round(_ratio(own, min), 3) for clock, own in seconds.items()},
        "seconds": {clock: {name: _spread(times) for name, times in own.items()} for clock, own in seconds.items()},
        "logical_tokens_per_s": {
            name: round(tokens["logical"] / statistics.median(times), 1) for name, times in seconds["wall"].items()
        },
        "tokens": {**tokens, "native_bins": len(bins)},
    }


def _ratio(seconds: dict[str, list[float]], of: Callable[[list[float]], float]) -> float:
    return of(seconds["native"]) / of(seconds["trainer_rank"])


def _spread(times: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 4), "min": round(min(times), 4), "max": round(max(times), 4)}


def _timed(step: Step, device: torch.device) -> dict[str, float]:
    """By each clock; the device's work is in the wall's."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = {clock: read() for clock, read in CLOCKS.items()}
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return {clock: read() - began[clock] for clock, read in CLOCKS.items()}


def start(sizes: Sizes, dtype: Dtype) -> TrainerRank:
    with tempfile.TemporaryDirectory() as folder:
        return TrainerRank(RandomMegatron(write_config(Path(folder), sizes), Layout(), dtype))


def main() -> None:
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model and rows of next to nothing, to see that it runs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bin-tokens", type=int, default=8192 if on_cuda else 1024, help="of the native step's bins")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    large = (QWEN3_8B, LARGE) if on_cuda else (SMALL, MEDIUM)
    dtype: Dtype = "bfloat16" if on_cuda else "float32"
    sizes, amount = (TINY, LITTLE) if options.tiny else large
    rank = start(sizes, dtype)
    results = [measure(rank, case, amount, options.bin_tokens, options.rounds) for case in CASES]
    page = {"benchmark": "trainer_rank_step", **provenance(), "accelerator": accelerator(), "torch": torch.__version__}
    page |= {"model": described(sizes), "dtype": dtype, "amount": vars(amount), "bin_tokens": options.bin_tokens}
    tell({**page, "threads": options.threads, "rounds": options.rounds, "results": results}, options.out)


if __name__ == "__main__":
    main()
