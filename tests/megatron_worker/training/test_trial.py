"""A tiny pass on a device that computes, and on one that does not."""

import torch

from megatron_worker.training import trial


def test_a_device_that_fails_is_named_with_its_error() -> None:
    assert trial._tried(torch.device("cpu")) is None
    told = trial._tried(torch.device("meta"))
    assert told is not None and told.startswith("meta fails at a tiny pass: ")


def test_a_device_that_computes_wrongly_is_named(monkeypatch) -> None:
    exact = torch.Tensor.square
    monkeypatch.setattr(torch.Tensor, "square", lambda given: exact(given) + given)
    assert trial._tried(torch.device("cpu")) == "cpu computes a tiny pass wrongly"


def test_packages_that_do_not_load_are_told(monkeypatch) -> None:
    monkeypatch.setattr(trial, "_MODULES", {"gpu": ("no_such_module",)})
    assert trial.lacks("gpu") == ["its packages do not load: No module named 'no_such_module'"]
