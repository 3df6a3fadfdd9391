"""How late heartbeats come on a busy machine: how often a heartbeat timeout would have declared a live host dead.

    python -m benchmarks.heartbeats [--busy 20] [--seconds 180] [--out FILE.json]

Starts `longshore dev` in a temporary folder, a run that trains, one that samples, and `--busy` processes that only
compute. Asks Temporal five times a second for the last heartbeat of each activity of a gpu or a sampler host, and
counts how often one was silent for longer than a timeout. No process is killed: each of these is a false alarm.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from temporalio.client import Client

from benchmarks.machine import provenance, tell
from benchmarks.recovery import Stack, started, submit_rl, submit_sft
from service.dev import Connection

TIMEOUTS_S = (2.0, 3.0, 5.0, 10.0, 20.0)
_ASK_EVERY_S = 0.2
_WATCHED = ("lease", "lease_sampler", "run_job", "sample")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=20, help="processes that compute beside the stack")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, started(Path(folder) / "stack") as stack:
        run_ids = []
        for submit in (submit_sft, submit_rl):
            submit(stack, Path(folder))
            run_ids.append(stack.run_id)
        with _busy(options.busy):
            measured = asyncio.run(_watch(stack, run_ids, options.seconds))
            result = {"what": "silence of living hosts, as Temporal saw it", "busy": options.busy, **measured}
            tell(result | provenance(), options.out)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """They end with this process, however it ends: their stdin does."""
    program = (
        "import sys, threading\n"
        "waiting = threading.Thread(target=sys.stdin.read)\n"
        "waiting.start()\n"
        "while waiting.is_alive(): pass"
    )
    busy = [subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


async def _watch(stack: Stack, run_ids: list[str], seconds: float) -> dict[str, object]:
    connection = Connection.read(stack.root)
    assert connection is not None
    client = await Client.connect(connection.temporal_address)
    longest: dict[tuple[str, str, float], float] = {}  # silence behind a heartbeat, by activity and its time
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for run_id in run_ids:
            described = await client.get_workflow_handle(run_id).describe()
            for pending in described.raw_description.pending_activities:
                name, heard = pending.activity_type.name, pending.last_heartbeat_time.ToMicroseconds() / 1e6
                if name in _WATCHED and heard > 0:
                    longest[run_id + pending.activity_id, name, heard] = time.time() - heard
        await asyncio.sleep(_ASK_EVERY_S)
    return {
        "seconds": seconds,
        "heartbeats": len(longest),
        "longest_silence_s": round(max(longest.values(), default=0.0), 2),
        "silences_longer_than_s": {f"{t:g}": sum(s > t for s in longest.values()) for t in TIMEOUTS_S},
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
