"""Routing replay of every family of mixtures: what a sampler tells, whichever decoder it has, the trainer takes.

Shape suffixes: N targets, T tokens, L layers with experts, K experts of a token.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activities.sampling.client import Sampler
from activities.sampling.completions import RoutesFile, RoutesWriter, SampledGroup
from activities.sampling.sample import Drawing, draw_group
from activities.tokenizing.render_prompts import PromptRow
from longshore.training import Full, Layout
from megatron_worker.megatron.engine import MegatronEngine
from shared.chat.completions import Sampling
from shared.errors import InvalidInput
from shared.families import read_config
from shared.families.architecture import Mixture
from shared.families.model_slices import shape_of
from tests.depth import drawn as some_of
from tests.megatron_worker.parallel_ranks import STEPS, step
from tests.megatron_worker.replayed import experts_of, with_own_routes
from tests.megatron_worker.rows import EXPERTS_BESIDE, Row, bin_of, distinct_model
from tests.megatron_worker.sampler_process import NAME, running
from tests.megatron_worker.scores import logprobs
from tests.megatron_worker.test_sampler_families import ids_of

pytestmark = pytest.mark.usefixtures("one_thread")

# How many of their layers have experts.
FAMILIES: dict[str, tuple[int, int]] = {
    "qwen3_moe": (2, 2),
    "qwen3_5_moe": (2, 2),
    "gpt_oss": (2, 2),
    "deepseek_v3": (3, 2),
    "glm4_moe": (3, 2),
    "glm4_moe_lite": (3, 2),
    "nemotron_h": (7, 2),
    "gemma4": (4, 4),
    "granitemoehybrid": (2, 2),
}
LENGTH = 9


@dataclasses.dataclass
class Drawn:
    """A model, what a sampler drew of it, and a folder with its routes."""

    model: Path
    groups: list[SampledGroup]
    routes: RoutesFile


@pytest.fixture(scope="module", params=some_of([*FAMILIES], 2))
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """Two prompts, of which transformers' model reads one in two parts, and three samples of each."""
    folder = tmp_path_factory.mktemp(request.param)
    own: dict[str, Any] = {"tied": True, "config": EXPERTS_BESIDE} if request.param == "gemma4" else {"tied": False}
    if request.param == "glm4_moe":
        own["seed"] = 3  # by the usual one each token takes the same experts in a layer, so routes tell nothing
    model = distinct_model(folder / "model", request.param, num_layers=FAMILIES[request.param][0], **own)
    shape = shape_of(read_config(model)).routes
    assert shape is not None
    how = Drawing(
        group_size=3, sampling=Sampling(max_tokens=LENGTH, ignore_eos=True), seed=3, policy_version=0, routes=shape
    )
    prompts = [PromptRow(f"rows.jsonl:{number}", tuple(ids_of(length)), {}) for number, length in enumerate((3, 270))]
    with running(model, folder) as ready, Sampler(ready.url, ready.api_key) as sampler, RoutesWriter(folder) as writer:
        groups = [
            writer.without_bytes(draw_group(sampler, NAME, how, number, number, prompt))
            for number, prompt in enumerate(prompts)
        ]
    return Drawn(model, groups, RoutesFile([folder], shape))


def test_routes_are_those_of_the_layers_that_have_experts(drawn: Drawn) -> None:
    config = read_config(drawn.model)
    mlps, shape = config.architecture().mlps, shape_of(config).routes
    mixtures = [mlp for mlp in mlps if isinstance(mlp, Mixture)]
    assert shape is not None
    num_layers, num_mixtures = FAMILIES[config.model_type]
    assert (len(mlps), len(mixtures), shape.num_layers) == (num_layers, num_mixtures, num_mixtures)
    assert {(mlp.num_experts, mlp.experts_per_token) for mlp in mixtures} == {(shape.num_experts, shape.per_token)}
    told = shape.has_experts or (True,) * num_layers
    assert told == tuple(isinstance(mlp, Mixture) for mlp in mlps)


def test_steps_by_the_trainers_own_routes_are_the_steps_without_to_the_bit(drawn: Drawn) -> None:
    free, told = (MegatronEngine(drawn.model, Layout(), "float32") for _ in range(2))
    for engine in (free, told):
        engine.train_full(Full())
    for bins, loss in STEPS:
        own = [with_own_routes(told, batch) for batch in bins]
        assert step(told, own, loss, 3e-4) == step(free, bins, loss, 3e-4)
    assert torch.equal(told._model.flat.buffer, free._model.flat.buffer)


def test_by_the_samplers_routes_the_trainer_scores_as_the_sampler(drawn: Drawn) -> None:
    """Its own choice, by scores that are as they were, would be another."""
    engine, generator = MegatronEngine(drawn.model, Layout(), "float32"), torch.Generator().manual_seed(0)
    for router in (each.router for each in experts_of(engine)):
        router.correction = 9 * torch.randn(router.weight.shape[0], generator=generator)
    rows, routes, sampler = [], list[np.ndarray](), list[float]()
    for group in drawn.groups:
        for sample in group.samples:
            ids, num_prompt = [*group.prompt_ids, *sample.token_ids], len(group.prompt_ids)
            rows.append(Row(ids, [0.0] * num_prompt + [1.0] * LENGTH))
            routes.append(drawn.routes.of_sequence(ids, num_prompt, (group.prompt_block, sample.block)))
            sampler += sample.logprobs
    free, route_TLK = bin_of(rows), torch.from_numpy(np.concatenate(routes))
    assert route_TLK.shape[0] == len(free.token_id_T)
    sampler_N = torch.tensor(sampler)
    assert (logprobs(engine, dataclasses.replace(free, route_TLK=route_TLK)) - sampler_N).abs().max() <= 1e-5
    assert (logprobs(engine, free) - sampler_N).abs().max() > 1e-3
    for layer in range(route_TLK.shape[1]):
        one_off = route_TLK.clone()
        one_off[:, layer] = route_TLK[:, layer].flip(0)
        changed_N = logprobs(engine, dataclasses.replace(free, route_TLK=one_off))
        assert (changed_N - sampler_N).abs().max() > 1e-3, "each layer's routes are taken"


def test_the_routes_of_another_sample_are_refused_by_name(drawn: Drawn) -> None:
    first, second = drawn.groups[0].samples[:2]
    prompt, ids = drawn.groups[0].prompt_block, (*drawn.groups[0].prompt_ids, *first.token_ids)
    assert drawn.routes.of_sequence(ids, 3, (prompt, first.block)).shape[0] == len(ids)
    for blocks in ((prompt, second.block), (drawn.groups[1].prompt_block, first.block)):
        with pytest.raises(InvalidInput, match=r"routes\.bin: its routes are those of another sequence"):
            drawn.routes.of_sequence(ids, 3, blocks)
