"""What the ranks of a layout do, of the tests (`do_trials`, under launch.on_ranks) and of the measured table.

Every layout's results go to `OUT/<model>/<layout>/`, and are compared with those of one rank, which are made with the
same functions (differences.py). All but a first step begins at the same checkpoint of one rank.
"""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors.torch import load_file, save_file

from longshore.losses import DPO, PPO, CrossEntropy, Kl, Loss, Reinforce
from longshore.training import LINEARS, Adam, Dtype, Full, Layout, Linear, Lora
from megatron_worker import lora
from megatron_worker.engine import Batch, LossFunction, Outputs
from megatron_worker.families import join_parts, local_of, parts_of
from megatron_worker.losses import loss_function
from megatron_worker.megatron import attention, parallel
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.megatron.model import MegatronModel
from megatron_worker.megatron.parallel import Group, Mesh
from shared.errors import InvalidInput
from shared.families.tensor_slices import TensorSlice
from tests.megatron_worker.differences import GRADIENTS
from tests.megatron_worker.rows import bin_of, empty_bin, random_rows, routed
from tests.megatron_worker.trees import LOSS as TREE_LOSS
from tests.megatron_worker.trees import as_tree, random_sequences

FUSED: tuple[Linear, ...] = ("qkv_proj", "gate_up_proj")
LORA = Lora(
    rank=3,
    alpha=6,
    targets=(*LINEARS, "lm_head"),
    rank_pattern={"q(_b|kv)?_proj": 5},
    alpha_pattern={"(kv_b|v|qkv)_proj": 2},
)
DROPPING = Lora(rank=3, dropout=0.3, targets=(*FUSED, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"))
# Where a gradient is as small as float32 rounds, Adam's first step has the size of the rate and the rounding's sign.
# An epsilon above the rounding keeps a comparison of weights one of layouts.
ADAM = Adam(weight_decay=0.01, clip_norm=1.0, eps=1e-5)
SFT_LOSS = loss_function(CrossEntropy())
KINDS = ("lora", "full")
LEARNING_RATES = {"lora": 1e-3, "full": 3e-4}

Bins = list[Batch]


Steps = list[tuple[Bins, LossFunction]]
FIRST = "first"  # a checkpoint after one step, in which no matrix of an adapter is zero


class Trial(BaseModel):
    model: Path
    layout: Layout
    faults: dict[str, str] = {}  # and in what each must show: weights, or history, of one kind or of both
    rounds: bool = False  # in bfloat16, too

    @property
    def name(self) -> str:
        return f"{self.model.name}/{self.layout.label}"


def sft_bins(seed: int) -> Bins:
    """Three bins: under dp2 one rank has two of them, the other one and an empty one."""
    rows = random_rows([40, 17, 90, 25, 60, 8, 33], seed=seed)
    return [bin_of(rows[:2]), bin_of(rows[2:5]), bin_of(rows[5:])]


def rl_bins(seed: int) -> Bins:
    """Groups that share prefixes, as trees, with advantages and old log-probabilities."""
    return [as_tree(random_sequences(seed + number, num_groups=1, num_sequences=4)) for number in range(3)]


# A step on rows, one on trees, one on rows.
STEPS: Steps = [(sft_bins(0), SFT_LOSS), (rl_bins(1), TREE_LOSS), (sft_bins(2), SFT_LOSS)]


def start(model: Path, layout: Layout, kind: str) -> MegatronEngine:
    engine = MegatronEngine(model, layout, "float32")
    engine.train_full(Full()) if kind == "full" else engine.add_adapter("run", LORA, seed=5)
    return engine


def own_bins(engine: MegatronEngine, bins: Bins) -> Bins:
    """Dealt round the data-parallel ranks, as many for each."""
    facts = engine.facts
    num_turns = -(-len(bins) // facts.dp_size)
    own = bins[facts.dp_rank :: facts.dp_size]
    return own + [empty_bin()] * (num_turns - len(own))


def step(engine: MegatronEngine, bins: Bins, loss: LossFunction, learning_rate: float) -> tuple[float, float]:
    """One update. Returns loss and gradient norm."""
    sums = accumulate(engine, bins, loss)
    norms = engine.optim_step(ADAM, learning_rate, sums["weight"])
    return sums["loss"] / sums["weight"], norms.grad_norm


def accumulate(engine: MegatronEngine, bins: Bins, loss: LossFunction) -> dict[str, float]:
    zero = torch.zeros((), dtype=torch.float64)
    sums = {"loss": zero, "weight": zero}
    for _batch, found in engine.forward_backward_all(own_bins(engine, bins), loss):
        sums = {name: sums[name] + found[name].double() for name in sums}
    return engine.reduce(sums)


def train(engine: MegatronEngine, kind: str, steps: Steps) -> list[tuple[float, float]]:
    return [step(engine, *each, LEARNING_RATES[kind]) for each in steps]


def gradients(engine: MegatronEngine, bins: Bins, loss: LossFunction) -> dict[str, torch.Tensor]:
    """Whole tensors by their Hugging Face or PEFT names, summed over all bins. Nothing is left accumulated."""
    accumulate(engine, bins, loss)
    training = engine.trained
    optimizer = training.optimizer
    optimizer.reduce(1.0)
    whole = optimizer.grad.like(torch.float32)
    for region in optimizer._regions:
        whole.buffer[region.all] = region.copies.join_shares(optimizer.grad.buffer[region.own])
    optimizer.zero_grad()
    return {p.name: engine._mesh.whole(p, whole.views, torch.float32).clone() for p in training.slices}


def scores(engine: MegatronEngine, batch: Batch) -> list[list[float]]:
    with torch.no_grad():
        found = engine.forward(batch, Outputs(entropy=True))
    assert found.logprob_N is not None and found.entropy_N is not None
    return [found.logprob_N.tolist(), found.entropy_N.tolist()]


def note_step(engine: MegatronEngine, bins: Bins, loss: LossFunction, out: Path) -> None:
    """Scores and gradients of a step's bins; no weight changes."""
    note(engine, out / "scores.json", [scores(engine, batch) for batch in bins])
    found = gradients(engine, bins, loss)
    if engine.facts.rank == 0:
        save_file(found, out / GRADIENTS)


def begin(model: Path, layout: Layout, kind: str, out: Path) -> None:
    """The first step of STEPS, with a checkpoint after it."""
    engine = start(model, layout, kind)
    if kind == "full":  # of the base, as it was published
        note(engine, out / "named.json", [[name, float(t.double().norm())] for name, t in engine.named_weights()])
    note(engine, out / "first.json", train(engine, kind, STEPS[:1]))
    engine.save(out / FIRST)


def measure(model: Path, layout: Layout, kind: str, first: Path, steps: Steps, out: Path, num_noted: int = 1) -> None:
    """From a checkpoint: scores and gradients of some of the steps, the steps, and those behind the first again."""
    engine = start(model, layout, kind)
    engine.load(first)
    for number, (bins, loss) in enumerate(steps[:num_noted]):
        note_step(engine, bins, loss, out / str(number))
    history = train(engine, kind, steps[:1])
    engine.save(out / "middle")
    history += train(engine, kind, steps[1:])
    engine.save(out / "end")
    note(engine, out / "history.json", history)
    prompts = [[20 + i, 30, 40 + i][: i + 1] * 3 for i in range(3)]
    note(engine, out / "greedy.json", engine.greedy(prompts, 6, frozenset({7})))
    engine.load(out / "middle")
    train(engine, kind, steps[1:])
    engine.save(out / "again")


def note(engine: MegatronEngine, path: Path, value: Any) -> None:
    """What each rank knows, in a file of its own."""
    path = path.with_name(f"{path.stem}-{engine.facts.rank}{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def drop(model: Path, layout: Layout, out: Path) -> None:
    """Two steps with dropout beside linears whose outputs tensor-parallel ranks share: all of them drop the same."""
    engine = MegatronEngine(model, layout, "float32")
    engine.add_adapter("run", DROPPING, seed=5)
    history = [step(engine, *STEPS[number], LEARNING_RATES["lora"]) for number in range(2)]
    note(engine, out / "dropping.json", [value for pair in history for value in pair])


def round_weights(path: Path) -> None:
    """To what bfloat16 can say, so that both dtypes compute the same function."""
    save_file({n: t.bfloat16().float() for n, t in load_file(path).items()}, path, metadata={"format": "pt"})


def round_adapter(adapter: Path, out: Path) -> None:
    shutil.copytree(adapter, out)
    round_weights(out / "adapter_model.safetensors")


def start_rounded(model: Path, layout: Layout, kind: str, adapter: Path, dtype: Dtype = "bfloat16") -> MegatronEngine:
    """With the adapter, or with all weights of the model, in training."""
    engine = MegatronEngine(model, layout, dtype)
    if kind == "full":
        engine.train_full(Full())
    else:
        engine.load_adapter("run", adapter, LORA, trainable=True)
    return engine


def run_rounded(model: Path, layout: Layout, adapter: Path, out: Path, dtype: Dtype = "bfloat16") -> None:
    for kind in KINDS:
        engine = start_rounded(model, layout, kind, adapter, dtype)
        note_step(engine, with_routes(engine, STEPS[0][0]), SFT_LOSS, out / kind)


def with_routes(engine: MegatronEngine, bins: Bins) -> Bins:
    """The bins with experts for their tokens: rounding would turn some choices, and each of those is no rounding."""
    return [routed(engine.facts.routes, batch, number) for number, batch in enumerate(bins)]


def refuse(model: Path, layout: Layout, out: Path, adapter: Path, damaged: Path) -> None:
    """A damaged adapter, which only rank 0 meets, is refused by every rank, and the engine is as good as before."""
    engine = MegatronEngine(model, layout, "float32")
    try:
        engine.load_adapter("bad", damaged if engine.facts.rank == 0 else adapter, LORA, trainable=True)
        said = "accepted"
    except InvalidInput as error:
        said = str(error)
    engine.load_adapter("good", adapter, LORA, trainable=True)
    note(engine, out / "refused.json", said)


def fail_to_save(model: Path, layout: Layout, out: Path) -> None:
    """Rank 0 cannot write: every rank hears of it, and none waits for tensors that are not gathered any more."""
    for kind in KINDS:
        engine = start(model, layout, kind)
        try:
            engine.save(model / "config.json")  # a file where the folder should be
            said = "saved"
        except OSError as error:
            said = str(error.strerror)
        note(engine, out / f"{kind}-unsaved.json", said)


# Faults: each breaks one function of ours, and must show in what a test compares.

Change = Callable[[Any], Any]


def _same_shard(_: Any) -> Any:
    def local(s: TensorSlice, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return join_parts(parts_of(s, whole, 0, size), s.split)

    return local


def _own_everywhere(original: Any) -> Any:
    def gathered(self: Mesh, tensor_slice: TensorSlice, parameter: torch.Tensor) -> torch.Tensor:
        whole, group = original(self, tensor_slice, parameter).clone(), self.splitting(tensor_slice)
        if (split := tensor_slice.split) is not None:
            own = local_of(tensor_slice, whole, group.rank, group.size).clone()
            for part in whole.chunk(group.size, dim=split):
                size = min(part.shape[split], own.shape[split])
                part.narrow(split, 0, size).copy_(own.narrow(split, 0, size))
        return whole

    return gathered


def _own_alone(_: Any) -> Any:
    return lambda self, tensor: tensor.chunk(self.size)[self.rank].clone()


def _placement(of: str, instead: str) -> Change:
    def change(original: Any) -> Any:
        def placement(self: Any, name: str) -> str:
            found = original(self, name)
            return instead if found == of else found

        return placement

    return change


def _kept(_: Any) -> Any:
    def exchange_rows(x: torch.Tensor, sent: list[int], received: list[int], group: Group) -> torch.Tensor:
        def back(grad: torch.Tensor) -> torch.Tensor:
            """Only what this rank sent itself has a gradient."""
            rows = [grad.new_zeros(n, *grad.shape[1:]) for n in sent]
            rows[group.rank] = grad.split(received)[group.rank]
            return torch.cat(rows)

        return parallel.linear_map(x, lambda x: group.exchange(x, sent, received), back)

    return exchange_rows


FAULTS: dict[str, tuple[Any, str, Change]] = {
    "skip-reduce": (Group, "sum_shares", _own_alone),
    "average-for-sum": (Group, "sum_shares", lambda original: lambda self, x: original(self, x) / self.size),
    "drop-shard": (Mesh, "gathered", _own_everywhere),
    "local-norm": (Group, "sum", lambda original: lambda self, x: None if x.ndim == 0 else original(self, x)),
    "local-count": (MegatronEngine, "reduce", lambda _: lambda self, sums: {n: float(x) for n, x in sums.items()}),
    "same-shard": (lora, "local_of", _same_shard),
    "forget-finalize": (MegatronModel, "_placement", _placement("partial", "whole")),
    "forget-tied": (MegatronModel, "_placement", _placement("tied", "split")),
    "forget-copies": (MegatronModel, "_placement", _placement("expert", "split")),
    "own-context": (attention, "gather_rows", lambda _: parallel.gather_alike),
    "own-tokens": (parallel, "exchange_rows", _kept),
}


@contextmanager
def fault(name: str) -> Iterator[None]:
    owner, attribute, change = FAULTS[name]
    original = owner.__dict__[attribute]
    plain = original.__func__ if isinstance(original, staticmethod) else original
    setattr(owner, attribute, change(plain))
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def kinds_shown(shows_in: str) -> list[str]:
    """In which kinds of training a fault must show."""
    return [kind for kind in KINDS if kind in shows_in] or list(KINDS)


def run_with_fault(name: str, shows_in: str, trial: Trial, out: Path) -> None:
    for kind in kinds_shown(shows_in):
        with fault(name):
            engine = start(trial.model, trial.layout, kind)
            history = train(engine, kind, STEPS[:1])
            if "weights" in shows_in:
                engine.save(out / kind / FIRST)
            else:
                note(engine, out / kind / "history.json", history + train(engine, kind, STEPS[1:2]))


def do_trials(trials: Sequence[Trial], results: Path) -> None:
    for number, trial in enumerate(trials):
        out, single = results / trial.name, results / trial.model.name / "single"
        for kind in KINDS:
            begin(trial.model, trial.layout, kind, out / kind)
            measure(trial.model, trial.layout, kind, single / kind / FIRST, STEPS[1:], out / kind, num_noted=2)
        if trial.rounds:
            run_rounded(trial.model, trial.layout, single / "rounded", out / "bfloat16")
        for name, shows_in in trial.faults.items():
            run_with_fault(name, shows_in, trial, out / "faults" / name)
        if number == 0:
            refuse(trial.model, trial.layout, out, single / "rounded", single / "damaged")
            fail_to_save(trial.model, trial.layout, out)
            drop(trial.model, trial.layout, out)


# Of the measured table (layout_table.py): steps of several objectives, from one file.

OBJECTIVES: dict[str, Loss] = {"sft": CrossEntropy(), "rl": PPO(kl=Kl(coefficient=0.1)), "dpo": DPO(beta=0.1)}
# Rounding moves ratios across PPO's clip, where its gradient jumps: what rounding does is asked of a smooth loss.
SMOOTH: dict[str, Loss] = OBJECTIVES | {"rl": Reinforce(kl=Kl(coefficient=0.1))}
DATA = "data.pt"


def do_objectives(trial: Trial, results: Path) -> None:
    """By kind and objective: what `measure` does, in float32; scores and gradients in bfloat16."""
    single, out = results / trial.model.name / "single", results / trial.name
    data: dict[str, list[Bins]] = torch.load(single / DATA, weights_only=False)
    for kind, (objective, loss) in itertools.product(KINDS, OBJECTIVES.items()):
        steps = [(bins, loss_function(loss)) for bins in data[objective]]
        measure(trial.model, trial.layout, kind, single / kind / FIRST, steps, out / "float32" / kind / objective)
    do_rounded(trial, single, out / "bfloat16", "bfloat16")


def do_rounded(trial: Trial, single: Path, out: Path, dtype: Dtype) -> None:
    """Scores and gradients of weights that bfloat16 can say; in float32, what they are without rounding."""
    data: dict[str, list[Bins]] = torch.load(single / DATA, weights_only=False)
    for kind in KINDS:
        engine = start_rounded(trial.model, trial.layout, kind, single / "rounded", dtype)
        for objective, loss in SMOOTH.items():
            note_step(engine, with_routes(engine, data[objective][0]), loss_function(loss), out / kind / objective)
