"""Policy losses and critics on the real engine: against transformers and autograd, however bins are cut, resumed."""

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from activities.hosts.run_job import JobMetrics
from activities.tokenizing.units import pair_unit
from activities.trajectories.pack_trajectories import GroupsRequest, sequence_rows, sharing_sets, write_step
from activities.trajectories.read_groups import Group, GroupsRead, GroupsReport, Scored
from longshore.events import Failed, Probed, Saved, Step, Succeeded
from longshore.fields import Artifact
from longshore.losses import CISPO, DPO, DRO, GSPO, PPO, CrossEntropy, Kl, Loss, Reinforce
from longshore.metrics import is_of_the_machine
from longshore.runs import RLRun
from longshore.training import Adam, Full, Layout, Lora, ScalarHead
from longshore.views import StepStatus
from megatron_worker.critic import Scale
from megatron_worker.engine import Batch, LossFunction, LossSums, Outputs
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.offload import Residency
from megatron_worker.training.batches import to_batch
from shared.chat.trajectories import Trajectory
from shared.jobs.job import Checkpointing, Job, JobCritic, PackedData, Schedule
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, Plan, Units, UnitsWriter
from shared.jobs.prefix_tree import split_tree
from tests.activities.groups import rl_run
from tests.depth import drawn
from tests.megatron_worker.engines import checkpoint_bytes
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.rows import VOCAB_SIZE, Row, bin_of, random_rows
from tests.megatron_worker.test_megatron_job import new_worker
from tests.megatron_worker.test_policy_jobs import ROLLOUT, TRAINER, write_rollouts
from tests.megatron_worker.training.test_gae import reference, rows, units_of
from tests.megatron_worker.trees import as_batch
from tests.megatron_worker.workshop import Workshop, read_log, sealed, write_plan
from workflows.training.job_plan import beside

LORA = Lora(rank=4, alpha=8)
ROWS = random_rows([40, 17, 90, 25, 60, 8, 33, 12])
TERMS = {"kl": Kl(coefficient=0.1), "entropy_coefficient": 0.05}
LOSSES: dict[str, Loss] = {
    "reinforce": Reinforce(**TERMS),
    "ppo": PPO(**TERMS, aggregation="sequence_mean", truncated_importance=1.1, old="trainer"),
    "cispo": CISPO(**TERMS, clip_high=0.2),
    "gspo": GSPO(**TERMS, clip_low=0.05, clip_high=0.05),
    "dro": DRO(**TERMS, aggregation="constant_length", constant=64),
    "dpo": DPO(beta=0.3),
}


def fresh(model: Path, dtype: str = "float32") -> MegatronEngine:
    """An adapter whose B is not zero, so that both of its matrices have gradients."""
    engine = MegatronEngine(model, Layout(), dtype)
    engine.add_adapter("run", LORA, seed=0)
    generator = torch.Generator().manual_seed(1)
    optimizer = engine.trained.optimizer
    noise = torch.randn(optimizer.master.buffer.shape, generator=generator) * 0.02
    optimizer.master.buffer.add_(noise)
    optimizer.refresh_working()
    return engine


def scored(engine: MegatronEngine, rows: list[Row], temperature: float = 1.0) -> list[Batch]:
    """Each row as a bin of its own; old, reference and sampler are near the engine's own log-probabilities."""
    random, batches = np.random.default_rng(0), []
    for number, row in enumerate(rows):
        batch = bin_of([row])
        with torch.no_grad():
            logprob_N = engine.forward(batch, Outputs(temperature=temperature)).logprob_N
        near = [logprob_N + torch.tensor(random.normal(scale=0.1, size=len(logprob_N))).float() for _ in range(3)]
        batches.append(
            dataclasses.replace(
                batch,
                weight_N=torch.ones_like(batch.weight_N),
                advantage_N=torch.full_like(batch.weight_N, (-1.0) ** number),
                old_logprob_N=near[0],
                ref_logprob_N=near[1],
                sampler_logprob_N=near[2],
                sequence_N=torch.full_like(batch.sequence_N, number),
            )
        )
    return batches


def joined(batches: list[Batch]) -> Batch:
    """Several bins as one."""
    parts: dict[str, list[torch.Tensor]] = {name: [] for name, values in vars(batches[0]).items() if values is not None}
    at = 0
    for batch in batches:
        for name, values in parts.items():
            value = getattr(batch, name)
            shifted = {"hidden_index_N": value + at, "parent_T": torch.where(value < 0, value, value + at)}
            values.append(shifted.get(name, value))
        at += len(batch.token_id_T)
    return Batch(**{name: torch.cat(values) for name, values in parts.items()})


def gradient(engine: MegatronEngine, loss: LossFunction, bins: list[Batch]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of these bins, normalised."""
    engine.zero_grad()
    sums = [engine.forward_backward(batch, loss) for batch in bins]
    weight = sum(s["weight"].double() for s in sums)
    total = sum(s["loss"].double() for s in sums)
    return float(total / weight), engine.trained.optimizer.grad.buffer.double().clone() / weight


def cuts(batches: list[Batch]) -> list[list[Batch]]:
    """Pairs stay together: DPO's are sequences 2k and 2k + 1."""
    pairs = [joined(batches[i : i + 2]) for i in range(0, len(batches), 2)]
    return [pairs, [joined(pairs[:1]), joined(pairs[1:])], [joined(pairs[::2]), joined(pairs[1::2])]]


# bfloat16 holds 8 bits, and each bin's gradient is rounded to them once: 2^-9 = 2e-3 of itself.
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 5e-3)])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_does_not_depend_on_how_a_mini_batch_is_cut(model: Path, name: str, dtype: str, bound: float):
    engine, loss = fresh(model, dtype), loss_function(LOSSES[name])
    batches = scored(engine, ROWS)
    whole_loss, whole = gradient(engine, loss, [joined(batches)])
    for bins in cuts(batches):
        cut_loss, cut = gradient(engine, loss, bins)
        distance = float((cut - whole).norm() / whole.norm())
        print(f"{name} {dtype}: gradient {distance:.1e}, loss {abs(cut_loss - whole_loss):.1e}")
        assert distance <= bound
        assert cut_loss == pytest.approx(whole_loss, abs=bound)


@pytest.mark.parametrize(
    ("name", "temperature"), [("reinforce", 1.0), ("gspo", 1.0), ("reinforce", 0.6), ("gspo", 1.5)]
)
def test_loss_and_gradient_norm_are_those_of_transformers_and_autograd(model: Path, name: str, temperature: float):
    """All weights trained, so that the output embedding's own gradient (of the entropy too) is seen."""
    from transformers import AutoModelForCausalLM

    engine = MegatronEngine(model, Layout(), "float32")
    engine.train_full(Full())
    batches, config = scored(engine, ROWS, temperature), LOSSES[name]
    value, _ = gradient(engine, loss_function(config, temperature), [joined(batches)])
    norms = engine.optim_step(Adam(clip_norm=1e9), 1e-6, sum_of_weights(config, batches))
    reference = AutoModelForCausalLM.from_pretrained(model).double()
    total = torch.zeros((), dtype=torch.float64)
    for row, batch in zip(ROWS, batches, strict=True):
        total = total + papers(config, reference, row, batch, temperature)
    total = total / sum_of_weights(config, batches)
    total.backward()
    squares = sum(float(p.grad.square().sum()) for p in reference.parameters() if p.grad is not None)
    assert value == pytest.approx(total.item(), rel=1e-5)
    assert norms.grad_norm == pytest.approx(squares**0.5, rel=1e-5)


def sum_of_weights(config: Loss, batches: list[Batch]) -> float:
    return float(len(batches) if isinstance(config, GSPO) else sum(len(b.weight_N) for b in batches))


def papers(config: Loss, model: torch.nn.Module, row: Row, batch: Batch, temperature: float) -> torch.Tensor:
    """One sequence's sum, from logits, in float64."""
    logit_NV = model(torch.tensor([row.ids])).logits[0, batch.hidden_index_N]
    logprob_NV = (logit_NV / temperature).log_softmax(-1)
    logprob_N = logprob_NV.gather(1, batch.label_N[:, None])[:, 0]
    entropy_N = -(logprob_NV.exp() * logprob_NV).sum(-1)
    behind_N = batch.ref_logprob_N.double() - logprob_N
    rest_N = 0.1 * (behind_N.exp() - 1 - behind_N) - 0.05 * entropy_N
    log_ratio_N, advantage = logprob_N - batch.old_logprob_N.double(), batch.advantage_N[0].double()
    if isinstance(config, GSPO):
        ratio = log_ratio_N.mean().exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage) + rest_N.mean()
    return (-log_ratio_N.exp() * advantage + rest_N).sum()


@pytest.fixture(scope="module")
def workshop(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    root = tmp_path_factory.mktemp("policy")
    write_rollouts(root / "rollouts", 6, vocab_size=512)
    write_plan(root / "plan", root / "rollouts", ROLLOUT)
    data = PackedData(units=sealed(root / "rollouts"), plan=sealed(root / "plan"))
    return Workshop(root, sealed(shutil.copytree(tiny_model, root / "model")), data, data, len(ROLLOUT))


def a_job(workshop: Workshop, name: str, start: Artifact | None = None, **changes: object) -> Job:
    fields: dict[str, object] = {
        "loss": TRAINER,
        "schedule": Schedule(kind="constant", learning_rate=2e-2),
        "checkpointing": Checkpointing(every_steps=1),
    }
    return workshop.job(name, workshop.plan(**(fields | changes)), start)


def steps(job: Job) -> list[dict[str, float]]:
    events = read_log(job.log_path)
    assert isinstance(events[-1], Succeeded), events[-1]
    return [e.metrics for e in events if isinstance(e, Step)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_old_log_probabilities_are_frozen_at_the_start_and_found_again(workshop: Workshop, dtype: str):
    """Scored without a graph, trained with one: the same bits, so that the first ratio is 1 and not nearly 1."""
    worker = new_worker(workshop.root)
    whole = a_job(workshop, f"whole-{dtype}", dtype=dtype)
    worker.do_one(whole)
    metrics = steps(whole)
    assert metrics[0]["ratio_max"] == metrics[0]["ratio_mean"] == 1.0
    assert metrics[0]["kl_old_new"] == metrics[0]["kl_reference"] == 0.0
    assert metrics[1]["ratio_max"] > 1.0
    assert metrics[2]["kl_old_new"] > 1e-3
    saved = [e for e in read_log(whole.log_path) if isinstance(e, Saved)]
    start = Artifact(uri=f"file://{saved[1].path}", sha256=saved[1].manifest_sha256)
    resumed = a_job(workshop, f"resumed-{dtype}", start, dtype=dtype)
    worker.do_one(resumed)
    assert [m["loss"] for m in steps(resumed)] == [m["loss"] for m in metrics][2:]
    again = [e for e in read_log(resumed.log_path) if isinstance(e, Saved)]
    assert again[-1].manifest_sha256 == saved[-1].manifest_sha256


def test_a_named_adapter_is_the_reference(workshop: Workshop):
    """Beside the adapter that is trained, in a slot of its own, and gone when the job ends."""
    worker, first = new_worker(workshop.root), a_job(workshop, "first")
    worker.do_one(first)
    steps(first)
    shutil.copytree(Path(first.checkpoint_dir) / "step-00000004" / "weights", workshop.root / "published")
    adapter = sealed(workshop.root / "published")
    loss = TRAINER.model_copy(update={"kl": Kl(coefficient=0.1, reference=adapter)})
    from_it, from_base = (
        a_job(workshop, name, loss=loss, initial_adapter=initial)
        for name, initial in (("from-it", adapter), ("from-base", None))
    )
    for job in (from_it, from_base):
        worker.do_one(job)
    assert steps(from_it)[0]["kl_reference"] == 0.0 < steps(from_it)[-1]["kl_reference"]
    assert steps(from_base)[0]["kl_reference"] > 1e-3
    assert steps(from_base)[0]["ratio_max"] == 1.0


def answered(prompt: np.ndarray, answer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A row of a pair, and which of its tokens are the answer's."""
    ids = np.concatenate([prompt, answer])
    return ids, np.arange(len(ids)) >= len(prompt)


def test_pairs_as_trees_are_pairs_as_chains(model: Path, tmp_path: Path):
    """The prompt once or twice: the same preference loss and gradient."""
    random, engine, loss = np.random.default_rng(3), fresh(model), loss_function(DPO(beta=0.3))
    trees = UnitsWriter(tmp_path / "trees", (*TOKEN_COLUMNS, *TARGET_COLUMNS))
    chains = UnitsWriter(tmp_path / "chains", (*TOKEN_COLUMNS, *TARGET_COLUMNS))
    for _ in range(3):
        prompt, chosen, rejected = (random.integers(3, 300, n) for n in (20, 7, 11))
        trees.append(**pair_unit(*answered(prompt, chosen), *answered(prompt, rejected)).columns())
        chains.append(**as_chains(prompt, chosen, rejected))
    results = []
    for writer, name in ((trees, "trees"), (chains, "chains")):
        writer.close()
        with Units(tmp_path / name) as units:
            batch = to_batch(units.read_bin(np.arange(3)), torch.device("cpu"))
        with torch.no_grad():
            logprob_N = engine.forward(batch, Outputs()).logprob_N
        results.append(gradient(engine, loss, [dataclasses.replace(batch, ref_logprob_N=logprob_N)]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert results[0][0] == pytest.approx(math.log(2), abs=1e-6)
    assert (results[0][1] - results[1][1]).norm() <= 2e-6 * results[1][1].norm()


def as_chains(prompt: np.ndarray, chosen: np.ndarray, rejected: np.ndarray) -> dict[str, np.ndarray]:
    """A pair's columns with the prompt written out for each answer."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in (*TOKEN_COLUMNS, *TARGET_COLUMNS)}
    at = 0
    for number, answer in enumerate((chosen, rejected)):
        ids = np.concatenate([prompt, answer])
        place, targets = np.arange(len(ids)), len(answer)
        own = {
            "token_id": ids,
            "position": place,
            "parent": np.where(place == 0, -1, place - 1 + at),
            "hidden_index": at + len(prompt) - 1 + np.arange(targets),
            "label": answer,
            "weight": np.ones(targets),
            "advantage": np.full(targets, 1.0 - 2 * number),
            "old_logprob": np.zeros(targets),
            "ref_logprob": np.zeros(targets),
            "sequence": np.full(targets, number),
        }
        for name, values in own.items():
            columns[name].append(values)
        at += len(ids)
    return {name: np.concatenate(values) for name, values in columns.items()}


PROBE = (5, 9, 300, 7, 7, 511)


def probed(log: str | Path) -> tuple[float, ...]:
    (event,) = [e for e in read_log(log) if isinstance(e, Probed)]
    assert len(event.logprobs) == len(PROBE) - 1
    return event.logprobs


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_job_trains_the_tempered_policy(workshop: Workshop, temperature: float):
    """Entropy, ratios, frozen and reference log-probabilities of the first steps, by transformers from logits / T. The
    adapter's B is zero, so that in the first step policy, old policy and reference are the base."""
    from transformers import AutoModelForCausalLM

    job = a_job(workshop, f"tempered-{temperature}", temperature=temperature, probe=PROBE)
    new_worker(workshop.root).do_one(job)
    first, second = steps(job)[:2]
    model, entropies = AutoModelForCausalLM.from_pretrained(workshop.model.uri.removeprefix("file://")).double(), []
    with Units(workshop.root / "rollouts") as units, torch.no_grad():
        for unit in (unit for one in ROLLOUT[0] for unit in one):
            batch = to_batch(units.read_bin(np.array([unit])), torch.device("cpu"))
            logit_NV = model(batch.token_id_T[None]).logits[0, batch.hidden_index_N] / temperature
            entropies.append(torch.distributions.Categorical(logits=logit_NV).entropy())
    assert first["entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-6)
    assert first["ratio_max"] == 1.0
    assert first["kl_reference"] == 0.0
    # The second mini-batch is scored by the weights of the beginning, for old and reference alike.
    assert second["kl_reference"] > 0
    assert second["kl_old_new"] == pytest.approx(second["kl_reference"], rel=0.5)
    assert probed(job.log_path) == pytest.approx(natural(workshop, job), abs=1e-5)


def natural(workshop: Workshop, job: Job) -> tuple[float, ...]:
    """Of the probe, by transformers and PEFT, with the adapter that a job left."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(workshop.model.uri.removeprefix("file://"))
    model = PeftModel.from_pretrained(base, Path(job.checkpoint_dir) / "step-00000004" / "weights")
    ids = torch.tensor([PROBE])
    with torch.no_grad():
        logprob_TV = model(ids).logits[0, :-1].log_softmax(-1)
    return tuple(logprob_TV.gather(1, ids[0, 1:, None])[:, 0].tolist())


ON_RANKS = {"temperature": 0.7, "probe": PROBE}


@pytest.fixture(scope="module")
def alone(workshop: Workshop) -> Job:
    job = a_job(workshop, "alone", **ON_RANKS)
    new_worker(workshop.root).do_one(job)
    return job


TWO_RANKS = [Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(cp=2)]


@pytest.mark.parametrize("layout", TWO_RANKS, ids=lambda layout: layout.label)
def test_two_ranks_report_and_learn_what_one_does(workshop: Workshop, alone: Job, layout: Layout):
    """At a temperature of their own; and what they leave is probed to the same numbers."""
    double = a_job(workshop, f"two-{layout.label}", layout=layout, **ON_RANKS)
    path = workshop.root / f"{layout.label}.json"
    path.write_text(double.model_dump_json())
    fork_ranks("megatron_worker", "--once", str(path), "--into", str(workshop.root / layout.label), num_ranks=2)
    log = next((workshop.root / layout.label).rglob("log.jsonl"))
    theirs = [e.metrics for e in read_log(log) if isinstance(e, Step)]
    for ours, other in zip(steps(alone), theirs, strict=True):
        assert set(ours) == set(other)
        for name in set(ours) - {"step_s", "tokens_per_s", "memory_bytes"}:
            assert other[name] == pytest.approx(ours[name], rel=2e-4, abs=2e-5), name
    assert probed(log) == pytest.approx(probed(alone.log_path), abs=1e-4)


LOSSES_OF_GROUPS: dict[str, Loss] = {
    "ppo": PPO(aggregation="sequence_mean"),
    "gspo": GSPO(clip_low=0.1, clip_high=0.1),
    "cispo": CISPO(aggregation="constant_length", constant=16),
}
BIN_TOKENS = 160


def groups_with_a_system_prompt(num_groups: int = 6, size: int = 4) -> list[Group]:
    """48 tokens of a system prompt, 12 of a question, answers of 6 to 12; logprobs near those of an untrained model."""
    random = np.random.default_rng(5)

    def ids(count: int) -> list[int]:
        return [int(i) for i in random.integers(3, VOCAB_SIZE, count)]

    def one(prompt: list[int]) -> Trajectory:
        answer = ids(int(random.integers(6, 13)))
        logprobs = [-math.log(VOCAB_SIZE) + float(p) for p in random.normal(scale=0.1, size=len(answer))]
        return Trajectory(
            token_ids=(*prompt, *answer),
            sampled=(*[False] * len(prompt), *[True] * len(answer)),
            logprobs=(*[None] * len(prompt), *logprobs),
            reward=float(random.normal()),
        )

    system = ids(48)
    prompts = [system + ids(12) for _ in range(num_groups)]
    return [tuple(of_one(one(prompt)) for _ in range(size)) for prompt in prompts]


def of_one(one: Trajectory) -> Scored:
    return Scored(one.reward, {}, (one,))


def run_of() -> RLRun:
    return rl_run(max_tokens=BIN_TOKENS)


@pytest.mark.parametrize("name", LOSSES_OF_GROUPS)
def test_a_step_of_shared_trees_is_the_step_of_groups_apart(model: Path, tmp_path: Path, name: str) -> None:
    groups, run = groups_with_a_system_prompt(), run_of()
    step = StepStatus(step=1, key="a", groups="file:///groups.jsonl")
    request = GroupsRequest(run_id="r1", tenant="default", run=run, step=step, policy_version=0, vocab_size=VOCAB_SIZE)
    read = GroupsRead(groups=groups, all_groups=groups, report=GroupsReport(num_groups=len(groups)))
    write_step(read, request, tmp_path / "units", tmp_path / "plan")
    with Units(tmp_path / "units") as units:
        plan = Plan(tmp_path / "plan")
        bins = [to_batch(units.read_bin(each), torch.device("cpu")) for each in plan.bins(0)]
        shared_tokens = int(units.token_offsets[-1])
    apart = [split_tree(rows, BIN_TOKENS) for rows in sequence_rows(groups, run)]
    apart_tokens = sum(unit.num_tokens for trees in apart for unit in trees)
    print(f"tokens packed: {shared_tokens} shared, {apart_tokens} apart")
    assert shared_tokens < apart_tokens - 2 * 48
    assert len(bins) > 1, "trees of several bins, so that the cut between them is tried too"
    engine, loss = fresh(model), loss_function(LOSSES_OF_GROUPS[name])
    shared_loss, shared = gradient(engine, loss, bins)
    apart_loss, by_group = gradient(engine, loss, [as_batch(trees) for trees in apart])
    distance, largest = float((shared - by_group).norm() / by_group.norm()), float((shared - by_group).abs().max())
    print(f"{name}: gradient {distance:.1e} by norm, {largest:.1e} at most; loss {abs(shared_loss - apart_loss):.1e}")
    assert by_group.abs().max() > 1e-3
    assert largest <= 1e-6
    assert distance <= 2e-6  # 8e-7 measured
    assert shared_loss == pytest.approx(apart_loss, abs=1e-6)


def test_groups_share_only_while_no_other_mini_batch_has_them() -> None:
    assert sharing_sets([(0, 2), (1, 3)], 4) == [(0, 2), (1, 3)]
    assert sharing_sets([(0, 1, 2), (0, 1, 2)], 3) == [(0, 1, 2)], "further epochs train the same set"
    assert sharing_sets([(0, 2), (1, 3), (0, 1), (2, 3)], 4) == [(0,), (1,), (2,), (3,)]
    assert sharing_sets([], 0) == []


HEADED = Lora(rank=2, alpha=8, targets=("q_proj", "down_proj"), head=ScalarHead())
RATE, CRITIC_RATE, EVERY = 2e-2, 1e-2, Checkpointing(every_steps=1)
PENALISED = PPO(old="trainer", kl=Kl(coefficient=0.1, estimator="k1", placement="reward"))
CRITICS = {
    "token": JobCritic(trainable=HEADED, learning_rate=CRITIC_RATE, gamma=0.98, gae_lambda=0.9, clip=0.05),
    "turn": JobCritic(trainable=HEADED, learning_rate=CRITIC_RATE, per="turn", whiten=False, clip=None),
}


@pytest.fixture(scope="module")
def critic_workshop(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Two epochs of two mini-batches."""
    root = tmp_path_factory.mktemp("critic")
    units_of(root / "units", rows(5)).close()
    num = Units(root / "units").header.num_units
    parts = [[[n] for n in range(0, num, 2)], [[n] for n in range(1, num, 2)]]
    write_plan(root / "plan", root / "units", [parts[0], parts[1], parts[1], parts[0]])
    data = PackedData(units=sealed(root / "units"), plan=sealed(root / "plan"))
    return Workshop(root, sealed(shutil.copytree(tiny_model, root / "model")), data, data, 4)


def critic_job(critic_workshop: Workshop, name: str, start: Artifact | None = None, **changes: object) -> Job:
    fields: dict[str, object] = {
        "loss": PENALISED,
        "critic": CRITICS["token"],
        "schedule": Schedule(kind="constant", learning_rate=RATE),
        "checkpointing": EVERY,
    }
    return critic_workshop.job(name, critic_workshop.plan(**(fields | changes)), start)


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


def by_hand(critic_workshop: Workshop, critic: JobCritic) -> list[dict[str, float]]:
    """The job's steps on an engine, with advantages by their definition. Returns some of the metrics of each step."""
    engine = MegatronEngine(critic_workshop.root / "model", Layout(), "float32")
    for slot, lora in (("critic", critic.trainable), ("run", LORA)):
        engine.add_adapter(slot, lora, seed=7)
    units = Units(critic_workshop.root / "units")
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
def test_a_job_does_what_its_formulas_say(critic_workshop: Workshop, name: str) -> None:
    """Cut and many-turn episodes that share prefixes, a penalty in the rewards, clipped values, whitened advantages."""
    job = critic_job(critic_workshop, f"plain-{name}", critic=CRITICS[name])
    new_worker(critic_workshop.root).do_one(job)
    for ours, theirs in zip(steps(job), by_hand(critic_workshop, CRITICS[name]), strict=True):
        for metric, value in theirs.items():
            assert ours[metric] == pytest.approx(value, rel=2e-4, abs=2e-5), metric
    last = steps(job)[-1]
    assert last["critic_learning_rate"] == CRITIC_RATE and last["kl_reference"] > 0
    assert ("critic_clipped_fraction" in last) == (name == "token")


def half(critic_workshop: Workshop, number: int) -> dict[str, object]:
    """The data of the first two steps of the job, or of the last two, as a job's own."""
    folder = critic_workshop.root / f"plan-{number}"
    if not folder.exists():
        parts = [[[n] for n in range(p, Units(critic_workshop.root / "units").header.num_units, 2)] for p in (0, 1)]
        write_plan(folder, critic_workshop.root / "units", parts[:: 1 - 2 * number])
    data = PackedData(units=critic_workshop.data.units, plan=sealed(folder))
    return {"data": data, "num_steps": 2, "job_id": f"00000{number + 1}", "first_step": 2 * number}


def in_two(critic_workshop: Workshop, names: tuple[str, str], workers, **changes: object) -> Job:
    """The job's steps as two jobs, of which the second goes on from what the first left."""
    first = critic_job(critic_workshop, names[0], **half(critic_workshop, 0), **changes)
    workers[0].do_one(first)
    begins = {"initial_checkpoint": checkpoint(first, 2)}
    second = critic_job(critic_workshop, names[1], **half(critic_workshop, 1), **begins, **changes)
    workers[1].do_one(second)
    return second


def test_the_next_job_begins_with_what_is_kept_or_read(critic_workshop: Workshop) -> None:
    """The same bits: critic, moments, and the unit of its values."""
    critic = CRITICS["token"].model_copy(update={"value_scale": "running"})
    worker = new_worker(critic_workshop.root)
    kept = in_two(critic_workshop, ("kept-1", "kept-2"), (worker, worker), critic=critic)
    read = in_two(
        critic_workshop,
        ("read-1", "read-2"),
        (new_worker(critic_workshop.root), new_worker(critic_workshop.root)),
        critic=critic,
    )
    ends = [checkpoint_bytes(Path(job.checkpoint_dir) / "step-00000004") for job in (kept, read)]
    assert ends[0] == ends[1]
    scale = Scale.model_validate_json(ends[0]["critic/scale.json"])
    assert scale.weight == pytest.approx(0.19) and scale.mean != 0
    assert steps(kept)[0]["explained_variance"] == steps(read)[0]["explained_variance"]


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_two_workers_make_the_bits_of_one(critic_workshop: Workshop, placement: str) -> None:
    """The policy on one worker, its critic on another; the second time each on a new one, as after a kill, and the
    policy's from the middle of its job."""
    loss = PPO(old="trainer", kl=Kl(coefficient=0.1, placement=placement))
    critic = CRITICS["token"].model_copy(update={"value_scale": "running"})
    one = new_worker(critic_workshop.root)
    whole = in_two(critic_workshop, (f"one-{placement}-1", f"one-{placement}-2"), (one, one), critic=critic, loss=loss)
    jobs: list[Job] = []
    begins: dict[str, object] = {}
    workers = [new_worker(critic_workshop.root), new_worker(critic_workshop.root)]
    for number in (0, 1):
        fields = {"critic": critic, "loss": loss, **half(critic_workshop, number), **begins}
        plans = beside(critic_job(critic_workshop, "whole", **fields).plan)
        jobs = [
            critic_workshop.job(f"{part}-{placement}-{number}", plan)
            for part, plan in zip(("policy", "critic"), plans, strict=True)
        ]
        for worker, job in zip(workers, jobs, strict=True):
            assert worker.do_one(job).state == "succeeded", read_log(job.log_path)[-1]
        policy, its_critic = (checkpoint(job, 2 * number + 2) for job in jobs)
        assert not (Path(policy.uri.removeprefix("file://")) / "critic").exists()
        begins = {"initial_checkpoint": policy}
        critic = critic.model_copy(update={"checkpoint": its_critic})
    ends = [checkpoint_bytes(Path(job.checkpoint_dir) / "step-00000004") for job in (whole, *jobs)]
    for name, data in ends[0].items():
        if name != "manifest.json":
            assert data == ends[2 if name.startswith("critic/") else 1][name], name
    told = [{**theirs, **ours} for ours, theirs in zip(*map(steps, jobs), strict=True)]
    for ours, theirs in zip(told, steps(whole), strict=True):
        assert all(ours[name] == theirs[name] for name in theirs if not is_of_the_machine(name))
    middle = critic_workshop.job(f"middle-{placement}", jobs[0].plan, checkpoint(jobs[0], 3))
    assert new_worker(critic_workshop.root).do_one(middle).state == "succeeded"
    again = critic_workshop.job(f"again-{placement}", jobs[1].plan)
    assert new_worker(critic_workshop.root).do_one(again).state == "succeeded"
    for job, same in zip(jobs, (middle, again), strict=True):
        assert checkpoint(job, 4).sha256 == checkpoint(same, 4).sha256


@pytest.mark.parametrize("step", drawn([1, 2, 3], 1))
def test_a_job_that_goes_on_ends_in_the_same_bits(critic_workshop: Workshop, step: int) -> None:
    """Advantages are made again of the weights that the job began with, and not of those in the checkpoint."""
    whole = critic_job(critic_workshop, f"whole-{step}")
    new_worker(critic_workshop.root).do_one(whole)
    resumed = critic_job(critic_workshop, f"resumed-{step}", checkpoint(whole, step))
    new_worker(critic_workshop.root).do_one(resumed)
    assert checkpoint(whole, 4).sha256 == checkpoint(resumed, 4).sha256
    assert [m["critic_loss"] for m in steps(resumed)] == [m["critic_loss"] for m in steps(whole)][step:]


def test_a_policy_waits_for_its_critic(critic_workshop: Workshop) -> None:
    """In a warm-up no weight of it changes, and the critic's do."""
    job = critic_job(critic_workshop, "alone", critic=CRITICS["token"].model_copy(update={"alone": True, "clip": None}))
    new_worker(critic_workshop.root).do_one(job)
    folders = [Path(job.checkpoint_dir) / f"step-0000000{step}" / "weights" for step in (1, 4)]
    ends = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not any(tensor.any() for name, tensor in ends[1].items() if "lora_B" in name)
    found = steps(job)
    assert found[-1]["critic_loss"] < found[0]["critic_loss"] and all(one["skipped"] == 1 for one in found)
    told = JobMetrics(PENALISED, found).combined()
    assert told["tokens"] > told["target_tokens"] > 0 and told["critic_learning_rate"] == CRITIC_RATE


def test_one_optimizer_is_on_the_device_at_a_time(critic_workshop: Workshop, monkeypatch) -> None:
    """At every move of tensors, of the policy's moments and the critic's one at most."""
    seen = set[tuple[str, ...]]()
    move = Residency._move

    def watched(self, wanted) -> None:
        move(self, wanted)
        seen.add(tuple(sorted(str(s) for (part, s), r in self._held.items() if part == "optimizer" and r.bytes.device)))

    monkeypatch.setattr(Residency, "_move", watched)
    new_worker(critic_workshop.root).do_one(critic_job(critic_workshop, "watched"))
    assert {("run-1",), ("run-1/critic",), ()} <= seen and max(map(len, seen)) == 1, seen


@pytest.fixture(scope="module")
def single(critic_workshop: Workshop) -> Job:
    job = critic_job(critic_workshop, "single")
    new_worker(critic_workshop.root).do_one(job)
    return job


OVER_RANKS = [("megatron", Layout(dp=2)), ("megatron", Layout(tp=2)), ("megatron", Layout(pp=2)),
              ("megatron", Layout(cp=2)), ("fsdp", Layout(dp=2)), ("fsdp", Layout(tp=2))]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "layout"), drawn(OVER_RANKS, 1, always=[OVER_RANKS[0]]), ids=lambda v: getattr(v, "label", v)
)
def test_ranks_report_and_learn_what_one_does(
    critic_workshop: Workshop, single: Job, engine: str, layout: Layout
) -> None:
    job = critic_job(critic_workshop, f"{engine}-{layout.label}", layout=layout, engine=engine)
    path = critic_workshop.root / f"{engine}-{layout.label}.json"
    path.write_text(job.model_dump_json())
    into = critic_workshop.root / f"{engine}-{layout.label}"
    fork_ranks("megatron_worker", "--once", str(path), "--into", str(into), num_ranks=2)
    theirs = [e.metrics for e in read_log(next(into.rglob("log.jsonl"))) if isinstance(e, Step)]
    for ours, other in zip(steps(single), theirs, strict=True):
        assert set(ours) == set(other)
        for name in set(ours) - {"step_s", "tokens_per_s", "memory_bytes", "critic_memory_bytes"}:
            assert other[name] == pytest.approx(ours[name], rel=2e-4, abs=2e-5), name


def test_a_checkpoint_without_a_critic_is_refused(critic_workshop: Workshop, single: Job) -> None:
    alone = critic_job(critic_workshop, "no-critic", critic=None, loss=PPO(old="trainer"))
    new_worker(critic_workshop.root).do_one(alone)
    job = critic_job(
        critic_workshop, "needs-one", job_id="000002", first_step=4, initial_checkpoint=checkpoint(alone, 4)
    )
    new_worker(critic_workshop.root).do_one(job)
    failed = read_log(job.log_path)[-1]
    assert isinstance(failed, Failed) and failed.kind == "corrupt_artifact"
    assert failed.message.endswith("the checkpoint has no critic, and the job trains one")


def test_a_loss_that_is_not_finite_fails_the_job(critic_workshop: Workshop) -> None:
    job = critic_job(critic_workshop, "burst", critic=CRITICS["token"].model_copy(update={"learning_rate": 1e30}))
    new_worker(critic_workshop.root).do_one(job)
    failed = read_log(job.log_path)[-1]
    assert isinstance(failed, Failed) and failed.kind == "not_finite" and "critic" in failed.message, failed


@pytest.mark.parametrize("changes", [{"loss": CrossEntropy()}, {"trainable": Full()}], ids=["loss", "full"])
def test_a_critic_needs_a_policy_of_an_adapter(critic_workshop: Workshop, changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="critic: it belongs to a policy loss, and to a lora"):
        critic_job(critic_workshop, "never", **changes)
