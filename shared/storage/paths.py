"""The keys of the store, and the folders that a host and its worker share. They are made only here."""

import hashlib
import json
import re
from pathlib import Path
from typing import Literal

from longshore.fields import Fence, Frozen

# --- The fence: identifies one scheduling of a run's work, so that a worker can refuse an older one ---


MANIFEST = "manifest.json"
LEFT = "_left.txt"
"""In a dataset's folder: which files of its source were left, in words."""
OWN = ".own"

# Prefixes of objects of all tenants.
ANSWER_RECORDS = "answers/"
EPISODES = "episodes/"
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
        self.prefix = f"runs/{run_id.replace('.', '/')}"  # RUN.critic: of its critic's own jobs, below the run
        self.record = f"{self.prefix}/run.json"
        self.result = f"{self.prefix}/result.json"
        self.previous_result = f"{self.prefix}/previous_result.json"
        self.checkpoints = f"{self.prefix}/checkpoints"
        self.leases = f"{self.prefix}/leases"
        self.logs = f"{self.prefix}/logs"
        self.wandb = f"{self.prefix}/wandb"
        self.steps = f"{self.prefix}/steps"
        self.is_closed = f"{self.prefix}/closed"  # exists once a session takes no more commands
        self.is_expired = f"{self.prefix}/expired"  # exists once its checkpoints or commands are deleted: no resuming
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

    def own_bytes(self, split: str, num_bytes: int | Literal[""]) -> str:
        """An empty object: this many bytes of a dataset are a copy of its tenant's uploads, and do not count again."""
        return f"{self.dataset(split)}{OWN}/{num_bytes}"

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

    def admitted(self, step: int) -> str:
        """Which prompts a train step of an RL run takes, if steps carry prompts over."""
        return f"{self.prefix}/admitted/{step:08d}.json"

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


def tenant_folder(tenant: str = "") -> str:
    """The prefix of everything of the store that a tenant may name by URI."""
    return f"tenants/{tenant}"


def upload(tenant: str, sha256: str, name: str) -> str:
    return f"{tenant_folder(tenant)}/uploads/{sha256}/{name}"


def query_record(query_id: str) -> str:
    """The object that holds a user's URI with its query (places.py). Ids are hashed: users send them."""
    return f"records/queries/{hashlib.sha256(query_id.encode()).hexdigest()}"


def upload_part(tenant: str, upload_id: str, part_id: str = "") -> str:
    """The bytes of one part of an upload; they are deleted when the file is complete."""
    return f"{tenant_folder(tenant)}/parts/{upload_id}/{part_id}"


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


SAMPLES = "samples.jsonl"
"""The file of `samples`: a `SampledItem` a line."""


def samples(key: str) -> str:
    """The completions of a step, as graders see them."""
    return f"sampled/{key}/samples"


def sampled_part(key: str, group: int) -> str:
    """The finished samples of one prompt, kept until the other prompts are sampled."""
    return f"sampled/{key}-parts/{group:010d}.json"


def sampled_turn(key: str, turn: int) -> str:
    """An answer of an episode, kept until all prompts are sampled."""
    return f"sampled/{key}-turns/{turn:010d}.json"


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
