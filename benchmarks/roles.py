"""Cost of each role of an RL step on one device: policy, reference and critic, seconds and bytes by part.

    python -m benchmarks.roles [--hidden 256] [--layers 4] [--rank 64] [--steps 4] [--out FILE.json]

One job of a random dense model: the reference (a second adapter), the old policy and the critic score the data, one
after another; then every step updates the critic and the policy. `seconds`, of the CPU, are of each role's passes and
updates; `peak_bytes` the most that each part (weights, gradients, optimizer) had on the device in that role's passes;
`both_optimizers` what they would be if both stayed there. The ratio says what the critic adds to a job. Prints JSON.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.machine import provenance
from examples.tiny_model import make_tiny_model
from longshore.fields import Artifact, Fence
from longshore.losses import PPO, Kl
from longshore.training import Layout, Lora, ScalarHead
from megatron_worker.dispatch import Dispatcher
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.offload import Residency
from megatron_worker.process.ranks import Staging, WorkerRanks
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.training.batches import Role
from megatron_worker.warm_engine import build_engine
from megatron_worker.worker import Worker
from shared.jobs.job import Job, JobCritic, JobPlan, PackedData, Schedule
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, PlanWriter, UnitsWriter
from shared.jobs.prefix_tree import SequenceRow, split_tree
from shared.settings import S3Settings
from shared.storage.artifacts import seal

GROUPS, GROUP_SIZE, PROMPT_TOKENS, ANSWER_TOKENS, BIN_TOKENS = 8, 4, 48, 48, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=64, help="of the adapters")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.hidden, options.layers, options.rank, options.steps)
    text = json.dumps({"what": "roles of an RL step on one device", **result, **provenance()}, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


class Watch:
    """Seconds and peak bytes of each role, while a job is done."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.peaks = defaultdict[str, dict[str, int]](lambda: defaultdict(int))
        self._role = "none"

    @contextmanager
    def of(self, role: str) -> Iterator[None]:
        before, began, self._role = self._role, time.process_time(), role
        try:
            yield
        finally:
            self.seconds[role] += time.process_time() - began
            self._role = before

    def look(self, residency: Residency) -> None:
        peaks = self.peaks[self._role]
        for part, held in residency.memory().parts.items():
            peaks[part] = max(peaks[part], held.device)


@contextmanager
def watched(watch: Watch, roles: dict[str | None, str]) -> Iterator[None]:
    """Count the dispatcher's work for a slot under the slot's role."""
    placed = Residency._at
    scored, held = Dispatcher.score, Dispatcher.resident

    @contextmanager
    def looked(self: Residency, wanted: Any) -> Iterator[None]:
        with placed(self, wanted):
            watch.look(self)
            yield

    def scores(self: Dispatcher, asked: Iterable[Role]) -> Iterator[None]:
        for role in asked:
            with watch.of(f"{roles[role.slot]}: scores"):
                yield from scored(self, [role])

    @contextmanager
    def resident(self: Dispatcher, slot: str | None) -> Iterator[Engine]:
        with watch.of(f"{roles[slot]}: updates"), held(self, slot) as engine:
            yield engine

    with (
        patch.object(Residency, "_at", looked),
        patch.object(Dispatcher, "score", scores),
        patch.object(Dispatcher, "resident", resident),
    ):
        yield


def measure(root: Path, hidden: int, layers: int, rank: int, num_steps: int) -> dict[str, Any]:
    texts = ["how many crates are on the quay? seven crates."] * 8
    make_tiny_model(root / "model", texts, hidden_size=hidden, num_layers=layers)
    lora = Lora(rank=rank, alpha=2 * rank)
    engine = MegatronEngine(root / "model", Layout(), "float32")
    engine.add_adapter("reference", lora, seed=1)
    engine.save(root / "reference")
    _write_data(root, num_steps)
    del engine
    roles: dict[str | None, str] = {"run": "policy", "run/reference": "reference", "run/critic": "critic"}
    watch, worker = Watch(), _worker(root)
    with watched(watch, roles):
        outcome = worker.do_one(_job(root, "first", lora, num_steps, with_critic=True))
    assert outcome.state == "succeeded", outcome.fault
    alone, plain = Watch(), _worker(root)
    with watched(alone, roles):
        plain.do_one(_job(root, "second", lora, num_steps, with_critic=False))
    most = {part: max(peaks[part] for peaks in watch.peaks.values()) for part in ("weights", "gradients", "optimizer")}
    own = max(peaks["optimizer"] for role, peaks in watch.peaks.items() if role.startswith("policy"))
    critic = max(peaks["optimizer"] for role, peaks in watch.peaks.items() if role.startswith("critic"))
    without = sum(alone.seconds.values())
    return {
        "model": {"hidden_size": hidden, "layers": layers, "lora_rank": rank},
        "trajectories": GROUPS * GROUP_SIZE,
        "steps": num_steps,
        "seconds": {role: round(seconds, 3) for role, seconds in sorted(watch.seconds.items())},
        "ratio_of_a_job_with_a_critic": round(sum(watch.seconds.values()) / without, 2),
        "peak_bytes": {role: dict(peaks) for role, peaks in sorted(watch.peaks.items()) if role != "none"},
        "most_bytes": most,
        "both_optimizers": own + critic,
    }


def _worker(root: Path) -> Worker:
    ranks = WorkerRanks(dist.HashStore(), rank=0, local_rank=0, world_size=1)
    return Worker(ranks, Staging(root / "cache", S3Settings(), ranks), build_engine)


def _write_data(root: Path, num_steps: int) -> None:
    random = np.random.default_rng(0)
    writer = UnitsWriter(root / "units", (*TOKEN_COLUMNS, *TARGET_COLUMNS))
    tokens = []
    for _ in range(GROUPS):
        prompt = random.integers(5, 90, PROMPT_TOKENS)
        rows = []
        for _ in range(GROUP_SIZE):
            ids = np.concatenate([prompt, random.integers(5, 90, ANSWER_TOKENS)])
            sampled = np.arange(len(ids)) >= PROMPT_TOKENS
            reward = np.where(np.arange(len(ids)) == len(ids) - 1, random.normal(), 0.0).astype(np.float32)
            zeros = np.zeros(len(ids), dtype=np.float32)
            rows.append(SequenceRow(ids, sampled, sampled.astype(np.float32), reward, zeros - 4, zeros))
        for unit in split_tree(rows, BIN_TOKENS):
            writer.append(**unit.columns())
            tokens.append(unit.num_tokens)
    writer.close()
    plan = PlanWriter(root / "plan", BIN_TOKENS)
    for _ in range(num_steps):
        plan.append_step([[n] for n in range(len(tokens))])
    plan.close(np.array(tokens))


def _job(root: Path, name: str, lora: Lora, num_steps: int, with_critic: bool) -> Job:
    def sealed(folder: str) -> Artifact:
        return Artifact(uri=f"file://{root / folder}", sha256=seal(root / folder))

    headed = lora.model_copy(update={"head": ScalarHead()})
    plan = JobPlan(
        run_id="run",
        job_id="000001",
        model=sealed("model"),
        trainable=lora,
        data=PackedData(units=sealed("units"), plan=sealed("plan")),
        num_steps=num_steps,
        loss=PPO(old="trainer", kl=Kl(coefficient=0.1, reference=sealed("reference/weights"))),
        critic=JobCritic(trainable=headed, learning_rate=1e-4) if with_critic else None,
        schedule=Schedule(kind="constant", learning_rate=1e-4),
    )
    folder = root / name
    paths = {name: str(folder / name) for name in ("checkpoint_dir", "scratch_dir")}
    return Job(plan=plan, fence=Fence(epoch=1), log_path=str(folder / "log.jsonl"), **paths)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
