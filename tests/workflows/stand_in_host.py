"""A gpu host in a process of its own, with stand-in workers."""

import asyncio
import os
import signal
import sys

from service.host import serve_host
from shared.settings import Settings
from tests.workflows.stand_in import StandInCommand


async def _serve(step_s: float) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await serve_host("gpu", Settings(), stopped, StandInCommand(step_s), tuple)


def main() -> None:
    """With the seconds that a worker's step takes as the one argument."""
    asyncio.run(_serve(float(sys.argv[0])))
    os._exit(0)  # as service/host.py: the SDK's threads may hang in an interpreter that is being taken down
