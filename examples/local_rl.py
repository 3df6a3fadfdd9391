"""A run that makes its own rollouts, without Temporal, hosts and leases: a sampler, a worker and this loop.

    python -m examples.local_rl RUN.json FOLDER

RUN.json is what `POST /rl_runs` takes, with `rollouts`. What a step asks, computes and is told by comes from the
functions that a server's workflow uses, so that metrics are the server's (but for seconds). Prints a line of JSON a
step; step 0 is the policy before the first. FOLDER keeps store and caches; nothing of a run that was ended goes on.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from activities.download import Download, DownloadRequest
from activities.follow import LogReader
from activities.grade import Grade, Graded, GradeRequest
from activities.group_samples import GroupSamples
from activities.lease_sampler import SamplerCommand
from activities.pack_trajectories import GroupsRequest, PackTrajectories
from activities.prove_adapter import ProveAdapter, ProveRequest
from activities.publish import Publish, PublishRequest
from activities.render_prompts import Prompts, RenderPrompts
from activities.resolve_adapter import AdapterRequest, ResolveAdapter
from activities.resolve_model import ModelRequest, ResolveModel
from activities.sample import Sample, Sampled, SampleRequest
from activities.samplers import Samplers, ServedSampler
from activities.step_metrics import job_metrics
from activities.worker_process import WorkerProcess, launch, torchrun
from shared.completions import SamplerReady
from shared.errors import WorkerLost
from shared.events import Event, Probed, Saved, Step, Succeeded, Terminal
from shared.jobs import Artifact, Fence, Job, JobPlan
from shared.leases import ProcessKey, WorkerKey
from shared.paths import HostPaths, write_atomically
from shared.runs import CheckpointRef, DatasetSource, Policy, RLRun, RLStart, RLState, RunStatus, StepStatus
from shared.settings import DownloadSettings, SamplingSettings, Settings
from workflows import policies, rollout_requests
from workflows.job_plan import rl_job

_FENCE = Fence(epoch=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN.json")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    run = RLRun.model_validate_json(arguments.run.read_bytes())
    for step in train(run, arguments.folder.resolve()):
        print(json.dumps(step.model_dump(mode="json", include={"step", "state", "metrics", "adapter"})), flush=True)


def train(run: RLRun, folder: Path) -> Iterator[StepStatus]:
    """The run's steps as they are done; number 0, where held-out prompts are given, is the policy before the first."""
    settings = Settings(root=folder, download=DownloadSettings(file_roots=(Path("/"),)))
    start = RLStart(run_id="local", run=run)
    loop = _prepare(start, settings)
    with _sampler(loop) as sampler, _worker(loop) as worker:
        loop = loop.with_sampler(sampler)
        if metrics := loop.evaluate(loop.policies[0]):
            yield StepStatus(step=0, key="rollouts-0", groups="", state="done", metrics=metrics)
        for step in range(1, loop.num_steps + 1):
            yield loop.step(step, worker)
