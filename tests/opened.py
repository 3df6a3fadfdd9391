"""What Temporal keeps, opened by the installation's keys: for tests of what is in it."""

from base64 import b64encode
from typing import Any, TypeVar

from google.protobuf.message import Message
from temporalio.api.common.v1 import Payload

from service.sealing import SealKey, seal_keys, unseal
from shared.settings import Settings

M = TypeVar("M", bound=Message)


def opened(message: M, settings: Settings) -> M:
    """A message as it was before its payloads were sealed."""
    return with_opened(message, seal_keys(settings))


def with_opened(message: M, keys: tuple[SealKey, ...]) -> M:
    found = type(message)()
    found.CopyFrom(message)
    for payload in payloads_of(found):
        if (was := unseal(payload, keys)) is not None:
            payload.CopyFrom(was)
    return found


def payloads_of(message: Message) -> list[Payload]:
    """All payloads of a message, however deep; changing them changes the message."""
    if isinstance(message, Payload):
        return [message]
    found = []
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            parts = value.values() if field.message_type.fields_by_name["value"].message_type else ()
        else:
            parts = (value,) if isinstance(value, Message) else value
        found += [payload for part in parts for payload in payloads_of(part)]
    return found


def on_the_wire(payload: Payload) -> dict[str, Any]:
    """A payload in JSON, as Temporal's page sends it to a codec."""
    metadata = {name: b64encode(value).decode() for name, value in payload.metadata.items()}
    return {"metadata": metadata, "data": b64encode(payload.data).decode()}
