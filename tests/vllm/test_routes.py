"""A leased vLLM tells the experts of a mixture's tokens, as our trainer would choose them; of a dense model it does not
start otherwise."""

from pathlib import Path

import numpy as np
import pytest
import torch

from activities.host_context import HostContext
from activities.sampling.lease_sampler import SamplerCommand
from activities.sampling.sample import Drawing, draw_group
from activities.sampling.samplers import Samplers
from activities.tokenizing.render_prompts import PromptRow
from longshore.fields import Artifact
from longshore.layout import Layout
from megatron_worker.megatron.engine import MegatronEngine
from shared.chat.completions import Sampling
from shared.jobs.leases import SamplerKey
from shared.jobs.packed import RouteShape
from shared.serving import LeasedSampler
from shared.settings import Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.store import open_store
from tests.activities.lease_on_thread import HeldSampler, Host
from tests.megatron_worker.replayed import with_own_routes
from tests.megatron_worker.rows import Row, bin_of, distinct_model
from tests.vllm.environment import ENVIRONMENT, VLLM_COMMAND, needs_vllm

pytestmark = needs_vllm
PROMPT = (10, 20, 30, 40, 50)
SHAPE = RouteShape(num_layers=2, num_experts=4, per_token=2)


def test_a_mixture_tells_its_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    settings = Settings(root=tmp_path / "host", sampling={"vllm_command": VLLM_COMMAND})
    folder = distinct_model(tmp_path / "model", "qwen3_moe", tied=False, head_dim=32)
    seal(folder)
    model: Artifact = upload_artifact(open_store(settings.store, settings.s3), "model", folder)
    key = SamplerKey(model=model, sampler="vllm", slots=8, max_model_len=64, tells_routes=True)
    how = Drawing(
        group_size=3, sampling=Sampling(max_tokens=6, ignore_eos=True), seed=1, policy_version=0, routes=SHAPE
    )
    command = SamplerCommand(HostContext(settings))
    with Host(tmp_path, idle_s=600, command=command) as host, HeldSampler(host, settings, key, 1, 900) as lease:
        at = {"fence": lease.grant.fence, "worker_id": lease.grant.worker_id}
        with Samplers(settings, host.pool).open(LeasedSampler(run_id="r1", sampler="vllm", **at)) as (client, name):
            group = draw_group(client, name, 0, 0, PromptRow("rows.jsonl:1", PROMPT, {}), how)
    prompt_TLK = np.frombuffer(group.prompt_routes, SHAPE.dtype)
    engine = MegatronEngine(folder, Layout(), "float32")
    for sample in group.samples:
        told_TLK = np.concatenate([prompt_TLK, np.frombuffer(sample.routes, SHAPE.dtype)])
        own = with_own_routes(engine, bin_of([Row([*PROMPT, *sample.token_ids], [1.0] * 11)])).route_TLK
        assert own is not None and len(told_TLK) == 10
        assert torch.equal(torch.from_numpy(told_TLK.astype(np.uint8)).sort(-1).values, own[:-1].sort(-1).values)
