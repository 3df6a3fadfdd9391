"""A vLLM that a sampler host leases out: adapters, weights, scores; a teacher behind a URL. On a CPU no routes."""

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from safetensors.torch import load_file, save_file

from activities.host_context import HostContext
from activities.hosts.workers import processes_of
from activities.sampling.sample import compare
from activities.sampling.samplers import OpenSampler, PolicyWeights, SamplerCommand, Samplers, adapter_name
from examples.tiny_model import make_tiny_model
from longshore.fields import Artifact
from longshore.losses import Distillation
from longshore.training import Lora
from shared.chat.completions import SamplerReady, Sampling
from shared.errors import InvalidInput, SamplerMismatch, SamplerUnavailable, WorkerLost
from shared.jobs.job import Evaluation, LeaseGrant, PackedData, SamplerKey, newest_name
from shared.jobs.packed import LIKELIEST_LOGPROBS
from shared.serving import LeasedSampler
from shared.settings import Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.store import open_store
from tests.activities.lease_on_thread import HeldSampler, Host
from tests.activities.sampling.injected import (
    Policy,
    check_that_faults_are_noticed,
    transformers_logprobs,
    write_weights,
    write_zero_adapter,
)
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.sampler_process import NAME, write_adapter
from tests.megatron_worker.test_distillation_jobs import TOP_K, ask, losses
from tests.megatron_worker.test_megatron_job import do, plan
from tests.megatron_worker.test_megatron_job import worker as worker  # a fixture
from tests.megatron_worker.workshop import Workshop, sealed, workshop_of_ids
from tests.vllm.environment import ENVIRONMENT, PYTHON, VLLM_COMMAND, needs_vllm

pytestmark = needs_vllm
PROMPT = (10, 20, 30, 40, 50)
TARGETS = ("q_proj", "v_proj", "down_proj")
BOUND = 1e-4
CANARY = "canary-that-vllm-must-not-see"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    root = tmp_path_factory.mktemp("vllm")
    return Settings(root=root / "host", sampling={"vllm_command": VLLM_COMMAND})


@pytest.fixture(scope="module")
def host(settings: Settings) -> Iterator[Host]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
        with Host(settings.root_path.parent, idle_s=600, command=SamplerCommand(HostContext(settings))) as host:
            yield host


@pytest.fixture(scope="module")
def model(settings: Settings) -> Artifact:
    return _uploaded(settings, "model", distinct_model(settings.root_path / "model", head_dim=32))


@pytest.fixture(scope="module")
def adapters(settings: Settings, model: Artifact) -> list[Artifact]:
    made = settings.root_path / "model"
    return [
        _uploaded(
            settings, f"adapter-{seed}", write_adapter(settings.root_path / f"adapter-{seed}", made, seed, TARGETS)
        )
        for seed in (1, 2, 3)
    ]


def _uploaded(settings: Settings, key: str, folder: Path) -> Artifact:
    seal(folder)
    return upload_artifact(open_store(settings.store, settings.s3), key, folder)


def place_of(grant: LeaseGrant) -> LeasedSampler:
    return LeasedSampler(run_id="r1", fence=grant.fence, worker_id=grant.worker_id, sampler="vllm")


def reference(model: Artifact, adapter: Artifact | None = None) -> tuple[float, ...]:
    return transformers_logprobs(path_of(model), path_of(adapter) if adapter else None, PROMPT)


def path_of(artifact: Artifact) -> Path:
    return Path(artifact.uri.removeprefix("file://"))


def leased(host: Host, settings: Settings, key: SamplerKey, epoch: int) -> HeldSampler:
    return HeldSampler(host, settings, key, epoch, patience_s=900)


def test_adapters(host: Host, settings: Settings, model: Artifact, adapters: list[Artifact]) -> None:
    context, samplers = HostContext(settings), Samplers(settings, host.pool)
    key = SamplerKey(model=model, sampler="vllm", max_lora_rank=4, slots=8, max_model_len=64)
    proofs = [reference(model, adapter) for adapter in (None, *adapters)]
    with leased(host, settings, key, 1) as lease:
        assert lease.grant.weights_socket is None
        _closed_to_others(host, lease.grant)
        for adapter, proof in zip((None, *adapters), proofs, strict=True):
            policy = PolicyWeights(adapter=adapter)
            with samplers.serving(place_of(lease.grant), "r1", policy, context) as (opened, served):
                told = opened.client.score(served.name, PROMPT)
                print(f"probe difference {compare(told, proof, PROMPT, BOUND):.2g}")
                drawn = opened.client.sample(served.name, PROMPT, Sampling(max_tokens=6, ignore_eos=True), 3, 7)
                (second,) = opened.client.sample(served.name, PROMPT, Sampling(max_tokens=6, ignore_eos=True), 1, 8)
                assert drawn[1].token_ids == second.token_ids
        stale, newest, wrong = (path_of(adapter) for adapter in adapters)
        others = {"stale": stale, "wrong": wrong, "missing": write_zero_adapter(settings.root_path / "zero", newest)}
        policy = Policy(adapters[1], True, PROMPT, proofs[2])
        check_that_faults_are_noticed(policy, others, context, samplers, place_of(lease.grant), is_mended=False)
        with samplers.open(place_of(lease.grant)) as opened, pytest.raises(InvalidInput, match="one for adapters"):
            opened.client.load_weights("w", str(path_of(model)))
        worker_id = lease.grant.worker_id
    with leased(host, settings, key, 2) as lease:
        assert lease.grant.worker_id == worker_id, "warm"
        with samplers.open(place_of(lease.grant)) as opened:
            assert set(opened.client.models()) == {opened.model}
        psutil.Process(ready_of(host, lease.grant).pid).kill()
        assert isinstance(lease.ended(), WorkerLost)
    assert processes_of(worker_id) == []
    with leased(host, settings, key, 3) as lease:
        policy.prove(context, samplers, place_of(lease.grant))
        with samplers.open(place_of(lease.grant)) as opened:
            policy.replace(opened.client, stale)
        with pytest.raises(SamplerMismatch):
            policy.prove(context, samplers, place_of(lease.grant))
        assert isinstance(lease.ended(), WorkerLost), "it is not kept warm for another run"
    assert processes_of(lease.grant.worker_id) == []


def ready_of(host: Host, grant: LeaseGrant) -> SamplerReady:
    return SamplerReady.model_validate_json(host.paths.worker(grant.worker_id).ready.read_bytes())


def _closed_to_others(host: Host, grant: LeaseGrant) -> None:
    """Only this user opens the socket and the ready file; the key is nowhere else, and no key of ours is there."""
    paths, ready = host.paths.worker(grant.worker_id), ready_of(host, grant)
    assert ready.socket is not None
    assert stat.S_IMODE(Path(ready.socket).stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(paths.ready.stat().st_mode) == 0o600
    assert ready.api_key.encode() not in paths.output.read_bytes()
    with httpx.Client(transport=httpx.HTTPTransport(uds=ready.socket), base_url=ready.url) as stranger:
        assert stranger.get("/health").status_code == 200
        for path in (
            "/v1/models",
            "/metrics",
            "/invocations",
            "/v1/load_weights",
            "/v1/update_weights",
            "/collective_rpc",
        ):
            assert stranger.post(path, json={"method": "reload_weights"}).status_code == 401
        stranger.headers["Authorization"] = f"Bearer {ready.api_key}"
        for path in ("/invocations", "/collective_rpc", "/update_weights", "/sleep", "/v1/chat/completions"):
            assert stranger.post(path, json={"method": "reload_weights"}).status_code == 404
    servers = [one for one in processes_of(grant.worker_id) if one.pid != ready.pid]
    assert servers
    for server in servers:
        assert ready.api_key not in " ".join(server.cmdline())
        assert CANARY not in server.environ().values()
        assert all(at.laddr.ip == "127.0.0.1" for at in server.net_connections("tcp") if at.status == "LISTEN")


@pytest.fixture(scope="module")
def weights(settings: Settings, model: Artifact) -> list[Artifact]:
    """A head that is tied to the embeddings, as the model's: on a CPU vLLM alone leaves that as it was."""
    root = settings.root_path
    return [_uploaded(settings, f"weights-{n}", write_weights(root / f"w{n}", root / "model", n)) for n in (1, 2, 3)]


def test_whole_weights(host: Host, settings: Settings, model: Artifact, weights: list[Artifact]) -> None:
    context, samplers = HostContext(settings), Samplers(settings, host.pool)
    how, long = Sampling(max_tokens=6, ignore_eos=True), Sampling(max_tokens=50, ignore_eos=True)
    names = [adapter_name("r1", each) for each in weights]
    proofs = [reference(each) for each in weights]
    with leased(host, settings, SamplerKey(model=model, sampler="vllm", slots=8, max_model_len=64), 4) as lease:
        place, drawn = place_of(lease.grant), []
        _closed_to_others(host, lease.grant)
        for number in (0, 1, 2, 0):  # and back to earlier ones
            began = time.monotonic()
            policy = PolicyWeights(weights=weights[number])
            with samplers.serving(place, "r1", policy, context) as (opened, served):
                seconds = time.monotonic() - began
                difference = compare(opened.client.score(served.name, PROMPT), proofs[number], PROMPT, BOUND)
                print(f"probe difference {difference:.2g}, there after {seconds:.2f} s")
                assert served.name == names[number] and set(opened.client.models()) == {names[number]}
                drawn.append(opened.client.sample(served.name, PROMPT, how, 2, 7))
                with pytest.raises(InvalidInput, match="404"):
                    opened.client.sample(names[number - 1], PROMPT, how, 1, 7)
        assert [one.token_ids for one in drawn[3]] == [one.token_ids for one in drawn[0]]
        assert drawn[3] != drawn[1]

        stale, newest, wrong = (path_of(each) for each in weights)
        others = {"stale": stale, "wrong": wrong, "missing": path_of(model)}
        check_that_faults_are_noticed(Policy(weights[1], False, PROMPT, proofs[1]), others, context, samplers, place)

        with samplers.open(place) as opened:
            client = opened.client
            # What is drawn when other weights come is drawn from the old ones to its end.
            before = client.sample(names[1], PROMPT, long, 8, 1)
            with ThreadPoolExecutor(2) as threads:
                drawing = threads.submit(client.sample, names[1], PROMPT, long, 8, 1)
                loading = threads.submit(client.load_weights, names[2], str(wrong))
                loading.result(60)
                try:
                    assert [one.token_ids for one in drawing.result(60)] == [one.token_ids for one in before]
                except InvalidInput as error:
                    assert "404" in str(error), "or not at all, if it came later"
            compare(client.score(names[2], PROMPT), proofs[2], PROMPT, BOUND)
            # Weights that lack a tensor are refused before anything is changed.
            with pytest.raises(InvalidInput, match=r"400: the tensors of .* are not those of the model"):
                client.load_weights("partial", str(write_partial(settings.root_path / "partial", newest)))
            compare(client.score(names[2], PROMPT), proofs[2], PROMPT, BOUND)
        # A file that cannot be read to its end: nobody knows what is loaded, so that nothing is drawn, and vLLM ends.
        broken = settings.root_path / "broken"
        shutil.copytree(newest, broken)
        os.truncate(broken / "model.safetensors", (broken / "model.safetensors").stat().st_size - 4)
        with pytest.raises((SamplerUnavailable, WorkerLost)), samplers.open(place) as opened:
            opened.client.load_weights("broken", str(broken))
        ended = lease.ended()
        assert isinstance(ended, WorkerLost) and "could not be loaded" in str(ended), ended
    assert processes_of(lease.grant.worker_id) == []


@pytest.mark.parametrize("kind", ["adapter", "weights"])
def test_every_token_says_which_version_drew_it(
    host: Host, settings: Settings, model: Artifact, adapters: list[Artifact], weights: list[Artifact], kind: str
) -> None:
    """Versions come as fast as they can while long answers are drawn. Each token has the log-probability that the
    version which it names gives it, by transformers, and none that another gives it."""
    context, samplers, name = HostContext(settings), Samplers(settings, host.pool), newest_name("r1")
    taught = kind == "adapter"
    made = [_amplified(settings, each) for each in adapters] if taught else weights
    policies: list[Artifact | None] = [None if taught else model, *made]
    key = SamplerKey(model=model, sampler="vllm", max_lora_rank=4 if taught else 0, slots=4, max_model_len=256)
    long = Sampling(max_tokens=200, ignore_eos=True)

    def policy_of(version: int) -> PolicyWeights:
        """Version 0 is the model as it was; then the three take turns."""
        artifact = policies[(version - 1) % 3 + 1] if version else policies[0]
        return PolicyWeights(**{kind: artifact, "in_place": kind, "policy_version": version})

    def served(version: int) -> OpenSampler:
        with samplers.serving(place, "r1", policy_of(version), context) as (opened, found):
            assert found.name == name
            return opened

    with leased(host, settings, key, 5 if taught else 6) as lease, ThreadPoolExecutor(1) as threads:
        place, version = place_of(lease.grant), 0
        served(0)
        with samplers.open(place) as opened:
            client = opened.client
            drawing = threads.submit(client.sample, name, PROMPT, long, 4, 7)
            while not drawing.done():
                version += 1
                served(version)
            drawn = drawing.result()
            told, by = client.scored_by(name, PROMPT)
            assert by.policy_version == version == client.models()[name].policy_version
            newest = policy_of(version)
            compare(told, _reference_of(model, newest, PROMPT), PROMPT, BOUND)
            served(version - 1)  # is older than what is served
            assert client.scored_by(name, PROMPT) == (told, by)
            (later,) = client.sample(name, PROMPT, Sampling(max_tokens=4), 1, 7)
            assert set(later.policy_versions) == {version}
            assert [one.policy_version for one in later.drawn_by] == [version]
        num_same = num_changes = 0
        for one in drawn:
            ids, drawn_by = (*PROMPT, *one.token_ids), np.array(one.policy_versions)
            known = {each: _reference_of(model, policy_of(each), ids)[len(PROMPT) - 1 :] for each in range(4)}
            by_version = np.array([known[each] for each in range(4)])
            which = np.where(drawn_by > 0, (drawn_by - 1) % 3 + 1, 0)
            apart = np.abs(by_version - np.array(one.logprobs))
            own = apart[which, np.arange(len(which))]
            assert own.max() < BOUND, (own.argmax(), own.max(), drawn_by[own.argmax()])
            num_same += int((apart < BOUND).sum()) - len(which)
            num_changes += len(set(one.policy_versions)) - 1
            assert (np.diff(drawn_by) >= 0).all()
        print(f"{version} versions, {num_changes} changes in 4 samples; {num_same} of 2400 tokens fit another version")
        assert num_changes >= 4 and num_same < 48


def _amplified(settings: Settings, adapter: Artifact) -> Artifact:
    """Return an adapter whose log-probabilities are far from the model's."""
    folder = settings.root_path / f"far-{adapter.sha256[:8]}"
    shutil.copytree(path_of(adapter), folder)
    path = folder / "adapter_model.safetensors"
    save_file({n: t * 20 if "lora_B" in n else t for n, t in load_file(path).items()}, path)
    return _uploaded(settings, folder.name, folder)


def _reference_of(model: Artifact, policy: PolicyWeights, ids: tuple[int, ...]) -> tuple[float, ...]:
    adapter = None if policy.adapter is None else path_of(policy.adapter)
    return transformers_logprobs(path_of(policy.weights or model), adapter, ids)


def write_partial(folder: Path, model: Path) -> Path:
    """Write a model without the last of its norms."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_host_without_vllm_says_so(settings: Settings, model: Artifact, tmp_path: Path) -> None:
    bare = settings.model_copy(update={"sampling": type(settings.sampling)()})
    with Host(tmp_path, command=SamplerCommand(HostContext(bare))) as host:
        error = HeldSampler(host, bare, SamplerKey(model=model, sampler="vllm"), 1).ended()
    assert isinstance(error, InvalidInput) and "LONGSHORE_SAMPLING__VLLM_COMMAND" in str(error)


def test_a_cpus_vllm_that_is_asked_for_routes_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    settings = Settings(root=tmp_path / "host", sampling={"vllm_command": VLLM_COMMAND})
    folder = distinct_model(tmp_path / "model", "qwen3_moe", tied=False, head_dim=32)
    seal(folder)
    model: Artifact = upload_artifact(open_store(settings.store, settings.s3), "model", folder)
    key = SamplerKey(model=model, sampler="vllm", slots=8, max_model_len=64, tells_routes=True)
    with Host(tmp_path, command=SamplerCommand(HostContext(settings))) as host:
        error = HeldSampler(host, settings, key, 1, patience_s=600).ended()
    assert "routing_replay: off" in str(error) and "Triton" in str(error)


VOCAB_SIZE, KEY = 512, "a-key-of-the-installation"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    root = tmp_path_factory.mktemp("teacher")
    make_tiny_model(root / "model", ["hello there"], vocab_size=VOCAB_SIZE, head_dim=32)  # as vLLM's kernels want it
    return workshop_of_ids(root, root / "model", VOCAB_SIZE, 6, [[0, 1], [2, 3]], [5, 6, 7])


@pytest.fixture(scope="module")
def teacher(workshop: Workshop) -> Path:
    """An adapter that is far from the base."""
    folder = write_adapter(workshop.root / "teacher", workshop.root / "model", 3, TARGETS)
    path = folder / "adapter_model.safetensors"
    save_file({n: t * 20 if "lora_B" in n else t for n, t in load_file(path).items()}, path)
    return folder


@pytest.fixture(scope="module")
def server(workshop: Workshop, teacher: Path) -> Iterator[SamplerReady]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--host", "127.0.0.1", "--api-key", KEY, "--dtype", "float32"]
    # One at a time: this build ends where the texts of several are scored by an adapter.
    options += ["--max-model-len", "64", "--max-num-seqs", "1", "--enable-lora", "--max-lora-rank", "8"]
    executable, *own = VLLM_COMMAND.split()
    command = [executable, "serve", str(workshop.root / "model"), *own, *options, "--lora-modules", f"{NAME}={teacher}"]
    deadline, output = time.monotonic() + 900, workshop.root / "vllm.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=file, stderr=file)
    try:
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()[-2000:]
            time.sleep(0.5)
        yield SamplerReady(url=f"http://127.0.0.1:{port}", api_key=KEY, pid=process.pid, model=PYTHON)
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False


def test_an_adapter_that_vllm_serves_teaches_as_it_does_on_the_worker(
    worker, workshop: Workshop, teacher: Path, server: SamplerReady, tmp_path: Path
) -> None:
    artifact, lora = sealed(teacher), Lora(rank=4, alpha=12, targets=TARGETS)
    told = {
        name: sealed(ask(tmp_path, server, data.units, workshop.model))
        for name, data in (("train", workshop.data), ("held-out", workshop.held_out))
    }
    asked = {
        name: PackedData(units=data.units, plan=data.plan, likeliest=told[name])
        for name, data in (("train", workshop.data), ("held-out", workshop.held_out))
    }
    by_url = Distillation(tokens="top_k", top_k=TOP_K)
    fields = {"trainable": lora}
    one = plan(workshop, data=asked["train"], evaluation=Evaluation(data=asked["held-out"]), loss=by_url, **fields)
    loss = Distillation(teacher=artifact, tokens="top_k", top_k=TOP_K)
    other = plan(workshop, evaluation=Evaluation(data=workshop.held_out), loss=loss, **fields)
    found = [losses(do(worker, workshop, name, job)) for name, job in (("by-url", one), ("by-adapter", other))]
    apart = np.abs(np.subtract(*found)).max()
    print(f"losses {apart:.1e} apart, of {found[1][0]:.3f}")
    assert apart < 1e-5 and found[0][0] > 0.003
    drawn = np.load(ask(tmp_path, server, workshop.data.units, workshop.model, top_k=0) / LIKELIEST_LOGPROBS)
    assert np.isfinite(drawn).all() and drawn.shape[1] == 1
