"""The records of a run in the store: its beginning, its train steps and its end, for when Temporal has forgotten it."""

from contextlib import suppress

from pydantic import Field
from temporalio import activity

from activities.host_context import HostContext, beating
from activities.records.checkpoints import discard_after
from longshore.fields import Artifact, Frozen
from shared.errors import InvalidInput, NotFound
from shared.runs.requests import RunId
from shared.runs.start import result_sha256
from shared.runs.status import Policy, RunStatus, StepStatus
from shared.storage.artifacts import read_record
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore
from shared.storage.uses import STATE_IS_GONE, expired, removed_run, use


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
    """A run that is resumed. `num_policies`: for how many of its last steps the policy after them is wanted."""

    run_id: RunId
    num_policies: int = Field(default=1, ge=1)


class Recovered(Frozen):
    """`last_step`: the number of the last recorded step. `trained`: the last one that changed the policy.

    `policies`: those after the last steps, oldest first. Version 0 is the policy that the run began with.
    """

    last_step: int = 0
    trained: StepStatus | None = None
    policies: tuple[Policy, ...] = ()


class RunRecords:
    """Records beginnings, steps and ends of runs. A cancellation of these activities does not interrupt them."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="record_result", no_thread_cancel_exception=True)
    def record_result(self, status: RunStatus) -> Recorded:
        store = self._host.store
        key = RunKeys(status.run_id).result
        with beating():
            store.put_bytes(key, status.model_dump_json(indent=1).encode())
        return Recorded(uri=f"{store.uri}/{key}")

    @activity.defn(name="begin", no_thread_cancel_exception=True)
    def begin(self, request: BeginRequest) -> Begun:
        """Check that the service asked for this workflow, before it does anything else.

        A start id that another execution has used is refused, since anybody who reaches Temporal can start a workflow
        with it again. So is the start of a run that has ended, unless it resumes the run from that very end.

        The result of a run that is resumed is moved away until it ends again.
        """
        store, keys = self._host.store, RunKeys(request.run_id)
        with beating():
            mine, place = _Start(execution=request.execution), keys.start(request.start_id)
            is_new = store.put_if_absent(place, mine.model_dump_json().encode())
            if not is_new and read_record(store, place, _Start) != mine:
                return Begun(refusal="this start was used before, and the service starts a run anew")
            ended = result_sha256(store, request.run_id)
            if ended is not None and not (request.resumed and ended == request.goes_on_from):
                return Begun(refusal="the run has ended, and the service has not resumed it")
            status = _reopened(store, keys) if request.resumed else None
            # Whoever deletes of the run has seen that its result is there no more, or is waited for here.
            use(store, keys.prefix, request.run_id, request.execution)
            if request.resumed and (gone := _what_is_gone(store, request.run_id)) is not None:
                with suppress(NotFound):
                    store.put_bytes(keys.result, store.get_bytes(keys.previous_result))
                return Begun(refusal=gone)
            return Begun(status=status)

    @activity.defn(name="record_step", no_thread_cancel_exception=True)
    def record_step(self, request: StepRecordRequest) -> None:
        """Write a step's record, and then the one under the client's key, which thus exists only for recorded steps."""
        with beating():
            store = self._host.store
            keys, data = RunKeys(request.run_id), request.step.model_dump_json(indent=1).encode()
            store.put_bytes(keys.step(request.step.step), data)
            if request.step.same_as is not None:
                return
            by_key = keys.step_key(request.step.key)
            # If a key was used for other groups, the first step keeps it.
            is_new = store.put_if_absent(by_key, data)
            if not is_new and read_record(store, by_key, StepStatus).step == request.step.step:
                store.put_bytes(by_key, data)

    @activity.defn(name="recover_steps", no_thread_cancel_exception=True)
    def recover_steps(self, request: RecoverRequest) -> Recovered:
        """Find the step at which a resumed run continues, and delete checkpoints of steps that were never recorded."""
        with beating():
            store = self._host.store
            found = sorted((info.key for info in store.list(f"{RunKeys(request.run_id).steps}/")), reverse=True)
            steps: list[StepStatus] = []  # newest first, back to one that made a policy
            for key in found:
                if len(steps) >= request.num_policies and _made_a_policy(steps[-1]):
                    break
                steps.append(read_record(store, key, StepStatus))
            trained = next(filter(_made_a_policy, steps), None)
            discard_after(store, request.run_id, trained.optimizer_step or 0 if trained else -1)
            return Recovered(
                last_step=steps[0].step if steps else 0,
                trained=trained,
                policies=_policies(steps)[-request.num_policies :],
            )


def _what_is_gone(store: ObjectStore, run_id: str) -> str | None:
    """Return why a run cannot continue: it was removed, or a policy deleted its state."""
    if store.head(removed_run(run_id)) is not None:
        return "the run was removed"
    return STATE_IS_GONE if store.head(expired(run_id)) is not None else None


def _reopened(store: ObjectStore, keys: RunKeys) -> RunStatus | None:
    """Move a run's result away. Returns the run's final status."""
    with suppress(NotFound):  # it was moved before, or never was
        store.put_bytes(keys.previous_result, store.get_bytes(keys.result))
        store.delete(keys.result)
    with suppress(NotFound):
        return read_record(store, keys.previous_result, RunStatus)
    return None


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
        before = read_record(store, RunKeys(run_id).step_key(step.key), StepStatus)
    except NotFound:
        return None
    if before.step == step.step:
        return None  # this very step, packed again
    if before.groups != step.groups:
        raise InvalidInput(f"it was used for {before.groups}, which made step {before.step}", "key")
    return before
