"""From a run to its job: everything that a user asked for arrives, and the rest has its default."""

import pytest
from pydantic import ValidationError

from activities.hosts.lease import LeaseRequest
from activities.records import saved_by_job
from longshore.dataset_runs import DatasetSource, DPORun, SFTRun
from longshore.fields import Artifact, Fence
from longshore.losses import DPO, CrossEntropy, reference_of, reference_uri
from longshore.runs import RLRun
from longshore.training import EarlyStop, Full, Layout
from longshore.views import CheckpointRef, RunStatus, StepStatus
from shared.jobs.job import JobPlan, PackedData, WorkerKey
from shared.models.shape import ModelShape
from shared.runs.start import RLStart, RunStart
from shared.runs.status import RLState
from shared.storage.paths import RunKeys
from workflows.training.job_plan import beside, dataset_job, rl_job

ANY = Artifact(uri="file:///any", sha256="0" * 64)
DATA = PackedData(units=ANY, plan=ANY)


def plan_of(num_steps: int = 35, eval_data: PackedData | None = None, **changes):
    source = DatasetSource(uri="d")
    eval_dataset = source if eval_data else None
    run = SFTRun(model="m", dataset=source, eval_dataset=eval_dataset, steps=num_steps, batch_size=2, **changes)
    start = RunStart(run_id="r1", run=run, threads_per_rank=2)
    return dataset_job(
        start, model=ANY, adapter=None, data=DATA, eval_data={"": eval_data} if eval_data else {}, num_steps=num_steps
    )


@pytest.mark.parametrize(("num_steps", "every"), [(1, 1), (9, 1), (10, 1), (11, 2), (35, 4), (1000, 100)])
def test_a_checkpoint_is_saved_every_tenth_of_a_run(num_steps: int, every: int) -> None:
    assert plan_of(num_steps).checkpointing.every_steps == every


def test_what_the_user_asked_for_arrives() -> None:
    plan = plan_of(
        learning_rate=0.5,
        schedule="cosine",
        warmup_steps=3,
        weight_decay=0.1,
        clip_norm=2.0,
        seed=11,
        dtype="bfloat16",
        engine="fsdp",
        layout=Layout(dp=2),
        trainable=Full(),
        checkpoint_every=7,
        keep_checkpoints=4,
        eval_every=5,
        num_samples=2,
        sample_tokens=9,
        keep="best",
        early_stop=EarlyStop(patience=2),
        eval_data=DATA,
    )
    assert (plan.schedule.kind, plan.schedule.learning_rate, plan.schedule.warmup_steps) == ("cosine", 0.5, 3)
    assert (plan.optimizer.weight_decay, plan.optimizer.clip_norm) == (0.1, 2.0)
    assert (plan.seed, plan.dtype, plan.trainable, plan.threads_per_rank) == (11, "bfloat16", Full(), 2)
    assert (plan.engine, plan.layout) == ("fsdp", Layout(dp=2))
    assert (plan.checkpointing.every_steps, plan.checkpointing.keep) == (7, 4)
    assert plan.evaluation.model_dump() == {
        "data": DATA.model_dump(),
        "every_steps": 5,
        "num_samples": 2,
        "sample_tokens": 9,
        "keep": "best",
        "best_by": "eval_loss",
        "early_stop": {"metric": "eval_loss", "patience": 2},
    }


def test_a_preference_run_has_its_loss_and_its_reference() -> None:
    run = DPORun(model="m", dataset=DatasetSource(uri="d"), steps=3, batch_size=2, beta=0.3, label_smoothing=0.1)
    given = {"model": ANY, "adapter": None, "data": DATA, "eval_data": {}, "num_steps": 3}
    start = RunStart(run_id="r1", run=run)
    assert dataset_job(start, **given).loss == DPO(beta=0.3, label_smoothing=0.1, reference="base")
    assert dataset_job(start, **given, reference=ANY).loss == DPO(beta=0.3, label_smoothing=0.1, reference=ANY)
    assert plan_of().loss == CrossEntropy()
    assert RunStart.model_validate_json(start.model_dump_json()) == start, "the kind tells runs apart"


def test_samples_come_from_held_out_prompts_alone() -> None:
    with pytest.raises(ValidationError, match="need an eval_dataset"):
        plan_of(num_samples=4)
    assert plan_of(num_samples=4, eval_data=DATA).evaluation.num_samples == 4


def rl_plan(reference: Artifact | None, changes: dict[str, object] | None = None, **loss: object) -> JobPlan:
    run = RLRun.model_validate({"model": "m", "loss": {"kind": "ppo"} | loss} | (changes or {}))
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 8, "vocab_size": 9}
    shape = ModelShape(family="qwen3", **sizes)
    status = RunStatus(run_id="r1", kind="rl", policy_version=0)
    state = RLState(model=ANY, shape=shape, reference=reference, status=status)
    step = StepStatus(step=1, key="a", groups="file:///g")
    return rl_job(RLStart(run_id="r1", run=run), state, step, DATA, num_steps=1)


@pytest.mark.parametrize("budget", [None, 1 << 30])
def test_bins_are_the_upper_bound_of_what_a_memory_budget_allows(budget: int | None) -> None:
    changes = {"memory_budget_bytes": budget, "bin_tokens": 4096, "recompute": "on"}
    for plan in (plan_of(**changes), rl_plan(None, changes)):
        assert plan.recompute == "on"
        assert (plan.memory_budget_bytes, plan.max_micro_batch_tokens) == (budget, 4096 if budget else None)


def test_a_reference_that_a_run_names_by_uri_is_an_artifact_in_its_jobs() -> None:
    kl = {"coefficient": 0.1, "reference": "s3://bucket/tenants/default/adapters/tide/v000001"}
    assert (
        reference_uri(RLRun.model_validate({"model": "m", "loss": {"kind": "ppo", "kl": kl}}).loss) == kl["reference"]
    )
    assert reference_of(rl_plan(ANY, kl=kl).loss) == ANY
    assert rl_plan(ANY, kl=kl).loss.model_dump(exclude={"kl"}) == rl_plan(None).loss.model_dump(exclude={"kl"})
    with pytest.raises(ValidationError, match=r"kl\.reference: a job has the adapter itself, .*adapters/tide"):
        rl_plan(None, kl=kl)


def test_base_is_a_reference_that_nobody_looks_up() -> None:
    kl = {"coefficient": 0.1}
    assert reference_uri(RLRun.model_validate({"model": "m", "loss": {"kind": "ppo", "kl": kl}}).loss) is None
    assert reference_of(rl_plan(None, kl=kl).loss) == "base"
    assert reference_of(rl_plan(None).loss) is None


def test_a_divided_step_is_the_policy_s_job_and_its_critic_s() -> None:
    """Each begins with its own checkpoint of the step before; jobs of a critic have names below the run's."""
    saved, of_critic = (
        CheckpointRef(step=3, fence=Fence(epoch=1), artifact=ANY.model_copy(update={"uri": uri}))
        for uri in ("file:///p", "file:///c")
    )
    run = RLRun(model="m", algorithm="ppo", critic={"own_worker": True})
    shape = ModelShape.model_construct()
    state = RLState(
        model=ANY,
        shape=shape,
        policy_version=1,
        optimizer_step=3,
        checkpoint=saved,
        critic_checkpoint=of_critic,
        status=RunStatus(run_id="r1", kind="rl", name="r1"),
    )
    step = StepStatus(step=2, key="a", groups="file:///g.jsonl")
    whole = rl_job(RLStart(run_id="r1", run=run, threads_per_rank=1), state, step, DATA, 2)
    policy, critic = beside(whole)
    assert whole.critic is not None and policy.critic is not None and critic.critic is not None
    assert (whole.critic.part, policy.critic.part, critic.critic.part) == ("both", "policy", "critic")
    assert (policy.run_id, critic.run_id, critic.critic.alone, policy.critic.alone) == ("r1", "r1.critic", True, False)
    for plan in (policy, critic):
        assert plan.critic is not None and plan.critic.checkpoint == of_critic.artifact
        assert (plan.initial_checkpoint, plan.optimizer, plan.schedule) == (
            saved.artifact,
            whole.optimizer,
            whole.schedule,
        )
    assert RunKeys(critic.run_id).checkpoints == f"{RunKeys('r1').prefix}/critic/checkpoints"
    assert saved_by_job(critic, saved.model_copy(update={"step": 9})) is None
    asked = {"epoch": 1, "key": WorkerKey.of(critic), "ready_timeout_s": 1}
    assert LeaseRequest(run_id=critic.run_id, **asked).run_id == "r1.critic"
    with pytest.raises(ValidationError, match="run_id"):
        LeaseRequest(run_id="r1.other", **asked)
