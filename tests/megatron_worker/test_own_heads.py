"""Heads of one's own on a TrainerRank: trained with a slot as torch trains both, saved and read with it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longshore.layout import Layout
from megatron_worker.trainer_rank import TrainerRank, train_head
from shared.errors import InvalidInput
from tests.megatron_worker import differences
from tests.megatron_worker.engines import ENGINES, checkpoint_bytes
from tests.megatron_worker.own_head_ranks import ADAM, LORA, STEPS, Trial, TwoLayers, loss_of, measure, train
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.scores import transformers_model
from tests.megatron_worker.trials import run_trials

pytestmark = pytest.mark.usefixtures("one_thread")
LAYOUTS = [
    *(("megatron", Layout(**each)) for each in ({"tp": 2, "sp": True}, {"cp": 2}, {"dp": 2})),
    *(("fsdp", Layout(**each)) for each in ({"dp": 2}, {"tp": 2})),
]


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
    run_trials("own_head_ranks", tmp_path, trials, num_ranks=2, timeout_s=400)
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
