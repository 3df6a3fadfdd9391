"""One worker over several machines: the real runner on hosts in network namespaces of their own.

Temporal is reached by a socket of each machine, the store is a folder; between the machines is one link each.
"""

import asyncio
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from temporalio.client import WorkflowHandle

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
from tests.depth import drawn
from tests.ended import end
from tests.machines import Machines, made
from workflows.sft import SFTWorkflow

pytestmark = pytest.mark.slow

NAMES = ("one", "two", "three")
LAYOUTS = (Layout(dp=2, nodes=2), Layout(tp=2, dp=2, nodes=2), Layout(pp=2, nodes=2), Layout(dp=3, nodes=3))
MISHAPS = ("kill a host", "kill a rank", "stop a host", "cut a link", "delay a link", "lose packets")


@dataclass
class Site:
    """Machines with a GPU host each, and a control host beside Temporal and the store."""

    settings: Settings
    machines: Machines
    dataset: Path
    model: Path
    exits: AsyncExitStack
    hosts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    async def add(self, name: str | None, shape: str = "machines", **more: str) -> None:
        """Start a GPU host on a machine; without a name, on this one."""
        root, address = self.settings.root_path / f"machine-{name}", self.settings.temporal_address
        root.mkdir(exist_ok=True)
        if name is not None:
            listener = self.machines.on(name, lambda: socket.create_server(("127.0.0.1", 0)))
            forwarding = await asyncio.start_server(partial(_forward, address), sock=listener)
            self.exits.callback(forwarding.close)
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
            checkpoint_every=3,
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


@asynccontextmanager
async def site(temporal_address: str, model: Path, dataset: Path, root: Path) -> AsyncIterator[Site]:
    queue = f"control-{uuid.uuid4().hex[:8]}"
    settings = Settings(root=root, temporal_address=temporal_address, control_queue=queue, cpu_threads=1)
    settings = settings.model_copy(update={"download": settings.download.model_copy(update={"file_roots": (Path("/"),)})})
    stopped = asyncio.Event()
    async with AsyncExitStack() as exits:
        machines = exits.enter_context(made(*NAMES))
        control = asyncio.create_task(serve_host("control", settings, stopped))
        try:
            yield Site(settings, machines, dataset, model, exits)
        finally:
            stopped.set()
            await control


async def _step(handle: WorkflowHandle[object, RunStatus]) -> int:
    return (await handle.query(SFTWorkflow.status)).step


@pytest.mark.parametrize("layout", drawn(LAYOUTS, 1), ids=lambda layout: layout.label)
async def test_several_machines_give_the_bits_of_one(
    layout: Layout, temporal_address: str, tiny_model: Path, chat_dataset: Path, tmp_path: Path
) -> None:
    async with site(temporal_address, tiny_model, chat_dataset, tmp_path) as place:
        for name in NAMES[: layout.nodes]:
            await place.add(name)
        several = await (await place.start(layout)).result()
        for host in place.hosts.values():
            await asyncio.to_thread(end, host)
        await place.add(None, "whole")
        whole = await (await place.start(layout.model_copy(update={"nodes": 1}), "whole")).result()
        assert place.files(several) == place.files(whole)
        assert several.workers_lost == 0
