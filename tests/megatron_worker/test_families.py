"""Every family, by property: it scores, trains, samples and is saved as transformers and PEFT have it, or is refused.

Models of families that are not ours are among them: the engine fsdp and the sampler compute those by transformers. A
new family is a line of MODELS and of the tables of settings; what is one family's own stands at the end.
"""

import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from activities.sampling.client import Sampler
from benchmarks.families import measure
from longshore.training import DELTA_NET, LATENT, LATENT_EXPERTS, LINEARS, MAMBA, EngineName, Full, Layout, Lora
from megatron_worker import families
from megatron_worker.families import read_slice, write_slice
from megatron_worker.megatron import attention
from megatron_worker.mixers.linear_attention import RecurrentPlan, plan_recurrence
from megatron_worker.sampler.adapters import load_adapter
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.tensors.safetensors_files import (
    TensorFiles,
    WrittenTensor,
    all_drawn,
    dequantized,
    shards_of,
    write_model,
)
from megatron_worker.tensors.slot_engine import Engine
from shared.errors import InvalidInput
from shared.families import FAMILIES, read_architecture, read_config
from shared.families.model_slices import shape_of
from shared.families.tensor_slices import TensorSlice
from shared.models.merging import Merger
from shared.models.peft import layer_of
from shared.models.shape import check_layout
from tests.depth import drawn
from tests.megatron_worker.driving import ADAM, LEARNING_RATE, train
from tests.megatron_worker.engines import ENGINES, start
from tests.megatron_worker.rows import (
    EXPERTS_BESIDE,
    GRANITE_DENSE,
    Row,
    bin_of,
    distinct_model,
    model_with_tower,
    random_rows,
    reference_steps,
)
from tests.megatron_worker.sampler_process import NAME, running
from tests.megatron_worker.scores import logprobs, logprobs_by_steps, logprobs_in_transformers, transformers_model
from tests.megatron_worker.trees import as_chains, as_one_sequence, as_tree, random_sequences, trees_beside_chains
from tests.megatron_worker.unknown_models import COMPUTED, unknown_model

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = list(FAMILIES)
EXPERTS, NO_EXPERTS = "gemma4 with experts", "nemotron_h without experts"
GRANITE, DENSE_GRANITE = "granitemoehybrid", "granitemoehybrid without experts"
MODELS: dict[str, dict[str, Any]] = {family: {"family": family} for family in NAMES} | {
    EXPERTS: {"family": "gemma4", "config": EXPERTS_BESIDE},
    DENSE_GRANITE: {"family": GRANITE, "num_layers": 4, "config": GRANITE_DENSE},
    NO_EXPERTS: {
        "family": "nemotron_h",
        "config": {"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]},
    },
}
GENERIC = {f"{family} by transformers": family for family in COMPUTED}
ALL = [*MODELS, *GENERIC]
RECURRENT = ["qwen3_5", "qwen3_5_moe", "nemotron_h", NO_EXPERTS, GRANITE, DENSE_GRANITE]
LFM2_AS_350M = {"block_auto_adjust_ff_dim": True, "intermediate_size": 104, "block_multiple_of": 32}
NEVER_TIED = {"nemotron_h", NO_EXPERTS}
FAMILIES = [(name, tied) for name in MODELS for tied in (True, False) if not (tied and name in NEVER_TIED)]
LENGTHS = (90, 2, 700, 33)
STEPS = [random_rows([40, 17, 90, 25, 60, 8], seed=step % 4) for step in range(20)]
ROW = [STEPS[0][2]]
CPU = torch.device("cpu")
SHORT, LONG = [1.0, 1.1, 1.3, 1.2, 2.0, 2.5, 3.0, 3.5], [1.0, 2.0, 4.0, 8.0, 9.0, 11.0, 16.0, 32.0]

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Models by name, each of which is made once: no test changes them, but their `changed` copies."""

    @functools.cache
    def model(name: str, tied: bool = False, num_layers: int = 4) -> Path:
        if name in GENERIC:
            return unknown_model(tmp_path_factory.mktemp("model"), GENERIC[name])
        settings = {"tied": tied, "num_layers": num_layers} | MODELS[name]
        return distinct_model(tmp_path_factory.mktemp("model"), **settings)

    return model


def changed(folder: Path, to: Path, change: dict[str, Any]) -> Path:
    """A copy whose config.json says something else; `...`: nothing."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | change
    (to / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return to


def with_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Write a model's file anew; returns what it has then."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def engine_of(folder: Path, kind: str = "base") -> Engine:
    """The engine that computes a model's family."""
    return start("fsdp" if read_architecture(folder).is_generic else "megatron", folder, kind)


def furthest_from_transformers(folder: Path, lengths: tuple[int, ...] = LENGTHS) -> float:
    """The largest difference of a log-probability, of rows packed in one bin."""
    rows = random_rows(lengths)
    found = logprobs(engine_of(folder), bin_of(rows))
    return float((found - logprobs_in_transformers(transformers_model(folder), rows)).abs().max())


def apart(*logprob_N: Tensor) -> float:
    return float((logprob_N[0] - logprob_N[1]).abs().max())


# Scores.


@pytest.mark.parametrize(("name", "tied"), [*FAMILIES, *((name, False) for name in drawn([*GENERIC], 2))])
def test_rows_of_a_bin_score_as_in_transformers(made, name, tied):
    assert furthest_from_transformers(made(name, tied, 2 if tied else 4)) <= 1e-5


@pytest.mark.parametrize("name", drawn(ALL, 4))
def test_trees_score_and_learn_as_their_sequences_alone(made, tmp_path, name):
    of_logprobs, of_gradients = trees_beside_chains(engine_of(made(name), "full"), tmp_path)
    assert of_logprobs <= 1e-5
    assert of_gradients <= 1e-5


@pytest.mark.parametrize("name", drawn(ALL, 4))
def test_a_row_s_scores_do_not_depend_on_the_rows_beside_it(made, name):
    driven, rows = engine_of(made(name)), random_rows([70, 3, 150, 64, 1, 65])
    alone = {id(row): logprobs(driven, bin_of([row])) for row in rows if len(row.ids) > 1}
    for order in ([0, 1, 2, 3, 4, 5], [4, 5, 3, 0, 2, 1], [2, 0]):
        found = logprobs(driven, bin_of([rows[i] for i in order]))
        expected = torch.cat([alone[id(rows[i])] for i in order if len(rows[i].ids) > 1])
        assert apart(found, expected) <= 1e-6


def width_of(plan: RecurrentPlan) -> int:
    return len(plan.ancestor_WT) + 1


STATE_FAULTS: dict[str, Callable[[RecurrentPlan, Tensor], RecurrentPlan]] = {
    "the state is not reset": lambda plan, parent_T: dataclasses.replace(
        plan_recurrence(as_one_sequence(parent_T), width_of(plan)), ancestor_WT=plan.ancestor_WT
    ),
    "a branch starts from zeros": lambda plan, parent_T: dataclasses.replace(
        plan_recurrence(as_chains(parent_T), width_of(plan)), ancestor_WT=plan.ancestor_WT
    ),
    "the convolution is not reset": lambda plan, parent_T: dataclasses.replace(
        plan, ancestor_WT=plan_recurrence(as_one_sequence(parent_T), width_of(plan)).ancestor_WT
    ),
    "the convolution of a branch starts from zeros": lambda plan, parent_T: dataclasses.replace(
        plan, ancestor_WT=plan_recurrence(as_chains(parent_T), width_of(plan)).ancestor_WT
    ),
}


LEAKS = [(name, fault) for name in RECURRENT for fault in STATE_FAULTS]
LEAKS += [("lfm2", fault) for fault in STATE_FAULTS if "convolution" in fault]


@pytest.mark.parametrize(("name", "fault"), drawn(LEAKS, 8))
def test_states_that_leak_or_are_lost_show(made, monkeypatch, name, fault):
    driven, tree = engine_of(made(name)), as_tree(random_sequences(3))
    expected, broken = logprobs(driven, tree), STATE_FAULTS[fault]
    monkeypatch.setattr(
        attention, "plan_recurrence", lambda p_T, width, share: broken(plan_recurrence(p_T, width, share), p_T)
    )
    assert apart(logprobs(driven, tree), expected) > 1e-3


# Training.

# With an epsilon of 1e-8 an element whose first gradient is little more than rounding (an adapter of gemma4 has one of
# 7e-7, beside others of 2e-3) takes a whole step by the sign of that, which depends on the CPU.
_ADAM = ADAM.model_copy(update={"eps": 1e-5})
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def peft_linears(name: str, model: Path) -> tuple[str, ...]:
    """Linears that PEFT sees in transformers' model, too: there experts are stacks."""
    in_stacks = read_architecture(model).num_experts and name not in (EXPERTS, GRANITE)
    return (*ATTENTION, *DELTA_NET, *LATENT, *MAMBA, *LATENT_EXPERTS) if in_stacks else LINEARS


@pytest.mark.parametrize("name", drawn(ALL, 3))
def test_twenty_lora_steps_equal_those_of_peft(made, tmp_path, name):
    """Losses and norms; the adapter is loaded by PEFT and merged into the model with the same scores."""
    from peft import PeftModel

    model, driven = made(name), engine_of(made(name))
    lora = Lora(rank=4, alpha=8, targets=peft_linears(name, model))
    driven.add_adapter("run", lora, seed=3)
    driven.save(tmp_path / "start")
    begin = tmp_path / "start" / "weights"
    reference = PeftModel.from_pretrained(transformers_model(model), begin, is_trainable=True)
    adapted = {name.removesuffix(".default.weight") for name, p in reference.named_parameters() if p.requires_grad}
    assert adapted == {name.removesuffix(".weight") for name in load_file(begin / "adapter_model.safetensors")}
    expected = reference_steps(reference, STEPS, LEARNING_RATE, _ADAM.weight_decay, _ADAM.clip_norm, _ADAM.eps)
    history = train(driven, [[rows[:2], rows[2:]] for rows in STEPS], _ADAM)
    assert expected[-1][0] < expected[0][0]
    assert [loss for loss, _ in history] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [norm for _, norm in history] == pytest.approx([norm for _, norm in expected], rel=5e-4)
    driven.save(tmp_path / "end")
    weights = tmp_path / "end" / "weights"
    reloaded_N = logprobs_in_transformers(PeftModel.from_pretrained(transformers_model(model), weights), ROW)
    assert apart(logprobs(driven, bin_of(ROW)), reloaded_N) <= 1e-5
    merged = Path(shutil.copytree(model, tmp_path / "merged"))
    with (weights / "adapter_model.safetensors").open("rb") as file:
        merger = Merger.of(lora, file, "adapter")
    with (model / "model.safetensors").open("rb") as source, (merged / "model.safetensors").open("wb") as target:
        merger.merge(source, target, "base")
    merger.check_used("base")
    assert apart(logprobs_in_transformers(transformers_model(merged), ROW), reloaded_N) <= 1e-5


@pytest.mark.parametrize("name", drawn(ALL, 3))
def test_twenty_full_steps_equal_those_of_torch(made, tmp_path, name):
    """Losses; what is saved is read to the bit, by transformers too; all of it has changed but what is no weight."""
    model, driven = made(name), engine_of(made(name), "full")
    expected = reference_steps(transformers_model(model), STEPS, 3e-4, ADAM.weight_decay, ADAM.clip_norm)
    history = train(driven, [[rows[:2], rows[2:]] for rows in STEPS], learning_rate=3e-4)
    assert expected[-1][0] < expected[0][0]
    assert [loss for loss, _ in history] == pytest.approx([loss for loss, _ in expected], rel=1e-4)
    driven.save(tmp_path)
    saved = tmp_path / "weights"
    assert torch.equal(logprobs(engine_of(saved), bin_of(STEPS[0])), logprobs(driven, bin_of(STEPS[0])))
    assert apart(logprobs(driven, bin_of(ROW)), logprobs_in_transformers(transformers_model(saved), ROW)) <= 1e-5
    before, after = load_file(model / "model.safetensors"), load_file(saved / "model.safetensors")
    assert set(before) == set(after)
    carried = read_architecture(model).carried
    assert {n for n in before if torch.equal(before[n], after[n])} == {n for n in before if n.startswith(carried)}


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_has_an_adapter_by_default_of_the_size_that_is_counted(made, tmp_path, name):
    """Read again as one of all; of linears that the model has not, none."""
    driven, shape, sizes = engine_of(made(name)), shape_of(read_config(made(name))), {}
    driven.add_adapter("a", Lora(rank=4, alpha=8), seed=0)
    driven.save(tmp_path)
    found = load_file(tmp_path / "weights" / "adapter_model.safetensors")
    targets = json.loads((tmp_path / "weights" / "adapter_config.json").read_text())["target_modules"]
    assert len(found) == 2 * shape.num_linears(LINEARS)
    assert {each.split(".")[-3] for each in found} == set(targets)
    for each, tensor in load_file(made(name) / "model.safetensors").items():
        *_, module, linear, _ = f"model.{each}".split(".")
        adapted = re.sub(r"^backbone\.", "model.", each).removesuffix("weight")
        if f"base_model.model.{adapted}lora_A.weight" in found:
            kind = "experts" if ".experts." in each else "shared" if module.startswith("shared_expert") else ""
            sizes.setdefault((linear, kind, layer_of(each)), []).append(tuple(tensor.shape))
    assert sizes
    assert {key: shape.linear_size(*key)[::-1] for key in sizes} == {key: each[0] for key, each in sizes.items()}
    driven.load_adapter("b", tmp_path / "weights", Lora(rank=4, alpha=8), trainable=True)
    if not {*targets} > {
        *ATTENTION,
        "gate_proj",
        "up_proj",
        "down_proj",
    }:  # else a model might have no other linears than are asked for
        one = "o_proj" if "o_proj" in targets else "out_proj"
        with pytest.raises(InvalidInput, match="the adapter's targets is"):
            driven.load_adapter("c", tmp_path / "weights", Lora(rank=4, alpha=8, targets=(one,)), trainable=True)
    absent = next(each for each in (*LATENT, *MAMBA, *DELTA_NET) if each not in targets)
    with pytest.raises(InvalidInput, match=f"no linear {absent}"):
        driven.add_adapter("d", Lora(targets=(absent,)), seed=0)


@pytest.mark.parametrize("name", drawn(["qwen3", *MODELS], 1))
def test_what_the_page_of_families_measures(tmp_path, name):
    """By another way than here: docs/families.md has these figures of every family."""
    name = "nemotron_h" if name == NO_EXPERTS else name
    row = measure(name, tmp_path)
    assert max(row[column] for column in ("packed", "tree", "gradient", "sampler", "saved")) <= 1e-5
    assert max(row[column] for column in ("lora", "full")) <= 1e-4


# The sampler.


@pytest.mark.parametrize("name", drawn(ALL, 3))
def test_the_sampler_s_steps_are_the_trainer_s_scores(made, tmp_path, name):
    model, driven = made(name), engine_of(made(name), "lora")
    train(driven, [[STEPS[0]], [STEPS[1]]])
    driven.save(tmp_path)
    decoder = Decoder(model, torch.float32, CPU)
    lora = load_adapter("a", tmp_path / "weights", decoder).lora_weights
    ids = random_rows([300])[0].ids
    expected = logprobs(driven, bin_of([Row(ids, [0.0] + [1.0] * 299)]))
    for cut in (1, 5, 64, 130, 270):
        found = logprobs_by_steps(decoder, ids, range(cut, cut + 20), lora)
        assert apart(found, expected[cut - 1 : cut + 19]) <= 1e-5


def test_a_sampler_reads_no_more_than_is_computed(made, tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    more = {"rope_parameters": rope, "original_max_position_embeddings": 40}
    folder = changed(made("qwen3"), tmp_path / "changed", more)
    with running(folder, tmp_path) as ready, Sampler(ready.url, ready.api_key) as sampler:
        assert sampler.models()[NAME].max_model_len == 40


# Files.


@pytest.mark.parametrize(("name", "tied"), FAMILIES)
def test_named_weights_are_the_files_own(made, name, tied):
    folder = made(name, tied, 2 if tied else 4)
    files = load_file(folder / "model.safetensors")
    weights = {name: weight.clone() for name, weight in engine_of(folder).named_weights()}
    carried = read_architecture(folder).carried  # what is not trained: corrections of routers, scalars of layers
    assert set(weights) == {n for n in files if not n.startswith(carried) and not (tied and n == "lm_head.weight")}
    assert all(torch.equal(weights[name], files[name]) for name in weights)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_slices_fill_every_row_of_every_parameter_once(made, name, tp):
    architecture = read_architecture(made(name))
    slices = [s for s in architecture.slices(tp, etp=1 if name == "gpt_oss" else tp) if not s.is_stack]
    shapes = {s.parameter: max(q.stop for q in slices if q.parameter == s.parameter) for s in slices}
    for rank in range(tp):
        filled = {}
        for s in slices:
            parameter = filled.setdefault(s.parameter, torch.zeros(shapes[s.parameter] * s.groups, 1))
            share = s.shape[0] if s.split != 0 else sum(span.stop - span.start for span in s.spans(rank, tp))
            before = torch.zeros_like(parameter)
            write_slice(s, before, torch.ones(share, 1))
            assert torch.equal(read_slice(s, before, share), torch.ones(share, 1))
            parameter += before
        for each, parameter in filled.items():
            is_padded = each.endswith(("word_embeddings.weight", "table.weight", "output_layer.weight"))
            padding = parameter.shape[0] * tp - 301 if is_padded else 0
            assert parameter.max() == 1, each
            assert parameter.sum() == parameter.numel() - (padding if rank == tp - 1 else 0), each


# Mistral's: test_published_layouts.py
TOWERS: list[str] = ["qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "gemma4_unified"]


@pytest.mark.parametrize("family", drawn(TOWERS, 2))
def test_a_decoder_is_trained_beside_its_tower(tmp_path, family):
    from peft import PeftModel

    whole_model = functools.partial(transformers_model, kind="AutoModelForImageTextToText")
    alone, folder = model_with_tower(tmp_path, family)
    (folder / "preprocessor_config.json").write_text("{}")
    driven, text = start("megatron", folder, "full"), start("megatron", alone, "full")
    assert torch.equal(logprobs(driven, bin_of(STEPS[0])), logprobs(text, bin_of(STEPS[0])))
    train(driven, [[STEPS[0]]])
    driven.save(tmp_path / "saved")
    saved = tmp_path / "saved" / "weights"
    before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
    assert set(before) == set(after) and (saved / "preprocessor_config.json").exists()
    of_text = {n for n in before if ("language_model" in n or n.startswith("lm_head")) and "layer_scalar" not in n}
    assert {name for name in before if not torch.equal(before[name], after[name])} == of_text
    assert apart(logprobs(driven, bin_of(ROW)), logprobs_in_transformers(whole_model(saved), ROW)) <= 1e-5
    adapted = start("megatron", folder)
    adapted.add_adapter("run", Lora(rank=4, alpha=8, targets=("q_proj", "o_proj")), seed=3)
    train(adapted, [[STEPS[0]], [STEPS[1]]])
    adapted.save(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "weights"
    names = load_file(weights / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    with_adapter = PeftModel.from_pretrained(whole_model(folder), weights)
    assert apart(logprobs(adapted, bin_of(ROW)), logprobs_in_transformers(with_adapter, ROW)) <= 1e-5


@pytest.mark.parametrize("family", TOWERS[:2])
def test_the_sampler_takes_a_model_with_a_tower_and_a_config_that_contradicts_itself_is_refused(tmp_path, family):
    alone, folder = model_with_tower(tmp_path, family)
    tokens = tuple(random_rows([50])[0].ids)
    assert torch.equal(*(Decoder(one, torch.float32, CPU).prefill(tokens, {}).hidden_H for one in (alone, folder)))
    for name, value in (("text_config", None), ("tie_word_embeddings", True)):
        with pytest.raises(InvalidInput, match=name):
            start("megatron", changed(folder, tmp_path / name, {name: value}))


# Settings.

OLMO_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"final_logit_softcapping": None}) for name in ("gemma3", "gemma4", EXPERTS)),
    *((name, {"sliding_window": 1}) for name in ("gemma3", "gemma4", EXPERTS, "olmo3", "phi3")),
    *((name, {"embedding_multiplier": 12.0}) for name in ("granite", GRANITE)),
    *((name, {"attention_multiplier": 0.0078125}) for name in ("granite", GRANITE)),
    *((name, {"residual_multiplier": 0.22}) for name in ("granite", GRANITE)),
    *((name, {"logits_scaling": 8.0}) for name in ("granite", GRANITE)),
    (GRANITE, {"time_step_limit": [0.6, {"__float__": "Infinity"}]}),
    (GRANITE, {"position_embedding_type": "rope"}),
    (GRANITE, {"num_experts_per_tok": 3}),
    (GRANITE, {"rms_norm_eps": 0.1}),
    (DENSE_GRANITE, {"position_embedding_type": None}),
    ("lfm2", {"norm_eps": 0.1}),
    ("lfm2", {"rope_parameters": ..., "rope_theta": 100.0}),
    (DENSE_GRANITE, {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}),
    ("granite", {"embedding_multiplier": ..., "logits_scaling": ...}),
    ("olmo3", {"layer_types": ...}),
    ("olmo3", {"rms_norm_eps": 0.1}),
    ("olmo3", {"rope_parameters": ..., "rope_scaling": OLMO_YARN}),  # as published
    ("olmo3", {"rope_parameters": ..., "rope_theta": 100.0}),  # of layers that attend to everything alone
    ("olmo3", {"rope_parameters": {"sliding_attention": OLMO_YARN}}),
    ("nemotron_h", {"time_step_min": 0.6}),  # some steps are smaller
    ("nemotron_h", {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}),
    ("nemotron_h", {"n_group": 1}),
    ("nemotron_h", {"norm_topk_prob": False}),
    ("nemotron_h", {"routed_scaling_factor": 2.5}),
    ("nemotron_h", {"layer_norm_epsilon": 0.1}),
    ("glm4_moe", {"routed_scaling_factor": 2.5}),
    ("glm4_moe", {"n_group": 1, "topk_group": 1}),
    ("glm4_moe", {"norm_topk_prob": False}),
    ("glm4_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
]


@pytest.mark.parametrize(("name", "change"), SETTINGS, ids=str)
def test_settings_mean_what_they_do_in_transformers(made, tmp_path, name, change):
    folder, rows = changed(made(name), tmp_path / "changed", change), bin_of(random_rows((90, 2, 133)))
    assert furthest_from_transformers(folder, (90, 2, 133)) <= 1e-5
    assert apart(logprobs(engine_of(folder), rows), logprobs(engine_of(made(name)), rows)) > 1e-3


LATENT_YARN = {
    **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e4},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0},
}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("nemotron_h", {"moe_latent_size": None}),
    ("glm4_moe", {"use_qk_norm": False, "n_shared_experts": 2}),  # as GLM-4.5-Air
    ("glm4_moe", {"attention_bias": False, "first_k_dense_replace": 2, "head_dim": 24}),
    ("nemotron_h", {"use_conv_bias": False, "conv_kernel": 3}),
    ("nemotron_h", {"n_groups": 4, "ssm_state_size": 8}),
    ("nemotron_h", {"n_groups": 1, "mamba_head_dim": 24}),
    (GRANITE, {"mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24}),  # as H Tiny
    (GRANITE, {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_groups": 1}),  # as H Micro
    (GRANITE, GRANITE_DENSE | {"layer_types": ["full_attention"] * 4}),  # as 350M, which has no Mamba layers
    (GRANITE, {"mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_expand": 1, "mamba_d_head": 16}),
    ("lfm2", LFM2_AS_350M),
    ("lfm2", LFM2_AS_350M | {"block_ffn_dim_multiplier": 1.3, "conv_L_cache": 4, "num_key_value_heads": 1}),
    ("lfm2", {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", "full_attention", "conv"]}),
    *(
        (family, change)
        for family in ("deepseek_v3", "glm4_moe_lite")
        for change in (
            {"q_lora_rank": None, "norm_topk_prob": False},
            {"rope_interleave": False, "v_head_dim": 40, "rope_parameters": LATENT_YARN},
            {"rope_parameters": {**LATENT_YARN, "mscale_all_dim": 0}, "n_group": 1, "topk_group": 1},
            {"n_shared_experts": 2, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        )
    ),
]


@pytest.mark.parametrize(("family", "config"), drawn(SHAPES, 6), ids=str)
def test_settings_that_change_shapes_mean_what_they_do_in_transformers(tmp_path, family, config):
    folder = distinct_model(tmp_path, family, tied=False, num_layers=4, config=config)
    assert furthest_from_transformers(folder, (90, 2, 300)) <= 1e-5


SIZES = {
    **{"vocab_size": 301, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "pad_token_id": None},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 310},
}
VARIANTS = {
    "as 31B": {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "as E2B": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "as 26B": EXPERTS_BESIDE
    | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "embeddings alone": {"hidden_size_per_layer_input": 8},
    "one shared": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1, "attention_k_eq_v": True},
    "scaled": {
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0},
            "full_attention": {
                **{"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0}
            },
        },
    },
}


@pytest.mark.parametrize("variant", drawn([*VARIANTS], 3))
def test_variants_of_gemma4_score_as_in_transformers(tmp_path, variant):
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    model, rows = Gemma4ForCausalLM(Gemma4TextConfig(**SIZES | VARIANTS[variant])), random_rows((90, 2, 33))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(0.3 if "q_norm" in name else 1 if "norm" in name else 5)
    model.save_pretrained(tmp_path)
    assert apart(logprobs(engine_of(tmp_path), bin_of(rows)), logprobs_in_transformers(model.eval(), rows)) <= 1e-5


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
            **{"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.0},
        },
        {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            **{"attention_factor": 1.3, "beta_fast": None},
        },
        {"rope_type": "dynamic", "factor": 3.0, "model": {"max_position_embeddings": 700}},
        {
            **{"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG},
            "model": {"max_position_embeddings": 2800, "original_max_position_embeddings": 700},
        },
        {
            **{"rope_type": "longrope", "short_factor": LONG, "long_factor": SHORT, "factor": 2.0},
            "original_max_position_embeddings": 701,
        },
        {
            **{"rope_type": "longrope", "short_factor": LONG, "long_factor": LONG, "attention_factor": 1.2},
            "original_max_position_embeddings": 100,  # one factor for all lengths
        },
        {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            "model": {"original_max_position_embeddings": 2048},  # which holds
        },
        {"rope_type": "yarn", "factor": 4.0, "model": {"max_position_embeddings": 128}},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])  # which rotates a part of each head
def test_rope_scalings_are_those_of_transformers(tmp_path, family, scaling):
    folder, plain = distinct_model(tmp_path / "scaled", family), distinct_model(tmp_path / "plain", family)
    set_rope(folder, {"partial_rotary_factor": 0.25} if family == "qwen3_5" else {}, scaling)
    assert furthest_from_transformers(folder) <= 1e-5
    rows = bin_of(random_rows(LENGTHS))
    found, before = (logprobs(engine_of(each), rows) for each in (folder, plain))
    assert (found - before).abs().max() > 1e-3 or scaling["rope_type"] == "dynamic"


def set_rope(folder: Path, own: dict, scaling: dict) -> None:
    """Give a model other rotary settings, and those of `model` besides. Factors are as many as its frequencies."""
    size = int(16 * own.get("partial_rotary_factor", 1)) // 2
    rope = {name: value[:size] if isinstance(value, list) else value for name, value in scaling.items()}
    more = rope.pop("model", {})
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_parameters": {"rope_theta": 1e4, **own, **rope}, **more}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("scaling", "most"),
    [
        ({"rope_type": "dynamic", "factor": 3.0, "model": {"max_position_embeddings": 40}}, 40),
        (
            {
                **{"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG},
                "original_max_position_embeddings": 40,
            },
            40,
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_sequences_whose_rotation_would_follow_from_their_length_are_refused(tmp_path, scaling, most, engine):
    folder = distinct_model(tmp_path)
    set_rope(folder, {}, scaling)
    driven = start(engine, folder)
    logprobs(driven, bin_of(random_rows((most, 12, most))))
    with pytest.raises(InvalidInput, match=f"a sequence has {most + 1} tokens.*of up to {most}"):
        logprobs(driven, bin_of(random_rows((12, most + 1))))


def test_old_and_new_rope_settings_are_read_alike(tmp_path):
    folder = distinct_model(tmp_path, "llama")
    new = read_architecture(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_architecture(folder) == new
    assert new.attention.rope.scaling.rope_type == "llama3"


@pytest.mark.parametrize("family", [name for name in NAMES if name not in ("nemotron_h", GRANITE)])  # no positions
def test_a_config_without_a_rope_key_means_what_transformers_takes_for_it(tmp_path, family):
    from transformers import AutoConfig

    folder = distinct_model(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "rope_theta", "rope_scaling"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(folder).rope_parameters
    theirs = theirs.get("sliding_attention", theirs)  # of the first layer
    attention = read_architecture(folder).attention
    assert attention.rope.scaling.rope_type == theirs["rope_type"]
    size = int(config.get("qk_rope_head_dim", attention.head_dim) * theirs.get("partial_rotary_factor", 1))
    assert (attention.rope.theta, attention.rope.size) == (theirs["rope_theta"], size)
    if theirs["rope_type"] != "default":
        assert furthest_from_transformers(folder) <= 1e-5


def test_what_transformers_takes_for_settings_that_a_file_leaves_out(tmp_path):
    """As published files do: only sizes that are not the default's."""
    from transformers import Gemma3TextConfig, Gemma4TextConfig

    for family, kind in (("gemma3_text", Gemma3TextConfig), ("gemma4_text", Gemma4TextConfig)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        ours, theirs = read_architecture(tmp_path), kind()
        assert [mixer.window is not None for mixer in ours.mixers] == [
            one == "sliding_attention" for one in theirs.layer_types
        ]
        assert {mixer.window for mixer in ours.mixers} == {theirs.sliding_window, None}
        assert (ours.vocab_size, ours.hidden_size, ours.tied) == (theirs.vocab_size, theirs.hidden_size, True)
        for number, mixer in enumerate(ours.mixers):
            rope = theirs.rope_parameters[theirs.layer_types[number]]
            own = theirs.per_layer_config[number] if family == "gemma4_text" else theirs
            assert (mixer.head_dim, mixer.num_kv_heads) == (own.head_dim, own.num_key_value_heads)
            assert (mixer.rope.theta, mixer.num_heads) == (rope["rope_theta"], theirs.num_attention_heads)


# What is refused, by its name.

OF_TWO_LAYERS = ("qwen3", "qwen3_moe", "gpt_oss")  # in this table, and tied


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3", {"model_type": "mamba"}, "model_type 'mamba' is not a known family"),
        ("qwen3", {"model_type": "gemma2"}, "it needs a soft cap of attention's scores; the nearest is gemma3"),
        ("qwen3", {"model_type": "granite", "logits_scaling": 0}, "logits_scaling"),
        (
            "qwen3",
            {"model_type": "olmo3", "sliding_window_pattern": 6, "rope_parameters": None},
            "sliding_window_pattern",
        ),
        (
            "qwen3",
            {"model_type": "olmo3", "rope_parameters": {"full_attention": {"truncate": False}}},
            "truncate=false: transformers does not read it",
        ),
        ("qwen3", {"model_type": "olmo3"}, "rope_parameters has neither full_attention nor sliding_attention"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3", {"attention_bias": True}, "attention_bias=true"),
        ("qwen3", {"sliding_window": 0, "use_sliding_window": True}, "sliding_window"),
        ("qwen3", {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "'su'"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "short_factor and long_factor, of 8 numbers",
        ),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": None},
            "dynamic rope scaling needs max_position_embeddings",
        ),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn rope scaling needs factor"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention, and there is no sliding_window",
        ),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention is not supported"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 2"),
        (
            "qwen3",
            {"model_type": "llama", "layer_types": ["sliding_attention"] * 2},
            "sliding_attention is not of this family",
        ),
        (
            "qwen3",
            {"model_type": "mistral", "sliding_window": 9, "layer_types": ["full_attention"] * 2},
            "a window is of all layers, or of none",
        ),
        ("qwen3", {"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers names 1 layers of 2"),
        ("qwen3", {"vocab_size": 0}, "vocab_size"),
        ("qwen3", {"vocab_size": 299}, r"is \(301, 64\), config\.json says \(299, 64\)"),
        ("qwen3", {"num_hidden_layers": 3, "layer_types": None}, "the weights lack the tensor model.layers.2."),
        ("qwen3", {"num_hidden_layers": 1, "layer_types": None}, "are not of this family"),
        (
            "qwen3",
            {"num_hidden_layers": 1, "layer_types": None, "carried": ["model."], "tensor_prefix": "model"},
            "are not of this family",
        ),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "layers without experts"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "layers without experts"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "5 experts of 4"),
        ("qwen3_moe", {"num_local_experts": 3}, r"mlp\.gate\.weight is \(4, 64\), config\.json says \(3, 64\)"),
        ("qwen3_moe", {"num_local_experts": 5, "num_experts_per_tok": 6}, "6 experts of 5"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq|quant_method"),
        ("gpt_oss", {"num_experts_per_tok": 5}, "5 experts of 4"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit"),
        ("gpt_oss", {"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ("gpt_oss", {"sliding_window": None}, "there is no sliding_window"),
        ("gpt_oss", {"attention_bias": False}, "are not of this family"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation"),
        ("gemma3", {"layer_types": ["full_attention"] * 3}, "names 3 layers"),
        ("gemma3", {"sliding_window": None}, "there is no sliding_window"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "neither full_attention nor"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "proportional"}}}, "'proportional'"),
        ("gemma3", {"tie_word_embeddings": True}, "differ"),
        ("gemma4", {"enable_moe_block": True}, "enable_moe_block=true needs"),
        ("gemma4", {"num_kv_shared_layers": 3}, "leaves no layer that makes"),
        ("gemma4", {"num_kv_shared_layers": 1}, r"2\.mlp\.gate_proj\.weight is \(384, 64\), config\.json says"),
        ("gemma4", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "cannot be used: Input should be None"),
        ("gemma4", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "needs rope_theta"),
        ("gemma4", {"vocab_size_per_layer_input": 300}, "is less than"),
        ("gemma4", {"per_layer_config": {"1": {"intermediate_size": 3}}}, "per_layer_config"),
        ("gemma4", {"per_layer_config": {}}, "config.json says"),
        ("gemma4", {"use_double_wide_mlp": False}, "config.json says"),
        *(
            (name, change, words)
            for name in ("qwen3_5", "qwen3_5_moe")
            for change, words in (
                ({"layer_types": ["full_attention"] * 3}, "names 3 layers"),
                ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
                ({"linear_num_key_heads": 3}, "3 key heads do not divide"),
                ({"linear_conv_kernel_dim": 5}, r"conv1d\.weight is .*config\.json says"),
                ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.05}}, "rotates 0 of 16"),
            )
        ),
        ("glm4_moe", {"attention_bias": False}, "are not of this family"),
        ("glm4_moe", {"use_qk_norm": False}, "are not of this family"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "lack the tensor model.layers.1.mlp.gate_proj"),
        ("glm4_moe", {"mlp_bias": True}, "mlp_bias=true"),
        ("glm4_moe", {"topk_group": 5}, "topk_group is 5 of 4 groups"),
        ("glm4_moe", {"partial_rotary_factor": 0.05, "rope_parameters": ...}, "not by pairs"),
        ("nemotron_h", {"layers_block_type": None}, "layers_block_type or hybrid_override_pattern"),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "conv"]}, "kind 'conv' is not known"),
        ("nemotron_h", {"layers_block_type": ["linear_attention"] * 4}, "at least one layer of attention"),
        ("nemotron_h", {"layers_block_type": ["full_attention"] * 4}, "lack the tensor .*q_proj"),
        (GRANITE, {"layer_types": ["linear_attention", "conv"] * 2}, "layer_types.1"),
        (GRANITE, {"layer_types": ["mamba"] * 4}, "at least one layer of attention"),
        (GRANITE, {"layer_types": ["attention"] * 3}, "names 3 layers"),
        (GRANITE, {"mamba_n_groups": 3}, "3 groups do not divide 4 heads"),
        (GRANITE, {"mamba_n_heads": 3}, "3 heads of 32 are not mamba_expand"),
        (GRANITE, {"mamba_proj_bias": True}, "mamba_proj_bias"),
        (GRANITE, {"attention_bias": True}, "attention_bias=true"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (GRANITE, {"time_step_limit": [0.0, 0.1]}, "an upper limit of steps, here of 0.1"),
        (GRANITE, {"num_experts_per_tok": 5}, "5 experts of 4"),
        (GRANITE, {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        (GRANITE, {"num_local_experts": 0}, "are not of this family"),
        (GRANITE, {"shared_intermediate_size": 48}, "config.json says"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "at least one layer of attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "names 2 layers"),
        ("lfm2", {"layer_types": ["mamba", "full_attention"] * 2}, "layer_types.0"),
        ("lfm2", {"conv_bias": True}, "conv_bias"),
        ("lfm2", {"conv_L_cache": 4}, "config.json says"),
        ("lfm2", {"block_auto_adjust_ff_dim": False}, "config.json says"),
        ("lfm2", {"use_short_filters": True}, "use_short_filters = True is not supported"),
        ("nemotron_h", {"n_groups": 3}, "3 groups do not divide 4 heads"),
        ("nemotron_h", {"n_groups": 4}, "config.json says"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"use_bias": True}, "use_bias"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias"),
        ("nemotron_h", {"sliding_window": 128}, "a sliding_window, here of 128"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts"),
        ("nemotron_h", {"n_group": 8}, "8 experts in 8 groups"),
        ("nemotron_h", {"n_group": 4, "num_experts_per_tok": 3}, "1 of 4 groups, for 3 experts"),
        *(
            (name, change, words)
            for name in ("deepseek_v3", "glm4_moe_lite")
            for change, words in (
                ({"num_key_value_heads": 2}, "each head has keys of its own"),
                ({"n_group": 3, "topk_group": 1}, "n_group is 3"),
                ({"n_group": 2, "topk_group": 3}, "topk_group is 3 of 2 groups"),
                ({"qk_rope_head_dim": 7}, "by pairs"),
                ({"partial_rotary_factor": 0.5}, "all of it must be rotated"),
                ({"mlp_layer_types": ["dense"]}, "mlp_layer_types names 1 layers of 4"),
                (
                    {"mlp_layer_types": ["sparse", "dense"] * 2, "first_k_dense_replace": 1},
                    "another part of the layers",
                ),
                ({"scoring_func": "softmax"}, "scoring_func"),
                ({"moe_layer_freq": 2}, "moe_layer_freq"),
                ({"attention_bias": True}, "attention_bias=true"),
                ({"kv_lora_rank": None}, "kv_lora_rank"),
                ({"kv_lora_rank": 21}, "config.json says"),
                ({"num_hidden_layers": 3, "num_nextn_predict_layers": 0}, "not of this family|4 layers of 3"),
                (
                    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
                    "weights that fp8 has",
                ),
            )
        ),
    ],
    ids=str,
)
def test_settings_that_we_would_compute_wrongly_are_refused(made, tmp_path, name, change, words):
    model = made(name, True, 2) if name in OF_TWO_LAYERS else made(name)
    with pytest.raises(InvalidInput, match=words):
        start("megatron", changed(model, tmp_path / "changed", change))


CORRECTION = "model.layers.2.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("gemma4", "model.layers.1.layer_scalar"),
        ("deepseek_v3", CORRECTION),
        ("deepseek_v3", "model.layers.1.self_attn.kv_a_layernorm.weight"),
        ("nemotron_h", "e_score_correction_bias"),
        (GRANITE, "model.layers.1.block_sparse_moe.input_linear.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named(made, tmp_path, name, missing):
    folder = changed(made(name), tmp_path / "changed", {})
    whole = next(each for each in load_file(folder / "model.safetensors") if each.endswith(missing))
    with_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if n != whole})
    with pytest.raises(InvalidInput, match=f"lack the tensor {re.escape(whole)}"):
        start("megatron", folder)


@pytest.mark.parametrize(
    ("name", "layout", "engine", "words"),
    [
        *(
            (name, Layout(), "fsdp", "fsdp does not train")
            for name in ("gemma4", "qwen3_5", "nemotron_h", "deepseek_v3", GRANITE, "lfm2")
        ),
        ("gemma4", Layout(pp=2), "megatron", "stages do not pass on keys and values that layers share"),
        ("gemma4", Layout(tp=4), "megatron", "tp=4 does not divide the model's 2 key/value heads"),
        ("nemotron_h", Layout(tp=4, sp=True), "megatron", "4 does not divide the model's 2 "),
        ("nemotron_h", Layout(ep=3, dp=3), "megatron", "ep=3"),
        (GRANITE, Layout(tp=2, sp=True, etp=2), "megatron", "etp"),
        ("lfm2", Layout(tp=3), "megatron", "3 does not divide"),
        (DENSE_GRANITE, Layout(tp=2), "megatron", "tp=2 does not divide the model's 1 groups of its Mamba layers"),
        ("deepseek_v3", Layout(tp=2), "megatron", "needs sp"),
        ("deepseek_v3", Layout(tp=3, sp=True), "megatron", "does not divide"),
    ],
    ids=str,
)
def test_layouts_and_engines_that_cannot_hold_a_model_are_refused(
    made, name: str, layout: Layout, engine: EngineName, words: str
):
    with pytest.raises(InvalidInput, match=words):
        check_layout(layout, shape_of(read_config(made(name))), engine)


def test_layouts_that_hold_latent_attention_or_embeddings_of_each_layer(made):
    latent, own = (shape_of(read_config(model)) for model in (made("deepseek_v3"), made("gemma4", True, 2)))
    for layout in (Layout(tp=2, sp=True), Layout(cp=2), Layout(ep=2, dp=2), Layout(tp=2, sp=True, etp=2)):
        check_layout(layout, latent)
    with pytest.raises(InvalidInput, match="tp=2 does not divide the model's 193 feed-forward size"):
        check_layout(Layout(tp=2, sp=True), latent.model_copy(update={"ffn_size": 193}))
    with pytest.raises(InvalidInput, match="and embeddings of each layer"):
        check_layout(Layout(pp=2), own)


def test_damaged_folders_are_refused_by_name(tmp_path):
    folder = distinct_model(tmp_path / "model")

    def broken(name: str) -> Path:
        return Path(shutil.copytree(folder, tmp_path / name))

    truncated = broken("truncated")
    data = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(data[:-1000])
    (broken("no-config") / "config.json").unlink()
    (broken("bad-config") / "config.json").write_text("{")
    (broken("no-weights") / "model.safetensors").unlink()
    for name, words in (
        ("truncated", "damaged or truncated"),
        ("no-config", "no config.json"),
        ("bad-config", "not valid JSON"),
        ("no-weights", "only safetensors"),
    ):
        with pytest.raises(InvalidInput, match=words) as caught:
            start("megatron", tmp_path / name)
        assert name in str(caught.value)


def test_a_model_in_several_files_is_read_and_written(tmp_path):
    tensors = {f"layer.{i}": torch.full((4, 8), float(i)) for i in range(5)}
    entries = [WrittenTensor(name, torch.float32, (4, 8)) for name in tensors]
    assert [len(shard) for shard in shards_of(entries, 300)] == [2, 2, 1]
    write_model(tmp_path, entries, iter(tensors.values()), max_bytes=300)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 128
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)


@pytest.mark.parametrize("blocked", [1, 2, 3])
def test_all_tensors_are_drawn_though_a_file_cannot_be_written(tmp_path, blocked):
    """Drawing them is collective: peers would wait for ever."""
    entries = [WrittenTensor(f"layer.{i}", torch.float32, (4, 8)) for i in range(5)]
    (tmp_path / f"model-{blocked:05d}-of-00003.safetensors").mkdir()
    tensors = iter([torch.zeros(4, 8)] * 5)
    with pytest.raises(IsADirectoryError), all_drawn(tensors):
        write_model(tmp_path, entries, tensors, max_bytes=300)
    assert list(tensors) == []


def test_files_that_we_write_are_the_library_s_own_format(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(4)}
    entries = [WrittenTensor(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    write_model(tmp_path, entries, iter(tensors.values()), max_bytes=1 << 20)
    assert all(torch.equal(t, tensors[n]) for n, t in load_file(tmp_path / "model.safetensors").items())
    first = (tmp_path / "model.safetensors").read_bytes()
    write_model(tmp_path, entries, iter(tensors.values()), max_bytes=1 << 20)
    assert (tmp_path / "model.safetensors").read_bytes() == first


def test_a_slice_is_read_without_the_rest(tmp_path):
    save_file({"w": torch.arange(30.0).view(10, 3)}, tmp_path / "model.safetensors")
    files = TensorFiles({"w": tmp_path / "model.safetensors"})
    tensor_slice = TensorSlice("w", "p", (10, 3), 0, 0, 4)
    assert torch.equal(files.local(tensor_slice, "w", 1, 3), torch.arange(12.0, 24.0).view(4, 3))
    assert files.local(tensor_slice, "w", 2, 3).shape == (2, 3)


# What is one family's own.


def test_keys_and_values_that_nobody_takes_are_kept(made, tmp_path):
    folder = changed(made("gemma4", True), tmp_path / "changed", {})
    unused = {"model.layers.3.self_attn.k_proj.weight": torch.ones(64, 64)}
    tensors = with_tensors(folder, lambda tensors: tensors | unused)
    start("megatron", folder, "full").save(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved/weights/model.safetensors")) == set(tensors)


@pytest.mark.parametrize("name", drawn(["deepseek_v3", "glm4_moe", "glm4_moe_lite"], 1))
@pytest.mark.parametrize("forgotten", ["correction", "groups", "scale"])
def test_what_is_forgotten_of_the_routing_shows(made, monkeypatch, name, forgotten):
    driven, batch = engine_of(made(name)), bin_of(STEPS[0])
    expected, choose, weights = logprobs(driven, batch), families.choose, families.weights
    without: dict[str, tuple[str, Callable[..., Any]]] = {
        "correction": ("choose", lambda score, mixture, _: choose(score, mixture)),
        "scale": ("weights", lambda *args: weights(*args) / args[2].scale),
        "groups": ("choose", lambda score, mixture, by: (score + by).topk(mixture.experts_per_token).indices),
    }
    monkeypatch.setattr(families, *without[forgotten])
    found = apart(logprobs(driven, batch), expected)
    assert found == 0 if forgotten == "groups" and read_config(made(name)).n_group == 1 else found > 1e-3


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "nemotron_h"])
def test_corrections_are_exact_in_bfloat16(made, tmp_path, name):
    """As published, they are such that bfloat16 tells none of them apart: other experts would be chosen."""
    folder = changed(made(name), tmp_path / "changed", {})
    corrected = [each for each in load_file(folder / "model.safetensors") if each.endswith("e_score_correction_bias")]
    files = with_tensors(folder, lambda tensors: tensors | {each: tensors[each] + 30 for each in corrected})
    driven = start("megatron", folder, "full", dtype="bfloat16")
    held = [value for key, value in driven._model.constants.items() if "correction" in key]
    assert corrected and all(torch.equal(*pair) for pair in zip(held, (files[n] for n in corrected), strict=True))
    driven.save(tmp_path / "saved")
    after = load_file(tmp_path / "saved/weights/model.safetensors")
    assert all(torch.equal(after[each], files[each]) for each in corrected)
    assert torch.bfloat16 in {tensor.dtype for tensor in after.values()}


def test_layers_of_multi_token_prediction_are_carried(made, tmp_path):
    folder = changed(made("deepseek_v3"), tmp_path / "changed", {"num_nextn_predict_layers": 1})
    behind = {"model.layers.4.eh_proj.weight": torch.randn(64, 128)}
    before = with_tensors(folder, lambda tensors: tensors | behind)
    driven = start("megatron", folder, "full")
    train(driven, [[STEPS[0]]])
    driven.save(tmp_path / "saved")
    after = load_file(tmp_path / "saved" / "weights" / "model.safetensors")
    assert after.keys() == before.keys()
    kept = {name for name in after if name.startswith("model.layers.4.") or name.endswith("correction_bias")}
    assert {name for name in after if torch.equal(after[name], before[name])} == kept


@pytest.mark.parametrize("name", drawn(["nemotron_h", NO_EXPERTS], 1))
def test_published_names_are_read(made, tmp_path, name):
    """Of tensors `model`, which transformers reads as `backbone`; of layers the letters of published files."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    blocks = json.loads((made(name) / "config.json").read_text())["layers_block_type"]
    pattern = "".join(letters[block] for block in blocks)
    more = {"layers_block_type": ..., "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    folder = changed(made(name), tmp_path / "changed", more | {"time_step_limit": [0.0, float("inf")]})
    mtp = {"mtp.norm.weight": torch.ones(64)}
    renamed = with_tensors(folder, lambda all_: {re.sub(r"^backbone\.", "model.", n): t for n, t in all_.items()} | mtp)
    driven = start("megatron", folder, "full")
    assert torch.equal(logprobs(driven, bin_of(ROW)), logprobs(engine_of(made(name)), bin_of(ROW)))
    driven.save(tmp_path / "saved")
    saved = tmp_path / "saved" / "weights"
    assert set(load_file(saved / "model.safetensors")) == set(renamed)
    assert apart(logprobs(driven, bin_of(ROW)), logprobs_in_transformers(transformers_model(saved), ROW)) <= 1e-5


@pytest.mark.parametrize("name", [GRANITE, DENSE_GRANITE])
def test_granite_s_files_have_published_names_and_may_have_published_words(made, tmp_path, name):
    files = load_file(made(name) / "model.safetensors")
    mlps = {re.sub(r"^model\.layers\.\d\.", "", each) for each in files if "mlp" in each or "moe" in each}
    experts = {f"block_sparse_moe.{each}.weight" for each in ("router.layer", "input_linear", "output_linear")}
    shared = {f"shared_mlp.{each}_linear.weight" for each in ("input", "output")}
    assert mlps == (shared | experts if name == GRANITE else shared)
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    kinds = [words[each] for each in json.loads((made(name) / "config.json").read_text())["layer_types"]]
    folder = changed(
        made(name), tmp_path / "changed", {"layer_types": kinds, "time_step_limit": ..., "mamba_d_head": "auto"}
    )
    assert read_architecture(folder) == read_architecture(made(name))


@pytest.mark.parametrize("name", [GRANITE, "lfm2"])
def test_a_hybrid_family_s_models_of_attention_alone_are_trained_by_both_engines(tmp_path, name):
    """As Granite 4.0 350M."""
    config = {"layer_types": ["full_attention"] * 2} | ({"num_local_experts": 0} if name == GRANITE else {})
    folder, batch = distinct_model(tmp_path / "model", name, tied=False, config=config), bin_of(STEPS[0])
    found = [start(engine, folder, "lora") for engine in ENGINES]
    assert apart(*(logprobs(driven, batch) for driven in found)) <= 1e-5
    losses = [train(driven, [[STEPS[0]], [STEPS[1]]], _ADAM) for driven in found]
    assert [loss for loss, _ in losses[0]] == pytest.approx([loss for loss, _ in losses[1]], rel=1e-5)


def test_lfm2_s_published_settings_are_read(made, tmp_path):
    """Older files name attention's layers, and sizes otherwise."""
    from transformers import AutoConfig

    config = json.loads((made("lfm2") / "config.json").read_text())
    old = {
        **{"layer_types": ..., "full_attn_idxs": [1, 3], "intermediate_size": ..., "tie_word_embeddings": ...},
        **{"block_ff_dim": config["intermediate_size"], "tie_embedding": False, "use_pos_enc": True},
        **{"block_use_swiglu": True, "block_use_xavier_init": True, "conv_use_xavier_init": True},
    }
    folder = changed(made("lfm2"), tmp_path / "old", old | {"intermediate_size": 7, "tie_word_embeddings": True})
    assert read_architecture(folder) == read_architecture(made("lfm2"))
    theirs = AutoConfig.from_pretrained(folder)
    assert (theirs.intermediate_size, theirs.tie_word_embeddings) == (config["intermediate_size"], False)
    assert theirs.layer_types == config["layer_types"]
    assert furthest_from_transformers(folder) <= 1e-5


def in_mxfp4(folder):
    """Quantize a model's experts: their numbers become random ones of the format. Returns what they stand for."""
    tensors, found = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        found[name] = blocks, scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return found


def test_mxfp4_is_read_as_transformers_does_and_written_as_it_is_trained(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = distinct_model(tmp_path / "model", "gpt_oss", tied=False)
    packed = in_mxfp4(folder)
    engine = engine_of(folder)
    weights = dict(engine.named_weights())
    for name, (blocks, scales) in packed.items():
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        assert torch.equal(dequantized(blocks, scales), expected)
        assert torch.equal(weights[name], expected.float())
    engine.train_full(Full())
    engine.save(tmp_path / "saved")
    written = tmp_path / "saved" / "weights"
    assert "quantization_config" not in json.loads((written / "config.json").read_text())
    assert not [name for name in load_file(written / "model.safetensors") if "_blocks" in name]
    row = [bin_of(random_rows([60]))]
    again = engine_of(written)
    assert torch.equal(logprobs(engine, row[0]), logprobs(again, row[0]))


def test_scales_of_another_shape_and_numbers_that_are_not_finite_are_refused(tmp_path):
    folder = distinct_model(tmp_path, "gpt_oss")
    in_mxfp4(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    for scales, words in (
        (tensors[f"{name}_scales"][:, :-1], "shape"),
        (torch.full_like(tensors[f"{name}_scales"], 255), "not finite"),
    ):
        changed = tensors | {f"{name}_scales": scales.contiguous()}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(InvalidInput, match=f"{name}.*{words}"):
            start("megatron", folder)
