"""Adapters and models as runs leave them in the store: published, with claim, run and job on record."""

import uuid
from pathlib import Path

from activities.publishing.publish import Claim, claim_version
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.fields import Artifact, Fence
from longshore.runs import RunRecord
from longshore.training import Full
from shared.jobs.job import Job
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.paths import RunKeys, published_version
from shared.storage.store import ObjectStore
from tests.workflows.stand_in import job_plan

BASE = "file:///models/tiny"
CREATED_AT = 1_700_000_000.5


def publish(
    store: ObjectStore, folder: Path, name: str, model: Artifact, tenant: str = "default", kind: str = "adapters"
) -> int:
    """The version that the folder becomes."""
    trainable = {"trainable": Full()} if kind == "models" else {}
    run = SFTRun(name=name, model=BASE, dataset=DatasetSource(uri="file:///data"), steps=1, batch_size=1, **trainable)
    record = RunRecord(run_id=f"sft-{uuid.uuid4().hex[:8]}", tenant=tenant, run=run, created_at=CREATED_AT)
    keys, fence = RunKeys(record.run_id), Fence(epoch=1)
    plan = job_plan(model).model_copy(update={"run_id": record.run_id})
    job = Job(plan=plan, fence=fence, log_path="/log", checkpoint_dir="/checkpoints", scratch_dir="/scratch")
    store.put_bytes(keys.record, record.model_dump_json().encode())
    store.put_bytes(keys.job("000001", fence), job.model_dump_json().encode())
    version = claim_version(store, tenant, kind, name, Claim(run_id=record.run_id))
    seal(folder)
    upload_artifact(store, published_version(tenant, kind, name, version), folder)
    return version
