"""Publishes a checkpoint's weights under a name and version, with a model card. Versions never change."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

from activities.heartbeats import on_thread, stop_if_cancelled
from activities.host_context import HostContext
from activities.sources.http import shown_uri
from activities.tokenizing.tokenizer import end_ids_of
from longshore.dataset_runs import DatasetRun, DistillRun, DPORun, RewardRun, SFTRun
from longshore.fields import Artifact, Frozen
from longshore.losses import Preferences
from longshore.metrics import is_of_the_machine
from longshore.runs import FIRST_TENANT, RLRun, Run, RunId, Tenant, dtype_of
from longshore.training import Full, Lora, SessionRun
from longshore.views import CheckpointRef, Envelope, FileEntry
from shared import provenance
from shared.automation import BestRequest
from shared.errors import CorruptArtifact, NotFound
from shared.jobs.job import ONLY_JOB
from shared.models.end_tokens import GENERATION, with_end_ids
from shared.provenance import Statement, started_of, statement_of
from shared.storage.artifacts import read_manifest, read_record
from shared.storage.files import copy_file
from shared.storage.paths import MANIFEST, RunKeys, published, published_version, version_claim
from shared.storage.store import ObjectStore, open_uri

# --- The card of a published adapter or model: its origin and measurements. The same run gives the same text ---

_METHODS = {
    "sft": "Supervised fine-tuning",
    "dpo": "Direct preference optimisation (DPO)",
    "distill": "Distillation",
    "reward": "A reward model",
    "rl": "Reinforcement learning",
    "session": "A session",
}
REGISTERING = """\
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

register_checkpoint_conversion_mapping("qwen3_5_moe", get_checkpoint_conversion_mapping("qwen2_moe"))
"""
_IN_PEFT = f"""## Loading with PEFT

PEFT 0.21 leaves out experts' adapters beside a model that reads images, unless this is said before:

```python
{REGISTERING}```
"""
_SENT = {"rl": "trajectories that a client sent", "session": "commands that a client sent"}


def model_card(
    run: Run, metrics: Mapping[str, float], report: Mapping[str, object], adapter: Mapping[str, object]
) -> str:
    """README.md, with the front matter that hubs read. It has no dates, versions or timings.

    `adapter`: the content of its `adapter_config.json`, if it has one.
    """
    if isinstance(run, RLRun | SessionRun):
        data = _SENT[run.kind]
    else:
        data = ", ".join(f"`{shown_uri(source.uri)}`" for source in run.sources)
    method = _METHODS[run.kind]
    if isinstance(run, DPORun) and run.objective != "sigmoid":
        method = f"Preference optimisation ({run.objective})"
    kind = "LoRA adapter" if run.trainable.kind == "lora" else "Fully fine-tuned model"
    library = "peft" if run.trainable.kind == "lora" else "transformers"
    return "\n".join(
        [
            "---",
            f"base_model: {run.model}",
            f"library_name: {library}",
            f"tags: [longshore, {run.kind}]",
            "---",
            f"# {kind} of {run.model}",
            "",
            f"{method} by Longshore on {data}.",
            "",
            *([_IN_PEFT] if {"exclude_modules", "target_parameters"} <= adapter.keys() else []),
            "## Metrics",
            *_table({n: f"{v:.6g}" for n, v in metrics.items() if not is_of_the_machine(n)}),
            "## Training",
            *_table(_hyperparameters(run)),
            "## Data",
            *_table({name: str(value) for name, value in report.items() if isinstance(value, int | float)}),
        ]
    )


def _hyperparameters(run: Run) -> dict[str, str]:
    match run.trainable:
        case Lora() as lora:
            given = lora.model_dump(exclude={"kind", "targets"}, exclude_defaults=True)
            shown = {"rank": lora.rank, "alpha": f"{lora.alpha:g}", "targets": ", ".join(lora.targets)} | given
            method = {f"LoRA {name.replace('_', ' ')}": str(value) for name, value in shown.items()}
        case Full():
            method = {"trained": "all weights"}
    fixed = {"dtype": dtype_of(run), "seed": str(run.seed)}
    if isinstance(run, SessionRun):  # its client sets the other hyperparameters at each step
        return {**method, **fixed}
    own = _of_reinforcement(run) if run.kind == "rl" else _of_dataset(run)
    chosen = ("optimizer", "decay", "lora_plus_ratio")  # shown if they are not the defaults
    own |= {n.replace("_", " "): str(v) for n, v in run.model_dump(include={*chosen}, exclude_defaults=True).items()}
    return {**method, **own, "weight decay": f"{run.weight_decay:g}", "clip norm": f"{run.clip_norm:g}", **fixed}


def _of_dataset(run: DatasetRun) -> dict[str, str]:
    match run:
        case SFTRun():
            own = {}
        case DPORun():
            reference = run.reference or run.initial_adapter or "base"
            named = "the base model" if reference == "base" else f"`{shown_uri(reference)}`"
            fields = run.model_dump(include=set(Preferences.model_fields), exclude_defaults=True)
            own = {name.replace("_", " "): str(value) for name, value in fields.items()} | {
                "beta": f"{run.beta:g}",
                "label smoothing": f"{run.label_smoothing:g}",
                "reference": named if run.has_reference else "none",
            }
        case RewardRun():
            own = {"objective": run.objective, "rewards": ", ".join(run.head.names), "center": f"{run.center:g}"}
        case DistillRun():
            own = {
                "teacher": "the base model" if run.teacher == "base" else f"`{shown_uri(run.teacher)}`",
                **{
                    f"teacher {name}": "the base model" if u == "base" else f"`{shown_uri(u)}`"
                    for name, u in run.teachers
                },
                "divergence": run.divergence + (f", skew {run.skew:g}" if run.skew is not None else ""),
                "compared": f"top {run.top_k}" if run.top_k else run.tokens,
                "temperature": f"{run.temperature:g}",
            }
    return own | {
        "length": f"{run.epochs:g} epochs" if run.epochs is not None else f"{run.steps} steps",
        "batch": f"{run.batch_size} examples" if run.batch_size is not None else f"{run.batch_tokens} tokens",
        "longest example": f"{run.max_tokens} tokens",
        "learning rate": f"{run.learning_rate:g}, {run.schedule}, {run.warmup_steps} warm-up steps",
    }


def _of_reinforcement(run: RLRun) -> dict[str, str]:
    return {
        "loss": run.loss.model_dump_json(exclude_none=True),
        "advantages": run.advantages.replace("_", " "),
        "optimizer steps": f"{run.epochs} x {run.mini_batches} a train step",
        "longest trajectory": f"{run.max_tokens} tokens",
        "learning rate": f"{run.learning_rate:g}, {run.schedule}, {run.warmup_steps} warm-up steps",
    }


def _table(rows: Mapping[str, str]) -> list[str]:
    return ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in sorted(rows.items())), ""]


Kind = Literal["adapters", "models"]
# Files that come from the checkpoint; all others of a fully fine-tuned model come from the base model's folder.
_WEIGHTS = (".safetensors", ".safetensors.index.json")
Sign = Callable[[Statement], Envelope]
MakeStatement = Callable[[Sequence[FileEntry]], Statement]


class PublishRequest(Frozen):
    """A checkpoint to publish. `metrics` and `report_uri` go into the card.

    `step`: the number of the step, for a run that publishes several versions; else None.
    """

    run_id: RunId
    tenant: Tenant = FIRST_TENANT
    run: Run
    step: int | None = None
    model: Artifact
    checkpoint: CheckpointRef
    report_uri: str | None
    metrics: dict[str, float]


class Published(Frozen):
    """A published version; `sha256` is its manifest's."""

    uri: str
    sha256: str
    name: str
    version: int


class Claim(Frozen):
    """A run's claim of a version. If the run publishes several, with the step and the hash of its checkpoint.

    The hash distinguishes two steps with one number: an unrecorded step's number is used again.
    """

    run_id: RunId
    step: int | None = None
    checkpoint_sha256: str | None = None


class Publish:
    """Puts an adapter, or a whole model after full fine-tuning, where users and servers find it."""

    def __init__(self, host: HostContext, sign: Sign | None = None) -> None:
        """`sign`: signs the statement beside each version; without it, no statement is written."""
        self._host = host
        self._sign = sign

    @on_thread("publish")
    def publish(self, request: PublishRequest) -> Published:
        """Publish as the next free version of the name; a run has one version, however often this is tried.

        Raises CorruptArtifact: the checkpoint, or the published version, does not match its manifest.
        """
        kind: Kind = "adapters" if request.run.trainable.kind == "lora" else "models"
        name = request.run.name or request.run_id
        claim = Claim(run_id=request.run_id)
        if request.step is not None:
            sha256 = request.checkpoint.artifact.sha256
            claim = Claim(run_id=request.run_id, step=request.step, checkpoint_sha256=sha256)
        version = claim_version(self._host.store, request.tenant, kind, name, claim)
        key = published_version(request.tenant, kind, name, version)
        artifact = self._made(key, partial(self._fill, request), partial(self._made_from, request, key))
        return Published(uri=artifact.uri, sha256=artifact.sha256, name=name, version=version)

    @on_thread("publish_best")
    def publish_best(self, request: BestRequest) -> Published:
        """Publish the version of a sweep's best trial again, under the sweep's name.

        It is a copy: either of the two may be deleted. Raises as `publish`.
        """
        claim = Claim(run_id=request.run_id)
        version = claim_version(self._host.store, request.tenant, request.kind, request.name, claim)
        key = published_version(request.tenant, request.kind, request.name, version)
        stage = self._host.stage
        made_from = partial(statement_of, place=key, run_id=request.run_id, settings={}, copied=request.artifact)
        artifact = self._made(key, lambda folder: _copy(stage(request.artifact), folder, lambda name: True), made_from)
        return Published(uri=artifact.uri, sha256=artifact.sha256, name=request.name, version=version)

    def _made(self, key: str, make: Callable[[Path], object], made_from: MakeStatement) -> Artifact:
        """Make a version, and then sign what it was made from. A version with a signed statement is kept.

        Without a statement the version is remade even if its files exist: we do not sign files that others may have
        written.
        """
        statement = f"{key}/{provenance.NAME}"
        if self._sign is None or self._host.store.head(statement) is not None:
            return self._host.made_once(key, "publish", make)
        artifact = self._host.made_once(key, "publish", make, anew=True)
        files = read_manifest(self._host.store, key, artifact.sha256).files
        self._host.store.put_if_absent(statement, self._sign(made_from(files)).model_dump_json().encode())
        return artifact

    def _made_from(self, request: PublishRequest, key: str, files: Sequence[FileEntry]) -> Statement:
        """Make the statement of a checkpoint's version, with the job that made it and how that began if on record."""
        fence, job, started = request.checkpoint.fence, None, None
        for job_id in dict.fromkeys((f"{request.step or 1:06d}", ONLY_JOB)):  # a step of RL is a job
            with suppress(NotFound):
                job = self._host.store.get_bytes(RunKeys(request.run_id).job(job_id, fence))
                started = started_of(self._host.store, request.run_id, job_id, fence)
                break
        settings = request.run.model_dump(mode="json")
        return statement_of(files, key, request.run_id, settings, request.checkpoint.artifact, job, started)

    def _fill(self, request: PublishRequest, folder: Path) -> None:
        checkpoint = self._host.stage(request.checkpoint.artifact)
        _copy(checkpoint / "weights", folder, lambda name: True)
        adapter: dict[str, object] = {}
        if request.run.trainable.kind == "lora":
            # PEFT finds the base model by this name. Patterns stay in their order, as the first that matches counts.
            config = folder / "adapter_config.json"
            adapter = json.loads(config.read_bytes())
            adapter["base_model_name_or_path"] = request.run.model.removeprefix("file://")
            config.write_text(json.dumps(adapter, indent=2) + "\n")
        else:
            model = self._host.stage(request.model)
            _copy(model, folder, lambda name: not name.endswith(_WEIGHTS) and not (folder / name).exists())
        # The generation config is written, for adapters too, if the model's own lacks tokens that end its answers.
        base = self._host.stage(request.model, only=(GENERATION, "config.json"))
        if (kept := with_end_ids(base, end_ids_of(self._host, request.model))) is not None:
            (folder / GENERATION).write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
        report = self._report(request.report_uri) if request.report_uri is not None else {}
        (folder / "README.md").write_bytes(model_card(request.run, request.metrics, report, adapter).encode())

    def _report(self, uri: str) -> dict[str, object]:
        store, key = open_uri(uri, self._host.settings.s3)
        try:
            report: dict[str, object] = json.loads(store.get_bytes(key))
        except ValueError as error:
            raise CorruptArtifact(f"the file is damaged: {error}", uri) from error
        return report


def claim_version(store: ObjectStore, tenant: str, kind: Kind, name: str, mine: Claim) -> int:
    """Return the version of `name` that a claim owns; if it has none yet, claim the next free one."""
    num_claims = sum(1 for _ in store.list(f"{published(tenant, kind, name)}/claims/"))
    for number in range(num_claims, 0, -1):
        claim = read_record(store, version_claim(tenant, kind, name, number), Claim)
        if claim == mine:
            return number
        if claim.run_id == mine.run_id and (claim.step or 0) < (mine.step or 0):
            break  # older claims are of earlier steps, as a run claims in order
    version, data = num_claims + 1, mine.model_dump_json(exclude_none=True).encode()
    while not store.put_if_absent(version_claim(tenant, kind, name, version), data):
        if read_record(store, version_claim(tenant, kind, name, version), Claim) == mine:
            break
        version += 1
    return version


def _copy(source: Path, target: Path, is_wanted: Callable[[str], bool]) -> None:
    """Copy the wanted files of a flat folder, its manifest left out."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != MANIFEST and is_wanted(path.name):
            with path.open("rb") as file, (target / path.name).open("wb") as copy:
                copy_file(file, copy, stop_if_cancelled)
