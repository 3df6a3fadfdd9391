"""Records of runs in the store: start and result, checkpoints, and the commands of sessions."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from pydantic import Field

from activities.heartbeats import on_thread
from activities.host_context import HostContext, OnHost
from longshore.commands import CommandProblem, CommandResult
from longshore.fields import Artifact, Fence, Frozen, added
from longshore.runs import JobsOf, RunId
from longshore.training import Watched
from longshore.views import CarriedOver, CheckpointRef, RunStatus, StepStatus
from shared.errors import CorruptArtifact, InvalidInput, NotFound
from shared.jobs.commands import Gap
from shared.jobs.job import WorkerPlan
from shared.runs.start import result_sha256
from shared.runs.status import Evaluated, Policy
from shared.storage import artifacts
from shared.storage.paths import MANIFEST, RunKeys
from shared.storage.store import ObjectStore, uri_of

# --- The checkpoints of a run in the store, of all its leases ---


def newest_first(store: ObjectStore, run_id: str) -> Iterator[CheckpointRef]:
    """Yield the checkpoints that are in the store."""
    for stored in reversed(artifacts.stored_checkpoints(store, run_id)):
        artifact = artifacts.find_artifact(store, stored.key)
        if artifact is not None:  # else it was pruned since it was listed
            yield CheckpointRef(step=stored.step, fence=Fence.from_label(stored.fence_label), artifact=artifact)


@dataclass(frozen=True)
class Found:
    """The newest intact checkpoint, and messages on newer ones that are damaged, the newest first."""

    checkpoint: CheckpointRef | None
    damaged: tuple[str, ...] = ()


def find_newest(store: ObjectStore, run_id: str, passed_over: Collection[str] = ()) -> Found:
    """Find the newest checkpoint whose files have the sizes in its manifest. (Hashes are checked when it is read.)

    `passed_over`: URIs of checkpoints that a worker found damaged.
    """
    damaged: list[str] = []
    for found in newest_first(store, run_id):
        if found.artifact.uri in passed_over:
            damaged.append(f"the checkpoint of step {found.step} is damaged")
            continue
        why = _what_is_wrong(store, RunKeys(run_id).checkpoint(found.fence, found.step))
        if why is None:
            return Found(found, tuple(damaged))
        if why:
            damaged.append(f"the checkpoint of step {found.step} is damaged: {why}")
    return Found(None, tuple(damaged))


def damage(store: ObjectStore, run_id: str, checkpoint: CheckpointRef) -> str | None:
    """Compare every file of a checkpoint with its manifest. Returns the difference, or None for a sound one."""
    key = RunKeys(run_id).checkpoint(checkpoint.fence, checkpoint.step)
    try:
        manifest = artifacts.read_manifest(store, key, checkpoint.artifact.sha256)
        for entry in manifest.files:
            info = store.head(f"{key}/{entry.path}")
            if info is None or artifacts.sha256_object(store, f"{key}/{entry.path}", info.size) != entry.sha256:
                why = "the file's SHA-256 is not the manifest's" if info else "the file is missing"
                raise CorruptArtifact(why, uri_of(store, f"{key}/{entry.path}"))
    except CorruptArtifact as error:
        return f"the checkpoint of step {checkpoint.step} is damaged: {error}"
    return None


def saved_by_job(plan: WorkerPlan, checkpoint: CheckpointRef | None) -> CheckpointRef | None:
    """Return a run's newest checkpoint if this job saved it; None if it is the one that the job before ended with.

    A job that trains a critic beside its policy has none: the newest may be of a step that failed, on other data.
    """
    if plan.step_critic is not None and plan.step_critic.part == "critic":
        return None
    if plan.initial_checkpoint is None or (checkpoint is not None and checkpoint.step > plan.first_step):
        return checkpoint
    return None


def last_epoch(store: ObjectStore, run_id: str) -> int:
    """The highest epoch that was ever leased for a run; 0 for one that never had a lease."""
    keys = (info.key for info in store.list(f"{RunKeys(run_id).leases}/"))
    labels = (key.rsplit("/", 1)[-1].removesuffix(".json") for key in keys)
    return max((Fence.from_label(label).epoch for label in labels), default=0)


def prune_checkpoints(store: ObjectStore, run_id: str, keep: int, fence: Fence, keep_states: int = 0) -> None:
    """Delete all checkpoints but the newest `keep`. Manifests go first, so that no incomplete one seems complete.

    The newest `keep_states` that are marked are kept, too: a session's client asked for them, or the last is the best.

    A checkpoint of an older lease with a later step than this lease has saved was damaged, or uploaded too late for
    this lease to resume from it. It is deleted.

    Incomplete uploads of older fences are deleted, too. If a newer lease exists, nothing is deleted, since that lease
    may have begun from any checkpoint.
    """
    if last_epoch(store, run_id) > fence.epoch:
        return
    keys = [info.key for info in store.list(f"{RunKeys(run_id).checkpoints}/")]
    found = artifacts.checkpoints_among(run_id, keys)
    # A host of an older lease may have put its manifest after files of it were deleted here as incomplete.
    reached = max((c.step for c in found if c.fence_label == fence.label), default=None)
    found_by_now = [c for c in found if c.fence_label >= fence.label or reached is None or c.step <= reached]
    whole = [c for c in found_by_now if c.fence_label >= fence.label or _what_is_wrong(store, c.key) is None]
    kept = {checkpoint.key for checkpoint in whole[-keep:]}
    if keep_states:
        marks = sorted(info.key for info in store.list(RunKeys(run_id).kept_states))
        for key in marks[:-keep_states]:
            store.delete(key)
        asked = {int(key.removeprefix(RunKeys(run_id).kept_states)) for key in marks[-keep_states:]}
        kept.update({c.step: c.key for c in whole if c.step in asked}.values())  # of two leases the later one's
    marked = {checkpoint.key for checkpoint in found}
    for checkpoint in found:
        if checkpoint.key not in kept:
            store.delete(f"{checkpoint.key}/{MANIFEST}")
    for key in keys:
        label, step, *_ = key.removeprefix(f"{RunKeys(run_id).checkpoints}/").split("/")
        folder = f"{RunKeys(run_id).checkpoints}/{label}/{step}"
        if folder not in kept and (folder in marked or label < fence.label):
            store.delete(key)


def _what_is_wrong(store: ObjectStore, key: str) -> str | None:
    """Compare a checkpoint's sizes with its manifest. Returns None if it is intact, else the fault.

    An empty text means that files are missing, because it was being pruned or uploaded.
    """
    try:
        manifest = artifacts.read_record(store, f"{key}/{MANIFEST}", artifacts.Manifest)
    except NotFound:
        return ""
    except CorruptArtifact as error:
        return str(error)
    sizes = {info.key.removeprefix(f"{key}/"): info.size for info in store.list(f"{key}/")}
    named = {entry.path: entry.size for entry in manifest.files}
    if unnamed := sorted(sizes.keys() - named.keys() - {MANIFEST}):
        return f"{uri_of(store, f'{key}/{MANIFEST}')}: it does not name {unnamed[0]}, which is there"
    if other := sorted(path for path, size in named.items() if sizes.get(path, size) != size):
        return f"{uri_of(store, f'{key}/{other[0]}')}: the file is not as long as its manifest says"
    return None if sizes.keys() >= named.keys() else ""


class FindCheckpointRequest(Frozen):
    """A run. `passed_over`: URIs of its checkpoints that a worker found damaged."""

    run_id: JobsOf
    passed_over: tuple[str, ...] = ()


class ResumePoint(Frozen):
    """The checkpoint to resume from. `last_epoch`: the number of leases so far. `damaged`: faults of newer ones."""

    checkpoint: CheckpointRef | None
    last_epoch: int
    damaged: tuple[str, ...] = ()


class FindCheckpoint(OnHost):
    """The activity `find_checkpoint`. It reads nothing but the store: every execution of a run gets the same answer."""

    @on_thread("find_checkpoint")
    def find_checkpoint(self, request: FindCheckpointRequest) -> ResumePoint:
        """Return the run's newest intact checkpoint, and its number of leases so far; None and 0 for a new run.

        Raises CorruptArtifact: there are checkpoints, and every one of them is damaged.
        """
        store = self._host.store
        found = find_newest(store, request.run_id, request.passed_over)
        if found.checkpoint is None and found.damaged:
            raise CorruptArtifact(f"no sound checkpoint is left to go on from: {'; '.join(found.damaged)}")
        epoch = last_epoch(store, request.run_id)
        return ResumePoint(checkpoint=found.checkpoint, last_epoch=epoch, damaged=found.damaged)


# --- The records of a run in the store ---
# Its beginning, its train steps and its end, for when Temporal has forgotten it.


class Recorded(Frozen):
    """The result's URI."""

    uri: str


class BeginRequest(Frozen):
    """The start of a run's workflow. `execution`: the id of the first in its chain of continued executions."""

    run_id: RunId
    start_id: str
    execution: str
    resumed: bool
    goes_on_from: str | None


class Begun(Frozen):
    """`refusal`: why the workflow must not run. `status`: the end of a run that is resumed; None if it had none."""

    refusal: str | None = None
    status: RunStatus | None = None


class _Start(Frozen):
    """The workflow execution that used a start."""

    execution: str


class StepRecordRequest(Frozen):
    """A step of a run that has ended, well or not."""

    run_id: RunId
    step: StepStatus


class RecoverRequest(Frozen):
    """A run that is resumed. `num_policies`: for how many of its last steps the policy after them is wanted.

    `watched`: what its evaluations decide, if they decide anything.
    """

    run_id: RunId
    num_policies: int = Field(default=1, ge=1)
    watched: Watched | None = None


class Recovered(Frozen):
    """`last_step`: the number of the last recorded step. `trained`: the last one that changed the policy.

    `policies`: those after the last steps, oldest first. Version 0 is the policy that the run began with. `carried`:
    the prompts that the last step left.
    """

    last_step: int = 0
    trained: StepStatus | None = None
    policies: tuple[Policy, ...] = ()
    evaluated: Evaluated = Evaluated()
    carried: CarriedOver = added(CarriedOver())


class RunRecords(OnHost):
    """Records beginnings, steps and ends of runs. A cancellation of these activities does not interrupt them."""

    @on_thread("record_result")
    def record_result(self, status: RunStatus) -> Recorded:
        store = self._host.store
        key = RunKeys(status.run_id).result
        store.put_bytes(key, status.model_dump_json(indent=1).encode())
        return Recorded(uri=f"{store.uri}/{key}")

    @on_thread("begin")
    def begin(self, request: BeginRequest) -> Begun:
        """Check that the service asked for this workflow, before it does anything else.

        A start id that another execution has used is refused, since anybody who reaches Temporal can start a workflow
        with it again. So is the start of a run that has ended, unless it resumes the run from that very end.

        The result of a run that is resumed is moved away until it ends again.
        """
        store, keys = self._host.store, RunKeys(request.run_id)
        self._host.run_begins()
        mine, place = _Start(execution=request.execution), keys.start(request.start_id)
        is_new = store.put_if_absent(place, mine.model_dump_json().encode())
        if not is_new and artifacts.read_record(store, place, _Start) != mine:
            return Begun(refusal="this start was used before, and the service starts a run anew")
        ended = result_sha256(store, request.run_id)
        if ended is not None and not (request.resumed and ended == request.goes_on_from):
            return Begun(refusal="the run has ended, and the service has not resumed it")
        if request.resumed:
            with suppress(NotFound):  # it was moved before, or never was
                store.put_bytes(keys.previous_result, store.get_bytes(keys.result))
                store.delete(keys.result)
            with suppress(NotFound):
                return Begun(status=artifacts.read_record(store, keys.previous_result, RunStatus))
        return Begun()

    @on_thread("record_step")
    def record_step(self, request: StepRecordRequest) -> None:
        """Write a step's record, and then the one under the client's key, which thus exists only for recorded steps."""
        store = self._host.store
        keys, data = RunKeys(request.run_id), request.step.model_dump_json(indent=1).encode()
        store.put_bytes(keys.step(request.step.step), data)
        if request.step.same_as is not None:
            return
        by_key = keys.step_key(request.step.key)
        # If a key was used for other groups, the first step keeps it.
        is_new = store.put_if_absent(by_key, data)
        if not is_new and artifacts.read_record(store, by_key, StepStatus).step == request.step.step:
            store.put_bytes(by_key, data)

    @on_thread("recover_steps")
    def recover_steps(self, request: RecoverRequest) -> Recovered:
        """Find the step at which a resumed run continues, and delete checkpoints of steps that were never recorded."""
        store = self._host.store
        found = sorted((info.key for info in store.list(f"{RunKeys(request.run_id).steps}/")), reverse=True)
        steps: list[StepStatus] = []  # newest first, back to one that made a policy
        num_policies = request.num_policies
        for key in found:
            if len(steps) >= num_policies and _made_a_policy(steps[-1]):
                break
            steps.append(artifacts.read_record(store, key, StepStatus))
            if (carried := steps[0].carried) is not None:  # which may be sampled from older policies than new prompts
                num_policies = request.num_policies + max(0, steps[0].step + 1 - carried.oldest)
        evaluated = Evaluated()
        for key in reversed(found if request.watched is not None else []):
            evaluated = evaluated.after(artifacts.read_record(store, key, StepStatus), request.watched)
        trained = next(filter(_made_a_policy, steps), None)
        for checkpoint in artifacts.stored_checkpoints(store, request.run_id):
            if checkpoint.step > (trained.optimizer_step or 0 if trained else -1):  # it will be done again
                store.delete(f"{checkpoint.key}/{MANIFEST}")  # first, so that the rest does not seem complete
                for info in list(store.list(f"{checkpoint.key}/")):
                    store.delete(info.key)
        return Recovered(
            last_step=steps[0].step if steps else 0,
            trained=trained,
            policies=_policies(steps)[-num_policies:],
            evaluated=evaluated,
            carried=(steps[0].carried if steps else None) or CarriedOver(),
        )


def _policies(steps: list[StepStatus]) -> tuple[Policy, ...]:
    """The policy after each of the steps, oldest first."""
    found = [Policy(after_step=0, version=0, adapter=None)]
    for step in reversed(steps):
        found.append(
            policy_of(step) if _made_a_policy(step) else found[-1].model_copy(update={"after_step": step.step})
        )
    return tuple(found[1:])


def policy_of(done: StepStatus) -> Policy:
    """The policy that a done step made."""
    assert done.policy_version is not None and done.checkpoint is not None
    adapter = None
    if done.adapter is not None and done.adapter_sha256 is not None:
        adapter = Artifact(uri=done.adapter, sha256=done.adapter_sha256)
    return Policy(
        after_step=done.step,
        version=done.policy_version,
        adapter=adapter,
        checkpoint=done.checkpoint.artifact,
        synced=done.synced,
        num_refuted=int(done.metrics.get("sync_given_up", 0)),
    )


def _made_a_policy(step: StepStatus) -> bool:
    return step.checkpoint is not None and step.same_as is None


def find_key(store: ObjectStore, run_id: str, step: StepStatus) -> StepStatus | None:
    """The step that had this step's key before, if there is one. Raises InvalidInput: it had other groups."""
    try:
        before = artifacts.read_record(store, RunKeys(run_id).step_key(step.key), StepStatus)
    except NotFound:
        return None
    if before.step == step.step:
        return None  # this very step, packed again
    if before.groups != step.groups:
        raise InvalidInput(f"it was used for {before.groups}, which made step {before.step}", "key")
    return before


# --- The records of a session's commands in the store, as control hosts read and write them ---

_ENDED = "the session ended before this command was done"


class CommandRecordRequest(Frozen):
    """The result of a command that a control host has finished (the publication of a saved state)."""

    run_id: RunId
    result: CommandResult


class FindCommandsRequest(Frozen):
    run_id: RunId


class DropCommandsRequest(Frozen):
    """`reason`: why the session ended, for the clients whose commands are dropped."""

    run_id: RunId
    reason: str | None = None


class FoundCommands(Frozen):
    """`next`: the first number without a result. `waiting`: the commands without one, in order. `last`: the greatest
    number with one.
    """

    next: int = 1
    waiting: tuple[int, ...] = ()
    last: int = 0
    closing: bool = False


class FillGapRequest(Frozen):
    """A command that did not come within `patience_s`, and the last one that waits for it."""

    run_id: RunId
    number: int
    through: int
    patience_s: float


class CommandRecords:
    """Reads and writes records of commands. A cancellation of these activities does not interrupt them."""

    def __init__(self, host: HostContext) -> None:
        self._store = host.store

    @on_thread("record_command")
    def record_command(self, request: CommandRecordRequest) -> None:
        """Write a command's result, which tells its client that it is done."""
        key = RunKeys(request.run_id).command_result(request.result.number)
        self._store.put_bytes(key, request.result.model_dump_json().encode())

    @on_thread("find_commands")
    def find_commands(self, request: FindCommandsRequest) -> FoundCommands:
        """Find which commands a session has done, and which wait."""
        return self._find(RunKeys(request.run_id))

    @on_thread("drop_commands")
    def drop_commands(self, request: DropCommandsRequest) -> None:
        """Drop the commands that wait at a session's end. They are not done even if the session is resumed."""
        keys = RunKeys(request.run_id)
        message = f"{_ENDED}: {request.reason}" if request.reason else _ENDED
        found = self._find(keys)
        for number in found.waiting:
            if number < found.last:  # it should save a state, and later commands are done
                self._say_dropped(keys, number, Gap(through=number, message=message))
        if found.waiting and found.waiting[-1] > found.last:
            gap = Gap(through=found.waiting[-1], message=message)
            self._store.put_bytes(keys.command(found.last + 1), gap.model_dump_json().encode())
            self._say_dropped(keys, found.last + 1, gap)

    @on_thread("pass_over")
    def fill_gap(self, request: FillGapRequest) -> bool:
        """Drop the commands that wait for a missing one. Returns False if that one has arrived after all."""
        keys, number = RunKeys(request.run_id), request.number
        message = f"command {number} did not come within {request.patience_s:g} s: send it, and those behind it again"
        gap = Gap(through=request.through, message=message)
        key, data = keys.command(number), gap.model_dump_json().encode()
        if not self._store.put_if_absent(key, data) and self._store.get_bytes(key) != data:
            return False
        self._say_dropped(keys, number, gap)
        return True

    def _find(self, keys: RunKeys) -> FoundCommands:
        done = _numbers(self._store, keys.command_result())
        return FoundCommands(
            next=next(number for number in count(1) if number not in done),
            waiting=tuple(sorted(_numbers(self._store, keys.command()) - done)),
            last=max(done, default=0),
            closing=self._store.head(keys.is_closed) is not None,
        )

    def _say_dropped(self, keys: RunKeys, first: int, gap: Gap) -> None:
        problem = CommandProblem(kind="dropped", message=gap.message)
        for number in reversed(range(first, gap.through + 1)):  # if the first one has its result, all have
            result = CommandResult(number=number, kind=gap.kind, problem=problem)
            self._store.put_bytes(keys.command_result(number), result.model_dump_json().encode())


def _numbers(store: ObjectStore, prefix: str) -> set[int]:
    return {int(info.key.removeprefix(prefix).removesuffix(".json")) for info in store.list(prefix)}
