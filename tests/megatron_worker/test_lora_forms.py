"""Forms of LoRA that PEFT has: trained as PEFT trains them, read and written as it does, and sampled with."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.training import LATENT, LINEARS, TARGETS, Adam, Layout, Lora, ScalarHead
from megatron_worker.lora import Masks, dropped
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.adapters import load_adapter
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.trainer_rank import ForwardInput, TrainerRank
from shared.errors import InvalidInput
from shared.families import read_architecture
from shared.families.tensor_slices import linears_of
from shared.models.peft import config_of, module_of, read_config
from tests.depth import drawn as some_of
from tests.megatron_worker.driving import ADAM, LEARNING_RATE, accumulate, train
from tests.megatron_worker.engines import ENGINES
from tests.megatron_worker.rows import Row, bin_of, distinct_model, random_rows, reference_loss, reference_steps
from tests.megatron_worker.scores import logprobs, logprobs_by_steps, logprobs_in_transformers

STEPS = [random_rows([20, 31, 12], seed=seed) for seed in range(10)]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FORMS = {
    "regex": Lora(rank=4, alpha=8, target_pattern=r"model\.layers\.(0|1)\..*(q|down)_proj"),
    "layers": Lora(rank=4, alpha=8, layers=(1,)),
    "patterns": Lora(
        rank=4,
        alpha=8,
        rank_pattern={"q_proj": 2, r"layers\.0\.mlp\..*": 6},
        alpha_pattern={"v_proj": 3, r"layers\.1\..*_proj": 5},
        rank_stabilized=True,
    ),
    "lm_head": Lora(rank=4, alpha=8, targets=("q_proj", "down_proj", "lm_head"), layers=(0,)),
    "lm_head alone": Lora(rank=3, alpha=8, targets=("lm_head",)),
    "dora": Lora(
        **{"rank": 4, "alpha": 8, "dora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3}}
    ),
}
# Of families with linears or a head of their own, all at once: what PEFT sees linears for.
OF_FAMILIES: dict[str, Lora] = {
    "gpt_oss": Lora(rank=4, targets=(*ATTENTION, "lm_head"), rank_pattern={"q_proj": 2}, alpha_pattern={"k_proj": 9}),
    "glm4_moe_lite": Lora(
        **{"rank": 4, "targets": (*LATENT, "o_proj", "lm_head"), "layers": (1,)},
        **{"rank_pattern": {"q_._proj": 2, "lm_head": 3}, "alpha_pattern": {"kv_.*": 9}, "rank_stabilized": True},
    ),
    "nemotron_h": Lora(
        **{"rank": 4, "target_pattern": r"model\.layers\.\d\.mixer\.(in|[qvo]|fc\d_latent)_proj|lm_head"},
        **{"rank_pattern": {r"in_proj": 6, r"layers\.1\..*": 2}, "alpha_pattern": {"fc1.*": 9}},
    ),
    "granitemoehybrid": Lora(
        **{"rank": 4, "targets": ("in_proj", "out_proj", "q_proj", "input_linear", "output_linear", "lm_head")},
        **{"rank_pattern": {"in_proj": 6, r"layers\.1\..*": 2}, "alpha_pattern": {"shared_mlp.*": 9}},
    ),
    "lfm2": Lora(
        **{"rank": 4, "targets": ("in_proj", "out_proj", "q_proj", "w1", "w2", "w3", "lm_head")},
        **{"rank_pattern": {"conv.out_proj": 6, r"layers\.1\..*": 2}, "alpha_pattern": {"w[12]": 9}},
    ),
    "gemma3": Lora(rank=4, targets=TARGETS, layers=(0,), rank_pattern={"up_proj": 6, "lm_head": 2}),  # tied, and capped
}
WITH_NORMS: dict[str, Lora] = {  # DoRA, beside experts that have none
    "gpt_oss": Lora(rank=4, alpha=8, dora=True, targets=ATTENTION),
    "glm4_moe_lite": Lora(rank=4, alpha=8, dora=True, targets=(*LATENT, "o_proj")),
    "nemotron_h": OF_FAMILIES["nemotron_h"].model_copy(
        update={"dora": True, "target_pattern": r"model\.layers\.\d\.mixer\.(in|[qvo]|fc\d_latent)_proj"}
    ),
}
WITH_NORMS["granitemoehybrid"] = OF_FAMILIES["granitemoehybrid"].model_copy(
    update={"dora": True, "targets": ("in_proj", "out_proj", "q_proj", "input_linear", "output_linear")}
)
# Of these some gradients are little more than rounding: with an epsilon of 1e-8 Adam moves such elements a whole step.
WITH_FAINT_GRADIENTS = {"granitemoehybrid", "lfm2"}
TOKENS = Lora(rank=4, alpha=8, targets=("embed_tokens", "q_proj", "lm_head"), rank_pattern={"embed_tokens": 3})
WITH_TOKENS: tuple[str, ...] = ("qwen2", "gemma3", "gemma4", "gpt_oss", "granite", "granitemoehybrid")  # some scaled
CASES = [("qwen3", engine, name) for engine in ENGINES for name in FORMS]
CASES += [(family, "megatron", "all") for family in OF_FAMILIES]
CASES += [("qwen2", engine, "dora") for engine in ENGINES]
CASES += [(family, "megatron", "norms") for family in WITH_NORMS]
CASES += [("qwen3", engine, "tokens") for engine in ENGINES] + [
    (family, "megatron", "tokens") for family in WITH_TOKENS
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Path]:
    @functools.cache
    def made(family: str) -> Path:
        return distinct_model(tmp_path_factory.mktemp(family), family, tied=family in ("gemma3", "qwen2"))

    return made


@pytest.fixture
def model(models) -> Path:
    return models("qwen3")


def in_peft(model: Path, weights: Path, is_trainable: bool = False):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model), weights, is_trainable=is_trainable
    ).train(is_trainable)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if "base_layer" not in name}


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert set(ours) == set(theirs)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> float:
    """How far two results of training are apart, by all elements together, beside how far training has moved them.

    Adam moves an element whose gradient is hardly more than rounding as far as any other, to whichever side rounding
    leads, and that differs between kinds of CPU: the furthest single element tells of that alone.
    """
    assert set(ours) == set(theirs) == set(before)
    squares = [[float((a[n] - b[n]).square().sum()) for n in ours] for a, b in ((ours, theirs), (ours, before))]
    return math.sqrt(sum(squares[0]) / sum(squares[1]))


def trained(engine, lora: Lora, folder: Path, adam: Adam = ADAM):
    """The adapter before and after ten steps, as folders."""
    engine.add_adapter("run", lora, seed=3)
    engine.save(folder / "before")
    train(engine, [[rows[:2], rows[2:]] for rows in STEPS], adam)
    engine.save(folder / "after")
    return folder / "before" / "weights", folder / "after" / "weights"


@pytest.mark.parametrize(("family", "engine", "name"), some_of(CASES, 12))
def test_ten_steps_are_peft_s_and_the_sampler_s(models, tmp_path, family, engine, name):
    model = models(family)
    ours = ENGINES[engine](model, Layout(), "float32")
    before, after = trained(
        ours,
        {**FORMS, "tokens": TOKENS}.get(name) or (WITH_NORMS if name == "norms" else OF_FAMILIES)[family],
        tmp_path,
        adam := ADAM.model_copy(update={"eps": 1e-5}) if family in WITH_FAINT_GRADIENTS else ADAM,
    )
    reference = in_peft(model, before, is_trainable=True)
    reference_steps(reference, STEPS, LEARNING_RATE, adam.weight_decay, adam.clip_norm, adam.eps)
    reference.save_pretrained(tmp_path / "theirs")
    rows = random_rows([40, 17], seed=9)
    expected = logprobs_in_transformers(reference.eval(), rows)
    assert apart(weights_of(after), weights_of(tmp_path / "theirs"), weights_of(before)) <= 1e-4
    assert (logprobs(ours, bin_of(rows)) - expected).abs().max() <= 1e-5
    assert (logprobs_in_transformers(in_peft(model, after), rows) - expected).abs().max() <= 1e-5
    ours.set_adapter(None)
    assert (logprobs(ours, bin_of(rows)) - expected).abs().max() > 1e-2

    # What PEFT has written of it is read as the same settings, loaded, and sampled with, as PEFT reads it: it sorts
    # patterns when it writes them, and takes the first that matches.
    assert config_of(read_config(tmp_path / "theirs")) == config_of(read_config(after))
    reference = in_peft(model, tmp_path / "theirs")
    expected = logprobs_in_transformers(reference, rows)
    ours.load_adapter("theirs", tmp_path / "theirs", None, trainable=False)
    assert (logprobs(ours, bin_of(rows)) - expected).abs().max() <= 1e-5
    decoder = Decoder(model, torch.float32, torch.device("cpu"))
    adapter = load_adapter("theirs", tmp_path / "theirs", decoder)
    ids = rows[0].ids
    whole = logprobs_in_transformers(reference, [Row(ids, [1.0] * len(ids))])
    drawn = logprobs_by_steps(decoder, ids, range(10, 30), adapter.lora_weights)
    assert (drawn - whole[9:29]).abs().max() <= 1e-5
    scored = decoder.score(tuple(ids), decoder.prefill(tuple(ids), adapter.lora_weights)).logprobs
    assert (torch.tensor(scored) - whole).abs().max() <= 1e-5


class OursInPeft(torch.nn.Module):
    """PEFT's dropout with our masks: of the step and bin that `masks` is at; at the output layer, of its targets."""

    def __init__(self, masks: Masks, linear: str, targets: list[torch.Tensor]) -> None:
        super().__init__()
        self.masks, self.linear, self.targets = masks, linear, targets

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, seed = x.flatten(0, -2), self.masks.seed_of(self.linear, 0)
        if seed is None or self.linear not in ("output_layer", "lm_head"):
            return dropped(seen, self.masks.rate, seed).view(x.shape)
        index_N = self.targets[0]
        return seen.index_copy(0, index_N, dropped(seen[index_N], self.masks.rate, seed)).view(x.shape)


@pytest.mark.parametrize(
    ("family", "engine", "dora"),
    [
        *(("qwen3", engine, False) for engine in ENGINES),
        *((family, "megatron", False) for family in OF_FAMILIES),
        *(("qwen2", engine, True) for engine in ENGINES),  # with biases
    ],
)
def test_dropout_is_peft_s_under_the_same_masks(models, tmp_path, family, engine, dora):
    """Two bins a step, each of one row. PEFT's own masks are of torch's random state, and of no step."""
    model, steps = models(family), [rows[:2] for rows in STEPS]
    lora = OF_FAMILIES.get(family, Lora(rank=4, alpha=8, targets=LINEARS if dora else TARGETS))
    lora = lora.model_copy(update={"dropout": 0.3, "dora": dora})
    ours = ENGINES[engine](model, Layout(), "float32")
    ours.add_adapter("run", lora, seed=3)
    ours.save(tmp_path / "before")
    reference = in_peft(model, tmp_path / "before" / "weights", is_trainable=True)
    masks, targets = Masks(0.3, seed=3), [torch.tensor([])]
    a = read_architecture(model)
    fused = linears_of([*a.slices(1), *([a.output_slice(1)] if a.tied else [])])
    ours_of = {module_of(part.name): linear.name for linear in fused for part in linear.slices}
    for name, module in reference.get_base_model().named_modules():
        if hasattr(module, "lora_dropout"):
            assert module.lora_dropout["default"].p == 0.3
            linear = ours_of[name] if engine == "megatron" else name
            module.lora_dropout["default"] = OursInPeft(masks, linear, targets)
    optimizer = torch.optim.AdamW((p for p in reference.parameters() if p.requires_grad), lr=3e-3, weight_decay=0)
    for step, rows in enumerate(steps):
        total = sum(sum(row.weights) for row in rows)
        for number, row in enumerate(rows):
            masks.moment, targets[0] = (step, number), bin_of([row]).hidden_index_N
            (reference_loss(reference, [row]) * sum(row.weights) / total).backward()
        optimizer.step()
        optimizer.zero_grad()
    masks.moment = None
    train(ours, [[[row] for row in rows] for rows in steps], Adam(clip_norm=0.0), learning_rate=3e-3)
    rows = random_rows([40, 17], seed=9)
    assert (logprobs(ours, bin_of(rows)) - logprobs_in_transformers(reference.eval(), rows)).abs().max() <= 1e-5
    ours.add_adapter("plain", lora.model_copy(update={"dropout": 0.0}), seed=3)
    train(ours, [[[row] for row in rows] for rows in steps], Adam(clip_norm=0.0), learning_rate=3e-3)
    assert (logprobs(ours, bin_of(rows)) - logprobs_in_transformers(reference, rows)).abs().max() > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_masks_follow_from_the_seed_and_the_step_alone(model, tmp_path, engine):
    lora = Lora(rank=4, alpha=8, dropout=0.3)
    bins = [[rows[:2], rows[2:]] for rows in STEPS]

    def trained_to_the_end(name: str, seed: int, killed_after: int | None = None) -> bytes:
        ours = ENGINES[engine](model, Layout(), "float32")
        ours.add_adapter("run", lora, seed)
        if killed_after is not None:
            train(ours, bins[:killed_after])
            ours.save(tmp_path / "saved")
            accumulate(ours, bins[0])  # lost with the worker
            ours = ENGINES[engine](model, Layout(), "float32")
            ours.load_adapter("run", tmp_path / "saved" / "weights", lora, trainable=True, seed=seed)
            ours.load(tmp_path / "saved")
        for number, each in enumerate(bins[killed_after or 0 :]):
            if number == 1:
                logprobs(ours, bin_of(STEPS[0]))  # an evaluation between steps draws nothing
            train(ours, [each])
        ours.save(tmp_path / name)
        return (tmp_path / name / "weights" / "adapter_model.safetensors").read_bytes()

    straight = trained_to_the_end("straight", seed=3)
    assert trained_to_the_end("killed", seed=3, killed_after=4) == straight
    assert trained_to_the_end("other", seed=4) != straight
    config = json.loads((tmp_path / "straight" / "weights" / "adapter_config.json").read_text())
    assert config["lora_dropout"] == 0.3


def test_masks_keep_the_mean_and_the_share():
    x, rate, seeds = torch.linspace(-2, 3, 50), 0.3, 4000
    drawn = torch.stack([dropped(x, rate, seed) for seed in range(seeds)])
    assert abs(float((drawn == 0).double().mean()) - rate) < 4 * (rate * (1 - rate) / drawn.numel()) ** 0.5
    deviation = x.abs() * (rate / (1 - rate) / seeds) ** 0.5
    assert ((drawn.mean(0) - x).abs() < 4.5 * deviation + 1e-6).all()
    masks = Masks(rate, 3, (0, 0))
    others = [(Masks(rate, 4, (0, 0)), "a", 0), (Masks(rate, 3, (1, 0)), "a", 0), (Masks(rate, 3, (0, 1)), "a", 0)]
    others += [(masks, "b", 0), (masks, "a", 1)]
    assert len({masks.seed_of("a", 0), *(each.seed_of(*of) for each, *of in others)}) == 6


def test_code_of_one_s_own_has_neither_dropout_nor_another_head(model):
    rank = TrainerRank(MegatronEngine(model, Layout(), "float32"))
    for lora in (Lora(dropout=0.1), Lora(targets=("lm_head",)), Lora(head=ScalarHead())):
        with pytest.raises(InvalidInput, match="a run's own passes alone"):
            rank.create_adapter("run", lora, seed=0)


@pytest.mark.parametrize(
    ("settings", "place", "words"),
    [
        ({"target_pattern": r".*\.mlp"}, "target_pattern", "model.layers.0.mlp, too, which takes no adapter"),
        ({"target_pattern": "x_proj"}, "trainable", "no linear of that name"),
        ({"layers": [0, 7]}, "layers", "nothing to adapt in layer 7"),
        ({"rank_pattern": {"q_prj": 2}}, "trainable", "like that: q_prj"),
        ({"targets": ["q_proj"], "alpha_pattern": {"v_proj": 2}}, "trainable", "like that: v_proj"),
        ({"targets": ["q_proj", "lm_head"], "dora": True}, "dora", "experts' excepted, and not of lm_head"),
    ],
)
def test_what_a_model_has_not_is_refused_by_its_field(model, settings, place, words):
    with pytest.raises(InvalidInput, match=words) as refused:
        MegatronEngine(model, Layout(), "float32").add_adapter("run", Lora.model_validate(settings), seed=0)
    assert refused.value.place == place


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize(
    ("lora", "module"), [(FORMS["lm_head"], "lm_head"), (TOKENS, "lm_head"), (TOKENS, "model.embed_tokens")]
)
def test_copies_of_embeddings_that_peft_writes_are_the_model_s(tmp_path, is_same, lora, module):
    """PEFT writes the output layer beside its adapter, and would load it. Here the model's is tied to its embedding."""
    model = distinct_model(tmp_path / "model", "qwen3", tied=True)
    ours = MegatronEngine(model, Layout(), "float32")
    after = trained(ours, lora, tmp_path)[1]
    reference = in_peft(model, after)
    reference.save_pretrained(tmp_path / "theirs")
    path, name = tmp_path / "theirs" / "adapter_model.safetensors", f"base_model.model.{module}.base_layer.weight"
    tensors = load_file(path)
    assert name in tensors
    if is_same:
        ours.load_adapter("theirs", tmp_path / "theirs", None, trainable=False)
        rows = random_rows([40, 17], seed=9)
        assert (logprobs(ours, bin_of(rows)) - logprobs_in_transformers(reference, rows)).abs().max() <= 1e-5
        adapter = load_adapter("theirs", tmp_path / "theirs", Decoder(model, torch.float32, torch.device("cpu")))
        assert "lm_head" in adapter.lora_weights
    else:
        tensors[name][7, 3] += 1
        save_file(tensors, path)
        with pytest.raises(InvalidInput, match=r"to 'model\.embed_tokens\.weight', and they differ"):
            ours.load_adapter("theirs", tmp_path / "theirs", None, trainable=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_dora_of_several_ranks_computes_in_bfloat16(model, tmp_path, engine):
    """Scales that differ among a fused linear's parts are float32, whatever the factors are."""
    losses = {}
    for dtype in ("float32", "bfloat16"):
        ours = ENGINES[engine](model, Layout(), dtype)
        ours.add_adapter("run", FORMS["dora"], seed=3)
        losses[dtype] = [loss for loss, _ in train(ours, [[rows] for rows in STEPS[:3]])]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=2e-3)
    ours.save(tmp_path)
    decoder = Decoder(model, torch.bfloat16, torch.device("cpu"))
    adapter = load_adapter("run", tmp_path / "weights", decoder)
    [row] = random_rows([30], seed=9)
    drawn = logprobs_by_steps(decoder, row.ids, range(10, 30), adapter.lora_weights)
    whole = logprobs(ours, bin_of([Row(row.ids, [1.0] * 30)]))
    assert (drawn - whole[9:29]).abs().max() <= 0.1


def test_dora_begins_with_the_norms_that_peft_begins_with(model, tmp_path):
    from peft import get_peft_model
    from peft.tuners.lora import LoraConfig
    from transformers import AutoModelForCausalLM

    ours = MegatronEngine(model, Layout(), "float32")
    ours.add_adapter("run", FORMS["dora"], seed=3)
    ours.save(tmp_path)
    config = LoraConfig(r=4, use_dora=True, target_modules=[*ATTENTION, "gate_proj", "up_proj", "down_proj"])
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).state_dict()
    found = {n: t for n, t in weights_of(tmp_path / "weights").items() if n.endswith("magnitude_vector")}
    assert all((norms - theirs[f"{name}.default.weight"]).abs().max() <= 1e-5 for name, norms in found.items())
    assert len(found) == len([name for name in theirs if "magnitude_vector" in name])


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_dora_beside_quantized_weights_is_peft_s_beside_what_they_stand_for(tmp_path, kind):
    model = distinct_model(tmp_path / "model", "qwen3", tied=False)
    ours = MegatronEngine(model, Layout(), "float32", quantize=kind)
    whole = {name: tensor.clone().contiguous() for name, tensor in ours.named_weights()}
    before, after = trained(ours, Lora(rank=4, alpha=8, dora=True, rank_pattern={"q_proj": 2}), tmp_path)
    save_file(whole, model / "model.safetensors", metadata={"format": "pt"})
    reference = in_peft(model, before, is_trainable=True)
    reference_steps(reference, STEPS, LEARNING_RATE, ADAM.weight_decay, ADAM.clip_norm)
    reference.save_pretrained(tmp_path / "theirs")
    assert furthest(weights_of(after), weights_of(tmp_path / "theirs")) <= 1e-5


@pytest.mark.parametrize("lora", [FORMS["dora"], Lora(rank=4, alpha=8, targets=("embed_tokens", "q_proj"))])
def test_passes_of_one_s_own_take_dora_and_embeddings(model, tmp_path, lora):
    rank = TrainerRank(MegatronEngine(model, Layout(), "float32"))
    rank.create_adapter("run", lora, seed=3)
    row = random_rows([30], seed=4)[0]
    for step in range(2):
        (found,) = rank.forward([ForwardInput(row.ids, target_logprobs=True, adapter="run")])
        if step == 0:
            rank.backward(-found.target_logprob_P.sum())
            before = rank.snapshot("run").tensors
            rank.optim_step(Adam(), 1e-2, 1.0, adapters=["run"])
    after = rank.snapshot("run")
    assert all(not torch.equal(after.tensors[n], before[n]) for n in before if n.endswith(("vector", "embedding_A")))
    after.write(tmp_path)
    expected = logprobs_in_transformers(in_peft(model, tmp_path), [Row(row.ids, [1.0] * 30)])
    assert (found.target_logprob_P - expected).abs().max() <= 1e-5
