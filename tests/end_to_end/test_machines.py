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
from typing import Any

import psutil
import pytest
from temporalio.client import WorkflowHandle

from activities.hosts.workers import processes_of
from longshore.dataset_runs import DatasetSource, PromptsSource, SFTRun
from longshore.runs import RLRun, Rollouts
from longshore.training import Layout, Lora, WeightSync
from longshore.views import RunStatus, StepStatus
from service.host import serve_host
from service.host_http.gangs import join_streams
from service.sealing import seal_keys
from service.temporal import connect_temporal
from shared.child_environment import child_environment
from shared.runs.start import RLStart, RunStart, RunTiming
from shared.settings import Settings
from shared.storage.artifacts import sha256_file
from shared.storage.paths import RunKeys
from shared.storage.store import open_store
from tests.depth import SEED
from tests.end_to_end.conftest import LETTERS
from tests.ended import end
from tests.machines import Machines, made
from tests.waiting import eventually
from tests.workflows.rows import recording
from tests.workflows.stack import has_checkpoint
from workflows.rl import RLWorkflow
from workflows.sft import SFTWorkflow

pytestmark = [pytest.mark.slow, pytest.mark.deep]

NAMES = ("one", "two", "three", "four")
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
    stopped: list[psutil.Process] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))

    async def add(self, name: str | None, shape: str = "machines", role: str = "gpu", **more: str) -> None:
        """Start a host on a machine; without a name, on this one."""
        root, address = self.root(name), self.settings.temporal_address
        root.mkdir(exist_ok=True)
        if name is not None:
            listener = self.machines.on(name, lambda: socket.create_server(("127.0.0.1", 0)))
            serving = asyncio.start_server(partial(forward, address), sock=listener)
            asyncio.run_coroutine_threadsafe(serving, self.forwarding).result()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            more["LONGSHORE_HOST_ADDRESS"] = self.machines.addresses[name]
        environment = child_environment(role) | {
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
        command = [sys.executable, "-P", "-m", "service.host", "--role", role]

        def start() -> subprocess.Popen[bytes]:
            with (root / "host.log").open("ab") as log:
                return subprocess.Popen(command, env=environment, cwd=root, stdout=log, stderr=log)

        host = self.machines.on(name, start) if name is not None else start()
        self.hosts[name or shape] = host

    async def start(
        self, layout: Layout, shape: str = "machines", steps: int = 12
    ) -> WorkflowHandle[object, RunStatus]:
        run = SFTRun(
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
        return await self._started(SFTWorkflow.run, RunStart(run=run, **self._of(shape)))

    async def start_rl(self, layout: Layout, prompts: Path) -> WorkflowHandle[object, RunStatus]:
        """Three steps whose weights two samplers of other machines get."""
        sync = WeightSync(backend="tcp")
        rollouts = Rollouts(
            prompts=PromptsSource(uri=prompts.as_uri()),
            grader=LETTERS,
            steps=3,
            prompts_per_step=4,
            group_size=4,
            max_completion_tokens=12,
            samplers=2,
            weight_sync=sync,
        )
        run = RLRun(
            model=str(self.model),
            loss={"kind": "reinforce"},
            trainable=Lora(rank=4),
            learning_rate=0.01,
            max_tokens=64,
            seed=7,
            layout=layout,
            rollouts=rollouts,
        )
        return await self._started(RLWorkflow.run, RLStart(run=run, **self._of("machines")))

    def _of(self, shape: str) -> dict[str, Any]:
        timing = RunTiming(heartbeat_timeout_s=5, host_pickup_timeout_s=10, cancel_grace_s=20, max_losses=9)
        run_id, start_id = f"run-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
        return {"run_id": run_id, "shape": shape, "timing": timing, "start_id": start_id, "is_tracked": False}

    async def _started(self, workflow: Any, start: RunStart | RLStart) -> WorkflowHandle[object, RunStatus]:
        client = await connect_temporal(self.settings)
        handle: WorkflowHandle[object, RunStatus] = await client.start_workflow(
            workflow, start, id=start.run_id, task_queue=self.settings.control_queue
        )
        return handle

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
        """Those that were stopped come back first, though others have taken their place."""
        for process in self.stopped:
            if process.is_running():
                process.resume()
        for host in self.hosts.values():
            await asyncio.to_thread(end, host)
        self.hosts.clear()

    def files(self, status: RunStatus) -> str:
        assert status.state == "succeeded" and status.adapter is not None, status
        return sha256_file(Path(status.adapter.removeprefix("file://"), "adapter_model.safetensors"))


async def forward(address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host, _, port = address.rpartition(":")
    with suppress(asyncio.CancelledError):  # the end of the test
        await join_streams((reader, writer), await asyncio.open_connection(host, int(port)))


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
        await exits.enter_async_context(recording(await connect_temporal(settings), settings))
        control = asyncio.create_task(serve_host("control", settings, stopped))
        try:
            place = Site(settings, machines, dataset, model, exits, forwarding)
            yield place
        finally:
            await place.end_hosts()
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
    place.stopped += place.processes(name)
    for process in place.stopped:
        process.suspend()


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
Trial = tuple[Layout, Mishap, bool]
TRIALS: list[Trial] = [
    *((layout, _undisturbed, False) for layout in LAYOUTS),
    (LAYOUTS[0], _undisturbed, True),
    *((LAYOUTS[0], mishap, False) for mishap in MISHAPS),
]


def _label(trial: Trial) -> str:
    layout, mishap, is_lossy = trial
    return "-".join([layout.label, mishap.__name__.strip("_"), *(["lossy"] if is_lossy else [])])


@pytest.mark.parametrize("trial", TRIALS, ids=_label)
async def test_several_machines_give_the_bits_of_one(
    trial: Trial, temporal_address: str, tiny_model: Path, chat_dataset: Path, tmp_path: Path
) -> None:
    """Whatever happens to one of them after the first checkpoint, and to the link between them."""
    layout, mishap, is_lossy = trial
    async with site(temporal_address, tiny_model, chat_dataset, tmp_path) as place:
        needed = NAMES[: layout.nodes + (mishap is not _undisturbed)]
        for name in needed:
            await place.add(name)
        if is_lossy:
            place.exits.enter_context(place.machines.flapping(needed[-1], 0.2, 1.8))
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


async def test_weights_go_from_several_machines_to_samplers_of_others(
    temporal_address: str, tiny_model: Path, chat_dataset: Path, prompts: dict[str, str], tmp_path: Path
) -> None:
    """A policy that is trained on two machines is sent to two samplers, and is that of one machine to the bit."""
    async with site(temporal_address, tiny_model, chat_dataset, tmp_path) as place:
        for name in ("one", "two"):
            await place.add(name)
        for name in ("three", "four"):
            address = place.machines.addresses[name]
            await place.add(name, role="sampler", LONGSHORE_SAMPLING__WEIGHTS_ADDRESS=address)
        digests = []
        for nodes in (2, 1):
            handle = await place.start_rl(Layout(dp=2, nodes=nodes), Path(prompts["train"]))
            digests.append((place.files(await handle.result()), *_synced(place, handle.id)))
        assert digests[0] == digests[1] and len(set(digests[0])) == len(digests[0]), "each step has other weights"


def _synced(place: Site, run_id: str) -> list[str]:
    """The digests of what samplers were sent, step by step."""
    store = open_store(place.settings.store, place.settings.s3)
    records = sorted(info.key for info in store.list(f"{RunKeys(run_id).steps}/"))
    steps = [StepStatus.model_validate_json(store.get_bytes(key)) for key in records]
    assert all(step.synced is not None for step in steps), steps
    return [str(step.synced) for step in steps]
