"""Provenance: a signed statement next to every published version, of its inputs and the code that made it.

An in-toto statement (version 1 of its attestation framework) whose predicate is SLSA's provenance (version 1), in a
DSSE envelope (version 1.0.2 of its specification), so that others' tools read it, too. It has no dates: publishing
again makes the same bytes.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from longshore.events import Started, parse_event
from longshore.fields import Artifact, Fence, Frozen
from longshore.views import Envelope, FileEntry
from shared.errors import NotFound
from shared.jobs.job import Job, artifacts_of
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

NAME = "provenance.json"
"""The envelope's file, in its version's folder. No manifest names it."""
_FIRST_LINE_BYTES = 1 << 16
_PLACE = "version_sha256"
_PACKAGES = ("longshore", "megatron_worker", "shared")
_LIBRARIES = ("torch", "megatron-core", "triton", "transformers", "safetensors", "numpy")


Resource = dict[str, Any]
"""A file or an artifact: `{"name": …, "digest": {"sha256": …}}`."""


class _Named(Frozen):
    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)


class Statement(_Named):
    """The signed statement. `subject`: the files of the version. `predicate`: SLSA's, as `statement_of` writes it."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(default="https://in-toto.io/Statement/v1", alias="_type")
    subject: tuple[Resource, ...]
    predicate_type: Literal["https://slsa.dev/provenance/v1"] = Field(
        default="https://slsa.dev/provenance/v1", alias="predicateType"
    )
    predicate: dict[str, Any]

    def is_of(self, place: str) -> bool:
        """Return True if it was signed for the version at this key of the store, and for no other version."""
        named = self.predicate.get("buildDefinition", {}).get("externalParameters", {})
        return bool(named.get(_PLACE) == _sha256(place))

    def differing(self, files: Iterable[FileEntry]) -> list[str]:
        """Return the paths of files that differ from the statement, that it does not name, or that are missing."""
        here = {entry.path: entry.sha256 for entry in files}
        said = {each["name"]: each["digest"]["sha256"] for each in self.subject}
        return sorted(path for path in here.keys() | said.keys() if here.get(path) != said.get(path))

    @property
    def run_id(self) -> str:
        return str(self.predicate["runDetails"]["metadata"]["invocationId"])

    @property
    def causes(self) -> list[tuple[str, str]]:
        """What made the weights, by name: versions and settings, then the SHA-256 of inputs, job and checkpoint."""
        built, details = self.predicate["buildDefinition"], self.predicate["runDetails"]
        artifacts = (*built["resolvedDependencies"], *details["byproducts"])
        hashes = [(each["name"], each["digest"]["sha256"]) for each in artifacts]
        return [*details["builder"]["version"].items(), *built["internalParameters"].items(), *hashes]


def enveloped(statement: Statement) -> Envelope:
    """Return the envelope of a statement, not signed."""
    content = statement.model_dump(mode="json")
    return Envelope(payload=base64.b64encode(json.dumps(content, sort_keys=True).encode()).decode())


def statement_in(envelope: Envelope) -> Statement:
    """Return the statement without checking a signature. Raises ValueError if the payload is no statement."""
    return Statement.model_validate_json(base64.b64decode(envelope.payload, validate=True))


def started_of(store: ObjectStore, run_id: str, job_id: str, fence: Fence) -> Started | None:
    """Return the first event of a running or ended job; None if it is not recorded."""
    keys = RunKeys(run_id)
    for log in (keys.log(job_id, fence), keys.log_part(job_id, fence, 1)):
        with suppress(NotFound):
            first = parse_event(store.read_range(log, 0, _FIRST_LINE_BYTES).split(b"\n", 1)[0])
            return first if isinstance(first, Started) else None
    return None


def statement_of(
    files: Iterable[FileEntry],
    place: str,
    run_id: str,
    settings: Mapping[str, object],
    checkpoint: Artifact | None = None,
    job: bytes | None = None,
    started: Started | None = None,
    copied: Artifact | None = None,
) -> Statement:
    """Make the statement of a version.

    Args:
        place: the version's key in the store. Only its hash is included, because the key names the tenant.
        settings: the run's request. Only its hash is included, because published versions may be passed on.
        job: the file of the job that made the checkpoint, if it is recorded.
        started: that job's first event.
        copied: the version that this one is a copy of.
    """
    internal, versions, inputs = {}, {"longshore": _version_of("longshore")}, list[tuple[str, str]]()
    byproducts = [] if checkpoint is None else [("checkpoint", checkpoint.sha256)]
    if copied is not None:
        inputs.append(("copied version", copied.sha256))
    if job is not None:
        read = Job.model_validate_json(job)
        plan = read.plan
        internal = {"engine": plan.engine, "layout": str(plan.layout), "dtype": plan.dtype, "seed": str(plan.seed)}
        data = [item for packed in plan.packed for item in vars(packed).items() if isinstance(item[1], Artifact)]
        names = {plan.model: "base model"} | {artifact: f"data {part}" for part, artifact in data}
        inputs += [(names.get(each, "weights"), each.sha256) for each in dict.fromkeys(artifacts_of(read))]
        byproducts.insert(0, ("job", hashlib.sha256(job).hexdigest()))
    if started is not None:
        internal |= {"device": started.device, "ranks": str(started.world_size)}
        versions |= {} if started.code is None else {"code": started.code}
    return Statement(
        subject=tuple(_resource(entry.path, entry.sha256) for entry in files),
        predicate={
            "buildDefinition": {
                "buildType": "urn:longshore:run:v1",
                "externalParameters": {
                    "request_sha256": _sha256(json.dumps(settings, sort_keys=True)),
                    _PLACE: _sha256(place),
                },
                "internalParameters": internal,
                "resolvedDependencies": [_resource(*each) for each in inputs],
            },
            "runDetails": {
                "builder": {"id": "urn:longshore:worker", "version": versions},
                "metadata": {"invocationId": run_id},
                "byproducts": [_resource(*each) for each in byproducts],
            },
        },
    )


def _resource(name: str, sha256: str) -> Resource:
    return {"name": name, "digest": {"sha256": sha256}}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def code_sha256() -> str:
    """Return a hash of the code that this process runs: our sources, and the versions of the libraries."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations is not None
        folder = Path(spec.submodule_search_locations[0])
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(folder).as_posix()}\n".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    for library in _LIBRARIES:
        digest.update(f"{library} {_version_of(library)}\n".encode())
    return digest.hexdigest()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
