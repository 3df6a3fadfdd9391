"""Trainer and samplers on machines of their own: network namespaces with a link each to one switch, which can be cut.

A thread enters a namespace, and what it starts stays there; so all machines are in this process.
"""

import ctypes
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_worker.weight_sync import connections
from megatron_worker.weight_sync.connections import accept_remotely
from megatron_worker.weight_sync.transports import collective
from shared.jobs.weight_sync import SyncAccess
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.weight_sync.samplers import KEY, listening
from tests.megatron_worker.weight_sync.test_kills import equal
from tests.megatron_worker.weight_sync.test_sync import STEPS, At, sync

_CLONE_NEWNET = 0x40000000


class Machines:
    """Namespaces by name. The n-th has the address 10.77.0.n."""

    def __init__(self, *names):
        self._prefix = f"longshore-{os.getpid()}-"
        self._addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}

    def make(self):
        ip("netns", "add", self._prefix + "switch")
        self._on("switch", "link", "add", "bridge", "type", "bridge")
        self._on("switch", "link", "set", "bridge", "up")
        for name, address in self._addresses.items():
            ip("netns", "add", self._prefix + name)
            peer = ("peer", "name", "eth0", "netns", self._prefix + name)
            self._on("switch", "link", "add", name, "type", "veth", *peer)
            self._on("switch", "link", "set", name, "master", "bridge", "up")
            self._on(name, "address", "add", f"{address}/24", "dev", "eth0")
            self._on(name, "link", "set", "eth0", "up")
            self._on(name, "link", "set", "lo", "up")

    def remove(self):
        for name in ("switch", *self._addresses):
            subprocess.run(["ip", "netns", "del", self._prefix + name], capture_output=True, check=False)

    def link(self, name, state):
        """Cut a machine's link (`down`), or mend it (`up`)."""
        self._on("switch", "link", "set", name, state)

    def on(self, name, call):
        """Do something on a machine, in a thread; what it starts is there too."""

        def there():
            with Path("/run/netns", self._prefix + name).open() as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0
            return call()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(there).result()

    def sampler(self, name, model, folder, opened):
        folder.mkdir()
        host = self._addresses[name]
        [one] = self.on(name, lambda: opened.enter_context(listening(model, folder, 1)))
        return replace(one, address=self.on(name, lambda: accept_remotely(host, KEY, one.models.receive)))

    def _on(self, name, *arguments):
        ip("-n", self._prefix + name, *arguments)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def machines():
    made = Machines("trainer", "first", "second", "stranger")
    try:
        made.make()
        yield made
    except FileNotFoundError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces can be made here: {error.cmd}: {error.stderr.strip()}")
    finally:
        made.remove()


@pytest.fixture
def quick(monkeypatch):
    """A link is given up after seconds, a broadcast soon after it."""
    monkeypatch.setattr(connections, "_LINK_S", 6)
    monkeypatch.setattr(collective, "_BROADCAST_S", 10.0)


def test_weights_travel_between_machines_whatever_happens_to_a_link(model, tmp_path, machines, quick):
    driven = start("megatron", model, "full")
    with ExitStack() as opened:
        samplers = [machines.sampler(name, model, tmp_path / name, opened) for name in ("first", "second")]

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
        sampler = machines.sampler("first", model, tmp_path / "first", opened)
        before = {name: tensor.clone() for name, tensor in sampler.tensors().items()}
        train(driven, STEPS[:1], learning_rate=1e-3)
        for access in (SyncAccess(), SyncAccess(secret="0" * 64)):
            refused = machines.on("stranger", lambda a=access: sync(driven, None, [sampler], 1, "collective", access=a))
            assert list(refused.problems) == [sampler.path] and refused.digest is None
            assert "no sampler listens" not in refused.problems[sampler.path], "it is reached, and refuses"
        assert all(torch.equal(sampler.tensors()[name], tensor) for name, tensor in before.items())
        assert machines.on("trainer", lambda: sync(driven, None, [sampler], 1, "collective")).problems == {}
        assert equal(sampler, driven)
