"""What the ranks of a parallel test do: `torchrun ... -m tests.megatron_worker.parallel_ranks MODEL OUT LAYOUT...`.

Every layout's results go to `OUT/<layout>/`; the test compares them with those of one rank, which it makes with the
same functions in its own process.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_worker.engine import Batch, Outputs
from megatron_worker.families.pieces import Piece
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.megatron.mesh import Mesh
from shared.errors import InvalidInput
from shared.jobs import Full, Lora
from shared.layout import Layout
from tests.megatron_worker.driving import train
from tests.megatron_worker.rows import bin_of, random_rows
from tests.megatron_worker.trees import LOSS as TREE_LOSS
from tests.megatron_worker.trees import as_chain, as_tree, random_sequences

LORA = Lora(rank=3, alpha=6)
# Three bins a step: under dp2 one rank has two of them, the other one.
STEPS = [
    [rows[:2], rows[2:5], rows[5:]] for rows in (random_rows([40, 17, 90, 25, 60, 8, 33], seed=s % 3) for s in range(6))
]
KINDS = ("lora", "full")
LEARNING_RATES = {"lora": 3e-3, "full": 3e-4}


def start(model: Path, layout: Layout, kind: str) -> MegatronEngine:
    engine = MegatronEngine(model, layout, "float32")
    engine.train_full(Full()) if kind == "full" else engine.add_adapter("run", LORA, seed=5)
    return engine


def run(model: Path, layout: Layout, out: Path) -> None:
    """Train three steps, save, train three more, save; for adapters and for all weights."""
    for kind in KINDS:
        engine = start(model, layout, kind)
        history = train(engine, STEPS[:3], learning_rate=LEARNING_RATES[kind])
        engine.save(out / kind / "middle")
        history += train(engine, STEPS[3:], learning_rate=LEARNING_RATES[kind])
        engine.save(out / kind / "end")
        note(engine, out / kind / "history.json", history)
        with torch.no_grad():
            logprob_N = engine.forward(bin_of(STEPS[0][0]), Outputs(entropy=True))
        note(engine, out / kind / "logprob.json", [logprob_N.logprob_N.tolist(), logprob_N.entropy_N.tolist()])
        prompts = [row.ids[:12] for row in STEPS[0][1]]
        note(engine, out / kind / "greedy.json", engine.greedy(prompts, 10, frozenset({7})))


def run_trees(model: Path, layout: Layout, trained: Path, out: Path) -> None:
    """Score and learn from groups of sequences as trees, a group a bin, and as chains, a sequence a bin.

    Notes the log-probabilities of the trees, and how far those of the chains, and this rank's gradients, are from
    the trees': the largest difference, and the norm of the difference over the norm.
    """
    engine = MegatronEngine(model, layout, "float32")
    engine.load_adapter("run", trained, LORA, trainable=True)
    groups = [random_sequences(i, num_groups=1) for i in range(3)]  # under dp2 one rank has two
    trees = [as_tree(rows) for rows in groups]
    chains = [as_chain(row) for rows in groups for row in rows]
    (tree_logprob_N, tree_gradient), (chain_logprob_N, chain_gradient) = (
        (torch.cat([scored(engine, b) for b in bins]), gradient(engine, bins)) for bins in (trees, chains)
    )
    note(engine, out / "logprob.json", tree_logprob_N.tolist())
    by_logprob = (tree_logprob_N - chain_logprob_N).abs().max()
    by_gradient = (tree_gradient - chain_gradient).norm() / chain_gradient.norm()
    note(engine, out / "differences.json", [float(by_logprob), float(by_gradient)])


def scored(engine: MegatronEngine, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        logprob_N = engine.forward(batch, Outputs()).logprob_N
    assert logprob_N is not None
    return logprob_N


def gradient(engine: MegatronEngine, bins: list[Batch]) -> torch.Tensor:
    """This rank's shard of the gradient of all bins, which are dealt round the data-parallel ranks."""
    engine.zero_grad()
    for batch in bins[engine.facts.dp_rank :: engine.facts.dp_size]:
        engine.forward_backward(batch, TREE_LOSS)
    summed = engine._training.optimizer.grad.buffer.clone()
    engine._mesh.sum_over_dp(summed)
    return summed


def go_on(model: Path, layout: Layout, checkpoint: Path, kind: str, out: Path) -> None:
    """The last three steps, from a checkpoint of any layout."""
    engine = start(model, layout, kind)
    engine.load(checkpoint)
    note(engine, out / "history.json", train(engine, STEPS[3:], learning_rate=LEARNING_RATES[kind]))
    engine.save(out / "end")


def note(engine: MegatronEngine, path: Path, value: Any) -> None:
    """What each rank knows, in a file of its own."""
    path = path.with_name(f"{path.stem}-{engine.facts.rank}{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@contextmanager
def mutated(owner: type, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Break one function of ours for a while: what a test must notice."""
    original = getattr(owner, name)
    setattr(owner, name, change(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def run_mutated(model: Path, layout: Layout, out: Path) -> None:
    """The same steps under three faults, each of which must show in the results."""

    def lora(name: str) -> None:
        engine = start(model, layout, "lora")
        note(engine, out / name / "history.json", train(engine, STEPS[:3], learning_rate=LEARNING_RATES["lora"]))
        engine.save(out / name / "middle")

    if layout.dp > 1:
        with mutated(
            Mesh, "sum_over_dp", lambda original: lambda self, t: original(self, t) if t.numel() < 3 else None
        ):
            lora("skip-dp")
        with mutated(Mesh, "sum_over_dp", lambda original: lambda self, t: (original(self, t), t.div_(2))[0]):
            lora("average-dp")
    if layout.tp > 1:
        keep_own = lambda _: lambda self, t: [t] * self.tp_size  # noqa: E731
        with mutated(Mesh, "gather_over_tp", keep_own):
            lora("drop-shard")
        with mutated(Mesh, "sum_over_tp", lambda _: lambda self, t: None):
            lora("local-norm")
        with mutated(Piece, "local", lambda _: lambda self, whole, rank, size: self_slice(self, whole)):
            lora("same-shard")


def self_slice(piece: Piece, whole: torch.Tensor) -> torch.Tensor:
    """Rank 0's share for every rank."""
    return whole if piece.split is None else whole.narrow(piece.split, 0, piece.bounds(0, 2)[1])


def refuse(model: Path, layout: Layout, out: Path, damaged: Path) -> None:
    """A damaged adapter, which only rank 0 meets, is refused by every rank, and the engine is as good as before."""
    engine = MegatronEngine(model, layout, "float32")
    own = damaged if engine.facts.rank == 0 else out / "lora" / "end" / "weights"
    try:
        engine.load_adapter("bad", own, LORA, trainable=True)
        said = "accepted"
    except InvalidInput as error:
        said = str(error)
    engine.load_adapter("good", out / "lora" / "end" / "weights", LORA, trainable=True)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("single", type=Path)
    parser.add_argument("layouts", nargs="+", type=Layout.model_validate_json)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layout in arguments.layouts:
        out = arguments.out / layout.label
        run(arguments.model, layout, out)
        run_trees(arguments.model, layout, arguments.single / "lora" / "end" / "weights", out / "trees")
        for kind in KINDS:
            go_on(arguments.model, layout, out / kind / "middle", kind, out / kind / "resumed")
            go_on(arguments.model, layout, arguments.single / kind / "middle", kind, out / kind / "from-single")
        run_mutated(arguments.model, layout, out / "mutated")
        refuse(arguments.model, layout, out, arguments.single / "damaged")
        fail_to_save(arguments.model, layout, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
