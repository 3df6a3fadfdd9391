"""Machines of their own for tests: network namespaces with a link each to one switch, which can be cut.

A thread enters a namespace, and what it starts stays there; so all machines are in this process.
"""

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000


class Machines:
    """Namespaces by name. The n-th has the address 10.77.0.n."""

    def __init__(self, *names: str) -> None:
        self._prefix = f"longshore-{os.getpid()}-"
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}

    def make(self) -> None:
        ip("netns", "add", self._prefix + "switch")
        self._on("switch", "link", "add", "bridge", "type", "bridge")
        self._on("switch", "link", "set", "bridge", "up")
        for name, address in self.addresses.items():
            ip("netns", "add", self._prefix + name)
            peer = ("peer", "name", "eth0", "netns", self._prefix + name)
            self._on("switch", "link", "add", name, "type", "veth", *peer)
            self._on("switch", "link", "set", name, "master", "bridge", "up")
            self._on(name, "address", "add", f"{address}/24", "dev", "eth0")
            self._on(name, "link", "set", "eth0", "up")
            self._on(name, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in ("switch", *self.addresses):
            subprocess.run(["ip", "netns", "del", self._prefix + name], capture_output=True, check=False)

    def link(self, name: str, state: str) -> None:
        """Cut a machine's link (`down`), or mend it (`up`)."""
        self._on("switch", "link", "set", name, state)

    @contextmanager
    def flapping(self, name: str, down_s: float, up_s: float) -> Iterator[None]:
        """Lose what goes over a machine's link again and again: TCP sends it once more, later."""
        ended = threading.Event()

        def flap() -> None:
            while not ended.wait(up_s):
                self.link(name, "down")
                ended.wait(down_s)
                self.link(name, "up")

        thread = threading.Thread(target=flap, name="flapping")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def on(self, name: str, call: Callable[[], T]) -> T:
        """Do something on a machine, in a thread; what it starts is there too."""

        def there() -> T:
            with Path("/run/netns", self._prefix + name).open() as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0
            return call()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(there).result()

    def _on(self, name: str, *arguments: str) -> None:
        ip("-n", self._prefix + name, *arguments)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def made(*names: str) -> Iterator[Machines]:
    """Machines for a `with` block. Skips the test where there can be none."""
    machines = Machines(*names)
    try:
        try:
            machines.make()
        except FileNotFoundError as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces can be made here: {error.cmd}: {error.stderr.strip()}")
        yield machines
    finally:
        machines.remove()
