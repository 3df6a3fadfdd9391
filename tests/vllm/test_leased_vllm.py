"""A vLLM that a sampler host leases out: it serves adapters, and what is wrong with one is noticed."""

import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from activities.host_context import HostContext
from activities.hosts.worker_process import processes_of
from activities.sampling.lease_sampler import SamplerCommand
from activities.sampling.sample import compare
from activities.sampling.samplers import PolicyWeights, Samplers, adapter_name
from shared.chat.completions import SamplerReady, Sampling
from shared.contract import Artifact
from shared.errors import InvalidInput, SamplerMismatch, WorkerLost
from shared.jobs.leases import LeaseGrant, SamplerKey
from shared.runs.serving import LeasedSampler
from shared.settings import Settings
from shared.storage.artifacts import seal, upload
from shared.storage.store import open_store
from tests.activities.lease_on_thread import HeldSampler, Host
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.sampler_process import write_adapter
from tests.vllm.environment import ENVIRONMENT, VLLM_COMMAND, needs_vllm

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
        for seed in (1, 2)
    ]


def _uploaded(settings: Settings, key: str, folder: Path) -> Artifact:
    seal(folder)
    return upload(open_store(settings.store, settings.s3), key, folder)


def place_of(grant: LeaseGrant) -> LeasedSampler:
    return LeasedSampler(run_id="r1", fence=grant.fence, worker_id=grant.worker_id, sampler="vllm")


def reference(settings: Settings, model: Artifact, adapter: Artifact | None = None) -> tuple[float, ...]:
    """Log-probabilities of PROMPT[1:] by transformers and PEFT, in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(model.uri.removeprefix("file://"), dtype=torch.float32)
        if adapter is not None:
            whole = PeftModel.from_pretrained(whole, adapter.uri.removeprefix("file://"))
        logprobs = torch.log_softmax(whole(torch.tensor([PROMPT])).logits[0], dim=-1)
    return tuple(logprobs[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])].tolist())


def leased(host: Host, settings: Settings, key: SamplerKey, epoch: int) -> HeldSampler:
    return HeldSampler(host, settings, key, epoch, patience_s=900)


def test_adapters(host: Host, settings: Settings, model: Artifact, adapters: list[Artifact]) -> None:
    context, samplers = HostContext(settings), Samplers(settings, host.pool)
    key = SamplerKey(model=model, sampler="vllm", max_lora_rank=4, slots=8, max_model_len=64)
    proofs = [reference(settings, model, adapter) for adapter in (None, *adapters)]
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
                # A wrong adapter, the stale one before it, or none: the proof fails.
                for other in proofs:
                    if other != proof:
                        with pytest.raises(SamplerMismatch):
                            compare(told, other, PROMPT, BOUND)
        with samplers.open(place_of(lease.grant)) as opened, pytest.raises(InvalidInput, match="404"):  # a missing one
            opened.client.sample(adapter_name("r1", adapters[0]), PROMPT, Sampling(max_tokens=1), 1, 0)
        worker_id = lease.grant.worker_id
    with leased(host, settings, key, 2) as lease:
        assert lease.grant.worker_id == worker_id, "warm"
        with samplers.open(place_of(lease.grant)) as opened:
            assert set(opened.client.models()) == {opened.model}
        psutil.Process(ready_of(host, lease.grant).pid).kill()
        assert isinstance(lease.ended(), WorkerLost)
    assert processes_of(worker_id) == []


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
        assert stranger.get("/v1/models").status_code == 401
        assert stranger.post("/collective_rpc", json={"method": "reload_weights"}).status_code == 404, "no dev mode"
    servers = [one for one in processes_of(grant.worker_id) if one.pid != ready.pid]
    assert servers
    for server in servers:
        assert ready.api_key not in " ".join(server.cmdline())
        assert CANARY not in server.environ().values()
        assert all(at.laddr.ip == "127.0.0.1" for at in server.net_connections("tcp") if at.status == "LISTEN")


def test_a_host_without_vllm_says_so(settings: Settings, model: Artifact, tmp_path: Path) -> None:
    bare = settings.model_copy(update={"sampling": type(settings.sampling)()})
    with Host(tmp_path, command=SamplerCommand(HostContext(bare))) as host:
        error = HeldSampler(host, bare, SamplerKey(model=model, sampler="vllm"), 1).ended()
    assert isinstance(error, InvalidInput) and "LONGSHORE_SAMPLING__VLLM_COMMAND" in str(error)
