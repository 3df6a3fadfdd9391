"""A host's samplers: started, leased, and switched to the weights that a request wants."""

import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field
from temporalio.exceptions import CancelledError

from activities.heartbeats import (
    HOST_LEAVES,
    LOOK_EVERY_S,
    host_is_leaving,
    on_thread,
    stop_if_cancelled,
    when_cancelled,
)
from activities.host_context import HostContext
from activities.hosts.lease import ProcessLease, check_backend, mark_of
from activities.hosts.workers import WorkerPool, WorkerProcess
from activities.sampling.client import ATTEMPTS, TIMEOUT_S, Sampler
from activities.sources.http import parse_http_uri, resolve, shown_uri
from activities.tokenizing.tokenizer import end_ids_of
from longshore.fields import Artifact, Frozen, Sha256
from longshore.runs import RunId
from longshore.training import OVER_TCP, SyncBackend
from shared.chat.completions import SamplerMemory, SamplerReady
from shared.errors import HostLeft, InvalidInput, SamplerUnavailable, WorkerLost
from shared.jobs.job import LeaseMark, ProcessKey, SamplerKey, newest_name
from shared.models import peft
from shared.serving import LeasedSampler, SamplerPlace
from shared.settings import Settings
from shared.storage.artifacts import open_artifact
from shared.storage.files import write_privately
from shared.storage.host_states import HostAddress
from shared.storage.paths import WorkerPaths

# --- Samplers ---
# Connects sampling activities to a sampler, one that this host leases out or a server behind a URL; loads adapters.
#
# Addresses and keys stay on the hosts: a leased sampler's in its ready file, a server's in the settings. Requests
# through Temporal only say which sampler is meant.

_DIGITS = 16
_WEIGHTS = "weights"  # the folder of a checkpoint that an adapter, or a whole model's weights, lie in
OWNER = "serving"
"""Prefix of the names of users' adapters, in the place of a run id, so that runs' adapters are left alone."""
_OURS = re.compile(rf"{OWNER}-[0-9a-f]+")
MAX_ADAPTERS = 16


class OpenSampler(NamedTuple):
    """A client of a sampler, and the base model's name in its requests."""

    client: Sampler
    model: str


class PolicyWeights(Frozen):
    """A run's policy on its model: an adapter, or weights in place of the model's; neither: the unchanged model.

    `keep`: adapters of this run that must stay loaded. `synced`: the digest of the same weights, if the trainer has
    sent them to the sampler (shared/jobs/job.py); otherwise, or if they have not arrived, they are loaded.
    `is_checkpoint`: adapter or weights are part of a checkpoint. `in_place`: the sampler keeps the
    newest version of the policy under one name, and one that is not older than this will do.
    """

    adapter: Artifact | None = None
    weights: Artifact | None = None
    keep: tuple[Artifact, ...] = ()
    synced: Sha256 | None = None
    policy_version: int = Field(default=0, ge=0)
    is_checkpoint: bool = False
    in_place: Literal["adapter", "weights"] | None = None

    def staged(self, host: HostContext) -> str | None:
        """Return the folder of the adapter, or weights, on this host; None for the unchanged model."""
        artifact = self.weights or self.adapter
        if artifact is None:
            return None
        if not self.is_checkpoint:
            return str(host.stage(artifact))
        return str(host.stage(artifact, (f"{_WEIGHTS}/*",)) / _WEIGHTS)


class Served(NamedTuple):
    """A policy's name in requests to a sampler. `was_sent`: a trainer's weight sync has just brought it there.

    `reload`: replaces what is served by the policy from the store. None if that is impossible: for the unchanged model,
    for a policy that is updated while samples are drawn, and for an adapter in a vLLM.
    """

    name: str
    was_sent: bool = False
    reload: Callable[[], None] | None = None


class WeightsInUse:
    """Lets activities of one host use a sampler at the same time only if they need the same weights."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users: dict[tuple[str, str], int] = {}

    @contextmanager
    def hold(self, sampler: str, weights: str) -> Iterator[None]:
        """Wait until nobody uses other weights of this sampler; others wait until the block ends."""
        mine = sampler, weights
        with self._changed:
            while any(key[0] == sampler and key != mine for key in self._users):
                stop_if_cancelled()
                self._changed.wait(LOOK_EVERY_S)
            self._users[mine] = self._users.get(mine, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._users[mine] -= 1
                if not self._users[mine]:
                    del self._users[mine]
                self._changed.notify_all()


class Samplers:
    """Every sampler that activities of this host can reach. Safe to use from several threads."""

    def __init__(self, settings: Settings, pool: WorkerPool | None = None) -> None:
        """
        Args:
            pool: the sampler processes of this host; without one only servers behind URLs can be reached.
        """
        self._settings = settings
        self._pool = pool
        self._weights_in_use = WeightsInUse()

    @contextmanager
    def open(self, place: SamplerPlace) -> Iterator[OpenSampler]:
        """Connect to a sampler. A leased one is not given back before the block ends.

        Raises:
            WorkerLost: the leased process is gone, or went while the block asked it, or serves another lease.
            SamplerUnavailable: the server cannot be reached.
            InvalidInput: no server is named, or it may not be asked, or it serves no model.
        """
        if isinstance(place, LeasedSampler):
            with self._using(place) as (_, opened):
                yield opened
            return
        own = self._settings.sampling
        named = place.url or own.url
        if named is None:
            raise InvalidInput("name the sampler's server as sampler_url, or set sampling.url", "rollouts.sampler_url")
        url = _without_version(named)
        is_own = own.url is not None and url == _without_version(own.url)
        # The operator's own URL may lead into a private network.
        reached = url if is_own else _public(url, self._settings.download.allow_private_addresses)
        key = own.api_key.get_secret_value() if is_own and own.api_key else None
        sampler = Sampler(reached, key, confinement=self._settings.confined)
        with sampler as client, when_cancelled(client.hang_up):
            model = next((name for name, card in client.models().items() if card.parent is None), None)
            if model is None:
                raise InvalidInput("the sampler serves no model", shown_uri(url))
            yield OpenSampler(client, model)

    def sleep(self, place: LeasedSampler) -> SamplerMemory:
        """Make a leased sampler free its memory. Raises as `open` does."""
        with self._using(place) as (worker, opened):
            worker.is_asleep = True
            return opened.client.sleep(1)

    def wake(self, place: LeasedSampler) -> SamplerMemory:
        """Make a leased sampler take its memory again. Raises as `open` does."""
        with self._using(place) as (worker, opened):
            memory = opened.client.wake()
            worker.is_asleep = False
            return memory

    @contextmanager
    def serving(
        self, place: SamplerPlace, run_id: str, policy: PolicyWeights, host: HostContext
    ) -> Iterator[tuple[OpenSampler, Served]]:
        """Connect to a sampler, and have it serve a run's policy for a `with` block.

        Raises: as `open`, and
            InvalidInput: the sampler refuses the policy. CorruptArtifact: its files have changed.
            SamplerUnavailable: the sampler does not answer.
        """
        with self.open(place) as opened:
            if policy.in_place is not None:
                yield opened, _serve_newest(opened.client, run_id, policy, host)
                return
            if policy.weights is None:
                yield opened, use_adapter(opened, run_id, policy, host)
                return
            name, client = adapter_name(run_id, policy.weights), opened.client
            with self._weights_in_use.hold(client.place, name), client.holding_weights():
                load, reload = partial(client.load_weights, name), partial(client.load_weights, name, again=True)
                yield opened, _serve(client, name, policy, client.models(), load, reload, host)

    def end(self, place: SamplerPlace) -> None:
        """End the process of a leased sampler, which ends its lease, so that it is not kept warm for another one.

        Raises WorkerLost: it serves this lease no longer.
        """
        if isinstance(place, LeasedSampler):
            with self._leased(place) as worker:
                worker.end()

    @contextmanager
    def _using(self, place: LeasedSampler) -> Iterator[tuple[WorkerProcess, OpenSampler]]:
        with self._leased(place) as worker:
            try:
                with connected(worker) as opened:
                    yield worker, opened
            except SamplerUnavailable as error:
                if worker.is_alive():
                    raise
                raise WorkerLost(worker.death_report()) from error

    def _leased(self, place: LeasedSampler) -> AbstractContextManager[WorkerProcess]:
        if self._pool is None:
            raise WorkerLost("this host leases no samplers out")
        return self._pool.using(place.worker_id, LeaseMark(run_id=place.run_id, fence=place.fence))


@contextmanager
def connected(worker: WorkerProcess, timeout_s: float = TIMEOUT_S, attempts: int = ATTEMPTS) -> Iterator[OpenSampler]:
    """Connect to a sampler process of this host. Raises WorkerLost if it has ended."""
    try:
        ready = SamplerReady.model_validate_json(worker.paths.ready.read_bytes())
    except FileNotFoundError as error:
        raise WorkerLost(worker.death_report()) from error
    sampler = Sampler(ready.url, ready.api_key, timeout_s, attempts, socket_path=ready.socket)
    with sampler as client, when_cancelled(client.hang_up):
        yield OpenSampler(client, ready.model)


def _without_version(url: str) -> str:
    """Return a URL without a final `/v1`, which OpenAI's base URLs have."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _public(url: str, allow_private_addresses: bool) -> str:
    """Check the URL of a user's server, and return the one to connect to.

    An http URL gets the IP address that was checked, since the name might resolve to another one a moment later. With
    https the certificate prevents that.

    Raises:
        InvalidInput: it is not a plain http(s) URL, or leads into a private network.
        SamplerUnavailable: its host name does not resolve.
    """
    parts = parse_http_uri(url)
    assert parts.hostname is not None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        addresses = resolve(parts.hostname, port, allow_private_addresses)
    except OSError as error:
        raise SamplerUnavailable(f"{shown_uri(url)}: no address is known for this host ({error.strerror})") from error
    if parts.scheme == "https":
        return url
    address = str(addresses[0][0])
    return parts._replace(netloc=f"[{address}]:{port}" if ":" in address else f"{address}:{port}").geturl()


def adapter_name(run_id: str, adapter: Artifact) -> str:
    """Return the name of an adapter in requests. It contains a hash of the weights, so a name never changes meaning."""
    return f"{run_id}-{adapter.sha256[:_DIGITS]}"


def _serve(
    client: Sampler,
    name: str,
    policy: PolicyWeights,
    present: Container[str],
    load: Callable[[str], None],
    reload: Callable[[str], None] | None,
    host: HostContext,
) -> Served:
    """Serve a policy under its name: keep it if it is present, name it if a trainer has sent it, else load it.

    `load` and `reload` take the folder where the policy's files are staged; `reload` is for a name that is served.
    """

    def from_store(into: Callable[[str], None]) -> None:
        folder = policy.staged(host)
        assert folder is not None
        into(folder)

    again = partial(from_store, reload) if reload is not None else None
    if name in present:
        return Served(name, reload=again)
    if policy.synced is not None and client.name_weights(name, policy.synced):
        return Served(name, was_sent=True, reload=again)
    from_store(load)
    return Served(name, reload=again)


def _serve_newest(client: Sampler, run_id: str, policy: PolicyWeights, host: HostContext) -> Served:
    """Serve a policy under the name of the run's newest version, which may be newer than this one."""
    name = newest_name(run_id)
    card = client.models().get(name)
    if card is None or (card.policy_version or 0) < policy.policy_version:
        client.update_weights(name, policy.policy_version, policy.staged(host), is_adapter=policy.in_place == "adapter")
        return Served(name)
    return Served(name, was_sent=card.root == policy.synced)


def use_adapter(opened: OpenSampler, run_id: str, policy: PolicyWeights, host: HostContext) -> Served:
    """Load an adapter of a run into a sampler. Without an adapter, the unchanged model is served.

    Other adapters of this run that are not in `keep` are unloaded; those of other runs stay. Unless a trainer has sent
    it, the sampler gets the adapter as a folder of this machine: a server behind a URL must see this host's disk.

    Raises: as `Samplers.serving`.
    """
    sampler, adapter, keep = opened.client, policy.adapter, policy.keep
    wanted = {adapter_name(run_id, one) for one in (adapter, *keep) if one is not None}
    present = sampler.models()
    for name in sorted(present.keys() - wanted):
        if re.fullmatch(rf"{re.escape(run_id)}-[0-9a-f]{{{_DIGITS}}}", name):
            sampler.unload_adapter(name)
    if adapter is None:
        return Served(opened.model)
    name = adapter_name(run_id, adapter)

    def reload(folder: str) -> None:
        sampler.unload_adapter(name)
        sampler.load_adapter(name, folder)

    # A vLLM caches keys and values by adapter name, also the probe's. Our own sampler reports what it serves.
    is_own = opened.model in present and present[opened.model].weights_sha256 is not None
    load = partial(sampler.load_adapter, name)
    return _serve(sampler, name, policy, present, load, reload if is_own else None, host)


def refusal(sampler: Sampler, model: str, error: InvalidInput, place: str) -> InvalidInput | SamplerUnavailable:
    """Return the error to raise for a refused request: SamplerUnavailable if the sampler no longer has the adapter."""
    if model in sampler.models():
        return InvalidInput(error.message, place)
    return SamplerUnavailable(f"the sampler serves {model} no longer: {error.message}")


@contextmanager
def refusing(sampler: Sampler, model: str, place: str) -> Iterator[None]:
    """Raise what the sampler refuses within the block as `refusal` says it."""
    try:
        yield
    except InvalidInput as error:
        raise refusal(sampler, model, error, place) from error


class ServingAdapters:
    """Loads adapters that answer users into samplers when they are needed. Safe to use from several threads.

    `max_adapters`: the most such adapters on one sampler; the one that was used longest ago makes room.
    """

    def __init__(self, host: HostContext, max_adapters: int = MAX_ADAPTERS) -> None:
        self._host = host
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._asked_at: dict[str, float] = {}

    def use(self, opened: OpenSampler, adapter: Artifact | None) -> str:
        """Load an adapter unless it is loaded, and return its name in requests. Its files are staged on this host.

        Raises:
            InvalidInput: the sampler refuses it. CorruptArtifact: its files have changed.
            SamplerUnavailable: the sampler does not answer.
        """
        if adapter is None:
            return opened.model
        name = adapter_name(OWNER, adapter)
        self._asked_at[name] = time.monotonic()
        if name not in opened.client.models() and not self._is_there(opened, name, adapter):
            folder = self._host.stage(adapter)
            with self._lock:
                if name not in opened.client.models():
                    self._make_room(opened, name)
                    opened.client.load_adapter(name, str(folder))
        return name

    def _is_there(self, opened: OpenSampler, name: str, adapter: Artifact) -> bool:
        """Name an adapter that its trainer has sent to the sampler. False if it has not, or others have come since.

        Only the adapter's configuration is staged.
        """
        [weights] = [
            each for each in open_artifact(adapter, self._host.settings.s3)[1].files if each.path == peft.WEIGHTS
        ]
        content = peft.content_sha256(peft.read_config(self._host.stage(adapter, (peft.CONFIG,))), weights.sha256)
        with self._lock:
            self._make_room(opened, name)
            return opened.client.name_weights(name, content)

    def _make_room(self, opened: OpenSampler, name: str) -> None:
        present = {one for one in opened.client.models() if _OURS.fullmatch(one)} - {name}
        oldest_first = sorted(present, key=lambda one: (self._asked_at.get(one, 0.0), one))
        for old in oldest_first[: max(0, len(present) + 1 - self._max_adapters)]:
            opened.client.unload_adapter(old)  # samples that are being drawn from it continue
            self._asked_at.pop(old, None)


# --- The lease of a sampler ---
# The model brought here, its process started or adopted, and held while its run samples.

# A timeout for requests that an idle sampler answers at once. It is short, as a lease cannot end during this wait.
_ANSWER_S = 20.0


class SamplerLeaseRequest(Frozen):
    """A run's request for a sampler. Answered by the signal `sampler_leased`, with a LeaseGrant.

    `sync_backend`: the transport of a trainer's weights to it.
    """

    run_id: RunId
    epoch: int
    key: SamplerKey
    ready_timeout_s: float
    sync_backend: SyncBackend = "auto"


@dataclass(frozen=True)
class SamplerCommand:
    """Makes the command line of a sampler. The model's files are staged on this machine first.

    `sync_key`: authenticates the installation's trainers to samplers (shared/jobs/job.py).
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
        kept = ["--kept-bytes", str(self.host.settings.sampling.kept_bytes)]
        own = [*sockets, *kept, "--logprobs-mode", "processed_logprobs"]
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

    def __init__(self, process: ProcessLease, host: HostContext, answers_at: HostAddress) -> None:
        self._lease, self._host, self._answers_at = process, host, answers_at

    @on_thread("lease_sampler")
    def lease_sampler(self, request: SamplerLeaseRequest) -> None:
        """Hold a sampler until this activity is cancelled, which is the release.

        Raises:
            WorkerLost: the process ended or did not come up, or this host leaves.
            InvalidInput: the model cannot be used, or its files have changed; or the host has no vLLM, or does not
                support the transport.
            StoreUnavailable: the model's files cannot be reached.
        """
        try:
            with self._lease.offered():
                settings, problems = self._host.settings, dict[str, str]()
                if settings.sampling.weights_address is None:
                    message = "it has no address for weights (LONGSHORE_SAMPLING__WEIGHTS_ADDRESS)"
                    problems = dict.fromkeys(OVER_TCP, message)
                check_backend(request.sync_backend, "sampler", settings.external_transport, problems)
                self._host.stage(request.key.model)
                self._hold(request)
        except CancelledError as error:
            if host_is_leaving():
                raise HostLeft(HOST_LEAVES) from error

    def _hold(self, request: SamplerLeaseRequest) -> None:
        mark = mark_of(request.run_id, request.epoch)
        with self._lease.begin(request.key, mark, request.ready_timeout_s) as worker:
            if worker is not None:
                _forget(worker, self._host.stage(request.key.model))
                worker.has_worked = True
                if self._lease.health is not None:
                    self._lease.health.worked()
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
