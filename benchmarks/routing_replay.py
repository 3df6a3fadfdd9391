"""Effect of routing replay on the mismatch of sampler and trainer, what it refuses, and its cost.

    python -m benchmarks.routing_replay [--rounds 9] [--out FILE.json]

A mixture of random weights (qwen3_moe, 4 layers of 4 experts, 2 a token, hidden size 128) in one process:

    mismatch   the sampler's routers get noise of a share of their weights' size, or it computes in bfloat16; the
               trainer computes in float32. The divergence of sampler and trainer (k3, in nats a drawn token) by the
               trainer's own routes and by the sampler's
    seconds    CPU, medians: sampling with and without returning routes; a step's passes (the old policy's and the
               trained one's) with and without replaying them. Both kinds take turns

Then a local run of two steps (docs/local.md), with and without, each on a separate sampler and worker:

    run        its own metrics, and the bytes of its files by each sampled or packed token
    refused    packing's error for a step where the routes of two samples are swapped
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from activities.sampling.completions import ROUTES, RoutesFile
from activities.trajectories.group_samples import GROUPS
from activities.trajectories.read_groups import Rules, parse_groups, read_groups
from benchmarks.machine import provenance, tell
from longshore.local import train
from longshore.runs import RLRun
from longshore.training import Full, Layout
from megatron_worker.engine import Batch, Outputs
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder
from shared.errors import InvalidInput
from shared.families import read_config
from shared.families.model_slices import shape_of
from shared.jobs.packed import RouteShape, UnitsHeader
from tests.megatron_worker.replayed import as_rows, drawn, routes_of, with_noise
from tests.megatron_worker.rows import VOCAB_SIZE, bin_of, distinct_model

_QWEN3_30B_A3B = RouteShape(num_layers=48, num_experts=128, per_token=8)
_NOISE = (0.01, 0.03, 0.1)
_PROMPTS, _SAMPLES, _LENGTH = 6, 8, 48
_LETTERS = "def grade(sample, item):\n    return sample['output_text'].count('e') / 8\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = provenance()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = distinct_model(root / "model", "qwen3_moe", tied=False, num_layers=4, hidden_size=128)
        shape = shape_of(read_config(model)).routes
        assert shape is not None
        result = {
            "what": "qwen3_moe of random weights, float32, one CPU thread",
            "route_bytes_a_token": shape.dtype.itemsize,
            "of_qwen3_30b_a3b": _QWEN3_30B_A3B.dtype.itemsize,
            "mismatch": mismatches(model),
            "seconds": seconds(model, arguments.rounds),
            "run": {name: run_of(root / name, model, name == "with") for name in ("with", "without")},
            "refused": refused(root / "with", shape),
            **about,
        }
    tell(result, arguments.out)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (32,), generator=generator).tolist() for _ in range(_PROMPTS)]


def mismatches(model: Path) -> dict[str, dict[str, float]]:
    """The mismatch for each disturbance of the sampler."""
    exact = {f"noise {share}": with_noise(Decoder(model, torch.float32, _CPU), share) for share in _NOISE}
    engine = MegatronEngine(model, Layout(), "float32")
    found = {}
    for name, decoder in (exact | {"bfloat16": Decoder(model, torch.bfloat16, _CPU)}).items():
        sequences = drawn(decoder, model, prompts(), _SAMPLES, _LENGTH)
        free = bin_of(as_rows(sequences))
        told = dataclasses.replace(free, route_TLK=torch.cat([routes_of(each) for each in sequences]))
        sampler_N = torch.tensor([value for each in sequences for value in each.raw])
        without, with_routes = (_divergence(engine, batch, sampler_N) for batch in (free, told))
        found[name] = {"without": without, "with": with_routes, "times_less": round(without / with_routes, 1)}
    return found


_CPU = torch.device("cpu")


def _divergence(engine: MegatronEngine, batch: Batch, sampler_N: torch.Tensor) -> float:
    with torch.no_grad():
        trainer_N = engine.forward(batch, Outputs()).logprob_N
    assert trainer_N is not None
    behind_N = (trainer_N - sampler_N).double()
    return float((behind_N.exp() - 1 - behind_N).mean())


def seconds(model: Path, rounds: int) -> dict[str, dict[str, float]]:
    decoder, engine = Decoder(model, torch.float32, _CPU), MegatronEngine(model, Layout(), "float32")
    engine.train_full(Full())
    sequences = drawn(decoder, model, prompts(), _SAMPLES, _LENGTH)
    free = bin_of(as_rows(sequences))
    told = dataclasses.replace(free, route_TLK=torch.cat([routes_of(each) for each in sequences]))
    loss = loss_function(local_loss().loss)

    def passes(batch: Batch) -> None:
        with torch.no_grad():
            engine.forward(batch, Outputs())
        engine.forward_backward(batch, loss)
        engine.zero_grad()

    return {
        "drawing": _timed(lambda tells: drawn(decoder, model, prompts(), _SAMPLES, _LENGTH, tells), rounds),
        "passes": _timed(lambda tells: passes(told if tells else free), rounds),
    }


def _timed(call: Callable[[bool], object], rounds: int) -> dict[str, float]:
    """CPU seconds of a call with and without, medians over rounds; both take turns in each."""
    spent: dict[bool, list[float]] = {True: [], False: []}
    for tells in [True, False] * (rounds + 1):
        began = time.process_time()
        call(tells)
        spent[tells].append(time.process_time() - began)
    with_routes, without = (statistics.median(spent[tells][1:]) for tells in (True, False))
    return {"with": round(with_routes, 3), "without": round(without, 3), "more": round(with_routes / without - 1, 3)}


def local_loss(**rollouts: object) -> RLRun:
    """A run of two steps on rows that `run_of` writes."""
    own = {
        "prompts": {"uri": rollouts.pop("prompts", "file:///none")},
        "grader": {"type": "python", "name": "letters", "source": _LETTERS},
        "steps": 2,
        "prompts_per_step": 8,
        "group_size": 8,
        "max_completion_tokens": 48,
    }
    settings = {"trainable": {"kind": "lora", "rank": 4}, "learning_rate": 1e-3, "max_tokens": 128, "dtype": "float32"}
    return RLRun.model_validate({"model": rollouts.pop("model", "none"), "rollouts": own | rollouts, **settings})


def run_of(folder: Path, model: Path, replays: bool) -> dict[str, object]:
    """Train two steps; return the last one's metrics and the sizes of its files."""
    folder.mkdir()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"crate {n} goes to quay {n % 7}"}) + "\n" for n in range(16)))
    run = local_loss(model=str(model), prompts=rows.as_uri(), routing_replay="on" if replays else "off")
    last = train(run, folder / "root", threads=1)
    files = list((folder / "root").rglob("*"))
    units = [UnitsHeader.model_validate_json(path.read_bytes()) for path in _named(files, "units.json", "tokenized")]
    num_packed = sum(header.num_tokens for header in units)
    num_sampled = sum(
        json.loads(path.read_bytes())["num_tokens"] for path in _named(files, "summary.json", "completions")
    )
    return {
        **{name: last.metrics[name] for name in ("kl_sampler_trainer", "step_s", "trajectories")},
        "sampled_tokens": num_sampled,
        "packed_tokens": num_packed,
        "bytes_a_sampled_token": {
            name: round(_bytes(_named(files, name)) / num_sampled, 1) for name in ("completions.jsonl", ROUTES, GROUPS)
        },
        "bytes_a_packed_token": {
            "routes": round(_bytes(_named(files, "route.bin")) / num_packed, 1),
            "all": round(
                _bytes(path for path in files if path.suffix == ".bin" and "tokenized" in path.parts) / num_packed, 1
            ),
        },
    }


def _named(files: Sequence[Path], name: str, folder: str = "") -> list[Path]:
    """Files in the store only: the hosts' copies are caches."""
    return [path for path in files if path.name == name and "store" in path.parts and folder in ("", *path.parts)]


def _bytes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def refused(folder: Path, shape: RouteShape) -> str:
    """Let the routes of two samples of a step change places."""
    groups, routes = (next(iter(_named(list(folder.rglob("*")), name))) for name in (GROUPS, ROUTES))
    first, *others = groups.read_text().splitlines()
    group = json.loads(first)
    one, other = group["trajectories"][:2]
    one["routes"], other["routes"] = other["routes"], one["routes"]
    changed = folder / GROUPS
    changed.write_text("\n".join([json.dumps(group), *others]) + "\n")
    rules = Rules(local_loss(), 1, VOCAB_SIZE, routes=RoutesFile([routes.parent], shape))
    try:
        read_groups(parse_groups(changed, GROUPS), rules)
    except InvalidInput as error:
        return str(error)
    raise AssertionError("it was accepted")


if __name__ == "__main__":
    main()
