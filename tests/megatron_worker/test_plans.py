"""Plans by property: resumed to the bit, and what one rank comes to, whatever is trained of what, how, by which ranks.

A plan is a line of the table: a form of LoRA or all weights, with a head or without, an optimizer, an engine, a layout.
That one rank trains as PEFT, transformers and torch do: test_lora_forms.py, test_heads.py, optimizers. Layouts of the
main engine with every family, and faults that must show: test_parallel.py.
"""

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.training import Adam, Dtype, EngineName, Full, Layout, Lora, Muon, Optimizer, ScalarHead
from megatron_worker.engine import Outputs
from megatron_worker.tensors.slot_engine import Engine
from tests.depth import drawn
from tests.megatron_worker import scored_rows
from tests.megatron_worker.differences import furthest
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import ENGINES, checkpoint_bytes
from tests.megatron_worker.launch import in_turn, on_ranks
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [random_rows([40, 17, 90, 25, 33], seed=seed) for seed in range(4)]
STEPS = [[rows[:2], rows[2:4], rows[4:]] for rows in ROWS]  # under dp2 one rank has two bins, the other an empty one
MODELS: dict[str, dict[str, Any]] = {
    family: {"family": family, "tied": family in ("qwen2", "gemma3")}
    for family in ("qwen3", "qwen2", "llama", "gemma3", "glm4_moe_lite", "gpt_oss", "qwen3_moe", "qwen3_5_moe")
}
# An epsilon above what gradients round to: else a step of a gradient of rounding alone is of the rate's size.
ADAM = Adam(weight_decay=0.01, clip_norm=1.0, eps=1e-5)


@dataclass(frozen=True)
class Plan:
    trainable: Lora | Full
    layout: Layout = field(default_factory=Layout)
    engine: EngineName = "megatron"
    model: str = "qwen3"
    optimizer: Optimizer = ADAM
    dtype: Dtype = "float32"
    settings: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5

    def __str__(self) -> str:
        is_lora = isinstance(self.trainable, Lora)
        form = "".join(f"-{name}" for name in ("dora", "head", "layers") if getattr(self.trainable, name, None))
        tokens = "-tokens" if is_lora and "embed_tokens" in self.trainable.targets else ""
        settings = "".join(f"-{value}" for value in (*self.settings.values(), self.dtype) if value != "float32")
        options = {"original": "scale", 4.0: "lora_plus_ratio", 3.0: "weight_decay"}
        own = "".join(f"-{value}" for value, name in options.items() if getattr(self.optimizer, name, None) == value)
        what = f"{self.trainable.kind}{form}{tokens}-{self.optimizer.kind}{own}{settings}"
        return f"{self.model}-{self.engine}-{self.layout.label}-{what}"


LORA, FULL = Lora(rank=4, alpha=8), Full()
DORA = Lora(rank=4, alpha=8, dora=True, rank_pattern={"q_proj": 2})
DORA_OF_LATENTS = Lora(rank=4, alpha=8, dora=True, targets=("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"))
TOKENS = Lora(rank=4, alpha=8, targets=("embed_tokens", "q_proj", "lm_head"), rank_pattern={"embed_tokens": 3})
HEADED, FULL_HEADED = scored_rows.lora("token"), Full(head=scored_rows.HEADS["sequence"])
MUON = Muon(weight_decay=0.1, eps=1e-5)
ORIGINAL = Muon(
    **{"momentum": 0.8, "nesterov": False, "newton_schulz_steps": 4, "scale": "original"},
    **{"weight_decay": 0.1, "decay": "matrices", "eps": 1e-5},
)
LORA_PLUS = Muon(weight_decay=0.1, lora_plus_ratio=4.0, eps=1e-5)
DP2, TP2, SP2, PP2, CP2 = (
    Layout(**each) for each in ({"dp": 2}, {"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2})
)
EP2 = Layout(dp=2, ep=2)

OF_TWO_RANKS = [
    *(Plan(DORA, layout, model="qwen2") for layout in (SP2, PP2)),  # with biases
    Plan(DORA, DP2, "fsdp", "qwen2"),
    *(Plan(DORA, layout) for layout in (TP2, CP2, DP2)),
    Plan(DORA_OF_LATENTS, SP2, model="glm4_moe_lite"),
    *(Plan(TOKENS, layout, model="llama") for layout in (TP2, CP2, DP2, SP2)),
    *(Plan(TOKENS, layout, "fsdp", "llama") for layout in (DP2, TP2)),
    Plan(TOKENS, PP2, model="gemma3"),  # tied
    *(Plan(each, layout) for each in (HEADED, FULL_HEADED) for layout in (TP2, SP2, PP2, CP2, DP2)),
    *(Plan(each, layout, "fsdp") for each in (HEADED, FULL_HEADED) for layout in (DP2, TP2)),
    Plan(HEADED.model_copy(update={"layers": (1,)}), PP2),  # the first stage has nothing of the slot
    *(Plan(FULL, layout, optimizer=MUON) for layout in (DP2, TP2)),
    *(Plan(FULL, layout, "fsdp", optimizer=MUON) for layout in (DP2, TP2)),
    *(Plan(LORA, layout, optimizer=LORA_PLUS) for layout in (DP2, SP2)),
    Plan(LORA, DP2, "fsdp", optimizer=LORA_PLUS),
    Plan(FULL, PP2, optimizer=ORIGINAL),
    Plan(FULL, DP2, optimizer=Adam(weight_decay=3.0, decay="matrices", eps=1e-5)),
    *(Plan(FULL, EP2, model=model, optimizer=MUON) for model in ("gpt_oss", "qwen3_moe")),
    Plan(FULL, DP2, "fsdp", "qwen3_moe", MUON),
    Plan(LORA, DP2, optimizer=MUON, settings={"optimizer_states": "8bit"}, tolerance=1e-3),
    *(Plan(LORA, layout, settings={"optimizer_states": "8bit"}, tolerance=5e-3) for layout in (DP2, SP2)),
]
OF_ONE_RANK = [
    *(Plan(each, engine=engine, dtype="bfloat16") for engine in ENGINES for each in (HEADED, FULL_HEADED)),
    *(
        Plan(each, dtype=dtype, settings={"optimizer_states": "8bit"})
        for each in (LORA, FULL)
        for dtype in ("float32", "bfloat16")
    ),
    *(
        Plan(LORA, model=model, dtype=dtype, settings={"quantize": kind})
        for model in ("qwen3", "qwen3_moe")
        for kind, dtype in (("nf4", "float32"), ("int8", "bfloat16"), ("fp8", "float32"))
    ),
    *(Plan(DORA, settings={"quantize": kind}) for kind in ("nf4", "int8")),
]
PLANS, ALONE = drawn(OF_TWO_RANKS, 9), drawn(OF_ONE_RANK, 4)


def begin(plan: Plan, model: Path, checkpoint: Path | None = None) -> Engine:
    engine = ENGINES[plan.engine](model, plan.layout, plan.dtype, **plan.settings)
    if isinstance(plan.trainable, Full):
        engine.train_full(plan.trainable, seed=3)
    elif checkpoint is None:
        engine.add_adapter("run", plan.trainable, seed=3)
    else:
        engine.load_adapter("run", checkpoint / "weights", plan.trainable, trainable=True, seed=3)
    if checkpoint is not None:
        engine.load(checkpoint)
    return engine


def steps(engine: Engine, plan: Plan, first: int, end: int) -> list[tuple[float, float]]:
    """Loss and norm of each."""
    rate, head = 3e-3 if isinstance(plan.trainable, Lora) else 3e-4, plan.trainable.head
    if head is None:
        return train(engine, STEPS[first:end], plan.optimizer, rate)
    return [
        scored_rows.step(engine, head.per, bins, rate) for bins in scored_rows.bins_of_steps(head.per, 4)[first:end]
    ]


def scores(engine: Engine, head: ScalarHead | None) -> list[torch.Tensor]:
    """Of each bin of a step: log-probabilities and entropies, or values of the head."""
    if head is not None:
        bins = scored_rows.bins_of_steps(head.per, 1)[0]
        return [scored_rows.values(engine, scored_rows.scored_bin(head.per, rows)) for rows in bins]
    with torch.no_grad():
        found = [engine.forward(bin_of(rows), Outputs(entropy=True)) for rows in STEPS[0]]
    return [torch.stack([each.logprob_N, each.entropy_N]).clone() for each in found]


def measure(plan: Plan, model: Path, out: Path, single: Path | None = None) -> list[Any]:
    """Four steps; the last two again from their checkpoint, and from one rank's. Returns what this rank knows."""
    engine = begin(plan, model)
    history = steps(engine, plan, 0, 2)
    engine.save(out / "middle")
    found = scores(engine, plan.trainable.head)
    history += steps(engine, plan, 2, 4)
    engine.save(out / "end")
    for name, checkpoint in {"again": out, "from-single": single}.items():
        if checkpoint is not None:
            engine = begin(plan, model, checkpoint / "middle")
            steps(engine, plan, 2, 4)
            engine.save(out / name)
    return [torch.tensor(history), *found]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, tuple[list[Any], list[list[Any]], Path, Path]]:
    """By plan: what one rank found, what each of two did, and the folders of both."""
    out = tmp_path_factory.mktemp("plans")

    @functools.cache
    def model(name: str) -> Path:
        return distinct_model(out / "models" / name, **MODELS[name])

    alone, singles = {}, dict[str, Plan]()
    for plan in PLANS:
        single = replace(plan, layout=Layout())
        assert singles.setdefault(str(single), single) == single, "two plans have one name"
        if str(single) not in alone:
            alone[str(single)] = measure(single, model(plan.model), out / str(single))
    folders = {str(plan): (out / str(plan), out / str(replace(plan, layout=Layout()))) for plan in PLANS}
    cases = [(plan, model(plan.model), *folders[str(plan)]) for plan in PLANS]
    by_rank = on_ranks(2, in_turn, measure, cases, timeout_s=500)
    return {
        str(plan): (alone[str(replace(plan, layout=Layout()))], [rank[number] for rank in by_rank], *folders[str(plan)])
        for number, plan in enumerate(PLANS)
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", PLANS, ids=str)
class TestTwoRanks:
    def test_resume_to_the_bit(self, results, plan):
        *_, two, one = results[str(plan)]
        for folder in (two, one):
            assert checkpoint_bytes(folder / "again") == checkpoint_bytes(folder / "end")
            assert checkpoint_bytes(folder / "middle") != checkpoint_bytes(folder / "end")

    def test_find_what_one_finds(self, results, plan):
        expected, found, *_ = results[str(plan)]
        for rank in found:
            for ours, theirs in zip(rank, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=plan.tolerance, atol=plan.tolerance)

    def test_come_to_what_one_comes_to_also_from_its_checkpoint(self, results, plan):
        *_, two, one = results[str(plan)]
        for name in ("end", "from-single"):
            assert furthest(two / name / "weights", one / "end" / "weights") <= plan.tolerance
            if "optimizer_states" not in plan.settings:
                assert furthest(two / name, one / "end") <= plan.tolerance


@pytest.mark.parametrize("plan", ALONE, ids=str)
def test_one_rank_resumes_to_the_bit(tmp_path, plan):
    measure(plan, distinct_model(tmp_path / "model", **MODELS[plan.model]), tmp_path / "out")
    assert checkpoint_bytes(tmp_path / "out" / "again") == checkpoint_bytes(tmp_path / "out" / "end")
    assert checkpoint_bytes(tmp_path / "out" / "middle") != checkpoint_bytes(tmp_path / "out" / "end")


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "megatron"])
@pytest.mark.parametrize("trainable", [HEADED, FULL_HEADED], ids=["lora", "full"])
def test_engines_come_to_the_same_with_a_head(tmp_path, engine, trainable):
    model = distinct_model(tmp_path / "model", **MODELS["qwen3"])
    for name in (engine, "megatron"):
        measure(Plan(trainable, engine=name), model, tmp_path / name)
    assert furthest(tmp_path / engine / "end", tmp_path / "megatron" / "end") <= 1e-5
