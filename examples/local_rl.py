"""A run that makes its own rollouts, without Temporal, hosts and leases: a sampler, a worker and this loop.

    python -m examples.local_rl RUN.json FOLDER

RUN.json is an `RLRun` with `rollouts`, as the API takes it. Each step uses the functions of the
server's workflow, so its metrics equal the server's, except for seconds. Prints one line of JSON per step;
step 0 is the policy before the first. FOLDER keeps the store and caches.
"""

import argparse
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from activities.grading.grade import Grade, Graded, GradeRequest
from activities.host_context import HostContext
from activities.hosts.progress import job_metrics
from activities.hosts.run_job import LogReader
from activities.hosts.workers import WorkerPool, WorkerProcess, ranks_command
from activities.models.resolve import AdapterRequest, Resolve
from activities.publishing.publish import Publish, PublishRequest
from activities.sampling.sample import PolicySampleRequest, Sampled, SamplerActivities
from activities.sampling.samplers import SamplerCommand, Samplers
from activities.sources.download import Download, DownloadRequest
from activities.tokenizing.render_prompts import Prompts, RenderPrompts
from activities.trajectories.group_samples import Drawn, GroupSamples
from activities.trajectories.pack_trajectories import GroupsRequest, PackTrajectories
from longshore.fields import Artifact
from shared.errors import InvalidInput, WorkerLost
from shared.jobs.events import Event, Probed, Saved, Step, Succeeded, Terminal
from shared.jobs.job import Job, JobPlan, LeaseMark, ProcessKey, WorkerKey
from shared.jobs.losses import reference_uri
from shared.runs.dataset_runs import DatasetSource
from shared.runs.requests import RLRun, dtype_of
from shared.runs.start import ModelRequest, RLStart
from shared.runs.status import CheckpointRef, Policy, RLState, RunStatus, StepStatus
from shared.serving import LeasedSampler
from shared.settings import DownloadSettings, Settings
from shared.storage.files import write_atomically
from shared.storage.paths import Fence, HostPaths
from workflows.rollouts import requests as rollout_requests
from workflows.training.job_plan import replayed_routes, rl_job

_FENCE = Fence(epoch=1)
_POLL_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN.json")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank; part of what decides the bits")
    arguments = parser.parse_args()
    run = RLRun.model_validate_json(arguments.run.read_bytes())
    for step in train(run, arguments.folder, arguments.threads):
        print(step.model_dump_json(include={"step", "state", "adapter", "metrics"}), flush=True)


def train(run: RLRun, folder: Path, threads: int = 1) -> Iterator[StepStatus]:
    """Yield the run's steps as they end; with held-out prompts, first step 0: the initial policy."""
    start = RLStart(run_id=f"local-{secrets.token_hex(4)}", run=run, threads_per_rank=threads)
    settings = Settings(root=folder.resolve(), download=DownloadSettings(file_roots=(Path("/"),)))
    state, paths = prepare(start, settings), HostPaths(settings.root_path)
    assert state.rollouts is not None
    if run.rollouts is not None and run.rollouts.sampler != "own":
        raise InvalidInput("this loop starts Longshore's own sampler alone", "rollouts.sampler")
    key = rollout_requests.sampler_key(start, state.model)
    mark = LeaseMark(run_id=start.run_id, fence=_FENCE)
    samplers = WorkerPool(paths, SamplerCommand(HostContext(settings)), {}, idle_limit_s=0)
    with running(samplers, key, mark) as sampler:
        place = LeasedSampler(run_id=start.run_id, fence=_FENCE, worker_id=sampler.worker_id)
        loop = Loop(start, state, settings, Samplers(settings, samplers), place)
        if run.rollouts is not None and run.rollouts.held_out is not None:
            yield StepStatus(step=0, key="rollouts-0", groups="", state="done", metrics=loop.evaluate())
        worker_key = WorkerKey(
            model=state.model, layout=run.layout, dtype=dtype_of(run), threads_per_rank=start.threads_per_rank
        )
        with running(WorkerPool(paths, ranks_command, {}, idle_limit_s=0), worker_key, mark) as worker:
            for number in range(1, state.rollouts.num_steps + 1):
                yield loop.step(number, worker)


def prepare(start: RLStart, settings: Settings) -> RLState:
    """Model, adapter and prompts: checked, brought and rendered."""
    run, rollouts = start.run, rollout_requests.rollouts_of(start.run)
    resolved = Resolve(HostContext(settings)).resolve_model(
        ModelRequest(uri=run.model, tenant=start.tenant, layout=run.layout, engine=run.engine)
    )
    adapter: Artifact | None = None
    if run.initial_adapter is not None:
        wanted = AdapterRequest(uri=run.initial_adapter, tenant=start.tenant, lora=run.trainable, shape=resolved.shape)
        adapter = Resolve(HostContext(settings)).resolve_adapter(wanted).adapter
    reference: Artifact | None = None
    if (uri := reference_uri(run.loss)) is not None:
        named = AdapterRequest(uri=uri, tenant=start.tenant, shape=resolved.shape)
        reference = Resolve(HostContext(settings)).resolve_adapter(named).adapter

    def rendered(split: Literal["train", "eval"], source: DatasetSource) -> Prompts:
        wanted = DownloadRequest(run_id=start.run_id, tenant=start.tenant, split=split, source=source)
        dataset = Download(HostContext(settings)).download(wanted).dataset
        request = rollout_requests.prompts_request(run, source, dataset, resolved.model)
        return RenderPrompts(HostContext(settings)).render_prompts(request)

    held_out = rendered("eval", rollouts.held_out.prompts) if rollouts.held_out else None
    return RLState(
        model=resolved.model,
        shape=resolved.shape,
        adapter=adapter,
        reference=reference,
        status=RunStatus(run_id=start.run_id, kind="rl"),
        rollouts=rollout_requests.rollout_data(run, rendered("train", rollouts.prompts), held_out),
    )


class Loop:
    """The steps of one run, and what they leave: the state that a workflow keeps, and the policies sampled from."""

    def __init__(
        self, start: RLStart, state: RLState, settings: Settings, samplers: Samplers, place: LeasedSampler
    ) -> None:
        assert state.rollouts is not None
        self._start, self._state, self._data, self._settings = start, state, state.rollouts, settings
        self._samplers, self._place = samplers, place
        self._routes = replayed_routes(start.run, state.shape)
        self._policies = [Policy(after_step=0, version=0, adapter=state.adapter)]

    def step(self, number: int, worker: WorkerProcess) -> StepStatus:
        """Sample, grade, group and train; then evaluate held-out prompts, if due."""
        run, data = self._start.run, self._data
        place = self._place, self._routes
        drawn: list[Drawn] = []
        again: tuple[int, ...] | None = None
        while again is None or again:
            samples = rollout_requests.step_samples(
                self._start, self._state.model, data.prompts, self._policies, number, *place, drawn, again
            )
            sampled, graded = self._graded(samples)
            drawn.append(Drawn(completions=sampled.completions, grades=graded.grades))
            wanted = rollout_requests.groups_request(run, drawn, number)
            grouped = GroupSamples(HostContext(self._settings)).group_samples(wanted)
            again = grouped.equal_groups
        step = StepStatus(step=number, key=f"rollouts-{number}", groups=grouped.groups_uri, metrics=grouped.metrics)
        done = self._trained(step, worker)
        if rollout_requests.is_evaluated(run, number, is_last=number == data.num_steps):
            done = done.model_copy(update={"metrics": done.metrics | self.evaluate()})
        return done

    def evaluate(self) -> dict[str, float]:
        """What held-out prompts say of the newest policy."""
        policies, prompts = self._policies, self._data.held_out
        assert prompts is not None
        samples = rollout_requests.held_out_samples(
            self._start, self._state.model, prompts, policies, policies[-1], self._place
        )
        sampled, graded = self._graded(samples)
        return rollout_requests.held_out_metrics(sampled, graded.summary)

    def _graded(self, samples: PolicySampleRequest) -> tuple[Sampled, Graded]:
        sampled = SamplerActivities(HostContext(self._settings), self._samplers).sample(samples)
        grader = rollout_requests.rollouts_of(self._start.run).grader
        return sampled, Grade(HostContext(self._settings)).grade(GradeRequest(samples=sampled.samples, grader=grader))

    def _trained(self, step: StepStatus, worker: WorkerProcess) -> StepStatus:
        """A step from its groups to its published adapter, which the sampler proves to serve."""
        start, state = self._start, self._state
        packed = PackTrajectories(HostContext(self._settings)).pack_trajectories(
            GroupsRequest(
                run_id=start.run_id,
                tenant=start.tenant,
                run=start.run,
                step=step.model_copy(update={"metrics": {}}),
                policy_version=state.policy_version,
                vocab_size=state.shape.vocab_size,
                routes=self._routes,
            )
        )
        metrics = step.metrics | packed.metrics
        if packed.data is None or packed.report_uri is None:
            self._add(self._policies[-1].model_copy(update={"after_step": step.step}))
            return step.model_copy(update={"state": "skipped", "metrics": metrics})
        plan = rl_job(start, state, step, packed.data, packed.num_steps)
        events = do_job(plan, worker)
        trained = job_metrics(plan.loss, (event.metrics for event in events if isinstance(event, Step)))
        [checkpoint] = [checkpoint_of(event) for event in events if isinstance(event, Saved)]
        [probed] = [event.logprobs for event in events if isinstance(event, Probed)]
        published = Publish(HostContext(self._settings)).publish(
            PublishRequest(
                run_id=start.run_id,
                run=start.run,
                step=step.step,
                model=state.model,
                checkpoint=checkpoint,
                report_uri=packed.report_uri,
                metrics=packed.metrics | trained,
            )
        )
        left = {"policy_version": state.policy_version + 1, "optimizer_step": checkpoint.step, "checkpoint": checkpoint}
        adapter = Artifact(uri=published.uri, sha256=published.sha256)
        policy = Policy(after_step=step.step, version=state.policy_version + 1, adapter=adapter)
        proof = rollout_requests.proof(start, self._data, self._policies, policy, probed, self._place)
        proved = SamplerActivities(HostContext(self._settings), self._samplers).prove_adapter(proof)
        self._add(policy)
        self._state = state.model_copy(update=left)
        metrics |= {"probe_difference_max": proved.max_difference} | trained
        return step.model_copy(update=left | {"state": "done", "adapter": published.uri, "metrics": metrics})

    def _add(self, policy: Policy) -> None:
        """Note the policy after a step; those that no later step is sampled from are forgotten."""
        num_kept = 1 + rollout_requests.rollouts_of(self._start.run).off_policy_steps
        self._policies = [*self._policies, policy][-num_kept:]


def do_job(plan: JobPlan, worker: WorkerProcess) -> list[Event]:
    """Write the job file and follow the log to its end. Raises RuntimeError when the job does not succeed."""
    outputs = worker.paths.outputs(plan.run_id, plan.job_id, _FENCE)
    job = Job(
        plan=plan,
        fence=_FENCE,
        log_path=str(outputs / "log.jsonl"),
        checkpoint_dir=str(outputs / "checkpoints"),
        scratch_dir=str(worker.paths.scratch(plan.run_id, plan.job_id, _FENCE)),
    )
    write_atomically(worker.paths.job(plan.run_id, plan.job_id, _FENCE), job.model_dump_json(indent=1).encode())
    reader, events = LogReader(Path(job.log_path)), list[Event]()
    while not events or not isinstance(events[-1], Terminal):
        was_alive = worker.is_alive()
        events += [line.event for line in reader.read()]
        if not was_alive and not (events and isinstance(events[-1], Terminal)):
            raise WorkerLost(worker.death_report())
        time.sleep(_POLL_S)
    if not isinstance(events[-1], Succeeded):
        raise RuntimeError(f"job {plan.job_id}: {events[-1].model_dump_json()}")
    return events


def checkpoint_of(saved: Saved) -> CheckpointRef:
    """A checkpoint as it lies on the worker's disk."""
    artifact = Artifact(uri=Path(saved.path).as_uri(), sha256=saved.manifest_sha256)
    return CheckpointRef(step=saved.step, fence=_FENCE, artifact=artifact)


@contextmanager
def running(pool: WorkerPool, key: ProcessKey, mark: LeaseMark) -> Iterator[WorkerProcess]:
    """A worker or sampler of our own, which is ready, until the block ends."""
    try:
        process = pool.acquire(key, mark)
        while not process.is_ready():
            if not process.is_alive():
                raise WorkerLost(process.death_report())
            time.sleep(_POLL_S)
        yield process
    finally:
        pool.close()


if __name__ == "__main__":
    main()
