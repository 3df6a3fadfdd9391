"""Heads of one's own on a TrainerRank: trained with a slot as torch trains both, saved and read with it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longshore.training import Adam, EngineName, Layout, Lora
from megatron_worker.trainer_rank import ForwardInput, TrainerRank, train_head
from shared.errors import InvalidInput
from tests.megatron_worker import differences
from tests.megatron_worker.engines import ENGINES, checkpoint_bytes
from tests.megatron_worker.launch import in_turn, on_ranks
from tests.megatron_worker.rows import distinct_model, random_rows
from tests.megatron_worker.scores import transformers_model

pytestmark = pytest.mark.usefixtures("one_thread")
LORA = Lora(rank=4, alpha=8)
ADAM = Adam(weight_decay=0.01, clip_norm=1.0, eps=1e-5)
STEPS = [[row.ids for row in random_rows([20, 31, 12, 25], seed=seed)] for seed in range(4)]
LAYOUTS = [
    *(("megatron", Layout(**each)) for each in ({"tp": 2, "sp": True}, {"cp": 2}, {"dp": 2})),
    *(("fsdp", Layout(**each)) for each in ({"dp": 2}, {"tp": 2})),
]


class TwoLayers(torch.nn.Module):
    """A head of one's own: two numbers a token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.down, self.out = torch.nn.Linear(hidden_size, 8), torch.nn.Linear(8, 2, bias=False)
        self.num_steps: Tensor
        self.register_buffer("num_steps", torch.tensor(0))

    def scores(self, hidden_NH: Tensor) -> dict[str, Tensor]:
        return dict(zip(("mean", "spread"), self.out(self.down(hidden_NH).tanh()).unbind(-1), strict=True))


@dataclass(frozen=True)
class Trial:
    model: Path
    engine: EngineName
    single: Path
    layout: Layout = field(default_factory=Layout)

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.layout.label}"


def loss_of(found: dict[str, Tensor]) -> Tensor:
    """Of one sequence: a number for each place, which is of no row's own."""
    target_P = torch.arange(len(found["mean"])).sin()
    return (found["mean"] - target_P).square().sum() + found["spread"].exp().sum()


def train(rank: TrainerRank, head: TwoLayers, first: int, end: int, name: str | None = "critic") -> list[float]:
    """Steps of the rows that are this rank's. Returns the norms."""
    norms = []
    for rows in STEPS[first:end]:
        own = rows[rank.facts.dp_rank :: rank.facts.dp_size]
        found = rank.forward([ForwardInput(ids, hidden=True, adapter=name) for ids in own])
        rank.backward(torch.stack([loss_of(head.scores(each.hidden_PH)) for each in found]).sum())
        norms.append(rank.optim_step(ADAM, 3e-3, float(len(rows)), [name])[name].grad_norm)
        head.num_steps += 1
    return norms


def measure(trial: Trial, out: Path) -> None:
    rank = TrainerRank(ENGINES[trial.engine](trial.model, trial.layout, "float32"))
    rank.create_adapter("critic", LORA, seed=3)
    head = TwoLayers(rank.facts.hidden_size)
    train_head(rank, "critic", head)
    norms = train(rank, head, 0, 2)
    rank.save("critic", out / "middle")
    norms += train(rank, head, 2, 4)
    rank.save("critic", out / "end")
    for name, begin in (("again", out), ("from-single", trial.single)):
        rank.load("critic", begin / "middle")
        norms += train(rank, head, 2, 4)
        rank.save("critic", out / name)
    (out / f"noted-{rank.facts.rank}.json").write_text(json.dumps(norms))
    if rank.facts.rank == 0:
        save_file({name: p.detach().clone() for name, p in head.named_parameters()}, out / "head.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return distinct_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["critic", None])
def test_it_steps_with_its_slot_as_in_torch(model, tmp_path, engine, name) -> None:
    from peft import PeftModel

    rank = TrainerRank(ENGINES[engine](model, Layout(), "float32"))
    rank.create_adapter("critic", LORA, seed=3) if name else rank.train_base()
    rank.export(name, tmp_path)
    head, theirs = TwoLayers(64), TwoLayers(64)
    train_head(rank, name, head)
    reference = PeftModel.from_pretrained(transformers_model(model), tmp_path, is_trainable=True) if name else None
    reference = reference or transformers_model(tmp_path)
    backbone = reference.base_model.model.model if name else reference.model
    trained = [p for p in (*reference.parameters(), *theirs.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=ADAM.weight_decay, eps=ADAM.eps)
    norms = []
    for rows in STEPS:
        for ids in rows:
            hidden_PH = backbone(input_ids=torch.tensor([ids])).last_hidden_state[0]
            (loss_of(theirs.scores(hidden_PH)) / len(rows)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, ADAM.clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
    assert train(rank, head, 0, len(STEPS), name) == pytest.approx(norms, rel=1e-4)
    for ours, other in zip(head.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)
    assert not torch.equal(head.out.weight, TwoLayers(64).out.weight)


def test_layouts_and_files(model, tmp_path) -> None:
    singles = {engine: tmp_path / f"{engine}-{Layout().label}" for engine in ENGINES}
    for engine, single in singles.items():
        single.mkdir()
        measure(Trial(model=model, engine=engine, single=single), single)
    trials = [Trial(model=model, engine=engine, layout=each, single=singles[engine]) for engine, each in LAYOUTS]
    for trial in trials:
        (tmp_path / trial.name).mkdir()
    on_ranks(2, in_turn, measure, [(trial, tmp_path / trial.name) for trial in trials], timeout_s=400)
    assert differences.furthest(singles["fsdp"] / "end", singles["megatron"] / "end") < 1e-5
    for trial in [*(Trial(model=model, engine=e, single=s) for e, s in singles.items()), *trials]:
        out = tmp_path / trial.name
        assert checkpoint_bytes(out / "again") == checkpoint_bytes(out / "end"), trial.name
        noted, (expected,) = (differences.notes(each, "noted") for each in (out, trial.single))
        assert all(rank == pytest.approx(expected, rel=1e-4) for rank in noted), trial.name
        for name in ("end", "from-single"):
            assert differences.furthest(out / name, trial.single / "end") < 1e-5, (trial.name, name)
        saved = load_file(out / "from-single" / "optimizer" / "optimizer.safetensors")
        head = load_file(out / "head.safetensors")
        assert int(saved["buffer.num_steps"]) == 4, trial.name
        assert len(head) == 3 and all(torch.equal(saved[f"master.own.{each}"], head[each]) for each in head)
    config = json.loads((tmp_path / "megatron-dp2" / "end" / "weights" / "adapter_config.json").read_text())
    assert config["task_type"] == "CAUSAL_LM", "the adapter's folder is PEFT's, whatever stands on its hidden states"


def test_what_is_not_there_is_refused(model, tmp_path) -> None:
    rank = TrainerRank(ENGINES["megatron"](model, Layout(), "float32"))
    with pytest.raises(InvalidInput, match="is not trained"):
        train_head(rank, None, TwoLayers(64))
    with pytest.raises(InvalidInput, match="is not trained"):
        train_head(rank, "critic", TwoLayers(64))
    rank.create_adapter("critic", LORA, seed=3)
    rank.save("critic", tmp_path / "alone")
    train_head(rank, "critic", TwoLayers(64))
    with pytest.raises(InvalidInput, match="tensors are missing"):
        rank.load("critic", tmp_path / "alone")
    rank.save("critic", tmp_path / "both")
    other = TwoLayers(64)
    other.register_buffer("num_steps", torch.zeros(2))
    train_head(rank, "critic", other)
    with pytest.raises(InvalidInput, match=r"'num_steps' has shape \(\), expected \(2,\)"):
        rank.load("critic", tmp_path / "both")
