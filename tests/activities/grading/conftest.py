"""The sandbox of untrusted code, in which nobody may be left."""

from collections.abc import Iterator

import psutil
import pytest

from activities.sandbox.calls import CODE, Server
from tests.waiting import wait_until


@pytest.fixture
def server() -> Iterator[Server]:
    """This process's server of untrusted code: nobody works for it when the test ends."""
    yield CODE
    assert CODE._process is not None
    [launcher] = [psutil.Process(CODE._process.pid)]
    wait_until(lambda: len(launcher.children(recursive=True)) <= 1, "no child is left")
