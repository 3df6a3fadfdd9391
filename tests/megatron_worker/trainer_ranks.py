"""What the ranks of a parallel TrainerRank do: `torchrun ... -m tests.megatron_worker.trainer_ranks MODEL ADAPTERS OUT
LAYOUT...`. The test compares what they leave with the same functions in its own process.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.trainer_rank import ForwardInput, TrainerRank
from shared.errors import InvalidInput
from shared.jobs import Adam
from shared.layout import Layout
from tests.megatron_worker.ranks import LORAS, load_adapters, random_ids, random_input, some_loss, tensors_of

BUDGET_BYTES = 3_000_000


def items_of_all_kinds() -> list[list[ForwardInput]]:
    """Groups that share a prefix, of every slot and kind."""
    generator = np.random.default_rng(3)
    items = []
    for _ in range(14):
        prefix = random_ids(generator, int(generator.integers(0, 30)))
        items.append([random_input(generator, prefix) for _ in range(generator.integers(1, 4))])
    return items


def run(model: Path, folders: dict[str, Path], layout: Layout, out: Path) -> None:
    rank = TrainerRank(MegatronEngine(model, layout, "float32"), memory_budget_bytes=BUDGET_BYTES)
    load_adapters(rank, folders)
    note(rank, out, "own", own_share(rank))
    note(rank, out, "micro_batches", dealt_out(rank))
    adapters = ["one", "two"]
    norms = rank.optim_step(Adam(clip_norm=1.0), 1e-3, 50.0, adapters=adapters)
    note(rank, out, "norms", [[norms[name].grad_norm, norms[name].clipped] for name in adapters])
    for name in adapters:
        rank.export(name, out / name)
    note(rank, out, "refusals", refusals(rank))


def own_share(rank: TrainerRank) -> dict[str, dict[str, list]]:
    """Outputs of a forward of this data-parallel rank's own inputs, by their places among all."""
    inputs = [asked for item in items_of_all_kinds() for asked in item]
    places = range(rank.facts.dp_rank, len(inputs), rank.facts.dp_size)
    with torch.no_grad():
        outputs = rank.forward([inputs[place] for place in places])
    return {str(place): as_lists(tensors_of(output)) for place, output in zip(places, outputs, strict=True)}


def dealt_out(rank: TrainerRank) -> dict[str, object]:
    """A loop with backwards over all items: which came when, and what they were."""
    found, indices, plans = {}, [], []
    for micro_batch in rank.forward_micro_batches(items_of_all_kinds()):
        for place, item in zip(micro_batch.indices, micro_batch.outputs, strict=True):
            found[str(place)] = [as_lists(tensors_of(output)) for output in item]
        total = sum((some_loss([o]) for item in micro_batch.outputs for o in item), start=torch.zeros(()))
        rank.backward(total)
        indices.append(list(micro_batch.indices))
        plans.append(micro_batch.planning.budget_bytes)
    return {"outputs": found, "indices": indices, "budgets": plans}


def refusals(rank: TrainerRank) -> list[str]:
    """What every rank says where one, or all, must refuse."""
    said = []
    row = [ForwardInput([5] * 40, target_logprobs=True)]
    huge = [ForwardInput([5] * 2000, target_logprobs=True, adapter="one")]
    for items in ([row, huge], [row, row[: rank.facts.rank]], [row, [ForwardInput([999])]]):
        try:
            for _ in rank.forward_micro_batches(items):
                pass
            said.append("accepted")
        except InvalidInput as error:
            said.append(f"{error.place}: {error.message[:21]}")
    alive = rank.forward([ForwardInput([5, 6], logits=True, adapter="one")]) if rank.facts.dp_rank == 0 else []
    for call in (lambda: rank.optim_step(Adam(), 1e-3, adapters=["one"]), lambda: rank.drop_adapter("one")):
        try:
            call()
            said.append("accepted")
        except InvalidInput as error:
            said.append(f"{error.place}: {error.message[-24:]}")
    del alive
    asked = [ForwardInput([5, 6], logits=True, adapter=name) for name in ("one", "two")]
    outputs = rank.forward(asked)
    rank.backward(sum((o.logit_PV.sum() for o in outputs), start=torch.zeros(())) * (rank.facts.dp_rank or torch.nan))
    try:
        rank.optim_step(Adam(), 1e-3, adapters=["one", "two"])
        said.append("accepted")
    except InvalidInput as error:
        said.append(f"{error.place}: {error.message[-24:]}")
    return said


def as_lists(tensors: dict[str, Tensor]) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def note(rank: TrainerRank, out: Path, name: str, value: object) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}-{rank.facts.rank}.json").write_text(json.dumps(value))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("adapters", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("layouts", nargs="+", type=Layout.model_validate_json)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layout in arguments.layouts:
        folders = {name: arguments.adapters / name for name in LORAS}
        run(arguments.model, folders, layout, arguments.out / layout.label)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
