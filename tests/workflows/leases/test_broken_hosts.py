"""Hosts that lose every worker at its start beside one that works."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from activities.hosts.lease import LeaseRecord
from shared.storage.host_states import is_bf16_fast, read_fast_bf16, read_states
from shared.storage.paths import RunKeys
from tests.workflows.stack import Stack, started

BREAKS = [sys.executable, "-c", "raise SystemExit('device-side assert triggered')"]


def hosts_of(stack: Stack, run_id: str) -> list[str]:
    """The hosts that leased a worker to a run, in order."""
    leases = [stack.store.get_bytes(info.key) for info in stack.store.list(f"{RunKeys(run_id).leases}/")]
    return [LeaseRecord.model_validate_json(lease).host_queue for lease in leases]


async def test_a_run_whose_worker_was_lost_at_its_start_goes_to_another_host(
    temporal_address: str, tmp_path: Path
) -> None:
    """The broken one passes its checks, and rests."""
    async with started(temporal_address, tmp_path) as stack:
        broken = await stack.add_gpu_host(command=lambda folder, key: BREAKS, check=tuple)
        handles = [await stack.start(steps=5, seed=seed) for seed in range(2)]
        good = await stack.add_gpu_host(check=tuple)
        for handle in handles:
            status = await handle.result()
            assert status.state == "succeeded"
            assert hosts_of(stack, handle.id) in ([broken, good], [good]), "never twice"
        assert read_fast_bf16(stack.store, stack.settings.shape) is is_bf16_fast(), "as they said when they came"


@pytest.mark.deep
async def test_forty_runs_succeed_beside_two_broken_hosts(temporal_address: str, tmp_path: Path) -> None:
    """One finds after its first loss what it lacks, and takes no more runs; the other rests ever longer."""
    async with started(temporal_address, tmp_path) as stack:
        checks = {"lacks": BreaksLater(), "rests": tuple, "good": tuple}
        names = {}
        for name, check in checks.items():
            command = None if name == "good" else lambda folder, key: BREAKS
            names[await stack.add_gpu_host(command=command, check=check, root=tmp_path / name)] = name
        handles = [await stack.start(steps=5, seed=seed) for seed in range(40)]
        ended = [await handle.result() for handle in handles]
        leases = Counter(names[queue] for handle in handles for queue in hosts_of(stack, handle.id))
        assert [status.state for status in ended] == ["succeeded"] * 40
        assert leases["lacks"] <= 1, leases
        assert any(state.lacks for state in read_states(stack.store, stack.settings.shape))


class BreaksLater:
    """A check that finds something, but not at the host's start."""

    def __init__(self) -> None:
        self._has_started = False

    def __call__(self) -> tuple[str, ...]:
        found = ("cuda:0 fails",) if self._has_started else ()
        self._has_started = True
        return found
