"""The part of W&B's protocol that ART's clients use to upload the data of `train_sft`: one file, logged as an artifact.

A client whose WANDB_BASE_URL is `<service>/wandb` sends its Longshore key as W&B's. GraphQL requests are answered by
the operation's name: this is not a query engine. W&B runs are not stored, neither metrics nor program output; an
artifact's `train.jsonl` becomes one of the tenant's files, under its quotas. An artifact's id is its encoded name: the
file is its only record.
"""

import hashlib
import re
from base64 import b64decode, urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, Header, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, JsonValue

from longshore.accounts import FileView
from service.accounts.keys import Asking, Principal, reads_or_writes
from service.apis.bodies import JsonBody, JsonRoute
from service.backend import Backed, Backend
from shared.errors import InvalidInput, LongshoreError, NotFound, QuotaExceeded

WANDB = "/wandb"
URL = "wandb-artifact:///"
DATA, _MANIFEST = "train.jsonl", "wandb_manifest.json"
_PURPOSE = "wandb-artifact"
_OPERATION = re.compile(r"\s*(?:query|mutation)\s+(?P<name>[A-Za-z]{1,64})\b")
_WORD = r"[^/\\#?%:\x00-\x1f\x7f]{1,128}"
_NAME = re.compile(rf"(?P<entity>{_WORD})/(?P<project>{_WORD})/(?P<name>{_WORD})(:(v0|latest))?")
_MOST_FILES = 16
TELEMETRY = tuple(f"{at}/sdk/otel/v1/{kind}" for at in ("", WANDB) for kind in ("logs", "metrics", "traces"))
"""Where W&B's package sends what it measures of itself, by OpenTelemetry's protocol and without a key."""

router = APIRouter(
    route_class=JsonRoute, prefix=WANDB, include_in_schema=False, dependencies=[Depends(reads_or_writes)]
)


def wandb_key(path: str, header: str) -> str | None:
    """Return the Authorization header equivalent to W&B's, `Basic` of `api:<key>`; None without one."""
    scheme, _, encoded = header.partition(" ")
    if not path.startswith(f"{WANDB}/") or scheme.lower() != "basic":
        return None
    try:
        key = b64decode(encoded, validate=True).decode().partition(":")[2]
    except (Base64Error, ValueError):
        return None
    return f"Bearer {key}"


@dataclass(frozen=True)
class ArtifactName:
    """An artifact. It has one version: its name is used once."""

    entity: str
    project: str
    name: str

    @classmethod
    def parse(cls, text: str, place: str) -> Self:
        """Parse `entity/project/name`, with `:v0` or without. Raises InvalidInput."""
        if (match := _NAME.fullmatch(text)) is None:
            rule = "an artifact is entity/project/name, or that with :v0: up to 128 characters each, no / \\ # ? % :"
            raise InvalidInput(rule, place)
        return cls(match["entity"], match["project"], match["name"])

    @classmethod
    def of_id(cls, artifact_id: object) -> Self:
        """Return the artifact of an id. Raises InvalidInput."""
        try:
            return cls.parse(urlsafe_b64decode(str(artifact_id)).decode(), "artifactID")
        except (Base64Error, ValueError):
            raise InvalidInput("this is no id of an artifact", "artifactID") from None

    @property
    def id(self) -> str:
        return urlsafe_b64encode(f"{self.entity}/{self.project}/{self.name}".encode()).decode()

    @property
    def file_id(self) -> str:
        return f"file-{hashlib.sha256(f'{_PURPOSE}/{self.id}'.encode()).hexdigest()[:24]}"


async def artifact_uri(backend: Backend, tenant: str, url: str) -> str:
    """Return the URI of the data behind `wandb-artifact:///entity/project/name:v0`.

    Raises InvalidInput: it is no such URL, or the tenant has logged no such artifact here.
    """
    name = ArtifactName.parse(url.removeprefix(URL), "training_data_url")
    try:
        return (await backend.files.show(tenant, name.file_id)).uri
    except NotFound:
        rule = (
            "no artifact of this name was logged here: set WANDB_BASE_URL to <service>/wandb where train_sft runs, "
            "or upload the file to /api/v1/files and send its URI"
        )
        raise InvalidInput(rule, "training_data_url") from None


class GraphQL(BaseModel):
    """A request of GraphQL."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    query: str
    variables: dict[str, JsonValue] | None = None


@router.post("/graphql")
async def graphql(body: JsonBody[GraphQL], request: Request, asking: Asking, backend: Backed) -> dict[str, Any]:
    """Answer the operations that log an artifact. Refusals are GraphQL errors, with status 200."""
    match = _OPERATION.match(body.query)
    operation = match["name"] if match else ""
    given: Mapping[str, Any] = body.variables or {}
    try:
        if (answer := _of_a_run(operation, given, asking)) is None:
            answer = await _of_an_artifact(operation, given, _Place(backend, asking.tenant, request))
    except LongshoreError as error:
        return {"errors": [{"message": str(error)}]}
    return {"data": answer}


def _of_a_run(operation: str, given: Mapping[str, Any], asking: Principal) -> dict[str, Any] | None:
    """Answer operations on the W&B run that logs the artifact; None for other operations. Nothing is stored."""
    match operation:
        case "Viewer":
            who = {"id": asking.tenant, "entity": asking.tenant, "username": asking.tenant, "email": None}
            return {"viewer": who | {"flags": "{}", "teams": {"edges": []}}}
        case "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        case "OrganizationCoreWeaveOrganizationID":
            return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}
        case "RunResumeStatus":
            return {"model": None}
        case "UpsertBucket":
            name = _text(given, "name")
            run = {"id": "run", "name": name, "displayName": name, "description": None, "config": "{}"}
            of = {"project": _project(_text(given, "entity", asking.tenant), _text(given, "project"))}
            return {"upsertBucket": {"bucket": run | of | {"sweepName": None, "historyLineCount": 0}, "inserted": True}}
        case "CreateRunFiles":  # none: what a program printed, and its packages, stay where they are
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": []}}
        case "ArtifactType":
            return {"project": {"artifact": None}}
    return None


@dataclass(frozen=True)
class _Place:
    """Where the artifacts of a request's tenant are uploaded to."""

    backend: Backend
    tenant: str
    request: Request

    def address(self, artifact_id: str, file_name: str) -> dict[str, Any]:
        """Return the upload URL of a file. The client sends its own key there because the answer names the header."""
        key = self.request.headers.get("authorization", "")
        base = str(self.request.base_url).rstrip("/")
        return {
            "uploadUrl": f"{base}{WANDB}/artifacts/{artifact_id}/{file_name}",
            "uploadHeaders": [f"Authorization:{key}"],
        }

    async def file(self, name: ArtifactName) -> FileView | None:
        try:
            return await self.backend.files.show(self.tenant, name.file_id)
        except NotFound:
            return None


async def _of_an_artifact(operation: str, given: Mapping[str, Any], place: _Place) -> dict[str, Any]:
    asked = given.get("input")
    asked = asked if isinstance(asked, dict) else {}
    match operation:
        case "CreateArtifact":
            words = (_text(asked, key) for key in ("entityName", "projectName", "artifactCollectionName"))
            name = ArtifactName.parse("/".join(words), "input")
            if await place.file(name) is not None:
                raise InvalidInput("an artifact of this name was logged: a name is used once here", name.name)
            made = {"id": name.id, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": made}}
        case "CreateArtifactManifest" | "UpdateArtifactManifest":
            # A manifest's id is its artifact's.
            artifact_id = given.get("artifactID") or given.get("artifactManifestID")
            name = ArtifactName.of_id(artifact_id)
            manifest = {"id": name.id, "file": {"id": name.id, **place.address(name.id, _MANIFEST)}}
            return {f"{operation[0].lower()}{operation[1:]}": {"artifactManifest": manifest}}
        case "CreateArtifactFiles":
            return {"createArtifactFiles": {"files": {"edges": _edges(asked.get("artifactFiles"), place)}}}
        case "CommitArtifact":
            name = ArtifactName.of_id(given.get("artifactID"))
            if (record := await place.file(name)) is None:
                raise InvalidInput(f"its {DATA} has not come", name.name)
            return {"commitArtifact": {"artifact": {"id": name.id, "digest": record.sha256}}}
        case "ArtifactByID":
            name = ArtifactName.of_id(given.get("id"))
            return {"artifact": _described(name, await place.file(name))}
    raise InvalidInput("of W&B's protocol there is what logs an artifact with training data, and no more", operation)


def _edges(files: Any, place: _Place) -> list[dict[str, Any]]:
    if not isinstance(files, list) or not 1 <= len(files) <= _MOST_FILES:
        raise InvalidInput(f"1 to {_MOST_FILES} files of an artifact", "input.artifactFiles")
    edges = []
    for file in files:
        asked = file if isinstance(file, dict) else {}
        if asked.get("name") != DATA:
            raise InvalidInput(f"an artifact here has one file, {DATA}", "input.artifactFiles")
        name = ArtifactName.of_id(asked.get("artifactID"))
        node = {"storagePath": DATA, "uploadMultipartUrls": None, "artifact": {"id": name.id}}
        edges.append({"node": node | place.address(name.id, DATA)})
    return edges


def _described(name: ArtifactName, record: FileView | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "__typename": "Artifact",
        "id": name.id,
        "artifactSequence": {
            "__typename": "ArtifactSequence",
            "name": name.name,
            "project": _project(name.entity, name.project),
        },
        "versionIndex": 0,
        "artifactType": {"name": "dataset"},
        "description": None,
        "metadata": "{}",
        "ttlDurationSeconds": 0,
        "ttlIsInherited": True,
        "tags": [],
        "historyStep": None,
        "state": "COMMITTED",
        "size": str(record.size),
        "digest": record.sha256,
        "commitHash": record.sha256,
        "fileCount": 1,
        "createdAt": datetime.fromtimestamp(record.created_at, UTC).isoformat(),
        "updatedAt": None,
        "aliases": [],
    }


def _project(entity: str, project: str) -> dict[str, Any]:
    return {"id": project, "internalId": project, "name": project, "entity": {"id": entity, "name": entity}}


def _text(given: Mapping[str, Any], name: str, default: str = "") -> str:
    value = given.get(name) or default
    if not isinstance(value, str) or not 1 <= len(value) <= 128:
        raise InvalidInput("a text of 1 to 128 characters", name)
    return value


@router.put("/artifacts/{artifact_id}/{file_name}")
async def upload(
    artifact_id: str,
    file_name: str,
    request: Request,
    asking: Asking,
    backend: Backed,
    content_length: Annotated[int, Header(ge=0)] = 0,
) -> dict[str, str]:
    """Take an artifact's data, once; its manifest is read over."""
    name = ArtifactName.of_id(artifact_id)
    is_known = file_name != DATA or await _Place(backend, asking.tenant, request).file(name) is not None
    if is_known:
        return await passed_over(request)
    try:
        await backend.files.receive(
            asking.tenant, DATA, request.stream(), num_bytes=content_length, purpose=_PURPOSE, file_id=name.file_id
        )
    except QuotaExceeded as error:
        raise HTTPException(403, str(error)) from None  # the client repeats a 429 for hours
    return {}


@router.post("/files/{entity}/{project}/{run}/file_stream")
async def passed_over(request: Request) -> dict[str, str]:
    """Read and drop a body: a run's metrics and its program's output."""
    async for _ in request.stream():
        pass
    return {}


open_router = APIRouter(include_in_schema=False)


async def _telemetry() -> Response:
    """Accept telemetry and drop it unread: an empty protobuf message acknowledges all of it."""
    return Response(media_type="application/x-protobuf")


for _path in TELEMETRY:
    open_router.add_api_route(_path, _telemetry, methods=["POST"])
