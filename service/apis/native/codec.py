"""The codec of Temporal's page and command line, `/api/v1/codec`: opens payloads for the installation's admins.

The protocol is Temporal's own, of remote codecs. Payloads are opened and never sealed: what hosts act on comes from the
service alone.
"""

import asyncio
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Response
from pydantic import Base64Bytes, Field
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from temporalio.api.common.v1 import Payload

from longshore.fields import Frozen
from service.accounts.keys import BEARER, require_operator
from service.apis.bodies import JsonBody, JsonRoute
from service.apis.errors import RESPONSES
from service.backend import Backed
from service.errors import Forbidden
from service.sealing import SealKey, seal_keys, unseal
from shared.errors import NotFound
from shared.settings import Settings

PREFIX = "/api/v1/codec"


async def _is_on(backend: Backed) -> None:
    if not backend.settings.temporal_codec:
        raise NotFound("this service opens no payloads of Temporal's: LONGSHORE_TEMPORAL_CODEC is not set")


router = APIRouter(
    route_class=JsonRoute,
    prefix=PREFIX,
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


@router.post("/decode", response_model=WirePayloads)
async def decode(body: JsonBody[WirePayloads], backend: Backed) -> Response:
    """Open payloads of any tenant's workflows. A payload that was not sealed here is returned unchanged."""
    return Response(await asyncio.to_thread(body.opened, backend.settings), media_type="application/json")


@router.post("/encode", include_in_schema=False)
async def encode() -> None:
    """Refuse: a payload is sealed for one workflow, and the protocol does not name it."""
    raise Forbidden("payloads are opened here, and none is sealed: ask Longshore's own API, which says who may")


def ui_origin(settings: Settings) -> str | None:
    """Return the origin of Temporal's page if it may use the codec; None if no page may."""
    if not (settings.temporal_codec and settings.temporal_ui):
        return None
    parts = urlsplit(settings.temporal_ui)
    return f"{parts.scheme}://{parts.netloc}"


class CodecCors:
    """Tells browsers that Temporal's page may ask the codec, with the session of whoever has signed in here."""

    def __init__(self, app: ASGIApp, origin: str | None) -> None:
        self._app = app
        self._shared = app
        if origin is not None:
            headers = ("authorization", "content-type", "x-namespace")
            self._shared = CORSMiddleware(
                app, allow_origins=(origin,), allow_methods=("POST",), allow_headers=headers, allow_credentials=True
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_codec = scope["type"] == "http" and scope["path"].startswith(f"{PREFIX}/")
        await (self._shared if is_codec else self._app)(scope, receive, send)
