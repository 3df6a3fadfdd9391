"""Trains about forty small jobs of all kinds, engines and layouts, and compares their bytes with another commit's.

    python -m benchmarks.golden --out before.json         at one commit
    python -m benchmarks.golden --against before.json     at another one, on the same machine; exits 1 on a difference

Each job runs as by hand (`megatron_worker --once`). Its entry has the SHA-256 of every file of its last checkpoint
(weights, optimizer, state) and of its metrics without times and memory. Sums of floats depend on the kind of CPU, so
two files of different machines do not compare.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from benchmarks.machine import attempt, provenance, tell
from examples.tiny_model import make_tiny_model
from longshore.commands import SaveState
from longshore.events import Evaluated, Step, Succeeded
from longshore.fields import Artifact
from longshore.losses import CISPO, DPO, DRO, GSPO, PPO, Distillation, Kl, Reinforce, SquaredError
from longshore.training import Adam, Full, Layout, Lora, Muon, ScalarHead
from shared.families import FAMILIES
from shared.jobs.job import Checkpointing, Evaluation, Job, JobCritic, PackedData, Schedule
from shared.jobs.packed import Units, UnitsWriter
from shared.storage.paths import MANIFEST
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.session_jobs import session_job, sft_commands
from tests.megatron_worker.test_policy_jobs import write_rollouts
from tests.megatron_worker.training.test_gae import rows, units_of
from tests.megatron_worker.workshop import read_log, sealed, workshop_of_ids, write_plan

VOCAB_SIZE = 301
NUM_STEPS = 3
_UNLIKE = ("step_s", "tokens_per_s", "memory_bytes")

LORA = Lora(rank=4, alpha=8)
POLICY = {"kl": Kl(coefficient=0.1), "entropy_coefficient": 0.05}
ALONE, EXPERTS = Layout(), Layout(pp=2, ep=2, dp=2)


@dataclass(frozen=True)
class Golden:
    """A job to train. `data`: the kind of its units. `fields`: of its plan."""

    fields: Mapping[str, object]
    family: str = "qwen3"
    data: str = "rows"
    layout: Layout = ALONE


def jobs() -> dict[str, Golden]:
    """Return the jobs by name."""
    found = {f"sft-{family}": Golden({}, family) for family in FAMILIES}
    found |= {f"fsdp-{family}": Golden({"engine": "fsdp"}, family) for family in ("qwen3", "qwen3_moe", "olmo3")}
    forms = {
        "dora": Lora(rank=4, alpha=8, dora=True),
        "rslora-dropout": Lora(rank=4, alpha=8, rank_stabilized=True, dropout=0.2),
        "embeddings-and-head": Lora(rank=4, alpha=8, targets=("q_proj", "lm_head", "embed_tokens")),
        "full": Full(),
    }
    found |= {f"{name}-{e}": Golden({"trainable": form, "engine": e}) for name, form in forms.items() for e in ENGINES}
    found |= {
        "bfloat16": Golden({"dtype": "bfloat16"}),
        "nf4": Golden({"quantize_base": "nf4"}),
        "8bit": Golden({"optimizer_states": "8bit", "trainable": Full()}),
        "muon": Golden({"optimizer": Muon(lora_plus_ratio=2.0)}),
        "recomputed": Golden({"recompute": "on"}),
        "budget": Golden({"memory_budget_bytes": 3_000_000}),
        "scalar-head": Golden(
            {"trainable": Lora(rank=4, alpha=8, head=ScalarHead()), "loss": SquaredError(scalar=0)}, data="scored"
        ),
        "dpo": Golden({"loss": DPO(beta=0.3)}, data="pairs"),
        "distillation": Golden({"loss": "teacher"}),
        "critic": Golden({"loss": PPO(old="trainer"), "critic": CRITIC}, data="trees"),
        "session": Golden({}, data="session"),
        "tp2": Golden({}, layout=Layout(tp=2, sp=True)),
        "cp2": Golden({}, layout=Layout(cp=2)),
        "fsdp-dp2": Golden({"engine": "fsdp", "trainable": Full()}, layout=Layout(dp=2)),
        "experts-4": Golden({}, "qwen3_moe", layout=EXPERTS),
    }
    losses: list[Reinforce | PPO | CISPO | GSPO | DRO] = [
        Reinforce(**POLICY),
        PPO(**POLICY, old="trainer"),
        CISPO(**POLICY),
        GSPO(**POLICY),
        DRO(**POLICY),
    ]
    return found | {each.kind: Golden({"loss": each}, data="rollouts") for each in losses}


ENGINES = ("megatron", "fsdp")
CRITIC = JobCritic(trainable=Lora(rank=2, alpha=8, targets=("q_proj",), head=ScalarHead()), learning_rate=1e-2)


class Shop:
    """A tiny model of a family, its data, and the jobs on it."""

    def __init__(self, root: Path, family: str) -> None:
        model = make_tiny_model(root / "model", ["w " * 50], family=family, vocab_size=VOCAB_SIZE)
        ids = [270, 271, 272]
        self._shop = workshop_of_ids(root, model, VOCAB_SIZE, NUM_STEPS, held_out=[[0, 1], [2], [3]], prompt_ids=ids)
        self._root = root

    def job(self, name: str, golden: Golden) -> Job:
        """Write a job's data, and return the job."""
        if golden.data == "session":
            commands = [*sft_commands(self._shop), SaveState()]
            return session_job(self._shop, self._root / name, commands, model=self._shop.model)
        fields = dict(golden.fields)
        if fields.get("loss") == "teacher":
            fields["loss"] = Distillation(teacher=self._teacher)
        data, num_steps = self._data(golden.data)
        evaluation = Evaluation(data=self._shop.held_out, num_samples=1, sample_tokens=3)
        plan = self._shop.plan(
            **{
                "layout": golden.layout,
                "data": data,
                "num_steps": num_steps,
                "checkpointing": Checkpointing(every_steps=num_steps),
                "schedule": Schedule(kind="constant", learning_rate=5e-3),
                "optimizer": Adam(eps=1e-5),
                "trainable": LORA,
                "evaluation": evaluation if golden.data == "rows" else Evaluation(),
            }
            | fields
        )
        return self._shop.job(name, plan)

    def _data(self, kind: str) -> tuple[PackedData, int]:
        if kind == "rows":
            return self._shop.data, NUM_STEPS
        folder, plan = self._root / kind, self._root / f"{kind}-plan"
        if not folder.exists():
            _WRITERS[kind](folder)
            with Units(folder) as units:
                num_units = units.header.num_units
            write_plan(plan, folder, [[[unit] for unit in range(first, num_units, 2)] for first in (0, 1)])
        return PackedData(units=sealed(folder), plan=sealed(plan)), 2

    @cached_property
    def _teacher(self) -> Artifact:
        job = self.job("teacher", Golden({"trainable": Lora(rank=2, alpha=64)}))
        run(job, self._root / "teacher.json")
        return sealed(_last_checkpoint(job) / "weights")


_SCORED = ("token_id", "hidden_index", "label", "weight", "advantage")


def _write_pairs(folder: Path) -> None:
    from activities.tokenizing.units import PAIR_COLUMNS, pair_unit

    random, writer = np.random.default_rng(4), UnitsWriter(folder, PAIR_COLUMNS)
    for _ in range(6):
        prompt, *answers = (random.integers(0, VOCAB_SIZE, random.integers(2, 6)) for _ in range(3))
        both = [np.concatenate([prompt, answer]) for answer in answers]
        masks = [np.arange(len(ids)) >= len(prompt) for ids in both]
        unit = pair_unit(both[0], masks[0], both[1], masks[1]).columns()
        writer.append(**{name: unit[name] for name in PAIR_COLUMNS})
    writer.close()


def _write_scored(folder: Path) -> None:
    random, writer = np.random.default_rng(5), UnitsWriter(folder, _SCORED)
    for unit in range(6):
        ids, one = random.integers(0, VOCAB_SIZE, random.integers(4, 13)), np.ones(1)
        last, score = np.array([len(ids) - 1]), np.full(1, unit / 3)
        writer.append(token_id=ids, hidden_index=last, label=0 * last, weight=one, advantage=score)
    writer.close()


_WRITERS: dict[str, Callable[[Path], object]] = {
    "pairs": _write_pairs,
    "scored": _write_scored,
    "rollouts": partial(write_rollouts, num_units=6, vocab_size=VOCAB_SIZE),
    "trees": lambda folder: units_of(folder, rows(5)).close(),
}


def run(job: Job, path: Path) -> None:
    """Run a job to its end. Raises RuntimeError: it failed."""
    path.write_text(job.model_dump_json())
    fork_ranks("megatron_worker", "--once", str(path), num_ranks=job.plan.layout.world_size)
    if not isinstance(last := read_log(job.log_path)[-1], Succeeded):
        raise RuntimeError(f"{path.stem}: {last}")


def hashes(job: Job) -> dict[str, str]:
    """Return the SHA-256 of each file of a job's last checkpoint, and of its metrics."""
    checkpoint, found = _last_checkpoint(job), {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            found[str(path.relative_to(checkpoint))] = hashlib.sha256(path.read_bytes()).hexdigest()
    metrics = [
        {name: value for name, value in event.metrics.items() if name not in _UNLIKE}
        for event in read_log(job.log_path)
        if isinstance(event, Step | Evaluated)
    ]
    return found | {"metrics": hashlib.sha256(json.dumps(metrics, sort_keys=True).encode()).hexdigest()}


def _last_checkpoint(job: Job) -> Path:
    return max(Path(job.checkpoint_dir).iterdir())


def _one(shop: Shop, path: Path, golden: Golden) -> dict[str, str]:
    print(path.stem, file=sys.stderr, flush=True)
    job = shop.job(path.stem, golden)
    run(job, path)
    return hashes(job)


def _all(names: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    shops: dict[str, Shop] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            golden = jobs()[name]
            if golden.family not in shops:
                shops[golden.family] = Shop(Path(folder, golden.family), golden.family)
            yield name, attempt(partial(_one, shops[golden.family], Path(folder, f"{name}.json"), golden))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="JOB", help="only these jobs")
    parser.add_argument("--out", type=Path, help="where the hashes are written")
    parser.add_argument("--against", type=Path, metavar="FILE", help="hashes of another commit")
    options = parser.parse_args()
    names = options.names or list(jobs())
    before = json.loads(options.against.read_text())["jobs"] if options.against else {}
    found = dict(_all(names))
    differing = {
        name: sorted(part for part in {*own, *before[name]} if own.get(part) != before[name].get(part))
        for name, own in found.items()
        if name in before and before[name] != own
    }
    tell(provenance() | {"jobs": found} | ({"differing": differing} if before else {}), options.out)
    return 1 if differing or (not before.keys() >= found.keys() and before) else 0


if __name__ == "__main__":
    raise SystemExit(main())
