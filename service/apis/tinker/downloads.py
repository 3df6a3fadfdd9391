"""Files of checkpoints, by signed URLs: whoever has one may read the file for an hour, without a key.

An address ends with the key that asked for it.
"""

import asyncio
import hmac
import json
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from contextlib import suppress

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from service.accounts.principals import Principal
from service.apis.tinker.addresses import TINKER_FILES
from service.apis.tinker.gateway import Gateway
from service.apis.tinker.records import CheckpointRecord, TinkerRecords
from service.apis.tinker.samples import weights_of
from service.backend import Backed, Backend
from service.errors import Forbidden
from service.files.files import PublishedFiles
from service.inference.published_models import PublishedModel
from service.sealing.keys import SealKey, seal_keys
from shared.errors import NotFound

router = APIRouter(prefix=TINKER_FILES.rstrip("/"), include_in_schema=False)
ARCHIVE = "archive.tar"
_LASTS_S = 3600.0


async def files_of(gateway: Gateway, checkpoint: CheckpointRecord) -> PublishedFiles:
    """Open the adapter of a checkpoint, as PEFT's files. Raises NotFound."""
    target, _ = await weights_of(gateway, None, checkpoint.path)
    assert target.adapter is not None
    return await asyncio.to_thread(PublishedFiles.of_artifact, target.adapter, gateway.backend.settings.s3)


async def unpublish(gateway: Gateway, checkpoint: CheckpointRecord) -> None:
    """Delete the version that a checkpoint has published, if it has."""
    with suppress(NotFound):
        model, result = await gateway.saved(checkpoint)
        if result.version is not None:
            version = PublishedModel("adapters", model.published_as, result.version)
            await asyncio.to_thread(gateway.backend.published.delete, gateway.tenant, version)


def signed(gateway: Gateway, checkpoint: CheckpointRecord, base_url: str) -> tuple[str, float]:
    """Return the address of a checkpoint's files, and when it ends."""
    expires = time.time() + _LASTS_S
    told = urlsafe_b64encode(
        json.dumps([gateway.tenant, checkpoint.path, expires, gateway.asking.key_id]).encode()
    ).decode()
    token = f"{told}.{_signature(seal_keys(gateway.backend.settings)[0], told)}"
    return f"{base_url.rstrip('/')}{TINKER_FILES}{token}", expires


def _signature(key: SealKey, told: str) -> str:
    return key.derived(f"tinker files {told}".encode()).hex()


def _opened(backend: Backend, token: str) -> tuple[Gateway, str]:
    """Return the gateway and the checkpoint's path of a token. Raises Forbidden: it is not ours, or has ended."""
    told, _, signature = token.partition(".")
    ours = (_signature(key, told).encode() for key in seal_keys(backend.settings))
    if not any(hmac.compare_digest(each, signature.encode()) for each in ours):
        raise Forbidden("this address is not signed here")
    try:
        tenant, path, expires, key_id = json.loads(urlsafe_b64decode(told))
    except (Base64Error, ValueError):
        raise Forbidden("this address is not signed here") from None
    if expires < time.time():
        raise Forbidden("this address has ended: ask for a new one")
    principal = Principal(tenant=tenant, key_id=key_id, scopes=frozenset())
    return Gateway(backend, principal, TinkerRecords(backend.store, backend.quotas, tenant)), path


@router.get("/{token}/{path}")
async def download(token: str, path: str, backend: Backed) -> StreamingResponse:
    """Send one file of a checkpoint's adapter, or all of them as a tar."""
    gateway, checkpoint_path = await asyncio.to_thread(_opened, backend, token)
    if not await backend.keys.is_good(gateway.asking.key_id):
        raise Forbidden("the key that asked for this address is good no longer")
    checkpoint = await gateway.read(gateway.records.checkpoint, checkpoint_path)
    files = await files_of(gateway, checkpoint)
    if path == ARCHIVE:
        return StreamingResponse(files.tar(checkpoint.name), media_type="application/x-tar")
    entry = files.entry(path)
    headers = {"content-length": str(entry.size)}
    return StreamingResponse(files.content(entry), media_type="application/octet-stream", headers=headers)
