"""Every family computes what transformers computes, and its tensors go in and come out unchanged."""

import json
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.layout import Layout
from megatron_worker.families import read_slice, write_slice
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.tensors.safetensors_files import TensorFiles, WrittenTensor, all_drawn, shards_of, write_model
from shared.errors import InvalidInput
from shared.families import read_architecture
from shared.families.model_slices import slices_of
from shared.families.tensor_slices import TensorSlice
from shared.models.config import Family
from tests.megatron_worker.engines import ENGINES, start
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows
from tests.megatron_worker.scores import logprobs, logprobs_in_transformers

NAMES = list(get_args(Family))
NEVER_TIED = {"nemotron_h"}
FAMILIES = [(family, tied) for family in NAMES for tied in (True, False) if not (tied and family in NEVER_TIED)]
LENGTHS = (90, 2, 700, 33)
SHORT, LONG = [1.0, 1.1, 1.3, 1.2, 2.0, 2.5, 3.0, 3.5], [1.0, 2.0, 4.0, 8.0, 9.0, 11.0, 16.0, 32.0]


def furthest_from_transformers(folder: Path) -> float:
    """The largest difference of a log-probability, of rows packed in one bin."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder)
    engine = MegatronEngine(folder, Layout(), "float32")
    rows = random_rows(LENGTHS)
    return float((logprobs(engine, bin_of(rows)) - logprobs_in_transformers(reference, rows)).abs().max())


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_logprobs_equal_those_of_transformers(tmp_path, family, tied):
    assert furthest_from_transformers(distinct_model(tmp_path, family, tied)) <= 1e-5


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
    found, before = (logprobs(MegatronEngine(each, Layout(), "float32"), rows) for each in (folder, plain))
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


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_named_weights_are_the_files_own(tmp_path, family, tied):
    folder = distinct_model(tmp_path, family, tied)
    files = load_file(folder / "model.safetensors")
    weights = {name: weight.clone() for name, weight in MegatronEngine(folder, Layout(), "float32").named_weights()}
    carried = read_architecture(folder).carried  # what is not trained: corrections of routers, scalars of layers
    assert set(weights) == {n for n in files if not n.startswith(carried) and not (tied and n == "lm_head.weight")}
    assert all(torch.equal(weights[name], files[name]) for name in weights)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("tp", [1, 2])
def test_slices_fill_every_row_of_every_parameter_once(tmp_path, family, tp):
    architecture = read_architecture(distinct_model(tmp_path, family))
    slices = [s for s in slices_of(architecture, tp, etp=1 if family == "gpt_oss" else tp) if not s.is_stack]
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
        for name, parameter in filled.items():
            is_padded = name.endswith(("word_embeddings.weight", "table.weight", "output_layer.weight"))
            padding = parameter.shape[0] * tp - 301 if is_padded else 0
            assert parameter.max() == 1, name
            assert parameter.sum() == parameter.numel() - (padding if rank == tp - 1 else 0), name


def test_old_and_new_rope_settings_are_read_alike(tmp_path):
    folder = distinct_model(tmp_path, "llama")
    new = read_architecture(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_architecture(folder) == new
    assert new.attention.rope.scaling.rope_type == "llama3"


@pytest.mark.parametrize("family", [name for name in NAMES if name != "nemotron_h"])  # it encodes no positions
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mlp_only_layers": [0]}, "layers without experts"),
        ({"decoder_sparse_step": 2}, "layers without experts"),
        ({"num_experts_per_tok": 5}, "5 experts of 4"),
        ({"num_local_experts": 3}, r"mlp\.gate\.weight is \(4, 64\), config\.json says \(3, 64\)"),
        ({"num_local_experts": 5, "num_experts_per_tok": 6}, "6 experts of 5"),
    ],
)
def test_a_mixture_that_we_would_compute_wrongly_is_refused(tmp_path, change, words):
    folder = distinct_model(tmp_path, "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InvalidInput, match=words):
        MegatronEngine(folder, Layout(), "float32")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not a known family"),
        ({"model_type": "gemma2"}, "it needs a soft cap of attention's scores; the nearest is gemma3"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling"),
        ({"model_type": "olmo3", "sliding_window_pattern": 6, "rope_parameters": None}, "sliding_window_pattern"),
        (
            {"model_type": "olmo3", "rope_parameters": {"full_attention": {"truncate": False}}},
            "truncate=false: transformers does not read it",
        ),
        ({"model_type": "olmo3"}, "rope_parameters has neither full_attention nor sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"sliding_window": 0, "use_sliding_window": True}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "'su'"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "short_factor and long_factor, of 8 numbers",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": None},
            "dynamic rope scaling needs max_position_embeddings",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn rope scaling needs factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention, and there is no sliding_window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 2"),
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 2}, "sliding_attention is not of this family"),
        (
            {"model_type": "mistral", "sliding_window": 9, "layer_types": ["full_attention"] * 2},
            "a window is of all layers, or of none",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers names 1 layers of 2"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": 299}, r"is \(301, 64\), config\.json says \(299, 64\)"),
        ({"num_hidden_layers": 3, "layer_types": None}, "the weights lack the tensor model.layers.2."),
        ({"num_hidden_layers": 1, "layer_types": None}, "are not of this family"),
        (
            {"num_hidden_layers": 1, "layer_types": None, "carried": ["model."], "tensor_prefix": "model"},
            "are not of this family",
        ),
    ],
)
def test_a_model_that_we_would_compute_wrongly_is_refused(tmp_path, change, words):
    folder = distinct_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InvalidInput, match=words):
        MegatronEngine(folder, Layout(), "float32")


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
            MegatronEngine(tmp_path / name, Layout(), "float32")
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
