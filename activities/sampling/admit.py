"""Admit prompts to a train step: the oldest that are complete, of those that several steps have begun.

With `rollouts.carry_over` the prompts of several steps are sampled at the same time, and a step trains the first ones
to be complete. Which these are depends on time, so it is decided once. The decision is in the store before anything
depends on it, then in the workflow's history, and the step's record names the prompts that remain (`CarriedOver`).
An attempt after a kill, and a run that is resumed, find it there.
"""

from collections.abc import Iterator
from functools import partial
from itertools import count

from pydantic import Field

from activities.heartbeats import on_thread, pause
from activities.host_context import OnHost, Parts
from activities.sampling.completions import RoutesFile, SampledGroup, read_sampled_groups
from activities.sampling.sample import Sampled, find_sampled, write_samples
from activities.tokenizing.render_prompts import PromptsFile
from longshore.fields import Artifact, Frozen
from longshore.runs import RunId
from shared.errors import NotFound
from shared.jobs.packed import RouteShape
from shared.storage.artifacts import find_artifact, read_record
from shared.storage.paths import RunKeys, completions, content_key, sampled_part, samples

_VERSION = "admitted-1"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class BegunPrompts(Frozen):
    """Prompts of a step, by their numbers in it. `key`: that of the request for their samples."""

    step: int
    key: str
    groups: tuple[int, ...]


class Admission(Frozen):
    """The prompts that a step takes."""

    taken: tuple[BegunPrompts, ...]


class AdmitRequest(Frozen):
    """The first `num_groups` prompts of `begun` to be complete are wanted for a step, in this order.

    `numbers`: of their groups in the result, if they were drawn again for the step; else groups are counted from 0.
    `prompts`: those of the run. `routes`: the shape of the model's experts, if they are stored.
    """

    run_id: RunId
    step: int
    prompts: Artifact
    begun: tuple[BegunPrompts, ...]
    num_groups: int = Field(ge=1)
    numbers: tuple[int, ...] | None = None
    routes: RouteShape | None = None

    def allows(self, decision: Admission) -> bool:
        """Return False if a decision is of other samples than these: a sampler had failed its proof since."""
        begun = {(one.step, one.key): set(one.groups) for one in self.begun}
        return all(begun.get((one.step, one.key), set()).issuperset(one.groups) for one in decision.taken)


class Admitted(Sampled, Admission):
    """The samples of the prompts in `taken`, in order."""


class AdmitGroups(OnHost):
    """The activity `admit_groups`."""

    @on_thread("admit_groups")
    def admit_groups(self, request: AdmitRequest) -> Admitted:
        """Wait until enough prompts are complete, and put the samples of the first ones together.

        Raises StoreUnavailable: the store is away.
        """
        store = self._host.store
        taken = self._decided(request) if request.numbers is None else self._when_complete(request)
        chosen = [one.model_dump_json(exclude={"step"}) for one in taken]
        key = content_key(_VERSION, request.prompts.sha256, str(request.numbers), *chosen)
        self._host.use(completions(key))
        if (done := find_sampled(store, key)) is None:
            with self._host.scratch("admit") as scratch, PromptsFile(self._host.stage(request.prompts)) as prompts:
                folders = scratch / "completions", scratch / "samples"
                numbers = iter(request.numbers) if request.numbers is not None else count()
                groups = (each for one in taken for each in self._groups(one, request.routes))
                write_samples((each.model_copy(update={"group": next(numbers)}) for each in groups), prompts, *folders)
                for folder, place in zip(folders, (completions(key), samples(key)), strict=True):
                    self._host.keep(place, folder)
            done = find_sampled(store, key)
        assert done is not None
        return Admitted(taken=taken, **dict(done))

    def _decided(self, request: AdmitRequest) -> tuple[BegunPrompts, ...]:
        """Return the prompts that the step takes. The first attempt to see enough of them complete has decided that."""
        store, key = self._host.store, RunKeys(request.run_id).admitted(request.step)
        if store.head(key) is None:
            decision = Admission(taken=self._when_complete(request))
            store.put_if_absent(key, decision.model_dump_json().encode())
        decision = read_record(store, key, Admission)
        if not request.allows(decision):
            decision = Admission(taken=self._when_complete(request))
            store.put_bytes(key, decision.model_dump_json().encode())
        return decision.taken

    def _when_complete(self, request: AdmitRequest) -> tuple[BegunPrompts, ...]:
        pause_s = _FIRST_PAUSE_S
        while True:
            taken, num_missing = list[BegunPrompts](), request.num_groups
            for one in request.begun:
                complete = self._complete(one)
                if groups := tuple(number for number in one.groups if number in complete)[:num_missing]:
                    taken.append(one.model_copy(update={"groups": groups}))
                    num_missing -= len(groups)
                if not num_missing:
                    return tuple(taken)
            pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _complete(self, one: BegunPrompts) -> frozenset[int]:
        store = self._host.store
        parts = Parts(store, partial(sampled_part, one.key)).known()
        # All are put together before a part is deleted, and so looked for after the parts.
        return frozenset(one.groups) if find_sampled(store, one.key) is not None else parts

    def _groups(self, one: BegunPrompts, routes: RouteShape | None) -> Iterator[SampledGroup]:
        """Yield the samples of prompts, one prompt at a time: from their parts, or from all put together."""
        store, left = self._host.store, list(one.groups)
        parts = Parts(store, partial(sampled_part, one.key))
        try:
            while left:
                part = parts.get(left[0])
                left.pop(0)
                yield SampledGroup.model_validate_json(part)
        except NotFound:
            artifact = find_artifact(store, completions(one.key))
            assert artifact is not None, "all are put together before a part is deleted"
            folder = self._host.stage(artifact)
            file = RoutesFile([folder], routes) if routes is not None else None
            for group in read_sampled_groups(folder):
                if group.group in left:
                    yield group if file is None else file.with_bytes(group)
