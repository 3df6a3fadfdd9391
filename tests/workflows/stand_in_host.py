"""A gpu host in a process of its own, with stand-in workers."""

import asyncio
import os
import signal
import sys

from service.host import serve_host
from shared.log_lines import start_logging
from shared.settings import Settings
from tests.workflows.stand_in import IdleCommand, StandInCommand


async def _serve(step_s: float, idle_s: float | None) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    start_logging()
    command = StandInCommand(step_s) if step_s else IdleCommand()
    await serve_host("gpu", Settings(), stopped, command, tuple, idle_s)


def main() -> None:
    """With the seconds that a step takes (0: its workers do no jobs) and, if it leaves by itself, those without a lease
    after which it does.
    """
    asyncio.run(_serve(*map(float, sys.argv), *[None] * (2 - len(sys.argv))))
    os._exit(0)  # as service/host.py: the SDK's threads may hang in an interpreter that is being taken down
