"""Jobs on a real worker process, for tests of what becomes of them."""

import threading
from pathlib import Path

from temporalio.testing import ActivityEnvironment

from activities.hosts.lease import Stager
from activities.hosts.run_job import JobResult, RunJob, RunJobRequest
from longshore.events import Step
from longshore.views import CheckpointRef
from shared.jobs.job import JobPlan
from shared.settings import S3Settings
from shared.storage.paths import RunKeys
from shared.storage.store import open_uri
from tests.activities.lease_on_thread import HeldLease, Host
from tests.workflows.stand_in import artifact, job_plan

KEYS = RunKeys("r1")


def plan_for(host: Host, tmp_path: Path, **changes: int) -> JobPlan:
    return job_plan(artifact(host.store, tmp_path / "any", "any", x_json="{}"), **changes)


class Running:
    """The run_job activity in a thread."""

    def __init__(self, host: Host, lease: HeldLease, plan: JobPlan, drain_grace_s: float = 0.0, **changes):
        self.environment = ActivityEnvironment()
        self.result: JobResult | None = None
        self.error: BaseException | None = None
        grant = lease.grant
        fields = {"fence": grant.fence, "worker_id": grant.worker_id, "cancel_grace_s": 20.0, **changes}
        request = RunJobRequest(plan=plan, **fields)
        stager = Stager(host.paths.cache, S3Settings())
        activity = RunJob(host.pool, host.store, stager, lease.notebook, drain_grace_s=drain_grace_s)

        def work() -> None:
            try:
                self.result = self.environment.run(activity.run_job, request)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def ended(self) -> JobResult:
        self.thread.join(60)
        assert not self.thread.is_alive()
        if self.error:
            raise self.error
        assert self.result is not None
        return self.result


def weights(host: Host, checkpoint: CheckpointRef | None, s3: S3Settings | None = None) -> bytes:
    assert checkpoint is not None
    store, key = open_uri(checkpoint.artifact.uri, s3 or S3Settings())
    return store.get_bytes(f"{key}/weights/adapter_model.safetensors")


def steps(events) -> list[int]:
    return [event.step for event in events if isinstance(event, Step)]
