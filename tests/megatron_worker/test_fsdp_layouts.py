"""The FSDP engine: layouts give what one rank gives, dense models of any family are exact or refused by the probe."""

import functools
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from examples.tiny_model import make_tiny_model
from longshore.training import Layout, Lora
from megatron_worker.engine import Outputs
from megatron_worker.fsdp import adapter
from megatron_worker.fsdp import model as fsdp_model
from megatron_worker.fsdp.engine import FsdpEngine
from megatron_worker.fsdp.model import probe
from megatron_worker.fsdp.optimizer import Ranks
from megatron_worker.mixers.tree_attention import plan_forest
from shared.errors import InvalidInput
from shared.families.tensor_slices import TensorSlice
from tests.depth import drawn
from tests.megatron_worker.differences import furthest, tensors
from tests.megatron_worker.driving import ADAM, train
from tests.megatron_worker.engines import LORA, checkpoint_bytes, gradient, start
from tests.megatron_worker.launch import on_ranks
from tests.megatron_worker.rows import bin_of, distinct_model, empty_bin, model_with_tower, random_rows
from tests.megatron_worker.scores import logprobs
from tests.megatron_worker.test_engine_state import storages_alive
from tests.megatron_worker.trees import LOSS as TREE_LOSS
from tests.megatron_worker.trees import as_chains, as_one_sequence, as_tree, random_sequences
from tests.megatron_worker.unknown_models import COMPUTED, unknown_model

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [random_rows([40, 17, 90, 25, 60, 8, 33], seed=s % 3) for s in range(6)]
# Three bins a step, or two, or one: ranks have as many as others, or fewer, or none.
STEPS = [[r[:2], r[2:5], r[5:]] if s % 3 == 0 else [r[:3], r[3:]] if s % 3 == 1 else [r] for s, r in enumerate(ROWS)]
RATES = {"lora": 3e-3, "full": 3e-4}
# An epsilon above the rounding keeps a comparison of weights one of layouts.
STEADY = ADAM.model_copy(update={"eps": 1e-5})
SHARDED = [("qwen3", Layout(dp=2)), ("qwen3", Layout(dp=3))]  # three divides none of the model's sizes but one
SPLIT = [
    ("qwen3", Layout(tp=2, dp=2)),  # norms of heads
    ("qwen2", Layout(tp=2)),  # biases
    ("phi3", Layout(tp=2)),  # fused linears, whose outputs are gathered
    ("mistral3", Layout(tp=2)),  # a decoder within a model that reads images
    ("qwen3_moe", Layout(dp=3)),  # four experts: ranks have two, two and none
]
SHARDED, SPLIT = drawn(SHARDED, 1), drawn(SPLIT, 1)
Run = tuple[str, Layout]


def made(folder: Path, family: str) -> Path:
    if family == "mistral3":
        return model_with_tower(folder, "mistral")[1]
    return unknown_model(folder, family) if family in COMPUTED else distinct_model(folder, family, tied=False)


def run(model: Path, layout: Layout, out: Path) -> dict[str, Any]:
    """Three steps, a checkpoint, three more, another, of adapters and of all weights. By kind, what this rank knows."""
    found = {}
    for kind, rate in RATES.items():
        engine = start("fsdp", model, kind, layout=layout)
        history = train(engine, STEPS[:3], adam=STEADY, learning_rate=rate)
        engine.save(out / kind / "middle")
        history += train(engine, STEPS[3:], adam=STEADY, learning_rate=rate)
        engine.save(out / kind / "end")
        with torch.no_grad():
            scores = engine.forward(bin_of(STEPS[0][0]), Outputs(entropy=True))
        found[kind] = {
            "history": torch.tensor(history),
            "scores": torch.stack([scores.logprob_N, scores.entropy_N]),
            "greedy": engine.greedy([row.ids[:12] for row in STEPS[0][1]], 10, frozenset({7})),
            "weights": {name: float(w.double().sum()) for name, w in engine.named_weights()},
        }
    return found


def run_trees(model: Path, layout: Layout, trained: Path, out: Path) -> None:
    """The gradient of three trees, a tree a bin, which are dealt round the ranks."""
    engine = start("fsdp", model, layout=layout)
    engine.load_adapter("run", trained, LORA, trainable=True)
    trees = [as_tree(random_sequences(seed, num_groups=1)) for seed in range(3)]
    size, rank = engine.facts.dp_size, engine.facts.dp_rank
    for turn in range(0, len(trees), size):
        own = trees[turn:][rank : rank + 1]
        engine.forward_backward(own[0] if own else empty_bin(), TREE_LOSS)
    gradient(engine, out)


def go_on(model: Path, layout: Layout, checkpoint: Path, kind: str, out: Path) -> None:
    """The last three steps, from a checkpoint of any number of ranks."""
    engine = start("fsdp", model, kind, layout=layout)
    engine.load(checkpoint)
    train(engine, STEPS[3:], adam=STEADY, learning_rate=RATES[kind])
    engine.save(out)


def measure(model: Path, layout: Layout, out: Path, single: Path, is_sharded: bool) -> dict[str, Any]:
    found = run(model, layout, out)
    run_trees(model, layout, single / "lora" / "end" / "weights", out / "trees")
    for kind in RATES:
        go_on(model, layout, out / kind / "middle", kind, out / kind / "resumed")
        go_on(model, layout, single / kind / "middle", kind, out / kind / "from-single")
    if is_sharded:
        for kind in RATES:
            found[kind]["offload"] = offload(model, layout, kind)
        found["faults"] = run_mutated(model, layout, out)
        found["refused"] = refused(model, layout, single)
    return found


def offload(model: Path, layout: Layout, kind: str) -> tuple[int, int, bool]:
    """Bytes that live after an offload beside the declared host buffers, and on the device; whether bits come back."""
    before = storages_alive()
    engine = start("fsdp", model, kind, layout=layout)
    train(engine, STEPS[:1], learning_rate=RATES[kind])
    with torch.no_grad():
        expected = engine.forward(bin_of(ROWS[0]), Outputs()).logprob_N.clone()
    known = set(before) | {expected.untyped_storage().data_ptr()}
    engine.place("host")
    memory = engine.memory()
    undeclared, end = 1, time.monotonic() + 120
    while undeclared and time.monotonic() < end:  # gloo's threads let go of their last work soon after it is done
        alive = sum(size for address, size in storages_alive().items() if address not in known)
        undeclared = alive - memory.host_bytes
        time.sleep(0.05)
    engine.place("device")
    with torch.no_grad():
        same = torch.equal(engine.forward(bin_of(ROWS[0]), Outputs()).logprob_N, expected)
    return undeclared, memory.device_bytes, same


def mutated(owner: type, name: str, change: Callable[[Any], Any], run: Callable[[], None]) -> None:
    """Break one function of ours for a while: what a test must notice."""
    original = getattr(owner, name)
    setattr(owner, name, change(original))
    try:
        run()
    finally:
        setattr(owner, name, original)


def run_mutated(model: Path, layout: Layout, out: Path) -> dict[str, Tensor]:
    """Three steps under faults, each of which must show in the results: losses and norms, by fault."""
    found = {}

    def three(name: str, kind: str) -> Callable[[], None]:
        def run() -> None:
            engine = start("fsdp", model, kind, layout=layout)
            found[name] = torch.tensor(train(engine, STEPS[:3], learning_rate=RATES[kind]))
            engine.save(out / name / "middle")

        return run

    skip = lambda original: lambda self, t: original(self, t) if t.numel() < 8 else None  # noqa: E731
    average = lambda original: lambda self, t: (original(self, t), t.div_(self.size))[0]  # noqa: E731
    local = lambda original: lambda self, t: original(self, t) if t.dim() else None  # noqa: E731
    mutated(Ranks, "sum", skip, three("lora-skip-sum", "lora"))
    mutated(Ranks, "sum", average, three("lora-average", "lora"))
    mutated(Ranks, "sum", local, three("full-local-norm", "full"))
    mutated(FSDPModule, "set_gradient_divide_factor", lambda _: lambda self, f: None, three("full-average", "full"))

    def own(original: Any) -> Any:
        def whole(self: Ranks, tensor_slice: TensorSlice, shards: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
            name = tensor_slice.name
            return original(self, tensor_slice, {name: torch.zeros_like(shards[name])} if self.rank else shards, dtype)

        return whole

    mutated(Ranks, "whole", own, three("full-drop-shard", "full"))
    return found


def refused(model: Path, layout: Layout, single: Path) -> list[str]:
    """What a rank says of a damaged adapter, which only rank 0 meets, and of a folder that cannot be written."""
    engine, said = start("fsdp", model, layout=layout), ["accepted", "saved"]
    whole = single / "lora" / "end" / "weights"
    try:
        engine.load_adapter("bad", single / "damaged" if engine.facts.rank == 0 else whole, LORA, trainable=True)
    except InvalidInput as error:
        said[0] = str(error)
    engine.load_adapter("good", whole, LORA, trainable=True)
    try:
        engine.save(model / "config.json")  # a file where the folder should be
    except OSError as error:
        said[1] = str(error.strerror)
    return said


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of a run: what one rank found, what each of several did, and the folders of both."""

    @functools.cache
    def single(family: str) -> tuple[Path, dict[str, Any], Path]:
        out = tmp_path_factory.mktemp(family)
        model = made(out / "model", family)
        found = run(model, Layout(), out)
        run_trees(model, Layout(), out / "lora" / "end" / "weights", out / "trees")
        damaged = Path(shutil.copytree(out / "lora" / "end" / "weights", out / "damaged")) / "adapter_model.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-100])
        return model, found, out

    @functools.cache
    def of(asked: Run) -> tuple[dict[str, Any], list[dict[str, Any]], Path, Path]:
        (family, layout), out = asked, tmp_path_factory.mktemp("ranks")
        model, expected, one = single(family)
        found = on_ranks(layout.world_size, measure, model, layout, out, one, asked in SHARDED, timeout_s=500)
        for kind in RATES:
            go_on(model, Layout(), out / kind / "middle", kind, out / kind / "to-single")
        return expected, found, out, one

    return of


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("asked", [*SHARDED, *SPLIT], ids=lambda run: f"{run[0]}-{run[1].label}")
class TestAgainstOneRank:
    def test_losses_scores_greedy_tokens_and_named_weights_on_every_rank(self, results, asked, kind):
        expected, found, *_ = results(asked)
        assert len(found) == asked[1].world_size
        for rank in found:
            torch.testing.assert_close(rank[kind]["history"], expected[kind]["history"], rtol=1e-5, atol=0)
            torch.testing.assert_close(rank[kind]["scores"], expected[kind]["scores"], rtol=0, atol=1e-5)
            assert rank[kind]["greedy"] == expected[kind]["greedy"]
            assert rank[kind]["weights"] == pytest.approx(expected[kind]["weights"], rel=1e-5, abs=1e-4)

    def test_weights_and_moments_also_from_the_other_s_checkpoint(self, results, asked, kind):
        *_, ours, theirs = results(asked)
        assert furthest(ours / kind / "middle", theirs / kind / "middle") <= 1e-5
        for name in ("end", "from-single", "to-single"):
            assert furthest(ours / kind / name, theirs / kind / "end") <= 1e-5

    def test_as_many_ranks_resume_to_the_bit(self, results, asked, kind):
        *_, ours, _ = results(asked)
        assert checkpoint_bytes(ours / kind / "end") == checkpoint_bytes(ours / kind / "resumed")

    def test_gradients_of_trees(self, results, asked, kind):
        *_, ours, theirs = results(asked)
        largest = max(float(t.abs().max()) for t in tensors(theirs / "trees" / "optimizer").values())
        assert furthest(ours / "trees" / "optimizer", theirs / "trees" / "optimizer") <= 1e-5 * max(1.0, largest)


@pytest.mark.parametrize("asked", SHARDED, ids=lambda run: run[1].label)
class TestShards:
    def test_offload_leaves_declared_host_buffers_and_every_bit(self, results, asked):
        _, found, *_ = results(asked)
        assert all(rank[kind]["offload"] == (0, 0, True) for rank in found for kind in RATES)

    def test_every_rank_hears_what_one_cannot_read_or_write(self, results, asked):
        _, found, *_ = results(asked)
        for rank in found:
            damaged, unsaved = rank["refused"]
            assert "damaged or truncated" in damaged and unsaved == "Not a directory"

    @pytest.mark.parametrize(
        "fault", ["lora-skip-sum", "lora-average", "full-local-norm", "full-average", "full-drop-shard"]
    )
    def test_a_fault_shows(self, results, asked, fault):
        """The comparisons above would fail under each of these."""
        (expected, found, ours, theirs), kind = results(asked), fault.split("-")[0]
        if fault == "full-drop-shard":
            assert furthest(ours / fault / "middle", theirs / kind / "middle") > 1e-3
            return
        for rank in found:
            assert not torch.allclose(rank["faults"][fault], expected[kind]["history"][:3], rtol=1e-4, atol=0)


def train_head(model: Path, layout: Layout, out: Path) -> Tensor:
    """Three steps of an adapter of output layer, embeddings and one linear: losses and norms."""
    engine = start("fsdp", model, layout=layout)
    engine.add_adapter("run", Lora(rank=4, alpha=8, targets=("q_proj", "lm_head", "embed_tokens")), seed=3)
    history = train(engine, STEPS[:3])
    engine.save(out / "end")
    return torch.tensor(history)


@pytest.mark.parametrize("num_ranks", drawn([2, 4], 1))
def test_an_adapter_of_the_output_layer_counts_once_on_tensor_parallel_ranks(tmp_path, num_ranks):
    model = distinct_model(tmp_path / "model", tied=False)
    expected = train_head(model, Layout(), tmp_path / "single")
    for history in on_ranks(num_ranks, train_head, model, Layout(tp=2, dp=num_ranks // 2), tmp_path / "ranks"):
        torch.testing.assert_close(history, expected, rtol=1e-5, atol=0)
    assert furthest(tmp_path / "ranks" / "end", tmp_path / "single" / "end") <= 1e-5


# What is refused.


def refusal(model: Path) -> str:
    try:
        start("fsdp", model, layout=Layout(tp=2, dp=dist.get_world_size() // 2))
    except InvalidInput as error:
        return str(error)
    return "accepted"


def test_a_model_without_a_plan_and_sizes_that_do_not_split_are_refused(tmp_path):
    """Every rank is told the rule."""
    folder = unknown_model(tmp_path / "stablelm", "stablelm")
    assert all("no `tp_plan`" in said for said in on_ranks(2, refusal, folder))
    odd = unknown_model(tmp_path / "granite", "granite", intermediate_size=190)
    rule = "tp * dp = 4 does not divide the 190 of model.layers.0.mlp.gate_proj.weight that are split"
    assert all(rule in said for said in on_ranks(4, refusal, odd))


def test_a_layout_of_pipeline_stages_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"by tp alone.*pp2"):
        start("fsdp", distinct_model(tmp_path), layout=Layout(pp=2))


def test_a_family_of_recurrent_layers_is_refused(tmp_path):
    folder = make_tiny_model(tmp_path, ["hello there"], family="qwen3_5")
    with pytest.raises(InvalidInput, match="fsdp does not train qwen3_5: use megatron"):
        start("fsdp", folder)


# Experts.


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", tied=False)


@pytest.mark.parametrize(("kind", "rate"), drawn([("lora", 3e-3), ("full", 3e-4)], 1))
def test_a_mixture_is_trained_as_by_the_other_engine(mixture, tmp_path, kind, rate):
    engines = {name: start(name, mixture, kind) for name in ("fsdp", "megatron")}
    for batch in (bin_of(STEPS[0][1]), as_tree(random_sequences(1))):
        ours, theirs = (logprobs(engine, batch) for engine in engines.values())
        assert (ours - theirs).abs().max() <= 1e-5
    steps = [[rows[:2], rows[2:6]] for rows in ROWS[:5]]
    ours, theirs = (train(engine, steps, adam=STEADY, learning_rate=rate) for engine in engines.values())
    for step, other in zip(ours, theirs, strict=True):
        assert step == pytest.approx(other, rel=1e-5)
    for name, engine in engines.items():
        engine.save(tmp_path / name)
    assert furthest(tmp_path / "fsdp", tmp_path / "megatron") <= 1e-5
    engines["fsdp"].load(tmp_path / "megatron")
    engines["megatron"].load(tmp_path / "fsdp")


def test_experts_of_swapped_halves_show(mixture, monkeypatch):
    """The comparison above would fail."""
    expected = logprobs(start("megatron", mixture), bin_of(STEPS[0][1]))
    monkeypatch.setitem(adapter._PARTS, "gate_up_proj", ("up_proj", "gate_proj"))
    assert (logprobs(start("fsdp", mixture), bin_of(STEPS[0][1])) - expected).abs().max() > 1e-3


@pytest.fixture(scope="module", params=drawn([*COMPUTED], 2))
def unknown(request, tmp_path_factory):
    return unknown_model(tmp_path_factory.mktemp(request.param), request.param)


def test_a_bfloat16_model_passes_well_within_its_bound(unknown):
    driven = FsdpEngine(unknown, Layout(), "bfloat16")
    assert probe(driven._model) > 1e-4  # nats: it is not the float32 one
    assert driven._model.dtype == torch.bfloat16


# What is refused.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parents", [as_one_sequence, as_chains])
def test_attention_that_is_not_the_bin_s_is_refused_with_the_numbers(tmp_path, monkeypatch, parents, dtype):
    def planned(parent_T, dtype, window):
        return plan_forest(parents(parent_T), dtype, window=window)

    monkeypatch.setattr(fsdp_model, "plan_forest", planned)
    rule = r"olmo2 cannot be trained by .* differ from those of transformers' model of each alone .* nats, and .* is"
    with pytest.raises(InvalidInput, match=rule):
        FsdpEngine(unknown_model(tmp_path, "olmo2"), Layout(), dtype)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        (
            "recurrent_gemma",
            {"block_types": ["recurrent", "attention"], "lru_width": 64},
            "of packed sequences differ .* by .* nats",
        ),
        ("mamba", {}, "attends by transformers' attention interface"),
        ("gemma2", {}, "its attention takes softcap"),
        ("granite_swa", {}, "its attention takes s_aux"),
        ("phi", {}, "of packed sequences differ"),
        ("olmo2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "longest sequence"),
        ("bloom", {}, "its config.json has no"),
        ("olmoe", {"num_experts": 4}, "it has experts; the nearest is qwen3_moe"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, family, settings, words):
    folder = unknown_model(tmp_path, family, **settings)
    with pytest.raises(InvalidInput, match=f"{family}.*{words}"):
        FsdpEngine(folder, Layout(), "float32")


def test_layers_that_attend_within_chunks_are_refused(tmp_path, monkeypatch):
    from transformers import masking_utils
    from transformers.models.olmo2 import modeling_olmo2

    def chunked(config, **given):
        config.attention_chunk_size = 8
        return masking_utils.create_chunked_causal_mask(config, **given)

    monkeypatch.setattr(modeling_olmo2, "create_causal_mask", chunked)
    with pytest.raises(InvalidInput, match=r"olmo2 .* attend to other tokens than those before"):
        FsdpEngine(unknown_model(tmp_path, "olmo2"), Layout(), "float32")


def test_a_family_that_transformers_has_not_is_refused(tmp_path):
    folder = unknown_model(tmp_path, "olmo2")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"olmo2"', '"nobody"'))
    with pytest.raises(InvalidInput, match=r"nobody cannot be trained by the engine fsdp"):
        FsdpEngine(folder, Layout(), "float32")


def test_the_megatron_engine_takes_none_of_them(tmp_path):
    with pytest.raises(InvalidInput, match=r"'stablelm' is not a known family: .*fsdp"):
        start("megatron", unknown_model(tmp_path, "stablelm"))
