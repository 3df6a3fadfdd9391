"""Trainer and samplers on machines of their own."""

import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from megatron_worker.weight_sync import connections
from megatron_worker.weight_sync.connections import accept_remotely
from megatron_worker.weight_sync.transports import collective
from shared.jobs.job import SyncAccess
from tests.machines import made
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.weight_sync.samplers import KEY, listening
from tests.megatron_worker.weight_sync.test_kills import equal
from tests.megatron_worker.weight_sync.test_sync import STEPS, At, sync


def sampler_at(machines, name, model, folder, opened):
    folder.mkdir()
    host = machines.addresses[name]
    [one] = machines.on(name, lambda: opened.enter_context(listening(model, folder, 1)))
    return replace(one, address=machines.on(name, lambda: accept_remotely(host, KEY, one.models.receive)))


@pytest.fixture
def machines():
    with made("trainer", "first", "second", "stranger") as machines:
        yield machines


@pytest.fixture
def quick(monkeypatch):
    """A link is given up after seconds, a broadcast soon after it."""
    monkeypatch.setattr(connections, "_LINK_S", 6)
    monkeypatch.setattr(collective, "_BROADCAST_S", 10.0)


def test_weights_travel_between_machines_whatever_happens_to_a_link(model, tmp_path, machines, quick):
    driven = start("megatron", model, "full")
    with ExitStack() as opened:
        samplers = [sampler_at(machines, name, model, tmp_path / name, opened) for name in ("first", "second")]

        def synced(version, at=None):
            train(driven, [STEPS[version % len(STEPS)]], learning_rate=1e-3)
            return machines.on("trainer", lambda: sync(driven, None, samplers, version, "collective", phases=at))

        def cut():
            machines.link("first", "down")

        def cut_for_a_moment():
            cut()
            threading.Timer(1.0, machines.link, ("first", "up")).start()

        assert synced(1).problems == {}
        at = At("fill 3", cut_for_a_moment)
        assert synced(2, at).problems == {} and "fill 3" in at.seen
        assert all(equal(one, driven) for one in samplers), "what was lost on the way has come again"

        first, second = samplers
        lost = synced(3, At("fill 3", cut))
        assert list(lost.problems) == [first.path] and lost.digest is not None
        assert equal(second, driven)
        with first.models._syncing:  # its end of the sync is over
            assert first.models.cards().data == []

        machines.link("first", "up")
        assert synced(4).problems == {}
        assert all(equal(one, driven) for one in samplers)


def test_a_stranger_on_a_third_machine_is_refused(model, tmp_path, machines):
    driven = start("megatron", model, "full")
    with ExitStack() as opened:
        sampler = sampler_at(machines, "first", model, tmp_path / "first", opened)
        before = {name: tensor.clone() for name, tensor in sampler.tensors().items()}
        train(driven, STEPS[:1], learning_rate=1e-3)
        for access in (SyncAccess(), SyncAccess(secret="0" * 64)):
            refused = machines.on("stranger", lambda a=access: sync(driven, None, [sampler], 1, "collective", access=a))
            assert list(refused.problems) == [sampler.path] and refused.digest is None
            assert "no sampler listens" not in refused.problems[sampler.path], "it is reached, and refuses"
        assert all(torch.equal(sampler.tensors()[name], tensor) for name, tensor in before.items())
        assert machines.on("trainer", lambda: sync(driven, None, [sampler], 1, "collective")).problems == {}
        assert equal(sampler, driven)
