"""The seals of 0.1, as that release made them: an HMAC-SHA256 beside each payload, which is not encrypted."""

import hmac
from collections.abc import Sequence
from typing import Self

from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import (
    ActivitySerializationContext,
    DataConverter,
    PayloadCodec,
    SerializationContext,
    WithSerializationContext,
    WorkflowSerializationContext,
)


class SealedBefore(PayloadCodec, WithSerializationContext):
    def __init__(self, key: bytes, scope: tuple[str, ...] = ()) -> None:
        self._key = key
        self._scope = scope

    def with_context(self, context: SerializationContext) -> Self:
        match context:
            case WorkflowSerializationContext():
                return type(self)(self._key, (context.namespace, context.workflow_id))
            case ActivitySerializationContext():
                name = context.activity_type or "" if context.workflow_id else ""
                return type(self)(self._key, (context.namespace, context.workflow_id or "", name))
        return type(self)(self._key)

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [
            Payload(metadata={**each.metadata, "longshore-seal": self._seal(each)}, data=each.data) for each in payloads
        ]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        raise NotImplementedError

    def _seal(self, payload: Payload) -> bytes:
        mac = hmac.new(self._key, digestmod="sha256")
        metadata = [part for name in sorted(payload.metadata) for part in (name.encode(), payload.metadata[name])]
        for part in (b"1", *(name.encode() for name in self._scope), b"", *metadata, b"", payload.data):
            mac.update(len(part).to_bytes(8, "big") + part)
        return mac.digest()


def data_converter(key: bytes) -> DataConverter:
    return DataConverter(payload_converter_class=PydanticPayloadConverter, payload_codec=SealedBefore(key))
