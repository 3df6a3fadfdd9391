"""Policy losses on the real engine: against transformers and autograd, however bins are cut, over ranks, resumed."""

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from activities.tokenizing.units import pair_unit
from longshore.events import Probed, Saved, Step, Succeeded
from longshore.fields import Artifact
from longshore.losses import CISPO, DPO, DRO, GSPO, PPO, Kl, Loss, Reinforce
from longshore.training import Adam, Full, Layout, Lora
from megatron_worker.engine import Batch, LossFunction, Outputs
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.training.batches import to_batch
from shared.jobs.job import Checkpointing, Job, PackedData, Schedule
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, Units, UnitsWriter
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.rows import Row, bin_of, random_rows
from tests.megatron_worker.test_megatron_job import new_worker
from tests.megatron_worker.test_policy_jobs import ROLLOUT, TRAINER, write_rollouts
from tests.megatron_worker.workshop import Workshop, read_log, sealed, write_plan

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
