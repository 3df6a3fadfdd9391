"""The keys of the store (with stored_bytes.py), and the folders that a host and its worker share. They are made only
here."""

import hashlib
import json
import re
from pathlib import Path

from pydantic import Field

from longshore.fields import Frozen

# --- The fence: identifies one scheduling of a run's work, so that a worker can refuse an older one ---


class Fence(Frozen):
    """Identifies one scheduling of a run's work. A worker refuses work with an older fence than its lease's.

    The workflow increments `epoch` at every new lease; `attempt` is Temporal's attempt within an epoch.
    """

    epoch: int = Field(ge=1)
    attempt: int = Field(default=1, ge=1)

    @property
    def label(self) -> str:
        """A path segment that sorts like the fences: `e000003-a01`."""
        return f"e{self.epoch:06d}-a{self.attempt:02d}"

    @classmethod
    def from_label(cls, label: str) -> "Fence":
        """Parse a fence from a path segment. Raises ValueError for any other segment."""
        epoch, attempt = label.split("-")
        fence = cls(epoch=int(epoch.removeprefix("e")), attempt=int(attempt.removeprefix("a")))
        if fence.label != label:
            raise ValueError(f"not a fence: {label}")
        return fence

    def is_older_than(self, other: "Fence") -> bool:
        return (self.epoch, self.attempt) < (other.epoch, other.attempt)


MANIFEST = "manifest.json"
LEFT = "_left.txt"
"""In a dataset's folder: which files of its source were left, in words."""

# Prefixes of objects of all tenants.
SENT_REQUESTS = "index/sent/"
FILE_RECORDS = "records/files/"
ANSWER_RECORDS = "answers/"
ANSWERING_HOSTS = "answering/"
"""Control hosts that ask the installation's own sampler."""
HOST_STATES = "hosts/"
SEAL_KEYS = "records/seal_keys.json"  # the ids of those that have sealed something


def content_key(*inputs: Frozen | str) -> str:
    """A key of 32 hex digits, derived from an activity's inputs, so that a retry finds its own work."""
    parts = [i if isinstance(i, str) else i.model_dump(mode="json") for i in inputs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class RunKeys:
    """Keys of one run in the store."""

    def __init__(self, run_id: str) -> None:
        self.prefix = f"runs/{run_id}"
        self.record = f"{self.prefix}/run.json"
        self.result = f"{self.prefix}/result.json"
        self.previous_result = f"{self.prefix}/previous_result.json"
        self.checkpoints = f"{self.prefix}/checkpoints"
        self.leases = f"{self.prefix}/leases"
        self.logs = f"{self.prefix}/logs"
        self.wandb = f"{self.prefix}/wandb"
        self.steps = f"{self.prefix}/steps"
        self.is_closed = f"{self.prefix}/closed"  # exists once a session takes no more commands
        self.host = f"{self.prefix}/host.json"  # the address of the host of a session's worker
        self.profile_request = f"{self.prefix}/profile.json"  # exists while somebody waits for a trace of steps
        self.kept_states = f"{self.prefix}/kept_states/"  # a mark for each state that a session's client asked for

    def start(self, start_id: str) -> str:
        """The record of the workflow execution that used this start id, so that no start is used twice."""
        return f"{self.prefix}/starts/{start_id}.json"

    def began_with(self, what: str) -> str:
        """The manifest of the model or adapter that the run's first execution found at the place that a user named."""
        return f"{self.prefix}/began_with/{what}.json"

    def dataset(self, split: str) -> str:
        return f"{self.prefix}/dataset/{split}"

    def command(self, number: int | None = None) -> str:
        """A session's command as it was accepted, never overwritten; without a number, the prefix of all of them."""
        return f"{self.prefix}/commands/" + ("" if number is None else f"{number:08d}.json")

    def command_result(self, number: int | None = None) -> str:
        """The result of a session's command; without a number, the prefix of all results."""
        return f"{self.prefix}/results/" + ("" if number is None else f"{number:08d}.json")

    def profile(self, job_id: str, fence: Fence, profile_id: str) -> str:
        return f"{self.logs}/{job_id}/{fence.label}/profile-{profile_id}.json.gz"

    def step(self, number: int) -> str:
        """The record of a train step of an RL run that has ended."""
        return f"{self.steps}/{number:08d}.json"

    def step_key(self, key: str) -> str:
        """The record of a train step by the client's key, which may hold any characters."""
        return f"{self.prefix}/step_keys/{hashlib.sha256(key.encode()).hexdigest()}.json"

    def lease(self, epoch: int) -> str:
        return f"{self.leases}/{Fence(epoch=epoch).label}.json"

    def checkpoint(self, fence: Fence, step: int) -> str:
        return f"{self.checkpoints}/{fence.label}/step-{step:08d}"

    def checkpoint_of(self, key: str) -> tuple[Fence, int] | None:
        """The fence and step of the checkpoint whose manifest a key is; None for any other key below `checkpoints`."""
        match key.removeprefix(f"{self.checkpoints}/").split("/"):
            case [label, step, name] if name == MANIFEST:
                return Fence.from_label(label), int(step.removeprefix("step-"))
            case _:
                return None

    def log(self, job_id: str, fence: Fence) -> str:
        """The whole log of one attempt, written after its terminal event."""
        return f"{self.logs}/{job_id}/{fence.label}/log.jsonl"

    def log_part(self, job_id: str, fence: Fence, first_seq: int) -> str:
        """A piece of the log, uploaded while the job runs; `first_seq`: the `seq` of its first event."""
        return f"{self.logs}/{job_id}/{fence.label}/parts/{first_seq:010d}.jsonl"

    def job(self, job_id: str, fence: Fence) -> str:
        return f"{self.logs}/{job_id}/{fence.label}/job.json"

    def output(self, job_id: str, fence: Fence) -> str:
        """The end of the worker's stdout and stderr, kept when an attempt does not succeed."""
        return f"{self.logs}/{job_id}/{fence.label}/output.log"


def host_state(name: str) -> str:
    """The state that a GPU or sampler host reports."""
    return f"{HOST_STATES}{name}.json"


def of_shape(shape: str, name: str) -> str:
    """What the GPU hosts of a shape last reported on bfloat16 or their ranks. It stays when they leave."""
    return f"shapes/{shape}/{name}.json"


def run_index(run_id: str = "") -> str:
    """An empty object a run, so that listing runs does not list their files. Ids sort by time of submission."""
    return f"index/runs/{run_id}"


def tenant_folder(tenant: str = "") -> str:
    """The prefix of everything of the store that a tenant may name by URI."""
    return f"tenants/{tenant}"


def idempotency(tenant: str, key: str | None = None) -> str:
    """The object that remembers which run an Idempotency-Key made; without a key, the prefix of all of them.

    Keys are hashed: they may hold anything.
    """
    return f"index/idempotency/{tenant}/" + ("" if key is None else f"{hashlib.sha256(key.encode()).hexdigest()}.json")


def sent_request(tenant: str, sha256: str | None = None) -> str:
    """The object that remembers under which key a request without one was accepted, by the request's hash.

    Without a hash, the prefix of all of them.
    """
    return f"{SENT_REQUESTS}{tenant}/" + ("" if sha256 is None else f"{sha256}.json")


def upload(tenant: str, sha256: str, name: str) -> str:
    return f"{tenant_folder(tenant)}/uploads/{sha256}/{name}"


# Records of the database's rows: small JSON objects that allow the database to be rebuilt.


def tenant_record(tenant: str = "") -> str:
    return f"records/tenants/{tenant}"


def key_record(key_id: str = "") -> str:
    """An API key: its hash, never itself."""
    return f"records/keys/{key_id}"


def query_record(query_id: str) -> str:
    """The object that holds a user's URI with its query (places.py). Ids are hashed: users send them."""
    return f"records/queries/{hashlib.sha256(query_id.encode()).hexdigest()}"


def file_record(tenant: str, file_id: str = "") -> str:
    return f"{FILE_RECORDS}{tenant}/{file_id}"


def chunked_upload(tenant: str, upload_id: str = "") -> str:
    """The record of an upload that is sent in parts; without an upload or a tenant, the prefix of several."""
    return f"records/uploads/{tenant}/{upload_id}" if tenant else "records/uploads/"


def upload_part(tenant: str, upload_id: str, part_id: str = "") -> str:
    """The bytes of one part of an upload; they are deleted when the file is complete."""
    return f"{tenant_folder(tenant)}/parts/{upload_id}/{part_id}"


def reserved(tenant: str) -> str:
    """The prefix of entries for bytes that are being written for a tenant (shared/storage/stored_bytes.py)."""
    return f"records/reserved/{tenant}/"


def brought(tenant: str, run_id: str = "") -> str:
    """The prefix of entries for the bytes that a tenant's runs, or one of them, have downloaded into the store."""
    return f"records/brought/{tenant}/{run_id}/" if run_id else f"records/brought/{tenant}/"


def webhook_record(tenant: str, webhook_id: str = "") -> str:
    return f"records/webhooks/{tenant}/{webhook_id}"


def delivery_record(tenant: str, webhook_id: str, notice_id: str = "") -> str:
    """The delivery of one notice to one webhook. Ids of notices sort by time."""
    return f"records/deliveries/{tenant}/{webhook_id}/{notice_id}"


def schedule_record(tenant: str = "", name: str = "") -> str:
    return f"records/schedules/{tenant}/{name}" if tenant else "records/schedules/"


class SweepKeys:
    """Keys of one sweep. ALL, ENDS: the prefixes of the records of all tenants' sweeps, and of their ends."""

    ALL, ENDS = "records/sweeps/", "records/sweep_ends/"

    def __init__(self, tenant: str, sweep_id: str = "") -> None:
        self.prefix = f"{self.ALL}{tenant}/{sweep_id}"
        self.record = f"{self.prefix}/sweep.json"
        self.is_cancelled = f"{self.prefix}/cancelled"
        self.end = f"{self.ENDS}{tenant}/{sweep_id}"


def last_scheduled(tenant: str, name: str) -> str:
    """The last run that a schedule made, and the data of that run."""
    return f"records/last_scheduled/{tenant}/{name}"


def art_model(tenant: str, model_id: str = "") -> str:
    """A model that a client of ART has registered. Ids sort by time."""
    return f"records/art_models/{tenant}/{model_id}"


def tinker_records(tenant: str = "") -> str:
    """The prefix of the records of clients of Tinker's SDK."""
    return f"records/tinker/{tenant}/" if tenant else "records/tinker/"


def counted_records(tenant: str) -> tuple[str, ...]:
    """The prefixes of records that a tenant's requests make. They count as bytes that it stores.

    Records that lie elsewhere, such as a run's, are noted in the tenant's ledger (stored_bytes.py).
    """
    ours = (tinker_records, art_model, art_name, schedule_record, webhook_record, file_record, chunked_upload)
    return *(prefix(tenant) for prefix in ours), SweepKeys(tenant).prefix, idempotency(tenant), sent_request(tenant)


def art_name(tenant: str, sha256: str = "") -> str:
    """The object whose creation decides which model has a name: `sha256` is the name's."""
    return f"records/art_names/{tenant}/{sha256}"


def answer_record(tenant: str, hour: int, answer_id: str) -> str:
    """The sampled token ids of an answer to a chat. The tenant's URIs cannot reach it."""
    return f"{ANSWER_RECORDS}{tenant}/{hour:08d}/{answer_id}.json"


def model_import(key: str) -> str:
    return f"models/imported/{key}"


def tokenized(key: str) -> str:
    return f"tokenized/{key}"


def packed(key: str) -> str:
    return f"packed/{key}"


def rendered_prompts(key: str) -> str:
    return f"prompts/{key}"


def completions(key: str) -> str:
    """The completions of a step, token by token."""
    return f"sampled/{key}/completions"


def samples(key: str) -> str:
    """The completions of a step, as graders see them."""
    return f"sampled/{key}/samples"


def sampled_part(key: str, group: int) -> str:
    """The finished samples of one prompt, kept until the other prompts are sampled."""
    return f"sampled/{key}-parts/{group:010d}.json"


def grouped(key: str) -> str:
    return f"grouped/{key}/groups"


def is_grouped(key: str) -> bool:
    """Return True for a key of `grouped`."""
    return re.fullmatch(r"grouped/[0-9a-f]{32}/groups", key) is not None


def grouped_report(key: str) -> str:
    """The report on a file of groups: outside the groups' folder, where every file holds groups."""
    return f"grouped/{key}/report.json"


def taught(key: str) -> str:
    return f"taught/{key}"


def graded(key: str) -> str:
    return f"graded/{key}"


def graded_part(key: str, first: int) -> str:
    """Finished grades from sample `first` on, kept while the rest is graded."""
    return f"graded/{key}-parts/{first:010d}.jsonl"


def rewarded(key: str) -> str:
    return f"rewarded/{key}"


def published(tenant: str, kind: str, name: str = "") -> str:
    """The prefix of a tenant's published versions of one name. `kind` is `adapters` or `models`."""
    return f"{tenant_folder(tenant)}/{kind}/{name}"


def published_version(tenant: str, kind: str, name: str, version: int) -> str:
    return f"{published(tenant, kind, name)}/v{version:06d}"


def version_claim(tenant: str, kind: str, name: str, version: int) -> str:
    """The object whose creation decides which run owns a version."""
    return f"{published(tenant, kind, name)}/claims/v{version:06d}.json"


def checkpoint_adapter(tenant: str, run_id: str, sha256: str) -> str:
    """The manifest that refers to a checkpoint's adapter without copying it; `sha256` is the checkpoint's."""
    return f"{tenant_folder(tenant)}/checkpoints/{run_id}/{sha256[:32]}"


def is_published(tenant: str, key: str) -> bool:
    """Return True for a key of `published_version`: only runs of this tenant write there, and no uploads."""
    pattern = rf"{re.escape(tenant_folder(tenant))}/(adapters|models)/[a-z0-9][a-z0-9._-]{{0,62}}/v[0-9]{{6,}}"
    return re.fullmatch(pattern, key) is not None


def checkpoint_adapter_run(tenant: str, key: str) -> str | None:
    """The run of a key that is one of `checkpoint_adapter`; None for any other key."""
    pattern = rf"{re.escape(tenant_folder(tenant))}/checkpoints/([a-z0-9][a-z0-9-]{{0,62}})/[0-9a-f]{{32}}"
    match = re.fullmatch(pattern, key)
    return match[1] if match else None


class HostPaths:
    """Local folders of the hosts of one root: their records, workers, the cache of staged artifacts, compiled kernels,
    and scratch.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hosts = root / "hosts"
        self.workers = root / "workers"
        self.cache = root / "cache"
        self.compiled = root / "compiled"
        self.scratch = root / "scratch"
        self.profiles = root / "profiles"

    def socket(self, queue: str) -> Path:
        """The socket at which the web service reaches the host with this task queue."""
        return self.root / "sockets" / f"{queue}.sock"

    def worker(self, worker_id: str) -> "WorkerPaths":
        return WorkerPaths(self.workers / worker_id)


class WorkerPaths:
    """The folder that a host and its worker share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record = root / "worker.json"
        self.leases = root / "leases"
        self.jobs = root / "jobs"
        self.claimed = root / "claimed"
        self.archive = root / "archive"
        self.stop = root / "stop"
        self.ready = root / "ready"
        self.meeting = root / "meeting"  # the port of torch's store, if a worker has several machines
        self.offloaded = root / "offloaded"
        self.sampler_socket = root / "sampler.sock"
        self.weights_socket = root / "weights.sock"
        self.output = root / "output.log"

    def lease(self, run_id: str) -> Path:
        """The lease of one of the runs that the worker serves."""
        return self.leases / f"{run_id}.json"

    def job(self, run_id: str, job_id: str, fence: Fence) -> Path:
        return self.jobs / f"{run_id}-{job_id}-{fence.label}.json"

    def cancel(self, run_id: str, job_id: str, fence: Fence) -> Path:
        """A file whose presence asks the worker to end this job at the next step boundary."""
        return self.root / "cancel" / f"{run_id}-{job_id}-{fence.label}"

    def outputs(self, run_id: str, job_id: str, fence: Fence) -> Path:
        """Holds `log.jsonl` and `checkpoints/` of one attempt."""
        return self.root / "outputs" / run_id / job_id / fence.label

    def scratch(self, run_id: str, job_id: str, fence: Fence) -> Path:
        return self.root / "scratch" / f"{run_id}-{job_id}-{fence.label}"
