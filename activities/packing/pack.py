"""Pack: units into a plan of steps and bins."""

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field, model_validator
from temporalio import activity

from activities.host_context import HostContext
from shared.contract import Artifact, Frozen
from shared.errors import InvalidInput
from shared.jobs import bins as packing
from shared.jobs.bins import Indices
from shared.jobs.packed import PlanHeader, PlanWriter, Units
from shared.storage.artifacts import read_record
from shared.storage.paths import content_key, packed

_VERSION = "pack-1"  # raise it when the same input gives another plan


MOST_STEPS_OF_EPOCHS = 50_000


class PackRequest(Frozen):
    """Units, and how to cut them into steps: `epochs` or `steps`, and `batch_size` or `batch_tokens`; or `whole`.

    An epoch's last step may be smaller. With `steps` the data is repeated for as many epochs as needed.
    """

    units: Artifact
    seed: int = Field(ge=0, lt=2**63)
    epochs: float | None = Field(default=None, gt=0)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    batch_tokens: int | None = Field(default=None, ge=1)
    bin_tokens: int = Field(ge=2)
    whole: bool = Field(default=False, description="evaluation: every unit once, in order")

    @model_validator(mode="after")
    def _one_length_one_batch(self) -> Self:
        if not self.whole and ((self.epochs is None) == (self.steps is None)):
            raise ValueError("give exactly one of epochs and steps")
        if not self.whole and ((self.batch_size is None) == (self.batch_tokens is None)):
            raise ValueError("give exactly one of batch_size and batch_tokens")
        return self

    @property
    def key(self) -> str:
        return content_key(_VERSION, self.units.sha256, self.model_dump_json(exclude={"units"}))


class Packed(Frozen):
    """A plan (shared/jobs/packed.py). `packing_efficiency` is tokens / (bins * tokens of a bin)."""

    plan: Artifact
    num_steps: int
    num_bins: int
    packing_efficiency: float


class Pack:
    """The activity `pack`."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="pack")
    def pack(self, request: PackRequest) -> Packed:
        """Make a plan. Raises InvalidInput if a unit is longer than a bin or a batch."""

        def write(folder: Path) -> None:
            # Packing only needs the units' lengths.
            staged = self._host.stage(request.units, only=("units.json", "token_offsets.bin"))
            write_plan(Units.read_lengths(staged), request, folder)

        key = packed(request.key)
        plan = self._host.made_once(key, "pack", write)
        header = read_record(self._host.store, f"{key}/plan.json", PlanHeader)
        return Packed(
            plan=plan,
            num_steps=header.num_steps,
            num_bins=header.num_bins,
            packing_efficiency=header.packing_efficiency,
        )


def write_plan(tokens_U: Indices, request: PackRequest, folder: Path) -> PlanHeader:
    """Stream a plan for units of these lengths into a folder. Not sealed."""
    _check_epochs(tokens_U, request)
    longest = int(tokens_U.max(initial=0))
    capacity = _capacity(longest, request)
    writer = PlanWriter(folder, capacity)
    for step in _steps(tokens_U, request):
        bins = packing.pack(tokens_U[step].tolist(), capacity)
        writer.append_step([step[each] for each in bins])
    return writer.close(tokens_U)


def _check_epochs(tokens_U: Indices, request: PackRequest) -> None:
    """Raise InvalidInput if `epochs` would be more than MOST_STEPS_OF_EPOCHS steps, as that is likely a mistake."""
    if request.epochs is None or request.whole:
        return
    size, batch = (
        (int(tokens_U.sum()), request.batch_tokens)
        if request.batch_size is None
        else (len(tokens_U), request.batch_size)
    )
    num_steps = round(request.epochs * size / (batch or 1))
    if num_steps > MOST_STEPS_OF_EPOCHS:
        found = f"{request.epochs:g} epochs of {len(tokens_U):,} examples are {num_steps:,} steps"
        advice = "give fewer epochs or a larger batch (or, if you mean it, the number of steps)"
        raise InvalidInput(f"{found}, {MOST_STEPS_OF_EPOCHS:,} at most: {advice}", "epochs")


def _capacity(longest: int, request: PackRequest) -> int:
    """Return the tokens of a bin: at most `bin_tokens`, and such that the bins of a full step are filled evenly."""
    for name in ("bin_tokens", "batch_tokens"):
        limit = getattr(request, name)
        if limit is not None and longest > limit:
            raise InvalidInput(f"an example has {longest} tokens, {name} is {limit}", name)
    if request.batch_tokens is None:
        return request.bin_tokens
    num_bins = -(-request.batch_tokens // request.bin_tokens)
    return max(longest, -(-request.batch_tokens // num_bins))


def _steps(tokens_U: Indices, request: PackRequest) -> Iterator[Indices]:
    """Cut the units into steps."""
    if request.whole:
        return iter([np.arange(len(tokens_U))])
    return islice(_endless(tokens_U, request), request.steps)


def _endless(tokens_U: Indices, request: PackRequest) -> Iterator[Indices]:
    """Yield the steps of one epoch after another. A fraction of an epoch is the first part of its order."""
    for epoch in count():
        order_U = packing.epoch_order(len(tokens_U), request.seed, epoch)
        if request.epochs is not None:
            left = request.epochs - epoch
            order_U = order_U[: round(min(1.0, left) * len(order_U))] if left > 0 else order_U[:0]
            if epoch == 0 and not len(order_U):
                order_U = packing.epoch_order(len(tokens_U), request.seed, 0)[:1]
        if not len(order_U):
            return
        if request.batch_size is not None:
            yield from packing.steps_by_count(order_U, request.batch_size)
        elif request.batch_tokens is not None:
            yield from packing.steps_by_tokens(order_U, tokens_U, request.batch_tokens)
