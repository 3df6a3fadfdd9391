"""One worker over several machines: the real runner on hosts in network namespaces of their own.

Temporal is reached by a socket of each machine, the store is a folder; between the machines is one link each.
"""

import asyncio
import random
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest
from temporalio.client import WorkflowHandle

from activities.hosts.worker_process import processes_of
from longshore.layout import Layout
from longshore.training import Lora
from service.host import serve_host
from service.sealing.keys import seal_keys
from service.temporal import connect_temporal
from shared.child_environment import child_environment
from shared.runs.dataset_runs import SFTRun
from shared.runs.sources import DatasetSource
from shared.runs.start import RunStart, RunTiming
from shared.runs.status import RunStatus
from shared.settings import Settings
from shared.storage.artifacts import sha256_file
from tests.depth import SEED, drawn
from tests.ended import end
from tests.machines import Machines, made
from tests.workflows.stack import eventually, has_checkpoint
from workflows.sft import SFTWorkflow

pytestmark = pytest.mark.slow

NAMES = ("one", "two", "three")
LAYOUTS = (Layout(dp=2, nodes=2), Layout(tp=2, dp=2, nodes=2), Layout(pp=2, nodes=2), Layout(dp=3, nodes=3))


@dataclass
class Site:
    """Machines with a GPU host each, and a control host beside Temporal and the store."""

    settings: Settings
    machines: Machines
    dataset: Path
    model: Path
    exits: AsyncExitStack
    forwarding: asyncio.AbstractEventLoop
    hosts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    handle: WorkflowHandle[object, RunStatus] | None = None
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))

    async def add(self, name: str | None, shape: str = "machines", **more: str) -> None:
        """Start a GPU host on a machine; without a name, on this one."""
        root, address = self.root(name), self.settings.temporal_address
        root.mkdir(exist_ok=True)
        if name is not None:
            listener = self.machines.on(name, lambda: socket.create_server(("127.0.0.1", 0)))
            serving = asyncio.start_server(partial(_forward, address), sock=listener)
            asyncio.run_coroutine_threadsafe(serving, self.forwarding).result()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            more["LONGSHORE_HOST_ADDRESS"] = self.machines.addresses[name]
        environment = child_environment("gpu") | {
            "LONGSHORE_ROOT": str(root),
            "LONGSHORE_STORE_URI": self.settings.store,
            "LONGSHORE_TEMPORAL_ADDRESS": address,
            "LONGSHORE_SHAPE": shape,
            "LONGSHORE_SEAL_KEY": " ".join(key.secret.decode() for key in seal_keys(self.settings)),
            "LONGSHORE_HEARTBEAT_TIMEOUT_S": "5",
            "LONGSHORE_WORKER_IDLE_S": "0",
            "LONGSHORE_DTYPE": "float32",
            **more,
        }
        command = [sys.executable, "-P", "-m", "service.host", "--role", "gpu"]

        def start() -> subprocess.Popen[bytes]:
            with (root / "host.log").open("ab") as log:
                return subprocess.Popen(command, env=environment, cwd=root, stdout=log, stderr=log)

        host = self.machines.on(name, start) if name is not None else start()
        self.hosts[name or shape] = host
        self.exits.push_async_callback(asyncio.to_thread, end, host)

    async def start(
        self, layout: Layout, shape: str = "machines", steps: int = 12
    ) -> WorkflowHandle[object, RunStatus]:
        run_id = f"run-{uuid.uuid4().hex[:8]}"
        run = SFTRun(
            name=run_id,
            model=str(self.model),
            dataset=DatasetSource(uri=self.dataset.as_uri()),
            batch_size=6,
            steps=steps,
            checkpoint_every=max(3, steps // 10),
            max_tokens=256,
            trainable=Lora(rank=4),
            learning_rate=0.01,
            seed=7,
            layout=layout,
        )
        timing = RunTiming(heartbeat_timeout_s=5, host_pickup_timeout_s=10, cancel_grace_s=20, max_losses=9)
        start = RunStart(
            run_id=run_id, run=run, shape=shape, timing=timing, start_id=uuid.uuid4().hex, is_tracked=False
        )
        client = await connect_temporal(self.settings)
        return await client.start_workflow(SFTWorkflow.run, start, id=run_id, task_queue=self.settings.control_queue)

    def chosen(self, num_parts: int) -> str | None:
        """One of the machines that have a part of the worker, once it has all."""
        have = [name for name in NAMES if any((self.root(name) / "workers").glob("*/ready"))]
        return self.chance.choice(have) if len(have) >= num_parts else None

    async def step(self) -> int:
        """The step of the newest checkpoint. A run that has ended is beyond all."""
        assert self.handle is not None
        status = await self.handle.query(SFTWorkflow.status)
        ended = 1 << 20 if status.state != "running" else 0
        return ended or (status.checkpoint.step if status.checkpoint else 0)

    async def has_passed(self, step: int) -> bool:
        return await self.step() > step

    def processes(self, name: str) -> list[psutil.Process]:
        """The host of a machine, and what it has started; the ranks are last."""
        host = psutil.Process(self.hosts[name].pid)
        return [host, *host.children(recursive=True)]

    def root(self, name: str | None) -> Path:
        return self.settings.root_path / f"machine-{name}"

    async def end_hosts(self) -> None:
        for host in self.hosts.values():
            await asyncio.to_thread(end, host)
        self.hosts.clear()

    def files(self, status: RunStatus) -> str:
        assert status.state == "succeeded" and status.adapter is not None, status
        return sha256_file(Path(status.adapter.removeprefix("file://"), "adapter_model.safetensors"))


async def _forward(address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host, _, port = address.rpartition(":")
    there = await asyncio.open_connection(host, int(port))

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    with suppress(asyncio.CancelledError):  # the end of the test
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))


Mishap = Callable[[Site, str], Awaitable[None]]


@asynccontextmanager
async def site(temporal_address: str, model: Path, dataset: Path, root: Path) -> AsyncIterator[Site]:
    queue = f"control-{uuid.uuid4().hex[:8]}"
    settings = Settings(root=root, temporal_address=temporal_address, control_queue=queue, cpu_threads=1)
    settings = settings.model_copy(
        update={"download": settings.download.model_copy(update={"file_roots": (Path("/"),)})}
    )
    stopped = asyncio.Event()
    forwarding = asyncio.new_event_loop()  # of its own, since the control host's may be busy for long
    threading.Thread(target=forwarding.run_forever, name="forwarding", daemon=True).start()
    async with AsyncExitStack() as exits:
        exits.callback(forwarding.call_soon_threadsafe, forwarding.stop)
        machines = exits.enter_context(made(*NAMES))
        control = asyncio.create_task(serve_host("control", settings, stopped))
        try:
            yield Site(settings, machines, dataset, model, exits, forwarding)
        finally:
            stopped.set()
            await control


async def _undisturbed(place: Site, name: str) -> None:
    """Nothing happens."""


async def _kill_a_host(place: Site, name: str) -> None:
    place.hosts[name].kill()


async def _kill_a_rank(place: Site, name: str) -> None:
    [worker, *_] = (place.root(name) / "workers").glob("*")
    processes_of(worker.name)[-1].kill()


async def _stop_a_machine(place: Site, name: str) -> None:
    """It hangs, with all that it does; for Temporal and the others it is silent."""
    stopped = place.processes(name)
    for process in stopped:
        process.suspend()
    place.exits.callback(lambda: [process.resume() for process in stopped if process.is_running()])


async def _cut_a_link(place: Site, name: str) -> None:
    """For good: the machine's host still hears of leases, and cannot do its part of one."""
    place.machines.link(name, "down")


async def _drain_a_host(place: Site, name: str) -> None:
    """The job saves a checkpoint before its host leaves, or the host of another of its machines."""
    place.hosts[name].terminate()


async def _kill_ten_hosts(place: Site, name: str) -> None:
    """Whichever has a part in it, again and again, each after a new checkpoint; the machine comes back."""
    for number in range(10):
        victim = name if not number else await eventually(lambda: place.chosen(2), "both parts", 300)
        step = await place.step()
        host = place.hosts[victim]
        host.kill()
        host.wait()
        await place.add(victim)
        await eventually(lambda s=step: place.has_passed(s), "a newer checkpoint", 300)


MISHAPS = (_kill_a_host, _kill_a_rank, _stop_a_machine, _cut_a_link, _drain_a_host, _kill_ten_hosts)
LINKS = (("delay", "20ms", "5ms"), ("loss", "3%"))
TRIALS = [
    *((layout, _undisturbed, ()) for layout in LAYOUTS),
    *((LAYOUTS[0], _undisturbed, link) for link in LINKS),
    *((LAYOUTS[0], mishap, ()) for mishap in MISHAPS),
]


def _label(trial: tuple[Layout, Mishap, tuple[str, ...]]) -> str:
    layout, mishap, link = trial
    return "-".join([layout.label, mishap.__name__.strip("_"), *link[:1]])


@pytest.mark.parametrize("trial", drawn(TRIALS, 1), ids=_label)
async def test_several_machines_give_the_bits_of_one(
    trial: tuple[Layout, Mishap, tuple[str, ...]],
    temporal_address: str,
    tiny_model: Path,
    chat_dataset: Path,
    tmp_path: Path,
) -> None:
    """Whatever happens to one of them after the first checkpoint, and to the link between them."""
    layout, mishap, link = trial
    async with site(temporal_address, tiny_model, chat_dataset, tmp_path) as place:
        needed = NAMES[: layout.nodes + (mishap is not _undisturbed)]
        for name in needed:
            await place.add(name)
            if link:
                place.machines.disturb(name, *link)
        steps = {_undisturbed: 12, _kill_ten_hosts: 3000}.get(mishap, 300)
        handle = place.handle = await place.start(layout, steps=steps)
        await eventually(lambda: has_checkpoint(handle), "a checkpoint", 300)
        await mishap(place, place.chosen(layout.nodes) or NAMES[0])
        several = await handle.result()
        await place.end_hosts()
        await place.add(None, "whole")
        whole = await (await place.start(layout.model_copy(update={"nodes": 1}), "whole", steps)).result()
        assert place.files(several) == place.files(whole)
        is_loss = mishap not in (_undisturbed, _drain_a_host)
        assert bool(several.workers_lost) == is_loss
