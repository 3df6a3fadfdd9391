"""Hosts that lose every worker at its start beside one that works, and one alone that lacks something."""

import asyncio
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from activities.hosts import standing
from activities.hosts.lease import LeaseRecord
from activities.hosts.standing import Fitness
from shared.runs.start import RunTiming
from shared.storage.host_states import MAX_LOST, is_bf16_fast, read_fast_bf16, read_states
from shared.storage.paths import RunKeys
from tests.waiting import eventually
from tests.workflows.stack import Stack, failure_of, started
from tests.workflows.stand_in import REPOSITORY, StandInCommand

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
        assert read_fast_bf16(stack.store, stack.settings.shape) is is_bf16_fast(), "as they said when they came"


async def test_a_run_on_a_host_alone_fails_with_what_the_host_lacks(
    temporal_address: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(standing.Standing.__init__, "__defaults__", (0.0, 0))
    async with started(temporal_address, tmp_path) as stack:
        await stack.add_gpu_host(check=lambda: ("torch is not installed: pip install torch",))
        timing = RunTiming(heartbeat_timeout_s=4, host_pickup_timeout_s=4, cancel_grace_s=20, max_losses=2)
        handle = await stack.start(timing=timing)
        cause = await asyncio.wait_for(failure_of(handle), 300)
        assert "torch is not installed: pip install torch" in str(cause)
        assert hosts_of(stack, handle.id) == []


@contextmanager
def small_disk(root: Path) -> Iterator[Path]:
    """A file system with just enough room for a host's check."""
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=280m", "tmpfs", str(root)], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def python_without_torch(folder: Path) -> str:
    """An environment with every package of this one but torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/*/site-packages")
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith("torch"):
            (packages / each.name).symlink_to(each)
    return str(folder / "bin" / "python")


@pytest.mark.skipif("FORTY_RUNS" not in os.environ, reason="set FORTY_RUNS=1, as root (tmpfs)")
@pytest.mark.timeout(560)
async def test_forty_runs_succeed_beside_three_broken_hosts(temporal_address: str, tmp_path: Path) -> None:
    """One lacks torch; the disk of one fills up, and the device of one breaks, once they have begun to poll."""
    is_broken = False
    without_torch = [python_without_torch(tmp_path / "venv"), "-m", "activities.hosts.standing"]
    stand_in = StandInCommand()

    def lacks_torch() -> tuple[str, ...]:
        done = subprocess.run(without_torch, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        return tuple(done.stdout.splitlines())

    with small_disk(tmp_path / "full") as full:
        async with started(temporal_address, tmp_path / "root") as stack:
            roots = {name: tmp_path / name for name in ("good", "torchless", "broken")} | {"full": full}
            checks = {name: Fitness("gpu", root) for name, root in roots.items()} | {"torchless": lacks_torch}
            commands = {"broken": lambda folder, key: BREAKS if is_broken else stand_in(folder, key)}
            names = {
                await stack.add_gpu_host(check=checks[name], command=commands.get(name), root=root): name
                for name, root in roots.items()
            }

            def states() -> dict[str, tuple[str, ...]]:
                return {names[state.queue]: state.lacks for state in read_states(stack.store, stack.settings.shape)}

            lacking = await eventually(
                lambda: len(found := states()) == 4 and all(map(_is_checked, found.values())) and found, "checks"
            )
            assert [name for name, lacks in lacking.items() if lacks] == ["torchless"]
            is_broken = True
            with (full / "ballast").open("wb") as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()
            handles = [await stack.start(steps=20, seed=seed) for seed in range(40)]
            ended = [await handle.result() for handle in handles]
            leases = [[names[queue] for queue in hosts_of(stack, handle.id)] for handle in handles]
            print("leases:", Counter(map(tuple, leases)), "now lacking:", states())
            assert [status.state for status in ended] == ["succeeded"] * 40
            assert all(len(set(hosts)) == len(hosts) for hosts in leases), "no host twice"
            assert sum(hosts.count("broken") for hosts in leases) <= MAX_LOST
            assert not any("torchless" in hosts for hosts in leases)


def _is_checked(lacks: tuple[str, ...]) -> bool:
    return not any("first check" in lack for lack in lacks)
