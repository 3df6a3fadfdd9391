"""Heads of scalars: their values, gradients and steps beside transformers' classifiers under PEFT, and their files."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longshore.training import EngineName, Full, Lora
from megatron_worker.engine import Outputs
from megatron_worker.losses import loss_function
from shared.models.peft import read_config
from tests.depth import drawn
from tests.megatron_worker.engines import ENGINES, gradient, start
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.scored_rows import (
    HEADS,
    LOSSES,
    adamw,
    bins_of_steps,
    lora,
    loss_of,
    reference_step,
    reference_values,
    scored_bin,
    scored_rows,
    step,
    total_weight,
    transformers_head,
    values,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: list[tuple[EngineName, str, str]] = [
    *((engine, "qwen3", per) for engine in ENGINES for per in LOSSES),
    ("megatron", "gpt_oss", "token"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Path]:
    @functools.cache
    def made(family: str) -> Path:
        return distinct_model(tmp_path_factory.mktemp(family), family, tied=False)

    return made


@pytest.mark.parametrize(("engine", "family", "per"), drawn(CASES, 2))
def test_an_adapter_with_a_head_is_trained_as_under_peft(models, tmp_path, engine, family, per) -> None:
    model, steps = models(family), bins_of_steps(per)
    driven = start(engine, model)
    driven.add_adapter("run", lora(per), seed=3)
    driven.save(tmp_path / "fresh")
    reference = transformers_head(model, per, tmp_path / "fresh" / "weights")
    optimizer = adamw(reference, 3e-3)
    rows = scored_rows(per, [17, 30, 5], seed=99)

    def compare() -> None:
        expected_NL = reference_values(reference, per, rows).detach()
        assert expected_NL.abs().max() > 0.1
        torch.testing.assert_close(values(driven, scored_bin(per, rows)), expected_NL, atol=1e-5, rtol=1e-5)

    compare()
    for number, bins in enumerate(steps):
        found = step(driven, per, bins, 3e-3)
        expected = reference_step(reference, optimizer, per, [r for each in bins for r in each])
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), number
    compare()


@pytest.mark.parametrize(("engine", "family", "per"), drawn(CASES, 2))
def test_all_weights_with_a_head_are_trained_as_in_transformers(models, tmp_path, engine, family, per) -> None:
    model, steps, rows = models(family), bins_of_steps(per), scored_rows(per, [17, 30, 5], seed=99)
    driven = start(engine, model)
    driven.train_full(Full(head=HEADS[per]), seed=3)
    driven.save(tmp_path / "fresh")
    reference = transformers_head(tmp_path / "fresh" / "weights", per)
    assert reference.config.id2label == dict(enumerate(HEADS[per].names))
    optimizer = adamw(reference, 3e-4)
    for number, bins in enumerate(steps):
        found = step(driven, per, bins, 3e-4)
        expected = reference_step(reference, optimizer, per, [r for each in bins for r in each])
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), number
    expected_NL, found_NL = reference_values(reference, per, rows).detach(), values(driven, scored_bin(per, rows))
    torch.testing.assert_close(found_NL, expected_NL, atol=1e-5, rtol=1e-5)
    driven.save(tmp_path / "end")
    again, names = transformers_head(tmp_path / "end" / "weights", per), set()
    for name, tensor in load_file(tmp_path / "end" / "weights" / "model.safetensors").items():
        names.add(name)
        torch.testing.assert_close(tensor, reference.state_dict()[name], atol=1e-5, rtol=1e-5)
    assert "lm_head.weight" not in names and "score.weight" in names
    torch.testing.assert_close(reference_values(again, per, rows).detach(), found_NL, atol=1e-5, rtol=1e-5)
    driven.drop_slot(None)
    driven.train_full(Full())  # the base is as it was published, and has its language head again
    assert driven.forward(scored_bin(per, rows), Outputs()).logprob_N is not None


@pytest.mark.parametrize(("engine", "family", "per"), drawn(CASES, 2))
def test_gradients_are_those_under_peft(models, tmp_path, engine, family, per) -> None:
    model, rows = models(family), scored_rows(per, [20, 31, 12], seed=0)
    driven = start(engine, model)
    driven.add_adapter("run", lora(per), seed=3)
    step(driven, per, [rows], 3e-3)  # B is zero before
    driven.save(tmp_path / "fresh")
    reference = transformers_head(model, per, tmp_path / "fresh" / "weights")
    driven.reset_moments()
    driven.forward_backward(scored_bin(per, rows), loss_function(LOSSES[per]))
    found = gradient(driven, tmp_path / "gradient", total_weight(per, rows))
    loss_of(reference, per, rows).backward()
    expected = {saved_name(name): p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() and any(name.endswith("score.weight") for name in found)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5 * float(tensor.abs().max()), rtol=1e-5, msg=name)


def saved_name(name: str) -> str:
    """Of a parameter in PEFT's model, in its file."""
    return name.replace(".default.", ".").replace(".modules_to_save", "").replace(".default", "")


@pytest.mark.parametrize("per", LOSSES)
def test_what_peft_saves_is_read_with_equal_values(models, tmp_path, per) -> None:
    """Its head's names are numbers, which those that are asked for replace."""
    from peft import LoraConfig, get_peft_model

    task, num = {"token": ("TOKEN_CLS", 1), "sequence": ("SEQ_CLS", 3)}[per]
    reference = transformers_head(models("qwen3"), per, None, num)
    theirs = get_peft_model(reference, LoraConfig(task_type=task, r=4, lora_alpha=8, target_modules=LINEARS))
    with torch.no_grad():
        for parameter in (p for p in theirs.parameters() if p.requires_grad):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    theirs.save_pretrained(tmp_path)
    rows = scored_rows(per, [17, 30, 5], seed=99)
    expected_NL = reference_values(theirs.eval(), per, rows).detach()
    for engine in ENGINES:
        driven = start(engine, models("qwen3"))
        driven.load_adapter("frozen", tmp_path, None, trainable=False)
        torch.testing.assert_close(values(driven, scored_bin(per, rows)), expected_NL, atol=1e-5, rtol=1e-5)
        driven.load_adapter("own", tmp_path, lora(per), trainable=True)
        driven.save(tmp_path / engine)
        assert read_config(tmp_path / engine / "weights", may_have_head=True).head == HEADS[per]
        ours, saved = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / engine / "weights", tmp_path))
        assert ours.keys() == saved.keys() and all(torch.equal(ours[name], saved[name]) for name in ours)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_of_a_slot_count_its_head(models, engine, dtype) -> None:
    driven = start(engine, models("qwen3"), dtype=dtype)
    for trainable in (lora("sequence"), Full(head=HEADS["token"])):
        plain, counted = (driven.slot_bytes(t) for t in (trainable.model_copy(update={"head": None}), trainable))
        assert all(counted[part] > plain[part] for part in counted)
        before = driven.memory().parts
        driven.add_adapter("run", trainable, 3) if isinstance(trainable, Lora) else driven.train_full(trainable, 3)
        grown = {p: n.device - (before[p].device if p in before else 0) for p, n in driven.memory().parts.items()}
        assert grown == counted, trainable.kind
        driven.place("host")
        driven.place("device")
        driven.drop_slot(None if trainable.kind == "full" else "run")
        driven.place("device", slots=[None])
