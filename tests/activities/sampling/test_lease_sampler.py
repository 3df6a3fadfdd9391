"""Leases of real samplers: brought up for a run, asked through Samplers, kept warm, and never left behind."""

import hashlib
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from pydantic import TypeAdapter
from safetensors.numpy import load_file, save_file
from temporalio.activity import ActivityCancellationDetails

from activities.host_context import HostContext
from activities.hosts.workers import WorkerProcess, processes_of
from activities.sampling import samplers as lease_sampler
from activities.sampling.samplers import SamplerCommand, Samplers
from longshore.fields import Artifact, Fence
from longshore.views import FileEntry
from shared.chat.completions import CompletionRequest, SamplerReady, Sampling
from shared.errors import HostLeft, InvalidInput, SamplerUnavailable, WorkerLost
from shared.jobs.job import LeaseGrant, LeaseMark, SamplerKey
from shared.serving import LeasedSampler, SamplerPlace, ServedSampler
from shared.settings import Settings
from shared.storage.artifacts import Manifest, seal, upload_artifact
from shared.storage.files import write_atomically
from shared.storage.paths import MANIFEST
from shared.storage.store import open_store
from tests.activities.lease_on_thread import HeldSampler, Host
from tests.activities.test_end_tokens import TURN_END, make_base
from tests.conftest import S3Server, free_port
from tests.megatron_worker.sampler_process import running
from tests.waiting import wait_until

PROMPT = (10, 20, 30)
FREE = Sampling(max_tokens=6, ignore_eos=True)


def sealed(model: Path, folder: Path, without: str = "") -> Path:
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns(without))
    seal(folder)
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Settings:
    """The root's path is longer than the address of a socket may be."""
    return Settings(root=tmp_path_factory.mktemp("samplers" * 13) / "host", s3=s3_server.settings)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server, tiny_model: Path) -> SamplerKey:
    """Of a base model in S3, whose files do not name the token that ends a turn."""
    folder = make_base(tiny_model, tmp_path_factory.mktemp("tiny") / "model")
    seal(folder)
    model = upload_artifact(open_store(s3_server.uri, s3_server.settings), "lease-sampler/tiny", folder)
    return SamplerKey(model=model, slots=8, max_model_len=64)


@pytest.fixture(scope="module")
def host(settings: Settings) -> Iterator[Host]:
    """Its sampler stays warm from test to test."""
    with sampler_host(settings, idle_s=600) as host:
        yield host


def sampler_host(settings: Settings, idle_s: float = 0.0) -> Host:
    return Host(settings.root_path.parent, idle_s=idle_s, command=SamplerCommand(HostContext(settings)))


def place_of(grant: LeaseGrant) -> LeasedSampler:
    return LeasedSampler(run_id="r1", fence=grant.fence, worker_id=grant.worker_id)


def ready_of(host: Host, grant: LeaseGrant) -> SamplerReady:
    return SamplerReady.model_validate_json(host.paths.worker(grant.worker_id).ready.read_bytes())


def test_a_lease_brings_the_model_and_starts_its_sampler(host: Host, settings: Settings, key: SamplerKey) -> None:
    with HeldSampler(host, settings, key, epoch=3) as lease:
        grant = lease.grant
        worker = host.paths.worker(grant.worker_id)
        assert (grant.fence, grant.host_queue) == (Fence(epoch=3, attempt=1), "host-queue")
        assert LeaseMark.model_validate_json(worker.lease("r1").read_bytes()) == LeaseMark(
            run_id="r1", fence=grant.fence
        )
        assert stat.S_IMODE(worker.ready.stat().st_mode) == 0o600
        ready = ready_of(host, grant)
        assert Path(ready.model).is_relative_to(host.paths.cache)
        told = lease.notebook.said
        assert [name for name, _ in told] == ["sampler_leased"]
        assert ready.api_key not in str(told) and str(ready.socket) not in str(told)
    assert lease.error is None
    assert list(host.store.list("")) == []  # no record of it


def test_it_listens_at_a_socket_that_its_user_alone_can_open(host: Host, settings: Settings, key: SamplerKey) -> None:
    with HeldSampler(host, settings, key, epoch=1) as lease:
        paths, ready = host.paths.worker(lease.grant.worker_id), ready_of(host, lease.grant)
        assert ready.socket is not None and Path(ready.socket).samefile(paths.sampler_socket)
        assert stat.filemode(paths.sampler_socket.stat().st_mode) == "srw-------"
        assert stat.filemode(paths.root.stat().st_mode) == "drwx------"
        processes = processes_of(lease.grant.worker_id)
        assert ready.pid in [process.pid for process in processes]
        assert [process.net_connections("inet") for process in processes] == [[]] * len(processes)


def test_a_leased_sampler_draws_and_scores(host: Host, settings: Settings, key: SamplerKey) -> None:
    samplers = Samplers(settings, host.pool)
    with HeldSampler(host, settings, key, epoch=1) as lease:
        place = place_of(lease.grant)
        carried = TypeAdapter(SamplerPlace).validate_json(place.model_dump_json())
        with samplers.open(carried) as (client, model):
            samples = client.sample(model, PROMPT, FREE, n=3, seed=7)
            assert [len(s.token_ids) for s in samples] == [6, 6, 6]
            scored = client.score(model, PROMPT + samples[0].token_ids)
            assert np.allclose(scored[len(PROMPT) - 1 :], samples[0].logprobs, atol=1e-5)
            ending = CompletionRequest(model=model, prompt=list(PROMPT), logit_bias={str(TURN_END): 100})
            [ended] = client.complete(ending.model_copy(update={"return_token_ids": True})).choices
            assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([TURN_END], "stop", None)
        another = place.model_copy(update={"fence": Fence(epoch=2, attempt=1)})
        with pytest.raises(WorkerLost, match="no longer serves"), samplers.open(another):
            pass
        with pytest.raises(WorkerLost, match="leases no samplers"), Samplers(settings).open(place):
            pass
    with pytest.raises(WorkerLost, match="no longer serves"), samplers.open(place):
        pass


def test_tempered_logprobs_are_of_what_was_drawn_from(host: Host, settings: Settings, key: SamplerKey) -> None:
    """The model's own are at temperature 1; the trainer divides its logits by the run's."""
    samplers, hot = Samplers(settings, host.pool), FREE.model_copy(update={"temperature": 3.0})
    with HeldSampler(host, settings, key, epoch=1) as lease, samplers.open(place_of(lease.grant)) as (client, model):
        (sample,) = client.sample(model, PROMPT, hot, n=1, seed=7)
        own = client.score(model, PROMPT + sample.token_ids)[len(PROMPT) - 1 :]
        assert np.abs(np.subtract(own, sample.logprobs)).max() > 1e-3


def write_adapter(folder: Path, model: Path) -> Path:
    """A PEFT folder of rank 1 on every q_proj."""
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = np.ones((1, weight.shape[1]), np.float32)
            tensors[f"{stem}.lora_B.weight"] = np.ones((weight.shape[0], 1), np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = b'{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}'
    write_atomically(folder / "adapter_config.json", config)
    return folder


def test_a_warm_sampler_serves_the_next_lease_without_the_adapters_of_the_last(
    host: Host, settings: Settings, key: SamplerKey, tiny_model: Path, tmp_path: Path
) -> None:
    samplers = Samplers(settings, host.pool)
    with HeldSampler(host, settings, key, epoch=1) as first:
        worker_id = first.grant.worker_id
        with samplers.open(place_of(first.grant)) as (client, model):
            client.load_adapter("r1-a", str(write_adapter(tmp_path / "adapter", tiny_model)))
            assert set(client.models()) == {model, "r1-a"}
            before = client.sample(model, PROMPT, FREE, n=2, seed=3)
    with HeldSampler(host, settings, key, epoch=2) as second:
        assert second.grant.worker_id == worker_id
        with samplers.open(place_of(second.grant)) as (client, model):
            assert set(client.models()) == {model}
            assert client.sample(model, PROMPT, FREE, n=2, seed=3) == before


def test_a_served_sampler_is_asked_with_the_key_of_the_installation_only_at_its_own_url(
    settings: Settings, tiny_model: Path, tmp_path: Path
) -> None:
    """Our own process stands for the server."""
    with running(tiny_model, tmp_path) as ready:
        told = {"url": f"{ready.url}/v1/", "api_key": ready.api_key}
        installed = Settings(root=settings.root, sampling=told)
        assert ready.api_key not in repr(installed)
        for place in (ServedSampler(), ServedSampler(url=ready.url)):
            with Samplers(installed).open(place) as (client, model):
                assert model == ready.model
                assert client.sample(model, PROMPT, FREE, n=1, seed=1)

        same_by_another_name = ServedSampler(url=ready.url.replace("127.0.0.1", "localhost"))
        with pytest.raises(InvalidInput, match="private network"), Samplers(installed).open(same_by_another_name):
            pass
        trusting = Settings(root=settings.root, sampling=told, download={"allow_private_addresses": True})
        with pytest.raises(InvalidInput, match="401"), Samplers(trusting).open(same_by_another_name):
            pass


def test_a_sampler_that_nobody_serves(settings: Settings) -> None:
    with pytest.raises(InvalidInput, match="sampler_url"), Samplers(settings).open(ServedSampler()):
        pass
    with pytest.raises(InvalidInput, match="only http"), Samplers(settings).open(ServedSampler(url="ftp://a/b")):
        pass
    with (
        pytest.raises(SamplerUnavailable, match="no address"),
        Samplers(settings).open(ServedSampler(url="http://nowhere.invalid:8000")),
    ):
        pass
    silent = Settings(root=settings.root, sampling={"url": f"http://127.0.0.1:{free_port()}"})
    with pytest.raises(SamplerUnavailable), Samplers(silent).open(ServedSampler()):
        pass


def test_a_warm_sampler_that_does_not_answer_is_ended(
    host: Host, settings: Settings, key: SamplerKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeldSampler(host, settings, key, epoch=1) as first:
        pid = ready_of(host, first.grant).pid
    psutil.Process(pid).suspend()
    monkeypatch.setattr(WorkerProcess, "is_stopped", lambda worker: False)  # it was not yet, a moment before
    monkeypatch.setattr(lease_sampler, "_ANSWER_S", 0.5)
    error = HeldSampler(host, settings, key, epoch=2).ended()
    assert isinstance(error, WorkerLost)
    assert "does not answer" in str(error)
    assert not psutil.pid_exists(pid)
    assert host.worker_ids() == []


def test_another_key_ends_the_idle_sampler_and_a_killed_one_loses_its_lease(
    host: Host, settings: Settings, key: SamplerKey
) -> None:
    with HeldSampler(host, settings, key, epoch=1) as first:
        idle = first.grant.worker_id
    lease = HeldSampler(host, settings, key.model_copy(update={"slots": 4}), epoch=2)
    place = place_of(lease.grant)
    assert host.worker_ids() == [place.worker_id]
    assert host.num_processes(idle) == 0
    with pytest.raises(WorkerLost, match="signal 9"), Samplers(settings, host.pool).open(place) as (client, model):
        psutil.Process(ready_of(host, lease.grant).pid).kill()
        client.sample(model, PROMPT, FREE, n=1, seed=1)
    error = lease.ended()
    assert isinstance(error, WorkerLost)
    assert "signal 9" in str(error)
    assert host.worker_ids() == []
    assert processes_of(place.worker_id) == []


def test_a_model_that_cannot_be_used_is_the_users_affair(settings: Settings, tiny_model: Path, tmp_path: Path) -> None:
    folder = sealed(tiny_model, tmp_path / "model", without="tokenizer.json")
    own = Settings(root=tmp_path / "host")
    with sampler_host(own) as host:
        model = upload_artifact(host.store, "model", folder)
        lease = HeldSampler(host, own, SamplerKey(model=model), epoch=1)
        wait_until(lambda: lease.error, "an error", timeout_s=150)
        error = lease.ended()
        assert isinstance(error, InvalidInput)
        assert error.place == model.uri
        assert "no tokenizer.json" in error.message
        assert host.worker_ids() == []


@pytest.mark.parametrize("leaving", [False, True])
def test_a_lease_may_end_while_its_model_is_brought(tmp_path: Path, leaving: bool) -> None:
    """16 GiB of nothing take a while to hash; whoever got through would find another hash."""
    own = Settings(root=tmp_path / "host")
    with sampler_host(own) as host:
        folder = tmp_path / "store" / "model"
        folder.mkdir(parents=True)
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(16 << 30)
        manifest = Manifest(files=(FileEntry(path="model.safetensors", size=16 << 30, sha256="0" * 64),)).encoded()
        write_atomically(folder / MANIFEST, manifest)
        model = Artifact(uri=folder.as_uri(), sha256=hashlib.sha256(manifest).hexdigest())
        lease = HeldSampler(host, own, SamplerKey(model=model), epoch=1)
        weights = str(folder / "model.safetensors")
        wait_until(lambda: weights in [file.path for file in psutil.Process().open_files()], "it is being hashed")
        details = ActivityCancellationDetails(worker_shutdown=leaving, cancel_requested=not leaving)
        lease.environment.cancel(cancellation_details=details)
        error = lease.ended()
        assert error is None or (leaving and isinstance(error, HostLeft))
        assert (error is not None) == leaving
        assert host.worker_ids() == []
