"""A host's part in its jobs' weight syncs: it gives workers their sync key and the addresses of samplers."""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.service import RPCError

from longshore.training import Lora
from shared.jobs.job import AnyPlan
from shared.jobs.leases import LeaseGrant
from shared.jobs.weight_sync import SyncAccess, SyncTarget, WeightSync, secret_of_run
from shared.serving import sampler_of_questions, serving_id
from shared.settings import Settings
from shared.storage.files import write_privately
from shared.storage.paths import HostPaths

_PAUSE_S = 1.0
_PATIENCE = timedelta(seconds=5)

Find = Callable[[AnyPlan], "Future[LeaseGrant | None]"]


class QuestionSamplers:
    """Finds the samplers that answer users' questions, by their serving workflows. Callers do not block."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop, settings: Settings) -> None:
        self._client, self._loop, self._settings = client, loop, settings

    def __call__(self, plan: AnyPlan) -> "Future[LeaseGrant | None]":
        key = sampler_of_questions(self._settings, plan.model, plan.dtype)
        return asyncio.run_coroutine_threadsafe(self._find(serving_id(self._settings, key)), self._loop)

    async def _find(self, workflow_id: str) -> LeaseGrant | None:
        if not self._settings.serving.weight_sync:
            return None
        handle = self._client.get_workflow_handle(workflow_id)
        try:
            up = await handle.query("samplers", result_type=list[LeaseGrant], rpc_timeout=_PATIENCE)
        except (RPCError, WorkflowQueryFailedError):  # nobody has asked this model, or nobody answers now
            return None
        return up[0] if up else None


@dataclass(frozen=True)
class TrainerSyncs:
    """This host's settings for its jobs' weight syncs.

    `key`: authenticates the installation's trainers to samplers. `root`: this host's folder. `find`: looks for the
    sampler that answers questions to the model that a plan trains.
    """

    key: bytes
    root: Path
    find: Find

    def of_job(self, plan: AnyPlan, log_path: str) -> "JobSyncs":
        return JobSyncs(self, plan, SyncAccess.path(log_path))


class JobSyncs:
    """Writes a worker's access to samplers beside its job's log."""

    def __init__(self, host: TrainerSyncs, plan: AnyPlan, path: Path) -> None:
        self._host, self._plan, self._path = host, plan, path
        self._looking: Future[LeaseGrant | None] | None = None
        self._looked_at = 0.0
        self._is_told = self._is_over = False

    def begin(self) -> None:
        """Write the worker's access to samplers if the plan names any."""
        if (target := self._plan.sync_target) is not None:
            self._write(target, target.profile_path)
        self.look()

    def end(self) -> None:
        """Write no more: the job's folder is about to go."""
        self._is_over = True

    def look(self) -> None:
        """Look, without blocking, for the sampler that answers questions to the model of a session.

        The session's client usually samples from it. The worker sends it the next weights that it saves; if that
        fails, the sampler loads them from the store.
        """
        now = time.monotonic()
        is_looking = self._looking is not None and not self._looking.done()
        is_wanted = self._plan.client_samples and isinstance(self._plan.trainable, Lora)
        if is_wanted and not is_looking and now > self._looked_at + _PAUSE_S:
            self._looked_at, self._looking = now, self._host.find(self._plan)
            self._looking.add_done_callback(self._found)

    def _found(self, looking: "Future[LeaseGrant | None]") -> None:
        grant = None if looking.cancelled() else looking.result()
        target = None if grant is None else _target(grant)
        if (target is not None or self._is_told) and not self._is_over:
            self._is_told = True
            self._write(target)

    def _write(self, target: SyncTarget | None, profile_path: str | None = None) -> None:
        run_id, profile = self._plan.run_id, None
        if profile_path is not None:
            profile = HostPaths(self._host.root).profiles / run_id / profile_path
            with suppress(OSError):  # the sync says that its profile cannot be written
                profile.parent.mkdir(parents=True, exist_ok=True)
        has_address = target is not None and any(place.address is not None for place in target.places)
        access = SyncAccess(
            secret=secret_of_run(self._host.key, run_id).hex() if has_address else None,
            profile=str(profile) if profile is not None else None,
            target=target,
        )
        write_privately(self._path, access.model_dump_json().encode())


def _target(grant: LeaseGrant) -> SyncTarget | None:
    """Return where to send weights; None for a sampler that takes none, or that this machine cannot reach."""
    socket, address = grant.weights_socket, grant.weights_address
    if socket is None or (address is None and not os.access(socket, os.W_OK)):
        return None
    return SyncTarget(
        sockets=(socket,), addresses=(address,), version=0, backend="auto", bucket_bytes=WeightSync().bucket_bytes
    )
