"""The native API's hosts and published models; keys, tenants, usage, the audit log; the codec for Temporal's page."""

import asyncio
import logging
import time
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Path, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import Base64Bytes, Field
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from temporalio.api.common.v1 import Payload

from longshore import accounts, views
from longshore.automation import GarbageView
from longshore.fields import Frozen
from longshore.runs import FIRST_TENANT, Tenant
from service.accounts import audit
from service.accounts.keys import BEARER, Asking, Keys, Principal, reads_or_writes, require, require_operator
from service.accounts.tenants import Quotas
from service.apis.bodies import JsonBody, JsonRoute, add_operations, file_answer, tar_answer
from service.apis.errors import RESPONSES
from service.backend import Backed, Backend
from service.files import PublishedFiles
from service.inference.episodes import Episodes
from service.inference.published_models import Exports, PublishedModels
from service.sealing import SealKey, public_keys, seal_keys, unseal
from shared.automation import GarbageRequest
from shared.errors import Conflict, Forbidden, InvalidInput, NotFound
from shared.runs.acceptance import precision_of
from shared.settings import Settings
from shared.storage.host_states import HostState, read_states

# --- Published models, their files and exports; and the hosts that poll ---

router = APIRouter(
    route_class=JsonRoute, prefix="/api/v1", dependencies=[*BEARER, Depends(reads_or_writes)], responses=RESPONSES
)
episodes_router = APIRouter(
    route_class=JsonRoute, prefix="/api/v1", dependencies=[*BEARER, Depends(require("inference"))], responses=RESPONSES
)
ModelId = Annotated[str, Path(max_length=128, description="`name`, its newest version; `name:v3`; `run:step-30`")]


@router.get("/hosts")
async def list_hosts(backend: Backed, asking: Asking) -> tuple[views.QueueHosts, ...]:
    """The hosts of each role: how many wait for work, what each of them is, and why some take no runs."""
    settings = backend.settings
    states = await asyncio.to_thread(read_states, backend.store, settings.shape)
    precision = await asyncio.to_thread(precision_of, "auto", settings, backend.store)
    queues: tuple[tuple[Literal["control", "gpu", "sampler"], str], ...] = (
        ("control", settings.control_queue),
        ("gpu", settings.lease_queue),
        ("sampler", settings.sampler_queue),
    )
    counts = await asyncio.gather(*(backend.temporal.num_polling(queue) for _, queue in queues))
    return tuple(
        views.QueueHosts(
            role=role,
            queue=queue,
            num_polling=count,
            lacking=tuple(
                f"{each.name} ({each.id}): {why}" if asking.is_operator else why
                for each in states
                if each.role == role
                for why in each.lacks
            ),
            precision=precision if role == "gpu" else None,
            hosts=tuple(_view(each, asking.is_operator) for each in states if each.role == role),
        )
        for (role, queue), count in zip(queues, counts, strict=True)
    )


def _view(host: HostState, by_name: bool) -> views.HostView:
    shown = host.model_dump(include={"shape", "max_ranks", "devices", "lease_since", "seen_at"})
    name = host.name if by_name else None
    return views.HostView(id=host.id, name=name, lacking=host.lacks, **shown)


add_operations(
    router,
    {"model_id": ModelId, "export": str},
    ("list_models", "GET /models", PublishedModels.views, 200),
    ("get_model", "GET /models/{model_id}", PublishedModels.view, 200),
    ("model_provenance", "GET /models/{model_id}/provenance", PublishedModels.provenance, 200),
    ("start_export", "POST /models/{model_id}/exports", Exports.start, 202),
    ("get_export", "GET /models/{model_id}/exports/{export}", Exports.view, 200),
    ("delete_export", "DELETE /models/{model_id}/exports/{export}", Exports.delete, 200),
)


add_operations(
    episodes_router,
    {
        "episode_id": str,
        "limit": Annotated[int, Query(ge=1, le=100)],
        "before": str | None,
        "first": Annotated[int, Query(ge=0, le=1024)],
    },
    ("begin_episode", "POST /episodes", Episodes.begin, 201),
    ("list_episodes", "GET /episodes", Episodes.list, 200),
    ("get_episode", "GET /episodes/{episode_id}", Episodes.show, 200),
    ("get_turns", "GET /episodes/{episode_id}/turns", Episodes.turns, 200),
    ("end_episode", "POST /episodes/{episode_id}/end", Episodes.end, 200),
)


@router.delete("/models/{model_id}")
async def delete_model(model_id: ModelId, backend: Backed, asking: Asking) -> views.DeletedVersions:
    """Delete a published model: `name:v3` deletes one version, `name` all. Their numbers are not used again."""
    audit.touched(model_id)
    await asyncio.to_thread(backend.published.delete_model, asking.tenant, model_id)
    await backend.quotas.measure(asking.tenant)
    return views.DeletedVersions(id=model_id)


@router.get("/models/{model_id}/files")
@router.get("/models/{model_id}/exports/{export}/files")
async def model_files(
    model_id: ModelId, backend: Backed, asking: Asking, export: str | None = None
) -> tuple[views.FileEntry, ...]:
    """The files of an adapter, in PEFT's format, or of a model, or of an export: paths, sizes, hashes."""
    return (await asyncio.to_thread(_files, backend, asking.tenant, model_id, export)).entries


@router.get("/models/{model_id}/files/{path:path}", response_class=Response)
@router.get("/models/{model_id}/exports/{export}/files/{path:path}", response_class=Response)
async def model_file(
    model_id: ModelId, path: str, backend: Backed, asking: Asking, export: str | None = None
) -> StreamingResponse:
    """One file of an adapter, of a model or of an export."""
    return file_answer(await asyncio.to_thread(_files, backend, asking.tenant, model_id, export), path)


@router.get("/provenance/keys")
async def provenance_keys(backend: Backed, asking: Asking) -> tuple[views.PublicKey, ...]:
    """The public keys that verify statements of this installation. Keep a copy elsewhere to trust them."""
    return await asyncio.to_thread(public_keys, backend.settings)


@router.get("/models/{model_id}/download", response_class=Response)
@router.get("/models/{model_id}/exports/{export}/download", response_class=Response)
async def download_model(
    model_id: ModelId, backend: Backed, asking: Asking, export: str | None = None
) -> StreamingResponse:
    """All files of an adapter, of a model or of an export, as a tar."""
    files = await asyncio.to_thread(_files, backend, asking.tenant, model_id, export)
    return tar_answer(files, "-".join(filter(None, (model_id.replace(":", "-"), export))))


@router.get("/models/{model_id}/base")
async def base_files(model_id: ModelId, backend: Backed, asking: Asking) -> tuple[views.FileEntry, ...]:
    """The files of the model that an adapter was trained on: with them an adapter can be merged."""
    return (await asyncio.to_thread(_base, backend, asking.tenant, model_id)).entries


@router.get("/models/{model_id}/base/{path:path}", response_class=Response)
async def base_file(model_id: ModelId, path: str, backend: Backed, asking: Asking) -> StreamingResponse:
    """One file of the model that an adapter was trained on."""
    return file_answer(await asyncio.to_thread(_base, backend, asking.tenant, model_id), path)


def _files(backend: Backend, tenant: str, model_id: str, export: str | None) -> PublishedFiles:
    if export is not None:
        artifact = backend.exports.artifact(tenant, model_id, export)
    else:
        artifact = backend.published.artifact(tenant, backend.published.find(tenant, model_id))
    return PublishedFiles.of_artifact(artifact, backend.settings.s3)


def _base(backend: Backend, tenant: str, model_id: str) -> PublishedFiles:
    target = backend.published.target_of(tenant, model_id)
    if target.adapter is None:
        raise InvalidInput("this is a whole model, and no adapter on one", "model_id")
    return PublishedFiles.of_artifact(target.model, backend.settings.s3)


# --- Keys, tenants, usage and the audit log ---

logger = logging.getLogger("longshore.service")
accounts_router = APIRouter(route_class=JsonRoute, prefix="/api/v1", dependencies=BEARER, responses=RESPONSES)
_admin = [Depends(require("admin"))]


@accounts_router.get("/whoami")
async def whoami(asking: Asking) -> Principal:
    """The tenant and the scopes of the key that asks."""
    return asking


add_operations(accounts_router, {}, ("usage", "GET /usage", Quotas.usage, 200), dependencies=[Depends(require("read"))])
add_operations(
    accounts_router,
    {"key_id": str},
    ("list_keys", "GET /keys", Keys.list, 200),
    ("revoke_key", "DELETE /keys/{key_id}", Keys.revoke, 200),
    dependencies=_admin,
)


@accounts_router.post("/keys", status_code=201, dependencies=_admin)
async def create_key(request: JsonBody[accounts.KeyRequest], backend: Backed, asking: Asking) -> accounts.NewKey:
    """Make a key. It is shown this once."""
    return await backend.keys.create(
        asking.tenant,
        title=request.title,
        scopes=request.scopes,
        expires_at=request.expires_at,
        created_by=asking.key_id,
    )


_operators = [Depends(require_operator("tenants are an affair of"))]


@accounts_router.post("/tenants", status_code=201, dependencies=_operators)
async def create_tenant(
    request: JsonBody[accounts.TenantRequest], backend: Backed, asking: Asking
) -> accounts.NewTenant:
    """Make a tenant and its first key. 409 when the name is taken."""
    backend.quotas.check_priced(request.quotas)
    try:
        tenant = await backend.tenants.create(request.tenant, request.title, request.quotas)
    except Conflict:
        keys = await backend.keys.list(request.tenant)
        is_open = any(k.revoked_at is None and (k.expires_at is None or k.expires_at > time.time()) for k in keys)
        if request.tenant == FIRST_TENANT or is_open:
            raise
        # Its making was cut off before somebody had a key to it: who tries again is given one.
        tenant = await backend.tenants.show(request.tenant)
    key = await backend.keys.create(tenant.tenant, title="first", scopes=accounts.ALL_SCOPES, created_by=asking.key_id)
    return accounts.NewTenant(tenant=tenant, key=key, warning=_shared_folders(backend))


def _shared_folders(backend: Backend) -> str | None:
    """The warning for a second tenant if all tenants may read folders of the hosts; None if no folder is open."""
    if not (roots := backend.settings.download.file_roots):
        return None
    text = f"every tenant may read files below {', '.join(map(str, roots))} on this installation's hosts"
    logger.warning("%s (download.file_roots)", text)
    return f"{text}: name other folders as download.file_roots, or with `longshore dev --open`"


@accounts_router.get("/tenants", dependencies=_operators)
async def list_tenants(backend: Backed) -> tuple[accounts.TenantView, ...]:
    """All tenants, by name."""
    return await backend.tenants.list()


@accounts_router.get("/tenants/{tenant}/usage", dependencies=_operators)
async def tenant_usage(tenant: Tenant, backend: Backed) -> accounts.TenantUsage:
    """A tenant's usage and quotas."""
    return await backend.quotas.usage((await backend.tenants.show(tenant)).tenant)


@accounts_router.put("/tenants/{tenant}/quotas", dependencies=_operators)
async def set_quotas(tenant: Tenant, quotas: JsonBody[accounts.QuotaSettings], backend: Backed) -> accounts.TenantView:
    """Set a tenant's quotas. Fields that are left out return to the installation's values."""
    backend.quotas.check_priced(quotas)
    record = await backend.tenants.set_quotas(tenant, quotas)
    backend.quotas.forget_ahead(tenant)
    return record


@accounts_router.post("/gc", dependencies=_operators)
async def collect_garbage(
    backend: Backed,
    dry_run: Annotated[bool, Query(description="only report what would be deleted")] = True,
    wait_s: Annotated[float, Query(ge=0, le=600, description="how long to wait for the end")] = 60,
) -> GarbageView:
    """Measure all tenants' storage, and delete objects that the policies expire. A repeated call joins."""
    return await backend.garbage.collect(GarbageRequest(is_dry=dry_run), wait_s)


@accounts_router.get("/audit", dependencies=_admin)
async def audit_log(
    backend: Backed,
    asking: Asking,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=1, le=2**62, description="the `next` of the previous page")] = None,
    everybody: Annotated[
        bool,
        Query(description="for the first tenant only: entries of all tenants, and of requests without a valid key"),
    ] = False,
) -> accounts.AuditPage:
    """Requests that changed something or were refused, newest first."""
    if everybody and not asking.is_operator:
        raise Forbidden("only admins of the first tenant see the log of other tenants")
    return await backend.audit.page(None if everybody else asking.tenant, limit, before)


# --- The codec of Temporal's page and command line: opens payloads for the installation's admins ---
#
# The protocol is Temporal's own, of remote codecs. Payloads are opened and never sealed: what hosts act on comes from
# the service alone.

CODEC = "/api/v1/codec"


async def _is_on(backend: Backed) -> None:
    if not backend.settings.temporal_codec:
        raise NotFound("this service opens no payloads of Temporal's: LONGSHORE_TEMPORAL_CODEC is not set")


codec_router = APIRouter(
    route_class=JsonRoute,
    prefix=CODEC,
    dependencies=[*BEARER, Depends(require_operator("payloads of all tenants are opened for")), Depends(_is_on)],
    responses=RESPONSES,
)


class WirePayload(Frozen):
    """A payload as Temporal writes it in JSON: bytes in base64."""

    metadata: dict[str, Base64Bytes] = Field(default_factory=dict)
    data: Base64Bytes = b""

    def opened(self, keys: tuple[SealKey, ...]) -> "WirePayload":
        """Return the decrypted payload, or the payload unchanged if none of the keys opens it."""
        found = unseal(Payload(metadata=self.metadata, data=self.data), keys)
        return self if found is None else WirePayload.model_construct(metadata=dict(found.metadata), data=found.data)


class WirePayloads(Frozen):
    payloads: tuple[WirePayload, ...] = Field(max_length=2000)

    def opened(self, settings: Settings) -> bytes:
        """Return JSON of the decrypted payloads. Blocking."""
        keys = seal_keys(settings)
        opened = tuple(each.opened(keys) for each in self.payloads)
        return WirePayloads.model_construct(payloads=opened).model_dump_json().encode()


@codec_router.post("/decode", response_model=WirePayloads)
async def decode(body: JsonBody[WirePayloads], backend: Backed) -> Response:
    """Open payloads of any tenant's workflows. A payload that was not sealed here is returned unchanged."""
    return Response(await asyncio.to_thread(body.opened, backend.settings), media_type="application/json")


@codec_router.post("/encode", include_in_schema=False)
async def encode() -> None:
    """Refuse: a payload is sealed for one workflow, and the protocol does not name it."""
    raise Forbidden("payloads are opened here, and none is sealed: ask Longshore's own API, which says who may")


def ui_origin(settings: Settings) -> str | None:
    """Return the origin of Temporal's page if it may use the codec; None if no page may."""
    if not (settings.temporal_codec and settings.temporal_ui):
        return None
    parts = urlsplit(settings.temporal_ui)
    return f"{parts.scheme}://{parts.netloc}"


class CodecCors(CORSMiddleware):
    """Tells browsers that Temporal's page may ask the codec, with the session of whoever has signed in here."""

    def __init__(self, app: ASGIApp, origin: str) -> None:
        headers = ("authorization", "content-type", "x-namespace")
        super().__init__(
            app, allow_origins=(origin,), allow_methods=("POST",), allow_headers=headers, allow_credentials=True
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_codec = scope["type"] == "http" and scope["path"].startswith(f"{CODEC}/")
        await (super().__call__ if is_codec else self.app)(scope, receive, send)
