"""The main engine's training beside PEFT's and torch's, of a family's own tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.training import Lora
from megatron_worker.tensors.slot_engine import Engine
from tests.megatron_worker.driving import ADAM, LEARNING_RATE, train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import Row, bin_of, reference_steps
from tests.megatron_worker.scores import logprobs, transformers_model

# With an epsilon of 1e-8 an element whose first gradient is little more than rounding (an adapter of gemma4 has one of
# 7e-7, beside others of 2e-3) takes a whole step by the sign of that, which depends on the CPU.
_ADAM = ADAM.model_copy(update={"eps": 1e-5})


def train_beside_peft(driven: Engine, model: Path, lora: Lora, steps: Sequence[Sequence[Row]], folder: Path) -> Any:
    """Steps of an adapter, whose losses and norms are those of PEFT from the same one. Returns PEFT's model."""
    from peft import PeftModel

    driven.add_adapter("run", lora, seed=3)
    driven.save(folder)
    reference = PeftModel.from_pretrained(transformers_model(model), folder / "weights", is_trainable=True)
    expected = reference_steps(reference, steps, LEARNING_RATE, _ADAM.weight_decay, _ADAM.clip_norm, _ADAM.eps)
    history = train(driven, [[rows[:2], rows[2:]] for rows in steps], _ADAM)
    assert expected[-1][0] < expected[0][0]
    assert [loss for loss, _ in history] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [norm for _, norm in history] == pytest.approx([norm for _, norm in expected], rel=5e-4)
    return reference


def train_beside_torch(driven: Engine, model: Path, steps: Sequence[Sequence[Row]], folder: Path) -> Any:
    """Steps of all weights, whose losses are those of a plain torch loop, and which are read again as they were saved
    into `folder`. Returns torch's model."""
    reference = transformers_model(model)
    expected = reference_steps(reference, steps, 3e-4, ADAM.weight_decay, ADAM.clip_norm)
    history = train(driven, [[rows[:2], rows[2:]] for rows in steps], learning_rate=3e-4)
    assert expected[-1][0] < expected[0][0]
    assert [loss for loss, _ in history] == pytest.approx([loss for loss, _ in expected], rel=1e-4)
    driven.save(folder)
    again = start("megatron", folder / "weights")
    assert torch.equal(logprobs(again, bin_of(steps[0])), logprobs(driven, bin_of(steps[0])))
    return reference
