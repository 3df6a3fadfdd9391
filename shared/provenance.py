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
from typing import Literal

from pydantic import ConfigDict, Field

from longshore.fields import Artifact, Frozen, Sha256
from shared.errors import NotFound
from shared.jobs.events import Started, parse_event
from shared.jobs.job import Job, artifacts_of
from shared.storage.artifacts import FileEntry
from shared.storage.paths import Fence, RunKeys
from shared.storage.store import ObjectStore

NAME = "provenance.json"
"""The envelope's file, in its version's folder. No manifest names it."""
PAYLOAD_TYPE = "application/vnd.in-toto+json"
_FIRST_LINE_BYTES = 1 << 16
_PLACE = "version_sha256"
_PACKAGES = ("longshore", "megatron_worker", "shared")
_LIBRARIES = ("torch", "megatron-core", "triton", "transformers", "safetensors", "numpy")


class Digest(Frozen):
    sha256: Sha256


class Resource(Frozen):
    """An input, identified by its hash. `uri`: its location, unless only the tenant may know that."""

    name: str
    digest: Digest
    uri: str | None = None

    @classmethod
    def of(cls, name: str, sha256: str, uri: str | None = None) -> "Resource":
        return cls(name=name, digest=Digest(sha256=sha256), uri=uri)


class _Named(Frozen):
    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)


class BuildDefinition(_Named):
    """The causes of the weights: the run's settings (the whole request as a hash), and all inputs.

    The external parameters include a hash of the version's key, which has its tenant, name and number.
    """

    build_type: Literal["urn:longshore:run:v1"] = Field(default="urn:longshore:run:v1", alias="buildType")
    external_parameters: dict[str, str] = Field(alias="externalParameters")
    internal_parameters: dict[str, str] = Field(alias="internalParameters")
    resolved_dependencies: tuple[Resource, ...] = Field(alias="resolvedDependencies")


class Builder(_Named):
    """What made the weights. `version`: `longshore`, the version, and `code`, the worker's `code_sha256`."""

    id: str = "urn:longshore:worker"
    version: dict[str, str]


class Metadata(_Named):
    invocation_id: str = Field(alias="invocationId", description="id of the run")


class RunDetails(_Named):
    builder: Builder
    metadata: Metadata
    byproducts: tuple[Resource, ...] = Field(
        description="the job file and the checkpoint from which the weights were made"
    )


class Predicate(_Named):
    build_definition: BuildDefinition = Field(alias="buildDefinition")
    run_details: RunDetails = Field(alias="runDetails")


class Statement(_Named):
    """The signed statement. `subject`: the files of the version."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(default="https://in-toto.io/Statement/v1", alias="_type")
    subject: tuple[Resource, ...]
    predicate_type: Literal["https://slsa.dev/provenance/v1"] = Field(
        default="https://slsa.dev/provenance/v1", alias="predicateType"
    )
    predicate: Predicate

    def is_of(self, place: str) -> bool:
        """Return True if it was signed for the version at this key of the store, and for no other version."""
        return self.predicate.build_definition.external_parameters.get(_PLACE) == _sha256(place)

    def differing(self, files: Iterable[FileEntry]) -> list[str]:
        """Return the paths of files that differ from the statement, that it does not name, or that are missing."""
        here = {entry.path: entry.sha256 for entry in files}
        said = {each.name: each.digest.sha256 for each in self.subject}
        return sorted(path for path in here.keys() | said.keys() if here.get(path) != said.get(path))


class Signature(Frozen):
    """`keyid`: the SHA-256 of the public key's 32 bytes; `sig`: Ed25519 of `signed_bytes`, in base64."""

    keyid: str
    sig: str


class Envelope(_Named):
    """DSSE's envelope. `payload`: the statement as JSON, in base64."""

    payload: str
    payload_type: str = Field(default=PAYLOAD_TYPE, alias="payloadType")
    signatures: tuple[Signature, ...] = ()

    @classmethod
    def around(cls, statement: Statement) -> "Envelope":
        content = statement.model_dump(mode="json", exclude_none=True)
        return cls(payload=base64.b64encode(json.dumps(content, sort_keys=True).encode()).decode())

    @property
    def signed_bytes(self) -> bytes:
        """The signed bytes: DSSE's pre-authentication encoding of type and payload. Raises ValueError."""
        body = base64.b64decode(self.payload, validate=True)
        return b" ".join((b"DSSEv1", *(b"%d %s" % (len(part), part) for part in (self.payload_type.encode(), body))))

    @property
    def statement(self) -> Statement:
        """Return the statement without checking a signature. Raises ValueError if the payload is no statement."""
        return Statement.model_validate_json(base64.b64decode(self.payload, validate=True))


class PublicKey(Frozen):
    """A key of this installation that verifies statements. `pem`: SubjectPublicKeyInfo of Ed25519."""

    keyid: str
    pem: str


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
    read = None if job is None else Job.model_validate_json(job)
    internal: dict[str, str] = {}
    if read is not None:
        plan = read.plan
        internal = {"engine": plan.engine, "layout": str(plan.layout), "dtype": plan.dtype, "seed": str(plan.seed)}
    if started is not None:
        internal |= {"device": started.device, "ranks": str(started.world_size)}
    byproducts = [
        *([] if job is None else [Resource.of("job", hashlib.sha256(job).hexdigest())]),
        *([] if checkpoint is None else [Resource.of("checkpoint", checkpoint.sha256)]),
    ]
    built_by = {"longshore": _version_of("longshore")} | (
        {"code": started.code} if started is not None and started.code is not None else {}
    )
    return Statement(
        subject=tuple(Resource.of(entry.path, entry.sha256) for entry in files),
        predicate=Predicate(
            build_definition=BuildDefinition(
                external_parameters={
                    "request_sha256": _sha256(json.dumps(settings, sort_keys=True)),
                    _PLACE: _sha256(place),
                },
                internal_parameters=internal,
                resolved_dependencies=tuple(_inputs(read, copied)),
            ),
            run_details=RunDetails(
                builder=Builder(version=built_by),
                metadata=Metadata(invocation_id=run_id),
                byproducts=tuple(byproducts),
            ),
        ),
    )


def _inputs(job: Job | None, copied: Artifact | None) -> Iterable[Resource]:
    if copied is not None:
        yield Resource.of("copied version", copied.sha256)
    if job is None:
        return
    names = {job.plan.model: "base model"}
    names |= {each: f"data {part}" for data in job.plan.packed for part, each in _parts(data)}
    for artifact in dict.fromkeys(artifacts_of(job)):
        yield Resource.of(names.get(artifact, "weights"), artifact.sha256)


def _parts(data: object) -> Iterable[tuple[str, Artifact]]:
    return ((name, value) for name, value in vars(data).items() if isinstance(value, Artifact))


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
