"""Jobs whose advantages are a critic's: beside the same steps by hand, over ranks, resumed; what is on the device."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from activities.hosts.run_job import JobMetrics
from longshore.events import Failed, Saved, Step
from longshore.fields import Artifact
from longshore.losses import PPO, CrossEntropy, Kl
from longshore.training import Adam, Full, Layout, Lora, ScalarHead
from megatron_worker.critic import Scale
from megatron_worker.engine import LossFunction, LossSums, Outputs
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.tensors.offload import Residency
from megatron_worker.training.batches import to_batch
from shared.jobs.job import Checkpointing, Job, JobCritic, PackedData, Schedule
from shared.jobs.packed import Units
from tests.depth import drawn
from tests.megatron_worker.engines import checkpoint_bytes
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.test_megatron_job import new_worker
from tests.megatron_worker.test_policy_megatron import steps
from tests.megatron_worker.training.test_gae import reference, rows, units_of
from tests.megatron_worker.workshop import Workshop, read_log, sealed, write_plan

LORA = Lora(rank=4, alpha=8)
HEADED = Lora(rank=2, alpha=8, targets=("q_proj", "down_proj"), head=ScalarHead())
RATE, CRITIC_RATE = 2e-2, 1e-2
PENALISED = PPO(old="trainer", kl=Kl(coefficient=0.1, estimator="k1", placement="reward"))
CRITICS = {
    "token": JobCritic(trainable=HEADED, learning_rate=CRITIC_RATE, gamma=0.98, gae_lambda=0.9, clip=0.05),
    "turn": JobCritic(trainable=HEADED, learning_rate=CRITIC_RATE, per="turn", whiten=False, clip=None),
}


@pytest.fixture(scope="module")
def workshop(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Two epochs of two mini-batches."""
    root = tmp_path_factory.mktemp("critic")
    units_of(root / "units", rows(5)).close()
    num = Units(root / "units").header.num_units
    parts = [[[n] for n in range(0, num, 2)], [[n] for n in range(1, num, 2)]]
    write_plan(root / "plan", root / "units", [parts[0], parts[1], parts[1], parts[0]])
    data = PackedData(units=sealed(root / "units"), plan=sealed(root / "plan"))
    return Workshop(root, sealed(shutil.copytree(tiny_model, root / "model")), data, data, 4)


def a_job(workshop: Workshop, name: str, start: Artifact | None = None, **changes: object) -> Job:
    fields: dict[str, object] = {
        "loss": PENALISED,
        "critic": CRITICS["token"],
        "schedule": Schedule(kind="constant", learning_rate=RATE),
        "checkpointing": Checkpointing(every_steps=1),
    }
    return workshop.job(name, workshop.plan(**(fields | changes)), start)


def checkpoint(job: Job, step: int) -> Artifact:
    event = next(e for e in read_log(job.log_path) if isinstance(e, Saved) and e.step == step)
    return Artifact(uri=f"file://{event.path}", sha256=event.manifest_sha256)


def plain_value_loss(clip: float | None) -> LossFunction:
    """The formula of docs/losses.md. Of a batch `ref_logprob_N` has the values before."""

    def sums(scores, batch) -> LossSums:
        value_N, total = scores.value_NL[:, 0].double(), torch.zeros(())
        for value, before, wanted, weight in zip(
            value_N, batch.ref_logprob_N, batch.advantage_N, batch.weight_N, strict=True
        ):
            error = (value - wanted) ** 2
            if clip is not None:
                error = torch.maximum(error, (before + (value - before).clamp(-clip, clip) - wanted) ** 2)
            total = total + 0.5 * weight * error if weight > 0 else total
        return LossSums(loss=total, weight=batch.weight_N.sum())

    return LossFunction(Outputs(logprob=False, values=True), sums)


def by_hand(workshop: Workshop, critic: JobCritic) -> list[dict[str, float]]:
    """The job's steps on an engine, with advantages by their definition. Returns some of the metrics of each step."""
    engine = MegatronEngine(workshop.root / "model", Layout(), "float32")
    for slot, lora in (("critic", critic.trainable), ("run", LORA)):
        engine.add_adapter(slot, lora, seed=7)
    units = Units(workshop.root / "units")
    whole = to_batch(units.read_bin(np.arange(units.header.num_units)), torch.device("cpu"))

    def scored(slot: str | None, outputs: Outputs):
        engine.set_adapter(slot)
        with torch.no_grad():
            return engine.forward(whole, outputs)

    old_N, reference_N = scored("run", Outputs()).logprob_N, scored(None, Outputs()).logprob_N
    value_N = scored("critic", Outputs(logprob=False, values=True)).value_NL[:, 0]
    trained_N = (whole.weight_N > 0).numpy()
    rewards_N = whole.advantage_N.double() - 0.1 * (old_N - reference_N).double() * trained_N
    units.columns["advantage"] = rewards_N.numpy()
    advantage_N, return_N, to_come_N = reference(units, value_N.double().numpy(), critic)
    spread = np.var((to_come_N - value_N.numpy())[trained_N]) / np.var(to_come_N[trained_N])
    if critic.whiten:
        mean, variance = advantage_N[trained_N].mean(), advantage_N[trained_N].var()
        advantage_N = (advantage_N - mean) / np.sqrt(variance + 1e-8)
    weight_N = whole.weight_N.clone()
    if critic.per == "turn":  # the first target of each answer
        place_N = whole.position_T[whole.hidden_index_N]
        follows = (place_N[1:] == place_N[:-1] + 1) & (whole.sequence_N[1:] == whole.sequence_N[:-1])
        weight_N[1:][follows] = 0
    columns = {"advantage_N": torch.from_numpy(advantage_N).float(), "old_logprob_N": old_N}
    critics = {"advantage_N": torch.from_numpy(return_N).float(), "ref_logprob_N": value_N, "weight_N": weight_N}
    found, ends = [], units.target_offsets
    plain_ppo = loss_function(PENALISED.model_copy(update={"kl": None}))
    for part in (0, 1, 1, 0):
        metrics = {"explained_variance": 1 - spread}
        for slot, loss, changes, rate in (
            ("critic", plain_value_loss(critic.clip), critics, CRITIC_RATE),
            ("run", plain_ppo, columns, RATE),
        ):
            engine.set_adapter(slot)
            total = weight = 0.0
            for unit in range(part, units.header.num_units, 2):
                batch = to_batch(units.read_bin(np.array([unit])), torch.device("cpu"))
                own = {name: values[ends[unit] : ends[unit + 1]] for name, values in changes.items()}
                sums = engine.forward_backward(dataclasses.replace(batch, **own), loss)
                total, weight = total + float(sums["loss"]), weight + float(sums["weight"])
            norms = engine.optim_step(Adam(), rate, weight)
            prefix = "critic_" if slot == "critic" else ""
            metrics |= {f"{prefix}loss": total / weight, f"{prefix}grad_norm": norms.grad_norm}
        found.append(metrics)
    return found


@pytest.mark.parametrize("name", CRITICS)
def test_a_job_does_what_its_formulas_say(workshop: Workshop, name: str) -> None:
    """Cut and many-turn episodes that share prefixes, a penalty in the rewards, clipped values, whitened advantages."""
    job = a_job(workshop, f"plain-{name}", critic=CRITICS[name])
    new_worker(workshop.root).do_one(job)
    for ours, theirs in zip(steps(job), by_hand(workshop, CRITICS[name]), strict=True):
        for metric, value in theirs.items():
            assert ours[metric] == pytest.approx(value, rel=2e-4, abs=2e-5), metric
    last = steps(job)[-1]
    assert last["critic_learning_rate"] == CRITIC_RATE and last["kl_reference"] > 0
    assert ("critic_clipped_fraction" in last) == (name == "token")


def in_two(workshop: Workshop, names: tuple[str, str], workers, **changes: object) -> Job:
    """The job's steps as two jobs, of which the second goes on from what the first left."""
    plans = []
    for number in (0, 1):
        folder = workshop.root / f"plan-{number}"
        if not folder.exists():
            parts = [[[n] for n in range(p, Units(workshop.root / "units").header.num_units, 2)] for p in (0, 1)]
            write_plan(folder, workshop.root / "units", parts[:: 1 - 2 * number])
            sealed(folder)
        plans.append(sealed(folder))
    first = a_job(workshop, names[0], data=PackedData(units=workshop.data.units, plan=plans[0]), num_steps=2, **changes)
    workers[0].do_one(first)
    second = a_job(
        workshop, names[1], data=PackedData(units=workshop.data.units, plan=plans[1]), num_steps=2, job_id="000002",
        first_step=2, initial_checkpoint=checkpoint(first, 2), **changes,
    )  # fmt: skip
    workers[1].do_one(second)
    return second


def test_the_next_job_begins_with_what_is_kept_or_read(workshop: Workshop) -> None:
    """The same bits: critic, moments, and the unit of its values."""
    critic = CRITICS["token"].model_copy(update={"value_scale": "running"})
    worker = new_worker(workshop.root)
    kept = in_two(workshop, ("kept-1", "kept-2"), (worker, worker), critic=critic)
    read = in_two(workshop, ("read-1", "read-2"), (new_worker(workshop.root), new_worker(workshop.root)), critic=critic)
    ends = [checkpoint_bytes(Path(job.checkpoint_dir) / "step-00000004") for job in (kept, read)]
    assert ends[0] == ends[1]
    scale = Scale.model_validate_json(ends[0]["critic/scale.json"])
    assert scale.weight == pytest.approx(0.19) and scale.mean != 0
    assert steps(kept)[0]["explained_variance"] == steps(read)[0]["explained_variance"]


@pytest.mark.parametrize("step", drawn([1, 2, 3], 1))
def test_a_job_that_goes_on_ends_in_the_same_bits(workshop: Workshop, step: int) -> None:
    """Advantages are made again of the weights that the job began with, and not of those in the checkpoint."""
    whole = a_job(workshop, f"whole-{step}")
    new_worker(workshop.root).do_one(whole)
    resumed = a_job(workshop, f"resumed-{step}", checkpoint(whole, step))
    new_worker(workshop.root).do_one(resumed)
    assert checkpoint(whole, 4).sha256 == checkpoint(resumed, 4).sha256
    assert [m["critic_loss"] for m in steps(resumed)] == [m["critic_loss"] for m in steps(whole)][step:]


def test_a_policy_waits_for_its_critic(workshop: Workshop) -> None:
    """In a warm-up no weight of it changes, and the critic's do."""
    job = a_job(workshop, "alone", critic=CRITICS["token"].model_copy(update={"alone": True, "clip": None}))
    new_worker(workshop.root).do_one(job)
    folders = [Path(job.checkpoint_dir) / f"step-0000000{step}" / "weights" for step in (1, 4)]
    ends = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not any(tensor.any() for name, tensor in ends[1].items() if "lora_B" in name)
    found = steps(job)
    assert found[-1]["critic_loss"] < found[0]["critic_loss"] and all(one["skipped"] == 1 for one in found)
    told = JobMetrics(PENALISED, found).combined()
    assert told["tokens"] > told["target_tokens"] > 0 and told["critic_learning_rate"] == CRITIC_RATE


def test_one_optimizer_is_on_the_device_at_a_time(workshop: Workshop, monkeypatch) -> None:
    """At every move of tensors, of the policy's moments and the critic's one at most."""
    seen = set[tuple[str, ...]]()
    move = Residency._move

    def watched(self, wanted) -> None:
        move(self, wanted)
        seen.add(tuple(sorted(str(s) for (part, s), r in self._held.items() if part == "optimizer" and r.bytes.device)))

    monkeypatch.setattr(Residency, "_move", watched)
    new_worker(workshop.root).do_one(a_job(workshop, "watched"))
    assert {("run-1",), ("run-1/critic",), ()} <= seen and max(map(len, seen)) == 1, seen


@pytest.fixture(scope="module")
def single(workshop: Workshop) -> Job:
    job = a_job(workshop, "single")
    new_worker(workshop.root).do_one(job)
    return job


OVER_RANKS = [("megatron", Layout(dp=2)), ("megatron", Layout(tp=2)), ("megatron", Layout(pp=2)),
              ("megatron", Layout(cp=2)), ("fsdp", Layout(dp=2)), ("fsdp", Layout(tp=2))]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "layout"), drawn(OVER_RANKS, 1, always=[OVER_RANKS[0]]), ids=lambda v: getattr(v, "label", v)
)
def test_ranks_report_and_learn_what_one_does(workshop: Workshop, single: Job, engine: str, layout: Layout) -> None:
    job = a_job(workshop, f"{engine}-{layout.label}", layout=layout, engine=engine)
    path = workshop.root / f"{engine}-{layout.label}.json"
    path.write_text(job.model_dump_json())
    into = workshop.root / f"{engine}-{layout.label}"
    fork_ranks("megatron_worker", "--once", str(path), "--into", str(into), num_ranks=2)
    theirs = [e.metrics for e in read_log(next(into.rglob("log.jsonl"))) if isinstance(e, Step)]
    for ours, other in zip(steps(single), theirs, strict=True):
        assert set(ours) == set(other)
        for name in set(ours) - {"step_s", "tokens_per_s", "memory_bytes", "critic_memory_bytes"}:
            assert other[name] == pytest.approx(ours[name], rel=2e-4, abs=2e-5), name


def test_a_checkpoint_without_a_critic_is_refused(workshop: Workshop, single: Job) -> None:
    alone = a_job(workshop, "no-critic", critic=None, loss=PPO(old="trainer"))
    new_worker(workshop.root).do_one(alone)
    job = a_job(workshop, "needs-one", job_id="000002", first_step=4, initial_checkpoint=checkpoint(alone, 4))
    new_worker(workshop.root).do_one(job)
    failed = read_log(job.log_path)[-1]
    assert isinstance(failed, Failed) and failed.kind == "corrupt_artifact"
    assert failed.message.endswith("the checkpoint has no critic, and the job trains one")


def test_a_loss_that_is_not_finite_fails_the_job(workshop: Workshop) -> None:
    job = a_job(workshop, "burst", critic=CRITICS["token"].model_copy(update={"learning_rate": 1e30}))
    new_worker(workshop.root).do_one(job)
    failed = read_log(job.log_path)[-1]
    assert isinstance(failed, Failed) and failed.kind == "not_finite" and "critic" in failed.message, failed


@pytest.mark.parametrize("changes", [{"loss": CrossEntropy()}, {"trainable": Full()}], ids=["loss", "full"])
def test_a_critic_needs_a_policy_of_an_adapter(workshop: Workshop, changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="critic: it belongs to a policy loss, and to a lora"):
        a_job(workshop, "never", **changes)
