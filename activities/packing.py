"""Pack: units into a plan of steps and bins."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import Field
from temporalio import activity

from activities.heartbeats import stop_if_cancelled
from activities.host_context import HostContext
from longshore.fields import Artifact, Frozen
from longshore.previews import Cut
from longshore.views import PlanHeader
from shared.errors import InvalidInput
from shared.jobs import bins as packing
from shared.jobs.bins import Indices, check_epochs, steps_of
from shared.jobs.packed import PlanWriter, Units
from shared.storage.artifacts import read_record
from shared.storage.paths import content_key, packed

_VERSION = "pack-1"  # raise it when the same input gives another plan


class PackRequest(Cut):
    """Units, and how to cut them into steps; or `whole`, for evaluation."""

    units: Artifact
    bin_tokens: int = Field(ge=2)
    whole: bool = Field(default=False, description="evaluation: every unit once, in order")

    @property
    def _is_cut(self) -> bool:
        return not self.whole

    @property
    def key(self) -> str:
        return content_key(_VERSION, self.units.sha256, self.model_dump_json(exclude={"units"}))


class Packed(Frozen):
    """A plan (shared/jobs/packed.py). `packing_efficiency` is tokens / (bins * tokens of a bin)."""

    plan: Artifact
    num_steps: int
    num_bins: int
    num_tokens: int | None = Field(default=None, description="of the units of all steps")
    packing_efficiency: float


class PackDataset:
    """The activity `pack`."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="pack", no_thread_cancel_exception=True)
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
            num_tokens=header.num_tokens,
            packing_efficiency=header.packing_efficiency,
        )


def write_plan(tokens_U: Indices, request: PackRequest, folder: Path) -> PlanHeader:
    """Stream a plan for units of these lengths into a folder. Not sealed."""
    if not request.whole:
        check_epochs(tokens_U, request)
    longest = int(tokens_U.max(initial=0))
    capacity = _capacity(longest, request)
    writer = PlanWriter(folder, capacity)
    for step in _steps(tokens_U, request):
        stop_if_cancelled()
        bins = packing.pack_bins(tokens_U[step].tolist(), capacity)
        writer.append_step([step[each] for each in bins])
    return writer.close(tokens_U)


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
    return steps_of(tokens_U, request)
