"""The lease of a sampler: the model brought here, its process started or adopted, and held while its run samples."""

import sys
from dataclasses import dataclass
from pathlib import Path

from temporalio import activity
from temporalio.exceptions import CancelledError

from activities.host_context import HOST_LEAVES, HostContext, beating, host_is_leaving
from activities.hosts.lease import ProcessLease, mark_of
from activities.hosts.progress import Signals
from activities.hosts.worker_pool import WorkerPool
from activities.hosts.worker_process import WorkerProcess
from activities.sampling.samplers import connected
from shared.contract import Frozen
from shared.errors import HostLeft, SamplerUnavailable, WorkerLost
from shared.jobs.leases import ProcessKey, SamplerKey
from shared.runs.requests import RunId
from shared.storage.paths import WorkerPaths

# A timeout for requests that an idle sampler answers at once. It is short, as a lease cannot end during this wait.
_ANSWER_S = 20.0


class SamplerLeaseRequest(Frozen):
    """A run's request for a sampler. Answered by the signal `sampler_leased`, with a LeaseGrant."""

    run_id: RunId
    epoch: int
    key: SamplerKey
    ready_timeout_s: float


@dataclass(frozen=True)
class SamplerCommand:
    """Makes the command line of Longshore's own sampler. The model's files are staged on this machine first."""

    host: HostContext

    def __call__(self, folder: Path, key: ProcessKey) -> list[str]:
        assert isinstance(key, SamplerKey)
        model = self.host.stage(key.model)  # fast: the lease activity has fetched it already
        paths = WorkerPaths(folder)
        return [
            *(sys.executable, "-P", "-m", "megatron_worker.sampler", "--model", str(model)),
            *("--ready-file", str(paths.ready), "--host-record", str(paths.record)),
            *("--weights-socket", str(paths.weights_socket)),
            *("--dtype", key.dtype, "--threads", str(key.threads), "--slots", str(key.slots)),
            *("--max-model-len", str(key.max_model_len), "--logprobs-mode", "processed_logprobs"),
        ]


class LeaseSampler:
    """Leases of this host's sampler. They are not recorded in the store, and need no fence.

    Samples are seeded and stored by content, so an old lease cannot spoil them.
    """

    def __init__(self, pool: WorkerPool, host: HostContext, signals: Signals, host_queue: str) -> None:
        self._lease = ProcessLease(pool, signals, host_queue, "sampler_leased")
        self._host = host

    @activity.defn(name="lease_sampler")
    def lease_sampler(self, request: SamplerLeaseRequest) -> None:
        """Hold a sampler until this activity is cancelled, which is the release.

        Raises:
            WorkerLost: the process ended or did not come up, or this host leaves.
            InvalidInput: the model cannot be used, or its files are not what they were.
            StoreUnavailable: the model's files cannot be reached.
        """
        try:
            with beating():
                self._host.stage(request.key.model)  # many gigabytes: a cancellation ends it anywhere
                with activity.shield_thread_cancel_exception():
                    self._hold(request)
        except CancelledError as error:
            if host_is_leaving():
                raise HostLeft(HOST_LEAVES) from error

    def _hold(self, request: SamplerLeaseRequest) -> None:
        mark = mark_of(request.run_id, request.epoch)
        with self._lease.begin(request.key, mark, request.ready_timeout_s) as worker:
            if worker is not None:
                _forget(worker, self._host.stage(request.key.model))
                if self._lease.tell(worker, mark, weights_socket=str(worker.paths.weights_socket)):
                    self._lease.hold(worker)


def _forget(worker: WorkerProcess, model: Path) -> None:
    """Unload all adapters of a sampler, and load the model's own weights where others have taken their place.

    An adopted process may still hold those of runs that it served before.
    """
    try:
        with connected(worker, _ANSWER_S, attempts=2) as (client, name):
            served = client.models()
            for adapter in [name for name, card in served.items() if card.parent is not None]:
                client.unload_adapter(adapter)
        if name not in served:
            with connected(worker) as (client, name):
                client.load_weights(name, str(model))
    except SamplerUnavailable as error:
        worker.end()
        raise WorkerLost(f"the sampler does not answer: {error}") from error
