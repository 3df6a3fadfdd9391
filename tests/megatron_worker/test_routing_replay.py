"""Routing replay: every pass takes the experts that it is told, and their weights are the router's own.

Shape suffixes: s tokens, H hidden size, E experts, K experts of a token.
"""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint as computed_again

from examples.tiny_model import make_tiny_model
from longshore.events import Failed, Saved, Step, Succeeded
from longshore.fields import Artifact
from longshore.losses import PPO
from longshore.training import Layout, Lora
from megatron_worker.engine import Batch, Outputs
from megatron_worker.layers import Router
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.trainer_rank import ForwardInput, TrainerRank
from shared.errors import InvalidInput
from shared.families.architecture import Mixture
from shared.jobs.job import Checkpointing, Job, PackedData, Schedule
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, RouteShape, UnitsWriter
from shared.jobs.prefix_tree import build_tree
from tests.megatron_worker.differences import GRADIENTS, furthest, furthest_gradient, logprobs, notes
from tests.megatron_worker.launch import environment, fork_ranks, in_turn, on_ranks, ranks_command
from tests.megatron_worker.parallel_ranks import KINDS, LEARNING_RATES, STEPS, note, note_step, start, step, with_routes
from tests.megatron_worker.replayed import as_rows, drawn, noted_routes, routes_of, with_noise, with_own_routes
from tests.megatron_worker.rows import VOCAB_SIZE, bin_of, distinct_model, routed
from tests.megatron_worker.trees import as_chain, as_tree, random_sequences
from tests.megatron_worker.workshop import Workshop, read_log, sealed, workshop_of_ids, write_plan

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = [Layout(ep=2, dp=2), Layout(tp=2, sp=True), Layout(tp=2, sp=True, etp=2), Layout(pp=2), Layout(cp=2)]
SHAPE = RouteShape(num_layers=2, num_experts=4, per_token=2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of four experts, two a token."""
    return distinct_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", tied=False)


# The router.


@pytest.mark.parametrize("normalised", [True, False])
def test_weights_and_gradients_are_those_of_the_formula_at_the_given_experts(normalised: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_sH, weight_EH = torch.randn(20, 16, generator=generator), torch.randn(8, 16, generator=generator)
    wanted_sK = torch.rand(20, 8, generator=generator).topk(3).indices
    upstream_sK = torch.randn(20, 3, generator=generator)
    router = Router({"router.weight": Parameter(weight_EH.clone())}, "router", Mixture(8, 4, 3, normalised), 1e-6)
    found_sK, expert_sK = router(hidden_sH, wanted_sK.to(torch.uint8))
    (found_sK * upstream_sK).sum().backward()
    exact_EH = weight_EH.double().requires_grad_()
    odds_sE = (hidden_sH.double() @ exact_EH.t()).exp()
    chosen_sK = torch.stack([odds_sE[token, wanted_sK[token]] for token in range(20)])
    expected_sK = chosen_sK / (chosen_sK if normalised else odds_sE).sum(-1, keepdim=True)
    (expected_sK * upstream_sK.double()).sum().backward()
    assert torch.equal(expert_sK, wanted_sK)
    assert (found_sK - expected_sK).abs().max() <= 1e-6
    assert router.weight.grad is not None and exact_EH.grad is not None
    assert (router.weight.grad - exact_EH.grad).abs().max() <= 1e-5
    assert (router.weight.grad.abs().sum(1) > 0).all(), "experts that were chosen against the scores learn, too"
    free_sK, own_sK = router(hidden_sH)
    assert torch.equal(router(hidden_sH, own_sK)[0], free_sK)


# The engine.


@pytest.mark.parametrize("kind", KINDS)
def test_steps_by_the_trainers_own_routes_are_the_steps_without_to_the_bit(model: Path, tmp_path: Path, kind: str):
    free, told = start(model, Layout(), kind), start(model, Layout(), kind)
    for bins, loss in STEPS:
        own = [with_own_routes(told, batch) for batch in bins]
        assert own[0].route_TLK is not None and own[0].route_TLK.shape[1:] == (2, 2)
        assert step(told, own, loss, LEARNING_RATES[kind]) == step(free, bins, loss, LEARNING_RATES[kind])
    free.save(tmp_path / "free")
    told.save(tmp_path / "told")
    files = [path for path in (tmp_path / "free").rglob("*") if path.is_file()]
    assert len(files) >= 3
    for path in files:
        assert path.read_bytes() == (tmp_path / "told" / path.relative_to(tmp_path / "free")).read_bytes(), path


def test_every_forward_takes_the_routes_that_it_is_given(model: Path) -> None:
    engine, (bins, loss) = start(model, Layout(), "full"), STEPS[0]
    batch = routed(engine.facts.routes, bins[0], 3)
    assert batch.route_TLK is not None
    with noted_routes(engine) as found:
        with torch.no_grad():
            scored = engine.forward(batch, Outputs()).logprob_N
            free = engine.forward(bins[0], Outputs()).logprob_N
        engine.forward_backward(batch, loss)
    assert scored is not None and free is not None
    for layer in range(2):
        for first in (0, 4):
            assert torch.equal(found[first + layer], batch.route_TLK[:, layer].long())
        assert not torch.equal(found[2 + layer], batch.route_TLK[:, layer].long())
    assert (scored - free).abs().max() > 0.1


def test_inputs_of_user_code_bring_their_routes(model: Path) -> None:
    """Some of one adapter's inputs do, others leave the choice to the router; a shared prefix has its one route."""
    rank = TrainerRank(MegatronEngine(model, Layout(), "float32"), least_saved_tokens=2)
    prefix, ends = [5, 6, 7, 8], ([9, 10], [11, 12, 13])
    asked = [ForwardInput([*prefix, *end], target_logprobs=True) for end in ends]
    batches = [Batch.chain([*prefix, *end], CPU) for end in ends]
    own = [with_own_routes(rank.engine, batch).route_TLK.numpy() for batch in batches]
    other = [routed(rank.facts.routes, batch, 3).route_TLK.numpy() for batch in batches]
    other[0][: len(prefix)] = other[1][: len(prefix)]
    free = rank.forward(asked)
    same = rank.forward([replace(one, routes=routes) for one, routes in zip(asked, own, strict=True)])
    assert all(torch.equal(a.target_logprob_P, b.target_logprob_P) for a, b in zip(free, same, strict=True))
    told = [replace(one, routes=routes.astype(np.int64)) for one, routes in zip(asked, other, strict=True)]
    found = rank.forward([*told, *asked])
    for answer, batch, routes in zip(found, batches, other, strict=False):
        expected = rank.engine.forward(batch.with_routes(routes), Outputs()).logprob_N
        assert (answer.target_logprob_P - expected).abs().max() <= 1e-5
    assert all(torch.equal(a.target_logprob_P, b.target_logprob_P) for a, b in zip(free, found[2:], strict=True))
    assert (found[0].target_logprob_P - free[0].target_logprob_P).abs().max() > 0.1
    twice = np.zeros_like(other[0])
    for wrong, rule in ((other[1], r"\(6, 2, 2\)"), (twice, "differ from each other"), (other[0] + 4, "from 0 to 3")):
        with pytest.raises(InvalidInput, match=rule) as refused:
            rank.forward([replace(asked[0], routes=wrong)])
        assert refused.value.place == "inputs[0].routes"


@pytest.mark.parametrize("whole_layers", [True, False], ids=["layers", "mlps"])
def test_passes_that_are_computed_again_take_the_same_routes(model: Path, tmp_path: Path, whole_layers: bool) -> None:
    """Two bins are under way before either is computed again: nothing may remember the last one's routes."""

    class Again(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: object, **kwargs: object) -> object:
            return computed_again(self.inner, *args, use_reentrant=False, **kwargs)

    engines = [start(model, Layout(), "full") for _ in range(2)]
    layers: list[Any] = engines[1]._model.layers
    for number, layer in enumerate(layers):
        if whole_layers:
            layers[number] = Again(layer)
        else:
            layer.mlp = Again(layer.mlp)
    gradients = []
    for engine in engines:
        bins = [routed(engine.facts.routes, batch, 5 + number) for number, batch in enumerate(STEPS[0][0][:2])]
        scores = [engine.forward(batch, Outputs()) for batch in bins]
        sum(each.logprob_N.sum() for each in scores if each.logprob_N is not None).backward()
        gradients.append({name: p.grad for name, p in engine._model.parameters.items()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient is not None and torch.equal(gradient, gradients[1][name]), name


def test_a_tree_by_routes_is_its_sequences_by_theirs(model: Path) -> None:
    """What sequences share has one route. Their own come from one table of tokens' contexts."""
    random = np.random.default_rng(0)
    table: dict[tuple[int, ...], np.ndarray] = {}

    def route(context: tuple[int, ...]) -> np.ndarray:
        return table.setdefault(context, np.stack([random.permutation(4)[:2] for _ in range(2)]))

    rows = [
        dataclasses.replace(
            row, routes=np.stack([route(tuple(row.token_ids[: n + 1])) for n in range(len(row.token_ids))])
        )
        for row in random_sequences(4)
    ]
    engine = start(model, Layout(), "full")
    with torch.no_grad():
        shared = engine.forward(as_tree(rows, SHAPE), Outputs()).logprob_N
        apart = [engine.forward(as_chain(row, SHAPE), Outputs()).logprob_N for row in rows]
        bare = engine.forward(as_tree([dataclasses.replace(row, routes=None) for row in rows]), Outputs()).logprob_N
    assert shared is not None and bare is not None
    assert (shared - torch.cat([each for each in apart if each is not None])).abs().max() <= 1e-5
    assert (shared - bare).abs().max() > 0.1


def test_a_shared_part_has_the_routes_of_a_sequence_that_goes_on(model: Path) -> None:
    del model
    base = random_sequences(0)[0]

    def row(ids: list[int], value: int):
        mask = np.arange(len(ids)) > 0
        ones = np.ones(len(ids))
        return dataclasses.replace(
            base,
            **{"token_ids": np.array(ids), "target_mask": mask, "weight": ones, "advantage": ones},
            **{"old_logprob": -ones, "ref_logprob": -ones, "routes": np.full((len(ids), 1, 1), value)},
        )

    tree = build_tree([row([5, 6], 1), row([5, 6, 8], 2), row([5, 6, 7], 3), row([9], 4)])
    assert tree.route_TLK is not None
    by_token = dict(zip(tree.token_id_T.tolist(), tree.route_TLK[:, 0, 0].tolist(), strict=True))
    assert by_token == {5: 2, 6: 2, 7: 3, 8: 2, 9: 4}


# Layouts.


def measure(model: Path, layout: Layout, out: Path) -> None:
    """Scores and gradients of rows and of trees, then three steps, with a checkpoint at the end."""
    for kind in KINDS:
        engine = start(model, layout, kind)
        for name, (bins, loss) in {"rows": STEPS[0], "trees": STEPS[1]}.items():
            note_step(engine, with_routes(engine, bins), loss, out / kind / name)
        history = [step(engine, with_routes(engine, bins), loss, LEARNING_RATES[kind]) for bins, loss in STEPS]
        note(engine, out / kind / "history.json", history)
        engine.save(out / kind / "end")


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family. The second stage of the second model begins behind the first of its two layers with experts."""
    blocks = distinct_model(tmp_path_factory.mktemp("blocks"), "nemotron_h", tied=False, num_layers=7)
    out = tmp_path_factory.mktemp("layouts")
    for folder in (model, blocks):
        measure(folder, Layout(), out / folder.name / "single")
    trials = [*((model, layout) for layout in LAYOUTS), (blocks, Layout(pp=2))]
    cases = [(folder, layout, out / folder.name / layout.label) for folder, layout in trials]
    on_ranks(2, in_turn, measure, cases, timeout_s=350)
    return {"qwen3_moe": out / model.name, "nemotron_h": out / blocks.name}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "layout"),
    [*(("qwen3_moe", layout) for layout in LAYOUTS), ("nemotron_h", Layout(pp=2))],
    ids=lambda each: each if isinstance(each, str) else each.label,
)
def test_two_ranks_do_what_one_does(results: dict[str, Path], family: str, layout: Layout, kind: str) -> None:
    ours, single = (results[family] / each / kind for each in (layout.label, "single"))
    for data in ("rows", "trees"):
        assert (logprobs(ours / data) - logprobs(single / data)).abs().max() <= 1e-5
        assert furthest_gradient(ours / data / GRADIENTS, single / data / GRADIENTS) <= 1e-5
    for history in notes(ours, "history"):
        for found, expected in zip(history, notes(single, "history")[0], strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
    assert furthest(ours / "end", single / "end") <= 1e-5


# The sampler.


def test_a_sampler_tells_the_experts_that_the_trainer_chooses(model: Path) -> None:
    """In float32, whose rounding decides no router of these."""
    decoder, engine = Decoder(model, torch.float32, CPU), MegatronEngine(model, Layout(), "float32")
    prompts = [[20, 30, 40, 50, 60], [7], [9, 9, 9]]
    sequences = drawn(decoder, model, prompts, num=4, length=9)
    for sequence in sequences:
        assert [len(part) for part in sequence.routes] == [len(sequence.prompt), *[1] * 8]
        own = with_own_routes(engine, bin_of(as_rows([sequence]))).route_TLK
        assert own is not None
        assert torch.equal(routes_of(sequence)[:-1].sort(-1).values, own[:-1].sort(-1).values)
    assert not any(each.routes for each in drawn(decoder, model, prompts, num=1, length=3, tells=False))


@pytest.mark.parametrize("disturbed", ["0.03", "0.1", "bfloat16"])
def test_the_mismatch_of_a_disturbed_router_falls_to_a_third_or_less(model: Path, disturbed: str) -> None:
    if disturbed == "bfloat16":
        decoder = Decoder(model, torch.bfloat16, CPU)
    else:
        decoder = with_noise(Decoder(model, torch.float32, CPU), float(disturbed))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB_SIZE, (30,), generator=generator).tolist() for _ in range(3)]
    sequences = drawn(decoder, model, prompts, num=8, length=40)
    engine, batch = MegatronEngine(model, Layout(), "float32"), bin_of(as_rows(sequences))
    told = dataclasses.replace(batch, route_TLK=torch.cat([routes_of(sequence) for sequence in sequences]))
    sampler_N, mismatch = torch.tensor([value for s in sequences for value in s.raw]), []
    for each in (batch, told):
        with torch.no_grad():
            trainer_N = engine.forward(each, Outputs()).logprob_N
        assert trainer_N is not None
        behind_N = trainer_N - sampler_N
        mismatch.append(float((behind_N.exp() - 1 - behind_N).mean()))
    print(disturbed, mismatch)
    assert mismatch[0] > 1e-6
    assert mismatch[1] <= mismatch[0] / 3


# A job.


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Policy steps on trees with routes."""
    root = tmp_path_factory.mktemp("jobs")
    make_tiny_model(root / "model", ["w " * 50], family="qwen3_moe", vocab_size=VOCAB_SIZE)
    made = workshop_of_ids(root, root / "model", VOCAB_SIZE, 4, held_out=[[0]], prompt_ids=[3])
    write_routed_units(root / "routed", SHAPE)
    write_plan(root / "routed-plan", root / "routed", [[[0, 1], [2]], [[3]], [[1], [0, 3]], [[2, 3]]], bin_tokens=999)
    data = PackedData(units=sealed(root / "routed"), plan=sealed(root / "routed-plan"))
    return dataclasses.replace(made, data=data, num_steps=4)


def write_routed_units(folder: Path, shape: RouteShape) -> None:
    random, writer = np.random.default_rng(0), UnitsWriter(folder, (*TOKEN_COLUMNS, *TARGET_COLUMNS), shape)
    for seed in range(4):
        columns = build_tree(random_sequences(seed, num_groups=1, num_sequences=3)).columns()
        size = len(columns["token_id"]), shape.num_layers, shape.num_experts
        writer.append(**columns, route=random.random(size).argsort(-1)[..., : shape.per_token])
    writer.close()


def fields(workshop: Workshop) -> dict[str, object]:
    return {
        "loss": PPO(old="trainer"),
        "schedule": Schedule(kind="constant", learning_rate=5e-3),
        "trainable": Lora(rank=4, alpha=8),
        "checkpointing": Checkpointing(every_steps=1),
        "data": workshop.data,
    }


def job_of(workshop: Workshop, name: str, start_at: Artifact | None = None, **changes: object) -> tuple[Job, Path]:
    job = workshop.job(name, workshop.plan(**(fields(workshop) | changes)), start_at)
    path = workshop.root / f"{name}.json"
    path.write_text(job.model_dump_json())
    return job, path


def done(workshop: Workshop, name: str, start_at: Artifact | None = None, **changes: object) -> Job:
    job, path = job_of(workshop, name, start_at, **changes)
    fork_ranks("megatron_worker", "--once", str(path), num_ranks=1)
    assert isinstance(read_log(job.log_path)[-1], Succeeded), read_log(job.log_path)[-1]
    return job


def saved(job: Job) -> list[Saved]:
    return [event for event in read_log(job.log_path) if isinstance(event, Saved)]


def weights(job: Job) -> bytes:
    return (Path(job.checkpoint_dir) / "step-00000004" / "weights" / "adapter_model.safetensors").read_bytes()


def test_a_job_that_is_killed_goes_on_to_the_same_bits(workshop: Workshop) -> None:
    """Old log-probabilities are made anew from the beginning's weights, by the same routes."""
    whole = done(workshop, "whole")
    killed, path = job_of(workshop, "killed")
    process = subprocess.Popen(ranks_command("megatron_worker", "--once", str(path)), env=environment())
    deadline = time.monotonic() + 120
    while not (Path(killed.log_path).exists() and saved(killed)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first = saved(killed)[0]
    going_on = done(workshop, "going-on", Artifact(uri=f"file://{first.path}", sha256=first.manifest_sha256))
    assert weights(going_on) == weights(whole)
    bare = shutil.copytree(workshop.root / "routed", workshop.root / "bare")
    header = json.loads((bare / "units.json").read_text())
    del header["routes"]
    header["columns"].remove("route")
    (bare / "units.json").write_text(json.dumps(header))
    (bare / "manifest.json").unlink()
    (bare / "route.bin").unlink()
    free = done(workshop, "free", data=PackedData(units=sealed(bare), plan=workshop.data.plan))
    assert weights(free) != weights(whole), "the routes decide something"
    ratios = [event.metrics["ratio_max"] for event in read_log(whole.log_path) if isinstance(event, Step)]
    assert ratios[0] == 1.0, "the old policy takes the routes, too"


def test_routes_of_another_model_fail_the_job_by_name(workshop: Workshop) -> None:
    write_routed_units(workshop.root / "other", SHAPE.model_copy(update={"num_experts": 8}))
    data = PackedData(units=sealed(workshop.root / "other"), plan=workshop.data.plan)
    job, path = job_of(workshop, "other", data=data)
    with pytest.raises(AssertionError):  # the worker's exit code
        fork_ranks("megatron_worker", "--once", str(path), num_ranks=1)
    end = read_log(job.log_path)[-1]
    assert isinstance(end, Failed)
    assert "num_experts=8" in end.message and "num_experts=4" in end.message
