"""Hosts that lose every worker at its start beside one that works, and one alone that lacks something."""

import asyncio
import sys
from pathlib import Path

from activities.hosts import standing
from activities.hosts.lease import LeaseRecord
from shared.runs.start import RunTiming
from shared.storage.paths import RunKeys
from tests.workflows.stack import Stack, failure_of, started

BREAKS = [sys.executable, "-c", "raise SystemExit('device-side assert triggered')"]


def hosts_of(stack: Stack, run_id: str) -> list[str]:
    """The hosts that leased a worker to a run, in order."""
    leases = [stack.store.get_bytes(info.key) for info in stack.store.list(f"{RunKeys(run_id).leases}/")]
    return [LeaseRecord.model_validate_json(lease).host_queue for lease in leases]


async def test_a_run_whose_worker_was_lost_at_its_start_goes_to_another_host(
    temporal_address: str, tmp_path: Path
) -> None:
    """Even where the broken one is free and passes its checks, and the other is busy."""
    async with started(temporal_address, tmp_path) as stack:
        broken = await stack.add_gpu_host(command=lambda folder, key: BREAKS, check=tuple)
        handles = [await stack.start(steps=5, seed=seed) for seed in range(2)]
        good = await stack.add_gpu_host(check=tuple)
        for handle in handles:
            status = await handle.result()
            assert status.state == "succeeded"
            assert hosts_of(stack, handle.id) in ([broken, good], [good]), "never twice"


async def test_a_run_on_a_host_alone_fails_with_what_the_host_lacks(
    temporal_address: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(standing.Standing.__init__, "__defaults__", (0.0,))
    async with started(temporal_address, tmp_path) as stack:
        await stack.add_gpu_host(check=lambda: ("torch is not installed: pip install torch",))
        timing = RunTiming(heartbeat_timeout_s=4, host_pickup_timeout_s=4, cancel_grace_s=20, max_losses=2)
        handle = await stack.start(timing=timing)
        cause = await asyncio.wait_for(failure_of(handle), 60)
        assert "torch is not installed: pip install torch" in str(cause)
        assert hosts_of(stack, handle.id) == []
