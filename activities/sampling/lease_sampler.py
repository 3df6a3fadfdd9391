"""The lease of a sampler: the model brought here, its process started or adopted, and held while its run samples."""

import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from temporalio import activity
from temporalio.exceptions import CancelledError

from activities.host_context import HOST_LEAVES, HostContext, beating, host_is_leaving
from activities.hosts.lease import ProcessLease, mark_of
from activities.hosts.progress import Signals
from activities.hosts.standing import Standing
from activities.hosts.transports import check_backend
from activities.hosts.worker_pool import WorkerPool
from activities.hosts.worker_process import WorkerProcess
from activities.sampling.samplers import connected
from activities.tokenizing.tokenizer import end_ids_of
from longshore.fields import Frozen
from shared.chat.sampler_control import SamplerReady
from shared.errors import HostLeft, InvalidInput, SamplerUnavailable, WorkerLost
from shared.jobs.leases import ProcessKey, SamplerKey
from shared.jobs.weight_sync import OVER_TCP, SyncBackend
from shared.runs.requests import RunId
from shared.storage.files import write_privately
from shared.storage.host_states import HostAddress
from shared.storage.paths import WorkerPaths

# A timeout for requests that an idle sampler answers at once. It is short, as a lease cannot end during this wait.
_ANSWER_S = 20.0


class SamplerLeaseRequest(Frozen):
    """A run's request for a sampler. Answered by the signal `sampler_leased`, with a LeaseGrant.

    `sync_backend`: the transport of a trainer's weights to it. `avoid`: as in LeaseRequest.
    """

    run_id: RunId
    epoch: int
    key: SamplerKey
    ready_timeout_s: float
    sync_backend: SyncBackend = "auto"
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True)
class SamplerCommand:
    """Makes the command line of a sampler. The model's files are staged on this machine first.

    `sync_key`: authenticates the installation's trainers to samplers (shared/jobs/weight_sync.py).
    """

    host: HostContext
    sync_key: bytes | None = None

    def __call__(self, folder: Path, key: ProcessKey) -> list[str]:
        """Raises InvalidInput if this host has no such sampler."""
        assert isinstance(key, SamplerKey)
        vllm = self._vllm() if key.sampler == "vllm" else []
        model = self.host.stage(key.model)  # fast: the lease activity has fetched it already
        paths = WorkerPaths(folder)
        common = [
            *("--model", str(model), "--ready-file", str(paths.ready), "--host-record", str(paths.record)),
            *("--dtype", key.dtype, "--threads", str(key.threads), "--slots", str(key.slots)),
            *("--max-model-len", str(key.max_model_len)),
            *("--end-ids", *map(str, end_ids_of(self.host, key.model))),
        ]
        program = [sys.executable, "-P", "-m", "megatron_worker.sampler"]
        if key.sampler == "vllm":
            program[-1] += ".vllm"
            routes = ["--tell-routes"] if key.tells_routes else []
            return [*program, *common, *routes, "--max-lora-rank", str(key.max_lora_rank), "--", *vllm]
        sockets = ["--socket", str(paths.sampler_socket), "--weights-socket", str(paths.weights_socket)]
        own = [*sockets, "--logprobs-mode", "processed_logprobs"]
        return [*program, *common, *own, *self._for_other_machines(paths)]

    def _for_other_machines(self, paths: WorkerPaths) -> list[str]:
        address = self.host.settings.sampling.weights_address
        if address is None or self.sync_key is None:
            return []
        key_file = paths.root / "weights.key"
        write_privately(key_file, self.sync_key.hex().encode())
        return ["--weights-address", str(address), "--weights-key-file", str(key_file)]

    def _vllm(self) -> list[str]:
        command = shlex.split(self.host.settings.sampling.vllm_command or "")
        if not command or shutil.which(command[0]) is None:
            what = f"finds no {command[0]}" if command else "has no vLLM"
            message = f"the sampler host {what}: set LONGSHORE_SAMPLING__VLLM_COMMAND there, or sample with own"
            raise InvalidInput(message, "rollouts.sampler")
        return command


class LeaseSampler:
    """Leases of this host's sampler. They are not recorded in the store, and need no fence.

    Samples are seeded and stored by content, so an old lease cannot spoil them.
    """

    def __init__(
        self,
        pool: WorkerPool,
        host: HostContext,
        signals: Signals,
        host_queue: str,
        answers_at: HostAddress,
        standing: Standing | None = None,
    ) -> None:
        self._answers_at = answers_at
        self._lease = ProcessLease(pool, signals, host_queue, "sampler_leased", standing)
        self._host = host
        self._standing = standing

    @activity.defn(name="lease_sampler")
    def lease_sampler(self, request: SamplerLeaseRequest) -> None:
        """Hold a sampler until this activity is cancelled, which is the release.

        Raises:
            WorkerLost: the process ended or did not come up, or this host leaves.
            InvalidInput: the model cannot be used, or its files have changed; or the host has no vLLM, or does not
                support the transport.
            StoreUnavailable: the model's files cannot be reached.
            ApplicationError: this host leaves it to others (`Standing.offered`).
        """
        try:
            with beating(), self._lease.offered(request.run_id, request.avoid):
                allowed = self._host.settings.experimental_transports
                check_backend(request.sync_backend, "sampler", allowed, self._problems())
                self._host.stage(request.key.model)  # many gigabytes: a cancellation ends it anywhere
                with activity.shield_thread_cancel_exception():
                    self._hold(request)
        except CancelledError as error:
            if host_is_leaving():
                raise HostLeft(HOST_LEAVES) from error

    def _problems(self) -> dict[str, str]:
        if self._host.settings.sampling.weights_address is not None:
            return {}
        message = "it has no address for weights (LONGSHORE_SAMPLING__WEIGHTS_ADDRESS)"
        return dict.fromkeys(OVER_TCP, message)

    def _hold(self, request: SamplerLeaseRequest) -> None:
        mark = mark_of(request.run_id, request.epoch)
        with self._lease.begin(request.key, mark, request.ready_timeout_s) as worker:
            if worker is not None:
                _forget(worker, self._host.stage(request.key.model))
                worker.has_worked = True
                if self._standing is not None:
                    self._standing.worked()
                takes_weights = request.key.sampler == "own"
                reached = {
                    "weights_socket": str(worker.paths.weights_socket) if takes_weights else None,
                    "weights_address": _address_of(worker),
                    "host_socket": self._answers_at.socket,
                    "host_address": self._answers_at.address,
                }
                if self._lease.tell(worker, mark, reached=reached):
                    self._lease.hold(worker)


def _address_of(worker: WorkerProcess) -> str | None:
    """Return the address at which a sampler takes weights from other machines. The sampler has just answered."""
    try:
        return SamplerReady.model_validate_json(worker.paths.ready.read_bytes()).weights_address
    except OSError as error:
        raise WorkerLost(f"the sampler is gone: {error}") from error


def _forget(worker: WorkerProcess, model: Path) -> None:
    """Unload all adapters of a sampler, and load the model's own weights if others have replaced them.

    An adopted process may still hold those of runs that it served before, or sleep.
    """
    try:
        if worker.is_asleep:
            with connected(worker) as (client, _):
                client.wake()
            worker.is_asleep = False
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
