"""Seal every payload that goes through Temporal: whoever reaches the Temporal server cannot start a run.

Every payload (inputs of workflows and activities, signals, updates, results) carries an HMAC-SHA256 over its bytes, the
id of the workflow that it belongs to and, for an activity's input or result, the activity's name. The service and the
hosts hold the key. Payloads without a valid seal, or from another workflow, are refused: a start fails at once, a
signal is dropped, an update is rejected, an activity is not run. A seal does not prevent reuse: a run's first activity
checks that its input is not used twice (activities/records/run_records.py). Payloads are not encrypted; a codec that
encrypts could replace this one.
"""

import hmac
import os
import re
import secrets
from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from temporalio.api.common.v1 import Payload
from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import (
    ActivitySerializationContext,
    CompositePayloadConverter,
    DataConverter,
    EncodingPayloadConverter,
    PayloadCodec,
    SerializationContext,
    WithSerializationContext,
    WorkflowSerializationContext,
)
from temporalio.exceptions import ApplicationError
from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from shared.settings import Settings
from shared.storage.files import private_folder

UNSEALED = "Unsealed"
"""The error type of payloads without a valid seal."""

_SEAL = "longshore-seal"
_REFUSED = "longshore/refused"
_VERSION = b"1"
_KEY_FILE = "seal.key"
# Temporal gives what a schedule starts the id of the schedule's action and the time.
_ACTION = re.compile(r"(schedule/.*)-\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


class Sealing(PayloadCodec, WithSerializationContext):
    """Seals payloads that are sent and checks the seals of those received."""

    def __init__(self, key: bytes, scope: tuple[str, ...] = ()) -> None:
        """`scope`: the workflow, and possibly the activity, for which seals are valid."""
        self._key = key
        self._scope = scope

    def with_context(self, context: SerializationContext) -> Self:
        match context:
            case WorkflowSerializationContext():
                return type(self)(self._key, (context.namespace, _id_of(context)))
            case ActivitySerializationContext():
                # Where the result of an activity without a workflow is read, its name is not known.
                name = context.activity_type or "" if context.workflow_id else ""
                return type(self)(self._key, (context.namespace, _id_of(context), name))
            case _:
                return type(self)(self._key)

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [_with_metadata(payload, {_SEAL: self._seal(payload)}) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Return payloads without their seals. One without a valid seal for this scope cannot be converted later."""
        return [self._checked(payload) for payload in payloads]

    def _checked(self, payload: Payload) -> Payload:
        if not hmac.compare_digest(payload.metadata.get(_SEAL, b""), self._seal(payload)):
            return _refused()
        return _with_metadata(payload, {})

    def _seal(self, payload: Payload) -> bytes:
        mac = hmac.new(self._key, digestmod="sha256")
        metadata = [part for item in _bare_metadata(payload).items() for part in (item[0].encode(), item[1])]
        for part in (_VERSION, *(name.encode() for name in self._scope), b"", *metadata, b"", payload.data):
            mac.update(len(part).to_bytes(8, "big") + part)
        return mac.digest()


def _id_of(context: WorkflowSerializationContext | ActivitySerializationContext) -> str:
    action = _ACTION.fullmatch(context.workflow_id or "")
    return action[1] if action else context.workflow_id or ""


def _bare_metadata(payload: Payload) -> dict[str, bytes]:
    return {name: payload.metadata[name] for name in sorted(payload.metadata) if name != _SEAL}


def _with_metadata(payload: Payload, more: dict[str, bytes]) -> Payload:
    return Payload(metadata=_bare_metadata(payload) | more, data=payload.data)


class _Refusal(EncodingPayloadConverter):
    """Raises an error for a payload that `Sealing` has refused."""

    @property
    def encoding(self) -> str:
        return _REFUSED

    def to_payload(self, value: Any) -> Payload | None:
        return None

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        raise ApplicationError("not sealed by this installation for this workflow", type=UNSEALED, non_retryable=True)


class SealedRunner(SandboxedWorkflowRunner):
    """Temporal's sandbox. It also checks that no input of a workflow or handler is missing, and so without a seal."""

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        instance = super().create_instance(det)
        instance.activate = partial(_activate, instance.activate, det.defn)  # type: ignore[method-assign]
        return instance


def _activate(
    activate: Callable[[WorkflowActivation], WorkflowActivationCompletion],
    definition: Any,
    activation: WorkflowActivation,
) -> WorkflowActivationCompletion:
    """Activate a workflow, and refuse missing inputs, with which the SDK itself would retry for ever."""
    for job in activation.jobs:
        match job.WhichOneof("variant"):
            case "initialize_workflow":
                _refuse_if_short(job.initialize_workflow.arguments, definition)
            case "signal_workflow":
                _refuse_if_short(job.signal_workflow.input, definition.signals.get(job.signal_workflow.signal_name))
            case "do_update":
                _refuse_if_short(job.do_update.input, definition.updates.get(job.do_update.name))
    return activate(activation)


def _refuse_if_short(given: MutableSequence[Payload], taker: Any) -> None:
    if taker is not None and len(given) != len(taker.arg_types or ()):
        del given[:]
        given.append(_refused())


def _refused() -> Payload:
    return Payload(metadata={"encoding": _REFUSED.encode()})


class SealedPayloadConverter(CompositePayloadConverter):
    def __init__(self) -> None:
        super().__init__(_Refusal(), *PydanticPayloadConverter().converters.values())


def sealed_data_converter(settings: Settings) -> DataConverter:
    """Return the data converter of every client and worker of this installation."""
    return DataConverter(payload_converter_class=SealedPayloadConverter, payload_codec=Sealing(seal_key(settings)))


def seal_key(settings: Settings) -> bytes:
    """Return the installation's key: from the settings, or else from a file in the root, which is made if missing."""
    if settings.seal_key is not None:
        return settings.seal_key.get_secret_value().encode()
    private_folder(settings.root_path)
    path = settings.root_path / _KEY_FILE
    if not path.exists():
        _make_key(path)
    return path.read_bytes().strip()


def sync_key(settings: Settings) -> bytes:
    """Return the key by which samplers know the installation's trainers. It never goes through Temporal."""
    return hmac.digest(seal_key(settings), b"weight sync", "sha256")


def _make_key(path: Path) -> None:
    """Write a new key, readable by its owner alone from the start; of several processes at once, one wins."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()
