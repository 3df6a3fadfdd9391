"""Workers of several machines: as many hosts are leased together, all or none, and lost together."""

import asyncio
from pathlib import Path

from longshore.layout import Layout
from tests.workflows.stack import eventually, has_checkpoint, started
from tests.workflows.stand_in_worker import adapter_bytes

TWO = Layout(dp=2, nodes=2)


async def test_two_hosts_are_one_worker_and_are_lost_and_leased_together(temporal_address: str, tmp_path: Path) -> None:
    """A host of two dies in the middle of a job: the other one's part ends too, and with a third the run goes on."""
    async with started(temporal_address, tmp_path) as stack:
        hosts = [stack.spawn_gpu_host(0.05, tmp_path / f"machine-{number}") for number in range(2)]
        handle = await stack.start(steps=40, layout=TWO)
        await eventually(lambda: has_checkpoint(handle), "a checkpoint")
        hosts[1].kill()
        await stack.add_gpu_host(root=tmp_path / "machine-3")
        status = await asyncio.wait_for(handle.result(), 60)
        assert status.state == "succeeded" and status.workers_lost == 1
        assert stack.weights(status) == adapter_bytes(7, 40)
