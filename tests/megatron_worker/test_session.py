"""Sessions on a worker: in the bits of a job, whatever is lost in between, on from saved states, also on two ranks."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from activities.tokenizing.units import PAIR_COLUMNS, pair_unit
from examples.tiny_model import make_tiny_model
from longshore.commands import Datum, Forward, ForwardBackward, OptimStep, SaveState
from longshore.events import Applied, Cancelled, Failed, Kept, Saved, Started, Step, Succeeded
from longshore.losses import DPO, PPO, Kl
from longshore.training import Full, Layout, Lora
from megatron_worker.engine import Batch, LossFunction
from megatron_worker.process.job_queue import EventLog
from shared.jobs.commands import Command, Gap, Skip
from shared.jobs.job import Job, PackedData, Schedule
from shared.jobs.packed import UnitsWriter
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.session_jobs import (
    data_of,
    do_all,
    load,
    packed_alike,
    result,
    session_job,
    sft_commands,
    state_of,
)
from tests.megatron_worker.tiny_engine import TinyEngine
from tests.megatron_worker.tiny_jobs import adapter_sha256, checkpoint, do, failure, new_worker
from tests.megatron_worker.workshop import Workshop, make_workshop, read_log, sealed, workshop_of_ids, write_plan


def write_unit(folder: Path, columns: dict[str, NDArray]) -> None:
    writer = UnitsWriter(folder, tuple(columns))
    writer.append(**columns)
    writer.close()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return make_workshop(tmp_path_factory.mktemp("session"))


@pytest.mark.parametrize("trainable", [Lora(rank=4, alpha=8), Full()])
def test_a_session_s_steps_are_a_job_s_to_the_byte(workshop: Workshop, tmp_path: Path, trainable: Lora | Full) -> None:
    changes = {"data": packed_alike(workshop), "trainable": trainable}
    whole = do(workshop, f"whole-{trainable.kind}", workshop.plan(**changes))
    job = do_all(workshop, tmp_path / "session", sft_commands(workshop), trainable=trainable)
    assert isinstance(read_log(job.log_path)[-1], Succeeded)
    last = 2 * workshop.num_steps
    ends = [
        Path(whole.checkpoint_dir) / f"step-{workshop.num_steps:08d}",
        Path(job.checkpoint_dir) / f"step-{last:08d}",
    ]
    for folder in ("weights", "optimizer"):
        names = sorted(path.name for path in (ends[0] / folder).iterdir())
        assert names
        for name in names:
            assert (ends[0] / folder / name).read_bytes() == (ends[1] / folder / name).read_bytes(), name
    steps = [[e.metrics for e in read_log(each.log_path) if isinstance(e, Step)] for each in (whole, job)]
    for name in ("loss", "grad_norm", "learning_rate", "target_tokens"):
        assert [metrics[name] for metrics in steps[0]] == [metrics[name] for metrics in steps[1]], name


def test_a_state_and_the_commands_after_it_give_the_same_bits(workshop: Workshop, tmp_path: Path) -> None:
    """As when a worker is lost with gradients that nobody stepped: what is before the state is skipped by number."""
    commands = sft_commands(workshop)
    half = ForwardBackward(data=data_of(workshop, 0)[:3])
    whole = [*commands[:4], SaveState(), half, *commands[4:]]
    undisturbed = do_all(workshop, tmp_path / "whole", whole)
    first = do_all(workshop, tmp_path / "first", whole[:6])
    saved = [e.step for e in read_log(first.log_path) if isinstance(e, Saved)]
    assert saved == [5]
    rest = session_job(workshop, tmp_path / "second", whole, start=checkpoint(first, 5))
    new_worker(workshop.root).do_one(rest)
    started = next(e for e in read_log(rest.log_path) if isinstance(e, Started))
    assert started.first_step == 5
    assert adapter_sha256(rest, len(whole)) == adapter_sha256(undisturbed, len(whole))
    for number in range(6, len(whole) + 1):
        one, other = result(rest, number), result(undisturbed, number)
        assert one.data == other.data
        assert one.metrics.get("loss") == other.metrics.get("loss")


def test_forwards_change_nothing_and_may_be_skipped(workshop: Workshop, tmp_path: Path) -> None:
    commands = sft_commands(workshop)
    with_forwards: list[Command] = []
    skipped: list[Command] = []
    for each in commands:
        with_forwards += [Forward(data=data_of(workshop, 1), entropy=True, top_k=3), each]
        skipped += [Skip(), each]
    jobs = [do_all(workshop, tmp_path / str(n), c) for n, c in enumerate((with_forwards, skipped))]
    assert adapter_sha256(jobs[0], len(skipped)) == adapter_sha256(jobs[1], len(skipped))
    found = result(jobs[0], 1).data
    assert found is not None
    for datum, scores in zip(data_of(workshop, 1), found, strict=True):
        assert len(scores.logprobs) == len(datum.tokens) - 1
        assert scores.entropies is not None and scores.top_ids is not None and scores.top_logprobs is not None
        assert all(len(ids) == 3 for ids in scores.top_ids)
        for label, logprob, ids, logprobs in zip(
            datum.tokens[1:], scores.logprobs, scores.top_ids, scores.top_logprobs, strict=True
        ):
            assert logprob is not None and logprobs[0] is not None
            assert logprob <= logprobs[0]
            assert label not in ids or logprobs[ids.index(label)] == pytest.approx(logprob)


def test_a_loss_of_the_client_s_own_has_the_gradients_of_the_built_in_one(workshop: Workshop, tmp_path: Path) -> None:
    """-w is what cross-entropy is differentiated to, so sending it back is the same step."""
    data = data_of(workshop, 0)
    plain = do_all(workshop, tmp_path / "plain", [ForwardBackward(data=data), OptimStep(learning_rate=0.05)])
    weight = result(plain, 2).metrics["weight"]
    own = [
        Forward(data=data),
        *(ForwardBackward(data=(datum,)) for datum in data),
        OptimStep(learning_rate=0.05, denominator=weight),
    ]
    by_hand = do_all(workshop, tmp_path / "own", own)
    assert result(by_hand, 8).metrics["grad_norm"] == pytest.approx(result(plain, 2).metrics["grad_norm"], rel=1e-6)
    forward, backward = result(by_hand, 1).data, result(plain, 1).data
    assert forward is not None and forward == backward


def test_a_preference_loss_of_the_client_s_own_has_the_gradients_of_dpo(workshop: Workshop, tmp_path: Path) -> None:
    """Scores by policy and base, then the derivatives of -log sigmoid(beta * margin) by each log-probability.

    Against the job whose loss is dpo, also where the margin is no longer 0.
    """
    beta, prompt = 0.5, (3, 5, 8)
    data = tuple(
        Datum(tokens=(*prompt, *answer), weights=(0.0, 0.0, *(1.0 for _ in answer)))
        for answer in ((13, 21), (34, 55, 2))
    )
    commands: list[Command] = []
    margins = []
    for step in range(2):
        commands += [Forward(data=data), Forward(data=data, adapter=False)]
        scored = do_all(workshop, tmp_path / f"scored-{step}", commands)
        policy, base = (result(scored, len(commands) - 1 + which).data for which in (0, 1))
        assert policy is not None and base is not None
        logprobs, reference = (
            torch.tensor([sum(filter(None, scores.logprobs)) for scores in each], dtype=torch.float64)
            for each in (policy, base)
        )
        logprobs.requires_grad_(True)
        chosen, rejected = logprobs - reference
        margins.append(float((beta * (chosen - rejected)).detach()))
        torch.nn.functional.logsigmoid(beta * (chosen - rejected)).neg().backward()
        assert logprobs.grad is not None
        own = tuple(
            Datum(tokens=datum.tokens, weights=tuple(-float(slope) * weight for weight in datum.weights or ()))
            for datum, slope in zip(data, logprobs.grad, strict=True)
        )
        commands += [ForwardBackward(data=own), OptimStep(learning_rate=0.05, denominator=1)]
    job = do_all(workshop, tmp_path / "whole", commands)
    folder = tmp_path / "pairs"
    columns = pair_unit(*(each for d in data for each in (np.array(d.tokens), np.arange(len(d.tokens)) >= 3))).columns()
    write_unit(folder / "units", {name: columns[name] for name in PAIR_COLUMNS})
    write_plan(folder / "plan", folder / "units", [[[0]], [[0]]])
    pairs = PackedData(units=sealed(folder / "units"), plan=sealed(folder / "plan"))
    schedule = Schedule(kind="constant", learning_rate=0.05)
    dpo = do(workshop, "dpo", workshop.plan(data=pairs, num_steps=2, loss=DPO(beta=beta), schedule=schedule))
    steps = [e.metrics for e in read_log(dpo.log_path) if isinstance(e, Step)]
    assert margins[0] == pytest.approx(0, abs=1e-6) and margins[1] > 0.01
    assert [step["reward_margin"] for step in steps] == pytest.approx(margins, abs=1e-5)
    norms = [result(job, number).metrics["grad_norm"] for number in (4, 8)]
    assert norms == pytest.approx([step["grad_norm"] for step in steps], rel=1e-4)


def test_sequences_that_begin_alike_share_it(workshop: Workshop, tmp_path: Path) -> None:
    prompt = tuple(range(3, 15))
    data = tuple(Datum(tokens=(*prompt, 20 + n, 30 + n, 40 + n)) for n in range(4))
    job = do_all(
        workshop,
        tmp_path / "trees",
        [
            ForwardBackward(data=data),
            ForwardBackward(data=data, share_prefixes=True),
            Forward(data=data, share_prefixes=True, adapter=False),
        ],
    )
    chains, trees, base = (result(job, number) for number in (1, 2, 3))
    assert chains.data is not None and trees.data is not None and base.data is not None
    assert trees.metrics["tokens"] < chains.metrics["tokens"] / 2
    assert trees.metrics["loss"] == pytest.approx(chains.metrics["loss"], abs=1e-6)
    for one, other, of_base in zip(chains.data, trees.data, base.data, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert of_base.logprobs == pytest.approx(other.logprobs, abs=1e-5), "a fresh adapter changes nothing"


def test_a_policy_loss_learns_from_advantages(workshop: Workshop, tmp_path: Path) -> None:
    loss = PPO(kl=Kl(coefficient=0.1))
    tokens = (3, 5, 8, 13)
    scored = do_all(workshop, tmp_path / "scored", [Forward(data=(Datum(tokens=tokens),))])
    found = result(scored, 1).data
    assert found is not None
    numbers = {"logprobs": found[0].logprobs, "ref_logprobs": found[0].logprobs}
    datum = Datum.model_validate({"tokens": tokens, "advantages": (0.0, 1.0, 1.0), **numbers})
    step = [ForwardBackward(data=(datum,), loss=loss), OptimStep(learning_rate=0.05)]
    job = do_all(workshop, tmp_path / "step", [*step, Forward(data=(Datum(tokens=tokens),))])
    after = result(job, 3).data
    assert after is not None and after[0].logprobs[1] > found[0].logprobs[1]  # type: ignore[operator]
    assert result(job, 1).metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("bad", "place", "rule"),
    [
        ("{", "", "JSON"),
        ('{"kind": "optim_step"}', "learning_rate", "required"),
        ('{"kind": "explode"}', "kind", "forward"),
        (Forward(data=(Datum(tokens=(1, 64)),)), "data[0].tokens[1]", "vocabulary of 64"),
        (Forward(data=(Datum(tokens=(1, 2), labels=((3, 64),)),)), "labels[0][1]", "vocabulary of 64"),
        (Forward(data=(Datum(tokens=(1,) * 25),)), "data[0].tokens", "max_tokens is 24"),
    ],
)
def test_a_bad_command_fails_alone(
    workshop: Workshop, tmp_path: Path, bad: Command | str, place: str, rule: str
) -> None:
    commands = sft_commands(workshop)[:4]
    plain = do_all(workshop, tmp_path / "plain", [commands[0], Skip(), *commands[1:]])
    job = do_all(workshop, tmp_path / "bad", [commands[0], bad, *commands[1:]])
    problem = result(job, 2).problem
    assert problem is not None and problem.kind == "invalid_input"
    assert place in problem.message and rule in problem.message
    assert adapter_sha256(job, 5) == adapter_sha256(plain, 5)
    assert [e.command for e in read_log(job.log_path) if isinstance(e, Applied) and e.failed] == [2]


def test_what_is_not_finite_drops_the_gradients_and_no_weight(workshop: Workshop, tmp_path: Path) -> None:
    commands = sft_commands(workshop)[:4]
    broken = ForwardBackward(data=(Datum(tokens=(1, 2, 3), weights=(3e38, 3e38)),) * 3)
    job = do_all(workshop, tmp_path / "broken", [*commands[:3], broken, commands[2], commands[3]])
    problem = result(job, 4).problem
    assert problem is not None and problem.kind == "not_finite"
    assert "dropped" in problem.message
    plain = do_all(workshop, tmp_path / "plain", [*commands[:2], Skip(), Skip(), *commands[2:]])
    assert adapter_sha256(job, 6) == adapter_sha256(plain, 6)


class SmallDevice(TinyEngine):
    """It is out of memory beyond so many tokens, halfway through a pass."""

    def forward_backward(self, batch: Batch, loss: LossFunction) -> dict[str, Tensor]:
        sums = super().forward_backward(batch, loss)
        if len(batch.token_id_T) > 20:
            raise torch.OutOfMemoryError("a device of 20 tokens")
        return sums


def test_a_command_that_the_device_has_no_memory_for_fails_alone(workshop: Workshop, tmp_path: Path) -> None:
    """It drops the gradients; a worker that has the memory does the same where it repeats the session."""
    small = [ForwardBackward(data=(Datum(tokens=tuple(range(3, 13 + n))),)) for n in range(4)]
    large = ForwardBackward(data=(Datum(tokens=tuple(range(3, 27))),))
    step = OptimStep(learning_rate=0.1)
    worker = new_worker(workshop.root, lambda plan, model: SmallDevice(model))
    job = do_all(workshop, tmp_path / "small", [small[0], step, small[1], large, small[2], step, small[3]], worker)
    problem = result(job, 4).problem
    assert problem is not None and problem.kind == "error"
    assert "a device of 20 tokens" in problem.message and "dropped" in problem.message
    assert [e.command for e in read_log(job.log_path) if isinstance(e, Applied) and e.failed] == [4]
    plain = do_all(workshop, tmp_path / "plain", [small[0], step, Skip(), Skip(), small[2], step, small[3]])
    again = do_all(workshop, tmp_path / "again", [small[0], step, small[1], Skip(drops=True), *small[2:3], step])
    assert adapter_sha256(job, 6) == adapter_sha256(plain, 6) == adapter_sha256(again, 6)


def test_a_gap_stands_for_all_numbers_that_it_names(workshop: Workshop, tmp_path: Path) -> None:
    """Whatever lies under them."""
    commands = sft_commands(workshop)[:2]
    plain = do_all(workshop, tmp_path / "plain", [*commands, *commands])
    never = ForwardBackward(data=(Datum(tokens=(1, 2, 3)),))
    gap = Gap(through=5, message="3 never came")
    job = do_all(workshop, tmp_path / "gap", [*commands, gap, never, "{}", *commands, SaveState()])
    assert [e.command for e in read_log(job.log_path) if isinstance(e, Applied)] == [1, 2, 3, 6, 7, 8]
    assert adapter_sha256(job, 8) == adapter_sha256(plain, 4)


def test_a_step_without_gradients_is_skipped_and_weights_that_cancel_want_a_number(
    workshop: Workshop, tmp_path: Path
) -> None:
    cancelling = ForwardBackward(data=(Datum(tokens=(1, 2, 3), weights=(1.0, -1.0)),))
    commands = [OptimStep(learning_rate=0.1), cancelling, OptimStep(learning_rate=0.1)]
    job = do_all(workshop, tmp_path / "s", [*commands, OptimStep(learning_rate=0.1, denominator=2)])
    assert result(job, 1).metrics == {"skipped": 1.0}
    problem = result(job, 3).problem
    assert problem is not None and "denominator" in problem.message
    assert result(job, 4).metrics["grad_norm"] > 0


def test_a_checkpoint_of_another_base_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    first = do_all(workshop, tmp_path / "first", sft_commands(workshop)[:2])
    other = make_workshop(tmp_path / "other")
    (tmp_path / "other" / "model" / "config.json").write_text(json.dumps({"model_type": "tiny", "eos_token_id": 62}))
    model = sealed(tmp_path / "other" / "model")
    job = session_job(other, tmp_path / "second", [], start=checkpoint(first, 2), model=model)
    new_worker(tmp_path / "other").do_one(job)
    assert "another base model" in failure(job).message


def test_a_cancelled_session_leaves_its_state(workshop: Workshop, tmp_path: Path) -> None:
    """With gradients that nobody stepped: the state is that of the command before them."""
    commands = sft_commands(workshop)[:3]
    job = session_job(workshop, tmp_path / "s", commands)
    worker = new_worker(workshop.root)
    asked = Path(job.commands_dir or "") / f"{3:08d}.result.json"
    worker.run(job, EventLog(Path(job.log_path)), cancelled=asked.exists)
    events = read_log(job.log_path)
    assert isinstance(events[-1], Cancelled | Succeeded)
    assert [e.step for e in events if isinstance(e, Saved)] == [2]
    assert not any(isinstance(e, Failed) for e in events)


def test_a_loaded_state_goes_on_as_in_the_session_that_saved_it(workshop: Workshop, tmp_path: Path) -> None:
    """Whatever was trained before, and with gradients that nobody stepped."""
    commands = sft_commands(workshop)
    source = do_all(workshop, tmp_path / "source", [*commands[:4], SaveState(), *commands[4:8], SaveState()])
    others = [*commands[6:8], SaveState(), commands[0], load(source, 5), *commands[4:8], SaveState()]
    job = do_all(workshop, tmp_path / "other", others, seed=11)
    assert result(job, 5).problem is None and result(job, 5).step == 5
    assert state_of(job, 5) == state_of(source, 5)
    assert state_of(job, 10) == state_of(source, 10)
    assert [e.step for e in read_log(job.log_path) if isinstance(e, Kept)] == [3, 10], "a load keeps no state"
    for start in (3, 5):  # as a new worker does, before the load or behind it
        again = session_job(workshop, tmp_path / f"from-{start}", others, start=checkpoint(job, start), seed=11)
        new_worker(workshop.root).do_one(again)
        assert state_of(again, 10) == state_of(job, 10), start


def test_a_state_without_its_optimizer_is_a_published_adapter(workshop: Workshop, tmp_path: Path) -> None:
    """A session that begins with the adapter makes the same steps."""
    commands = sft_commands(workshop)
    source = do_all(workshop, tmp_path / "source", [*commands[:4], SaveState()])
    adapter = sealed(Path(source.checkpoint_dir) / "step-00000005" / "weights")
    begun = do_all(workshop, tmp_path / "begun", commands[4:8], initial_adapter=adapter)
    loading = [*commands[6:8], load(source, 5, optimizer=False), *commands[4:8]]
    job = do_all(workshop, tmp_path / "loading", loading)
    assert state_of(job, 7) == state_of(begun, 4)
    with_moments = do_all(workshop, tmp_path / "moments", [load(source, 5), *commands[4:8]])
    assert state_of(with_moments, 5) != state_of(begun, 4)


@pytest.mark.parametrize("bad", ["missing", "rank", "base", "damaged"])
def test_a_state_that_does_not_fit_changes_nothing(workshop: Workshop, tmp_path: Path, bad: str) -> None:
    commands = sft_commands(workshop)[:4]
    lora = Lora(rank=8, alpha=8) if bad == "rank" else Lora(rank=4, alpha=8)
    source = do_all(workshop, tmp_path / "source", commands[:2], trainable=lora)
    asked = load(source, 2)
    folder = Path(source.checkpoint_dir) / "step-00000002"
    match bad:
        case "missing":
            (folder / "manifest.json").unlink()
        case "base":
            state = json.loads((folder / "state.json").read_bytes())
            (folder / "state.json").write_text(json.dumps(state | {"model_sha256": "0" * 64}))
            asked = asked.model_copy(update={"checkpoint": sealed(folder)})
        case "damaged":
            with (folder / "optimizer" / "optimizer.safetensors").open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x7f")
    rules = {"missing": "missing", "rank": "rank is 8, 4 is asked for", "base": "another base", "damaged": "SHA-256"}
    job = do_all(workshop, tmp_path / "bad", [commands[0], asked, *commands[1:]])
    problem = result(job, 2).problem
    assert problem is not None and rules[bad] in problem.message
    plain = do_all(workshop, tmp_path / "plain", [commands[0], Skip(), *commands[1:]])
    assert state_of(job, 5) == state_of(plain, 5)


def labelled(datum: Datum, labels: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None) -> Datum:
    return Datum.model_validate({"tokens": datum.tokens, "labels": labels, "label_weights": weights})


def test_labels_that_are_the_next_tokens_change_no_bit(workshop: Workshop, tmp_path: Path) -> None:
    data = data_of(workshop, 0)
    same = tuple(
        labelled(datum, [[token] for token in datum.tokens[1:]], [[weight] for weight in datum.weights or ()])
        for datum in data
    )
    step = OptimStep(learning_rate=0.05)
    jobs = [
        do_all(workshop, tmp_path / name, [ForwardBackward(data=each), step])
        for name, each in (("plain", data), ("labels", same))
    ]
    assert result(jobs[0], 1).data == result(jobs[1], 1).data
    assert state_of(jobs[0], 2) == state_of(jobs[1], 2)


def test_a_teacher_s_likeliest_tokens_are_several_labels_in_a_place(workshop: Workshop, tmp_path: Path) -> None:
    """Their gradients are the sum of each one's, and what is scored are the ids that were asked for."""
    datum = data_of(workshop, 0)[0]
    scored = do_all(workshop, tmp_path / "scored", [Forward(data=(Datum(tokens=datum.tokens),), top_k=3)])
    found = result(scored, 1).data
    assert found is not None and found[0].top_ids is not None and found[0].top_logprobs is not None
    ids = [list(each) for each in found[0].top_ids]
    ids[1] = []  # a place without any
    weights = [[0.5, 0.25, 0.0][: len(each)] for each in ids]
    together = labelled(datum, ids, weights)
    apart = [labelled(datum, [each[k : k + 1] for each in ids], [each[k : k + 1] for each in weights]) for k in (0, 1)]
    step = OptimStep(learning_rate=0.05, denominator=1)
    one = do_all(workshop, tmp_path / "one", [ForwardBackward(data=(together,)), step])
    two = do_all(workshop, tmp_path / "two", [*(ForwardBackward(data=(each,)) for each in apart), step])
    norms = [result(one, 2).metrics["grad_norm"], result(two, 3).metrics["grad_norm"]]
    assert norms[0] > 0 and norms[0] == pytest.approx(norms[1], rel=1e-5)
    scores = result(one, 1).data
    assert scores is not None
    wanted = [pair for k, pair in enumerate(found[0].top_logprobs) if k != 1]
    assert scores[0].logprobs == pytest.approx([value for pair in wanted for value in pair[:2]], abs=1e-6)


@pytest.fixture(scope="module")
def workshop_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    root = tmp_path_factory.mktemp("ranks")
    make_tiny_model(root / "model", ["w " * 50], vocab_size=301)
    return workshop_of_ids(root, root / "model", 301, 2, held_out=[[0, 1], [2], [3]], prompt_ids=[270, 271, 272])


def by_two_ranks(workshop_of_ranks: Workshop, name: str, job: Job) -> Job:
    path = workshop_of_ranks.root / f"{name}.json"
    path.write_text(job.model_dump_json())
    fork_ranks("megatron_worker", "--once", str(path), num_ranks=2)
    return job


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2)], ids=["dp2", "tp2"])
def test_a_session_on_two_ranks_is_its_job_to_the_byte(
    workshop_of_ranks: Workshop, tmp_path: Path, layout: Layout
) -> None:
    """And so is one whose ranks were lost behind a saved state, with gradients that nobody had stepped."""
    name = f"dp{layout.dp}"
    # One bin: with dp 2, a rank has none of it.
    single = Forward(data=data_of(workshop_of_ranks, 1)[:1], entropy=True, top_k=3)
    plan = workshop_of_ranks.plan(data=packed_alike(workshop_of_ranks), layout=layout)
    whole = by_two_ranks(workshop_of_ranks, f"job-{name}", workshop_of_ranks.job(name, plan))
    first, *rest = sft_commands(workshop_of_ranks)
    assert isinstance(first, ForwardBackward)
    halves: list[Command] = [first, rest[0], SaveState(), *rest[1:], single]
    begun = by_two_ranks(
        workshop_of_ranks,
        f"begun-{name}",
        session_job(workshop_of_ranks, tmp_path / "begun", halves[:4], layout=layout),
    )
    start = checkpoint(begun, 3)
    rest_of_it = session_job(workshop_of_ranks, tmp_path / "rest", halves, start=start, layout=layout)
    session = by_two_ranks(workshop_of_ranks, f"rest-{name}", rest_of_it)
    assert [e.command for e in read_log(session.log_path) if isinstance(e, Applied)] == [4, 5, 6]
    assert state_of(session, 6) == state_of(whole, 2)
    scored = result(session, 6).data
    assert scored is not None and scored[0].entropies and scored[0].top_ids
    assert len(scored[0].top_ids) == len(scored[0].entropies) == len(scored[0].logprobs)
    lost, again = result(begun, 4), result(session, 4)
    assert lost.data == again.data and lost.data is not None
    assert [len(scores.logprobs) for scores in lost.data] == [
        sum(weight != 0 for weight in datum.weights or ()) for datum in data_of(workshop_of_ranks, 1)
    ], "each rank computed its part, and all of it is told"
