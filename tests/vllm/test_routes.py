"""A leased vLLM is asked for the experts of a mixture's tokens. On a CPU it cannot tell them, and says so."""

from pathlib import Path

import pytest

from activities.host_context import HostContext
from activities.sampling.samplers import SamplerCommand
from longshore.fields import Artifact
from shared.jobs.job import SamplerKey
from shared.settings import Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.store import open_store
from tests.activities.lease_on_thread import HeldSampler, Host
from tests.megatron_worker.rows import distinct_model
from tests.vllm.environment import ENVIRONMENT, VLLM_COMMAND, needs_vllm

pytestmark = needs_vllm


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
