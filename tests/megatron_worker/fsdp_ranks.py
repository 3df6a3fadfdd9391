"""What each rank of an FSDP engine does in test_fsdp_ranks.py, under the launcher; on one rank, what to compare with.

python -m megatron_worker.process.launcher N tests.megatron_worker.fsdp_ranks MODEL OUT SINGLE
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from longshore.layout import Layout
from megatron_worker.engine import Outputs
from megatron_worker.fsdp.optimizer import Ranks
from megatron_worker.process.ranks import start_group
from shared.errors import InvalidInput
from shared.families.tensor_slices import TensorSlice
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import LORA, gradient, start
from tests.megatron_worker.rows import bin_of, empty_bin, random_rows
from tests.megatron_worker.test_engine_state import storages_alive
from tests.megatron_worker.trees import LOSS as TREE_LOSS
from tests.megatron_worker.trees import as_tree, random_sequences

ROWS = [random_rows([40, 17, 90, 25, 60, 8, 33], seed=s % 3) for s in range(6)]
# Three bins a step, or two, or one: ranks have as many as others, or fewer, or none.
STEPS = [[r[:2], r[2:5], r[5:]] if s % 3 == 0 else [r[:3], r[3:]] if s % 3 == 1 else [r] for s, r in enumerate(ROWS)]
RATES = {"lora": 3e-3, "full": 3e-4}


def note(path: Path, value: Any) -> None:
    """What each rank knows, in a file of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = path.with_name(f"{path.stem}-{rank}{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def run(model: Path, layout: Layout, out: Path) -> None:
    """Train three steps, save, train three more, save; for adapters and for all weights."""
    for kind, rate in RATES.items():
        engine = start("fsdp", model, kind, layout=layout)
        history = train(engine, STEPS[:3], learning_rate=rate)
        engine.save(out / kind / "middle")
        history += train(engine, STEPS[3:], learning_rate=rate)
        engine.save(out / kind / "end")
        note(out / kind / "history.json", history)
        with torch.no_grad():
            scores = engine.forward(bin_of(STEPS[0][0]), Outputs(entropy=True))
        note(out / kind / "logprob.json", [scores.logprob_N.tolist(), scores.entropy_N.tolist()])
        prompts = [row.ids[:12] for row in STEPS[0][1]]
        note(out / kind / "greedy.json", engine.greedy(prompts, 10, frozenset({7})))
        note(out / kind / "weights.json", {name: float(w.double().sum()) for name, w in engine.named_weights()})


def run_trees(model: Path, layout: Layout, trained: Path, out: Path) -> None:
    """The gradient of three trees, a tree a bin, which are dealt round the ranks."""
    engine = start("fsdp", model, layout=layout)
    engine.load_adapter("run", trained, LORA, trainable=True)
    trees = [as_tree(random_sequences(seed, num_groups=1)) for seed in range(3)]
    size, rank = engine.facts.dp_size, engine.facts.dp_rank
    for turn in range(0, len(trees), size):
        own = trees[turn:][rank : rank + 1]
        engine.forward_backward(own[0] if own else empty_bin(), TREE_LOSS)
    gradient(engine, out)


def go_on(model: Path, layout: Layout, checkpoint: Path, kind: str, out: Path) -> None:
    """The last three steps, from a checkpoint of any number of ranks."""
    engine = start("fsdp", model, kind, layout=layout)
    engine.load(checkpoint)
    train(engine, STEPS[3:], learning_rate=RATES[kind])
    engine.save(out)


def offload(model: Path, layout: Layout, kind: str, out: Path) -> None:
    """How many bytes live after an offload beside the declared host buffers, and whether the bits come back."""
    before = storages_alive()
    engine = start("fsdp", model, kind, layout=layout)
    train(engine, STEPS[:1], learning_rate=RATES[kind])
    with torch.no_grad():
        expected = engine.forward(bin_of(ROWS[0]), Outputs()).logprob_N.clone()
    known = set(before) | {expected.untyped_storage().data_ptr()}
    engine.place("host")
    memory = engine.memory()
    undeclared, end = 1, time.monotonic() + 120
    while undeclared and time.monotonic() < end:  # gloo's threads let go of their last work soon after it is done
        alive = sum(size for address, size in storages_alive().items() if address not in known)
        undeclared = alive - memory.host_bytes
        time.sleep(0.05)
    engine.place("device")
    with torch.no_grad():
        same = torch.equal(engine.forward(bin_of(ROWS[0]), Outputs()).logprob_N, expected)
    note(out / f"offload-{kind}.json", [undeclared, memory.device_bytes, same])


def mutated(owner: type, name: str, change: Callable[[Any], Any], run: Callable[[], None]) -> None:
    """Break one function of ours for a while: what a test must notice."""
    original = getattr(owner, name)
    setattr(owner, name, change(original))
    try:
        run()
    finally:
        setattr(owner, name, original)


def run_mutated(model: Path, layout: Layout, out: Path) -> None:
    """Three steps under faults, each of which must show in the results."""

    def three(name: str, kind: str) -> Callable[[], None]:
        def run() -> None:
            engine = start("fsdp", model, kind, layout=layout)
            note(out / name / "history.json", train(engine, STEPS[:3], learning_rate=RATES[kind]))
            engine.save(out / name / "middle")

        return run

    skip = lambda original: lambda self, t: original(self, t) if t.numel() < 8 else None  # noqa: E731
    average = lambda original: lambda self, t: (original(self, t), t.div_(self.size))[0]  # noqa: E731
    local = lambda original: lambda self, t: original(self, t) if t.dim() else None  # noqa: E731
    mutated(Ranks, "sum", skip, three("lora-skip-sum", "lora"))
    mutated(Ranks, "sum", average, three("lora-average", "lora"))
    mutated(Ranks, "sum", local, three("full-local-norm", "full"))
    mutated(FSDPModule, "set_gradient_divide_factor", lambda _: lambda self, f: None, three("full-average", "full"))

    def own(original: Any) -> Any:
        def whole(self: Ranks, tensor_slice: TensorSlice, shards: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
            name = tensor_slice.name
            return original(self, tensor_slice, {name: torch.zeros_like(shards[name])} if self.rank else shards, dtype)

        return whole

    mutated(Ranks, "whole", own, three("full-drop-shard", "full"))


def refuse(model: Path, layout: Layout, single: Path, out: Path) -> None:
    """A damaged adapter, which only rank 0 meets, is refused by every rank, and the engine is as good as before."""
    engine = start("fsdp", model, layout=layout)
    whole = single / "lora" / "end" / "weights"
    try:
        engine.load_adapter("bad", single / "damaged" if engine.facts.rank == 0 else whole, LORA, trainable=True)
        said = "accepted"
    except InvalidInput as error:
        said = str(error)
    engine.load_adapter("good", whole, LORA, trainable=True)
    note(out / "refused.json", said)
    try:
        engine.save(model / "config.json")  # a file where the folder should be
        said = "saved"
    except OSError as error:
        said = str(error.strerror)
    note(out / "unsaved.json", said)


def main() -> None:
    model, out, single = (Path(argument) for argument in sys.argv[1:])
    torch.set_num_threads(1)
    start_group("gloo")
    layout = Layout(dp=dist.get_world_size())
    run(model, layout, out)
    run_trees(model, layout, single / "lora" / "end" / "weights", out / "trees")
    for kind in RATES:
        go_on(model, layout, out / kind / "middle", kind, out / kind / "resumed")
        go_on(model, layout, single / kind / "middle", kind, out / kind / "from-single")
        offload(model, layout, kind, out)
    run_mutated(model, layout, out / "mutated")
    refuse(model, layout, single, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
