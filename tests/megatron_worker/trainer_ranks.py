"""What the ranks of a parallel TrainerRank do (`run`, under launch.on_ranks).

The test compares what they leave with the same functions in its own process.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longshore.fields import Frozen
from longshore.training import Adam, EngineName, Layout, Recompute
from megatron_worker.process.ranks import everyone
from megatron_worker.trainer_rank import ForwardInput, TrainerRank
from shared.errors import InvalidInput
from tests.megatron_worker.engines import ENGINES
from tests.megatron_worker.ranks import LORAS, load_adapters, random_ids, random_input, some_loss, tensors_of

_WITHOUT_LIMIT = 1 << 40  # bytes
_BUDGET = 2.2  # times what the largest item needs alone: two ranks need several micro-batches


class Trial(Frozen):
    """An engine around the model called `model`, whose folder and adapters lie where the results go."""

    model: str
    engine: EngineName = "megatron"
    layout: Layout = Layout()

    @property
    def name(self) -> str:
        return f"{self.model}/{self.engine}-{self.layout.label}"


def items_of_all_kinds() -> list[list[ForwardInput]]:
    """Groups that share a prefix, of every slot and kind."""
    generator = np.random.default_rng(3)
    items = []
    for _ in range(20):
        prefix = random_ids(generator, int(generator.integers(0, 30)))
        items.append([random_input(generator, prefix) for _ in range(generator.integers(1, 4))])
    return items


def run(trial: Trial, out: Path) -> None:
    rank = start(trial, out)
    out = out / trial.name
    note(rank, out, "own", own_share(rank, inputs_of_all_kinds()))
    large, items = one_large_item(), items_of_all_kinds()
    rank.memory_budget_bytes = budget_of(rank, large, times=0.8)
    note(rank, out, "in_parts", dealt_out(rank, large))
    rank.memory_budget_bytes = budget_of(rank, items)
    note(rank, out, "micro_batches", dealt_out(rank, items))
    make_step(rank, out)
    note(rank, out, "refusals", refusals(rank))
    is_alone = trial.layout.world_size == 1
    turns = {n: range(n) for n in (1, 2, 4)} if is_alone else {rank.facts.dp_size: [rank.facts.dp_rank]}
    note(rank, out, "uneven", {str(dp_size): uneven(rank, dp_size, whose) for dp_size, whose in turns.items()})
    if rank.engine.needs_lockstep:
        note(rank, out, "refused_in_step", refused_in_step(rank))
    step_base(rank, out)


def step_base(rank: TrainerRank, out: Path) -> None:
    """Train the base in place of adapters, each data-parallel rank on inputs of its own; note norm and weights."""
    for name in rank.adapters:
        rank.drop_adapter(name)
    rank.train_base()
    own = inputs_of_all_kinds()[rank.facts.dp_rank :: rank.facts.dp_size]
    outputs = rank.forward([replace(asked, adapter=None) for asked in own])
    rank.backward(sum((some_loss([output]) for output in outputs), start=torch.zeros(())))
    norms = rank.optim_step(Adam(clip_norm=1.0, eps=1e-5), 1e-3, 50.0)
    note(rank, out, "base", norms[None].grad_norm)
    rank.export(None, out / "base")


def make_step(rank: TrainerRank, out: Path) -> None:
    """Step both adapters, and note norms and weights."""
    adapters = ["one", "two"]
    # Where a gradient is as small as Adam's usual eps, a step magnifies its rounding by learning rate / eps.
    norms = rank.optim_step(Adam(clip_norm=1.0, eps=1e-5), 1e-3, 50.0, adapters=adapters)
    note(rank, out, "norms", [[norms[name].grad_norm, norms[name].clipped] for name in adapters])
    for name in adapters:
        rank.export(name, out / name)


def start(trial: Trial, out: Path) -> TrainerRank:
    engine = ENGINES[trial.engine](out / trial.model / "model", trial.layout, "float32")
    recompute: Recompute = "on" if engine.needs_lockstep else "auto"  # passes are in step, also what is computed again
    rank = TrainerRank(engine, memory_budget_bytes=_WITHOUT_LIMIT, recompute=recompute)
    load_adapters(rank, {name: out / trial.model / "adapters" / name for name in LORAS})
    return rank


def budget_of(rank: TrainerRank, items: list[list[ForwardInput]], times: float = _BUDGET) -> int:
    """What fits a few items, by this rank's own estimates, which are the same on all ranks.

    How many bytes an item takes is measured: other libraries, and collectives that end later, hold more of them.
    """
    requests = [rank.checked(item, f"items[{number}]") for number, item in enumerate(items)]
    slots, in_step = rank.measured_slots(requests, _WITHOUT_LIMIT), rank.engine.needs_lockstep
    alone = (rank.dispatcher.planner.next_shares([item], 0, slots, in_step, _WITHOUT_LIMIT) for item in requests)
    needed = max(share.planned_bytes for shares in alone for share in shares)
    return int(times * max(everyone(needed)))


def one_large_item() -> list[list[ForwardInput]]:
    """All inputs without a graph, as an item that needs several passes."""
    return [[replace(asked, no_grad=True) for asked in inputs_of_all_kinds()]]


def inputs_of_all_kinds() -> list[ForwardInput]:
    return [asked for item in items_of_all_kinds() for asked in item]


def own_share(rank: TrainerRank, inputs: Sequence[ForwardInput]) -> dict[str, dict[str, list]]:
    """Outputs of a forward of this data-parallel rank's own inputs, by their places among all."""
    places = range(rank.facts.dp_rank, len(inputs), rank.facts.dp_size)
    with torch.no_grad():
        outputs = rank.forward([inputs[place] for place in places])
    return {str(place): as_lists(tensors_of(output)) for place, output in zip(places, outputs, strict=True)}


def dealt_out(rank: TrainerRank, items: list[list[ForwardInput]]) -> dict[str, object]:
    """A loop with backwards over all items: which came when, and what they were."""
    found, indices, plans = {}, [], []
    item = output = None  # a rank may have none
    for micro_batch in rank.forward_micro_batches(items):
        for place, item in zip(micro_batch.indices, micro_batch.outputs, strict=True):
            found[str(place)] = [as_lists(tensors_of(output)) for output in item]
        total = torch.zeros(())
        for item in micro_batch.outputs:
            for output in item:
                total = total + some_loss([output])
        rank.backward(total)
        indices.append(list(micro_batch.indices))
        plans.append(micro_batch.planning.budget_bytes)
        del micro_batch, total
        item = output = None  # what is held takes of the next one's budget
    return {"outputs": found, "indices": indices, "budgets": plans}


def refusals(rank: TrainerRank) -> list[str]:
    """What every rank says where one, or all, must refuse."""
    said = []
    row = [ForwardInput([5] * 40, target_logprobs=True)]
    huge = [ForwardInput([5] * 2000, target_logprobs=True, adapter="one")]

    def ask(items: list[list[ForwardInput]]) -> None:
        for _ in rank.forward_micro_batches(items):
            pass

    for items in ([row, huge], [row, row[: rank.facts.rank]], [row, [ForwardInput([999])]]):
        said.append(refusal(partial(ask, items), slice(21)))
    alive = rank.forward([ForwardInput([5, 6], logits=True, adapter="one")] if rank.facts.dp_rank == 0 else [])
    calls = (lambda: rank.optim_step(Adam(), 1e-3, adapters=["one"]), lambda: rank.drop_adapter("one"))
    said += [refusal(call, slice(-24, None)) for call in calls]
    del alive
    asked = [ForwardInput([5, 6], logits=True, adapter=name) for name in ("one", "two")]
    outputs = rank.forward(asked)
    rank.backward(sum((o.logit_PV.sum() for o in outputs), start=torch.zeros(())) * (rank.facts.dp_rank or torch.nan))
    return [*said, refusal(lambda: rank.optim_step(Adam(), 1e-3, adapters=["one", "two"]), slice(-24, None))]


def refusal(call: Callable[[], object], shown: slice) -> str:
    """Where and why a call is refused, of the reason a part."""
    try:
        call()
    except InvalidInput as error:
        return f"{error.place}: {error.message[shown]}"
    return "accepted"


def uneven(rank: TrainerRank, dp_size: int, whose: Sequence[int]) -> dict[str, float]:
    """Norms of gradients: of two forwards for each of these data-parallel ranks, the later one backward first.

    The first rank alone has a loss of its earlier forward; the others let the outputs go, or have none.
    """
    inputs = inputs_of_all_kinds()
    for dp_rank in whose:
        own = inputs[dp_rank::dp_size]
        earlier = rank.forward(own[:4] if dp_rank < 2 else [])
        always = ForwardInput([5, 6, 7], logits=True, adapter="two")
        later = rank.forward([always, *(asked for asked in own[4:] if asked.adapter != "one" or dp_rank)])
        if dp_rank:
            del earlier
        rank.backward(some_loss(later))
        rank.backward(some_loss(earlier) if dp_rank == 0 else torch.zeros(()))
    norms = rank.optim_step(Adam(clip_norm=0.0), 0.0, 50.0, adapters=["one", "two"])
    return {name: norms[name].grad_norm for name in norms}


def refused_in_step(rank: TrainerRank) -> list[str]:
    """What all ranks say where one of them is out of step."""
    row = ForwardInput([5, 6, 7], target_logprobs=True, hidden=True, adapter="one", positions=[0, 1])

    def keeps_no_graph() -> None:
        with torch.set_grad_enabled(rank.facts.rank > 0):
            rank.forward([row])

    def twice() -> None:
        (output,) = rank.forward([row])
        rank.backward(output.target_logprob_P.sum())
        rank.backward(output.hidden_PH.sum())

    def wrong_input() -> None:
        rank.forward([row if rank.facts.rank else ForwardInput([999])])

    return [refusal(call, slice(21)) for call in (keeps_no_graph, twice, wrong_input)]


def as_lists(tensors: dict[str, Tensor]) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def note(rank: TrainerRank, out: Path, name: str, value: object) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}-{rank.facts.rank}.json").write_text(json.dumps(value))
