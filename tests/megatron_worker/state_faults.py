"""Faults of recurrent layers: states, or what a convolution looks back on, leak into a sequence or are lost to it."""

import dataclasses
from collections.abc import Callable

import pytest
from torch import Tensor

from megatron_worker.megatron import attention
from megatron_worker.mixers.linear_attention import RecurrentPlan, plan_recurrence
from megatron_worker.tensors.slot_engine import Engine
from tests.megatron_worker.scores import logprobs
from tests.megatron_worker.trees import as_chains, as_one_sequence, as_tree, random_sequences

STATE_FAULTS: dict[str, Callable[[RecurrentPlan, Tensor], RecurrentPlan]] = {
    "the state is not reset": lambda plan, parent_T: dataclasses.replace(
        plan_recurrence(as_one_sequence(parent_T), 4), ancestor_WT=plan.ancestor_WT
    ),
    "a branch starts from zeros": lambda plan, parent_T: dataclasses.replace(
        plan_recurrence(as_chains(parent_T), 4), ancestor_WT=plan.ancestor_WT
    ),
    "the convolution is not reset": lambda plan, parent_T: dataclasses.replace(
        plan, ancestor_WT=plan_recurrence(as_one_sequence(parent_T), 4).ancestor_WT
    ),
    "the convolution of a branch starts from zeros": lambda plan, parent_T: dataclasses.replace(
        plan, ancestor_WT=plan_recurrence(as_chains(parent_T), 4).ancestor_WT
    ),
}


def changed_by(driven: Engine, monkeypatch: pytest.MonkeyPatch, fault: str) -> float:
    """How far a tree's log-probabilities are off, at most, under a fault."""
    tree = as_tree(random_sequences(3))
    expected = logprobs(driven, tree)
    monkeypatch.setattr(
        attention,
        "plan_recurrence",
        lambda parent_T, width: STATE_FAULTS[fault](plan_recurrence(parent_T, width), parent_T),
    )
    return float((logprobs(driven, tree) - expected).abs().max())
