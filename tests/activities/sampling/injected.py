"""Faults that are put into a sampler on purpose: under a policy's name it serves something else, or nothing."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.sampling.client import Sampler
from activities.sampling.sample import Drawing, Proved, ProveRequest, SamplerActivities, compare, draw_group
from activities.sampling.samplers import PolicyWeights, Samplers, adapter_name
from activities.tokenizing.render_prompts import PromptRow
from longshore.fields import Artifact
from shared.chat.completions import Sampling
from shared.errors import SamplerMismatch, SamplerUnavailable
from shared.models.peft import WEIGHTS
from shared.serving import SamplerPlace

DRAWING = Drawing(group_size=1, sampling=Sampling(max_tokens=4), seed=0, policy_version=0)


@dataclass(frozen=True)
class Policy:
    """A policy to be served by a sampler, an adapter or whole weights, and its log-probabilities of a probe."""

    artifact: Artifact
    is_adapter: bool
    probe: tuple[int, ...]
    logprobs: tuple[float, ...]

    def prove(self, host: HostContext, samplers: Samplers, place: SamplerPlace) -> Proved:
        """As a run does it after each step."""
        policy = {"adapter" if self.is_adapter else "weights": self.artifact}
        request = ProveRequest(run_id="r1", probe=self.probe, logprobs=self.logprobs, bound=1e-4, place=place, **policy)
        proved: Proved = ActivityEnvironment().run(SamplerActivities(host, samplers).prove_adapter, request)
        return proved

    def score(self, host: HostContext, samplers: Samplers, place: SamplerPlace) -> tuple[float, ...]:
        """By what the sampler serves as this policy."""
        policy = PolicyWeights(**{"adapter" if self.is_adapter else "weights": self.artifact})
        with samplers.serving(place, "r1", policy, host) as (opened, served):
            return opened.client.score(served.name, self.probe)

    def replace(self, client: Sampler, folder: Path) -> None:
        """Put something else in the place of what the sampler serves by this policy's name."""
        name = adapter_name("r1", self.artifact)
        if self.is_adapter:
            client.unload_adapter(name)
            client.load_adapter(name, str(folder))
        else:
            client.load_weights(name, str(folder))


def check_that_faults_are_noticed(
    policy: Policy,
    others: Mapping[str, Path],
    host: HostContext,
    samplers: Samplers,
    place: SamplerPlace,
    is_mended: bool = True,
) -> None:
    """Each of `others` fails the proof by the policy's name; without what it names, the sampler draws nothing.

    `is_mended`: a proof that fails has the policy loaded from the store. It is checked that this was necessary.
    """
    name = adapter_name("r1", policy.artifact)
    with samplers.open(place) as opened:
        for fault, folder in others.items():
            policy.replace(opened.client, folder)
            assert name in opened.client.models()
            with pytest.raises(SamplerMismatch) as noticed:
                compare(policy.score(host, samplers, place), policy.logprobs, policy.probe, 1e-4)
            print(f"{fault}: {noticed.value}")
            if is_mended:
                assert policy.prove(host, samplers, place).was_reloaded
                assert not policy.prove(host, samplers, place).was_reloaded
        if policy.is_adapter:
            opened.client.unload_adapter(name)
        else:
            opened.client.load_weights("another", str(next(iter(others.values()))))
        with pytest.raises(SamplerUnavailable, match=f"serves {name} no longer"):
            draw_group(opened.client, name, DRAWING, 0, 0, PromptRow("rows.jsonl:1", policy.probe, {}))
        print(f"right again: {policy.prove(host, samplers, place).max_difference:.2g}")
        draw_group(opened.client, name, DRAWING, 0, 0, PromptRow("rows.jsonl:1", policy.probe, {}))


def transformers_logprobs(
    model: Path, adapter: Path | None, probe: tuple[int, ...], dtype: str = "float32"
) -> tuple[float, ...]:
    """By transformers and PEFT, of probe[1:]: an opinion independent of ours."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        if adapter is not None:
            whole = PeftModel.from_pretrained(whole, adapter)
        logprobs = torch.log_softmax(whole(torch.tensor([probe])).logits[0].float(), dim=-1)
    return tuple(logprobs[torch.arange(len(probe) - 1), torch.tensor(probe[1:])].tolist())


def write_weights(folder: Path, model: Path, seed: int) -> Path:
    """Write other weights of a model, as if it had been trained."""
    import torch
    from transformers import AutoModelForCausalLM

    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1 + 0.2 * torch.randn(weight.shape, generator=generator))
    changed.save_pretrained(folder)
    return folder


def write_zero_adapter(folder: Path, adapter: Path) -> Path:
    """Write an adapter that changes nothing: with it a sampler draws as one that ignores the adapter it is given."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(adapter, folder)
    weights = {name: torch.zeros_like(tensor) for name, tensor in load_file(adapter / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS)
    return folder
