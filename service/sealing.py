"""The installation's keys: payloads of Temporal sealed, and published versions signed."""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from temporalio import converter
from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.exceptions import ApplicationError
from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from longshore.fields import bounded
from longshore.views import PAYLOAD_TYPE, Envelope, PublicKey, Signature
from shared.errors import CorruptArtifact, InvalidInput, NotFound, WrongSealKey
from shared.provenance import Statement, enveloped, statement_in
from shared.settings import Settings
from shared.storage.files import private_folder
from shared.storage.paths import SEAL_KEYS
from shared.storage.store import ObjectStore, open_store

# --- The keys of an installation, which authenticate service and hosts to each other ---
# The first one seals, all open.
#
# The store lists the ids of all keys that have sealed anything, in the order of their first use. So a process notices
# that its own key is wrong, and can tell a payload under a key that it lacks from a forged one under an unlisted key.

_KEY_FILE = "seal.key"


@dataclass(frozen=True)
class SealKey:
    secret: bytes = field(repr=False)

    @cached_property
    def id(self) -> str:
        """The key's name in payloads, in the store and in messages: 16 hex digits that do not reveal the key."""
        return self.derived(b"key id")[:8].hex()

    def derived(self, purpose: bytes) -> bytes:
        """Return a key of 32 bytes for one purpose."""
        return hmac.digest(self.secret, purpose, "sha256")


@dataclass(frozen=True)
class SealKeys:
    """The keys of one process, the one that seals first, and the store that lists the installation's."""

    keys: tuple[SealKey, ...]
    store: ObjectStore = field(repr=False)

    @classmethod
    def of(cls, settings: Settings) -> "SealKeys":
        """Return the keys of the settings, or else of a file in the root, which is made if missing."""
        return cls(seal_keys(settings), open_store(settings.store, settings.s3))

    @property
    def current(self) -> SealKey:
        return self.keys[0]

    def admit(self) -> None:
        """Put the key that seals on the store's list. Blocking. Raises as `check`."""
        if not (listed := self.check()):
            self.store.put_if_absent(SEAL_KEYS, json.dumps([self.current.id]).encode())
            listed = self.check()
        if self.current.id not in listed:
            self.store.put_bytes(SEAL_KEYS, json.dumps([*listed, self.current.id]).encode())

    def check(self) -> list[str]:
        """Return the store's list. Blocking. Raises WrongSealKey: the last key, which seals, is not one of these."""
        listed = self.listed()
        if listed and found_key(self.keys, listed[-1]) is None:
            own = ", ".join(key.id for key in self.keys)
            raise WrongSealKey(f"this installation seals with the key {listed[-1]}, and not with {own}: {MEND}")
        return listed

    def listed(self) -> list[str]:
        """Return the ids of the store's list. Blocking."""
        try:
            found: list[str] = json.loads(self.store.get_bytes(SEAL_KEYS))
        except NotFound:
            return []
        return found


MEND = "set LONGSHORE_SEAL_KEY as elsewhere (docs/hardening.md#keys-and-their-rotation)"


def seal_keys(settings: Settings) -> tuple[SealKey, ...]:
    """Return this process's keys, without checking the store's list. Raises InvalidInput: the root's file has none."""
    if settings.seal_key is not None:
        given = settings.seal_key.get_secret_value()
    else:
        private_folder(settings.root_path)
        path = settings.root_path / _KEY_FILE
        if not path.exists():
            _make_key(path)
        given = path.read_text()
    if not (keys := tuple(SealKey(part.encode()) for part in given.split())):
        raise InvalidInput("there is no key in this file", str(settings.root_path / _KEY_FILE))
    return keys


def found_key(keys: Sequence[SealKey], key_id: str) -> SealKey | None:
    return next((key for key in keys if key.id == key_id), None)


def has_seal_key(settings: Settings) -> bool:
    """Return True if this process is given a key, or its root has one: none has to be made."""
    return settings.seal_key is not None or (settings.root_path / _KEY_FILE).exists()


def sync_key(settings: Settings) -> bytes:
    """Return the key that authenticates the installation's trainers to samplers. It never goes through Temporal."""
    return seal_keys(settings)[0].derived(b"weight sync")


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


# --- Signing ---
# The key that an installation signs statements with (shared/provenance.py), and the check of its signatures.


class Signer:
    """Signs with a key derived from the sealing key: only holders of that key can sign."""

    def __init__(self, settings: Settings) -> None:
        self._key = _signing_key(seal_keys(settings)[0])

    @property
    def public_key(self) -> PublicKey:
        return _described(self._key.public_key())

    def sign(self, statement: Statement) -> Envelope:
        """Return the envelope of a statement; equal statements have equal ones."""
        envelope = enveloped(statement)
        signature = base64.b64encode(self._key.sign(envelope.signed_bytes)).decode()
        return envelope.model_copy(update={"signatures": (Signature(keyid=self.public_key.keyid, sig=signature),)})


def public_keys(settings: Settings) -> tuple[PublicKey, ...]:
    """Return the keys that verify statements of this installation, the current one first."""
    return tuple(_described(_signing_key(key).public_key()) for key in seal_keys(settings))


def _signing_key(key: SealKey) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(key.derived(b"provenance"))


def checked(envelope: Envelope, keys: Iterable[PublicKey]) -> Statement:
    """Return the statement of an envelope that one of these keys has signed.

    Raises:
        CorruptArtifact: none has, or it is no statement.
        InvalidInput: a key cannot be read.
    """
    by_id = {key.keyid: key for key in map(read_key, (key.pem for key in keys))}
    for signature in envelope.signatures:
        if (key := by_id.get(signature.keyid)) is None:
            continue
        try:
            _loaded(key.pem).verify(base64.b64decode(signature.sig, validate=True), envelope.signed_bytes)
            if envelope.payload_type != PAYLOAD_TYPE:
                raise CorruptArtifact(f"a statement of another type, {envelope.payload_type!r}", "payloadType")
            return statement_in(envelope)
        except (InvalidSignature, ValueError) as error:
            reason = str(error) or "the signature is of something else"
            raise CorruptArtifact(f"it is not what key {key.keyid[:16]} signed: {reason}", "signatures") from error
    signed_by = ", ".join(each.keyid[:16] for each in envelope.signatures) or "nobody"
    raise CorruptArtifact(f"it is signed by {signed_by}, and the keys are {', '.join(k[:16] for k in by_id)}", "keyid")


def read_key(pem: str) -> PublicKey:
    """Return a key with its own id. Raises InvalidInput: it is no public key of Ed25519 in PEM."""
    return _described(_loaded(pem))


def _loaded(pem: str) -> Ed25519PublicKey:
    try:
        key = load_pem_public_key(pem.encode())
    except ValueError as error:
        raise InvalidInput(f"no public key in PEM: {error}", "key") from error
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInput("keys are of Ed25519", "key")
    return key


def _described(key: Ed25519PublicKey) -> PublicKey:
    raw = key.public_bytes(Encoding.Raw, PublicFormat.Raw)
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    return PublicKey(keyid=hashlib.sha256(raw).hexdigest(), pem=pem)


# --- Encrypts every payload that goes through Temporal, so that its server and database reveal nothing ---
#
# Every payload (inputs of workflows and activities, signals, updates, queries, results, heartbeats, memos, and the
# messages of failures) is encrypted by AES-256-GCM. Its associated data are the workflow's id and, for an activity's
# inputs and results, the activity's name. The service and the hosts hold the keys. Payloads that none of the keys
# opens, or of another workflow, are refused: a start fails at once, a signal is dropped, an update is rejected, an
# activity is not run. A seal does not prevent reuse: a run's first activity checks that its input is not used twice
# (activities/records.py).
#
# A payload under a key that the installation has, but this process lacks, is not refused: the workflow's task fails,
# and is retried until a host with that key takes it.

UNSEALED = "Unsealed"
"""The error type of payloads that no key of the installation opens, or of another workflow."""

ENCRYPTED = b"binary/encrypted"
KEY_ID, _SCOPE = "encryption-key-id", "longshore-scope"
_NONCE_BYTES = 12
_REFUSED = "longshore/refused"
# Temporal gives a scheduled workflow the id of the schedule's action plus the time.
_ACTION = re.compile(r"(schedule/.*)-\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_log = logging.getLogger("longshore.codec")
Scope = tuple[str, ...]
"""Namespace, workflow and possibly activity, for which a seal is good."""


class Sealing(converter.PayloadCodec, converter.WithSerializationContext):
    """Seals payloads that are sent and opens those received.

    Args:
        leave: ends a process that lacks the current sealing key, before it fails work that others could do.
    """

    def __init__(self, keys: SealKeys, scope: Scope = (), leave: Callable[[], None] | None = None) -> None:
        self.keys = keys
        self._scope = scope
        self._leave = leave
        self._ciphers: dict[str, _Cipher] = {}

    def with_context(self, context: converter.SerializationContext) -> Self:
        match context:
            case converter.WorkflowSerializationContext():
                scope: Scope = (context.namespace, _id_of(context))
            case converter.ActivitySerializationContext():
                # Where the result of an activity without a workflow is read, its name is not known.
                name = context.activity_type or "" if context.workflow_id else ""
                scope = (context.namespace, _id_of(context), name)
            case _:
                scope = ()
        return type(self)(self.keys, scope, self._leave)

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [self._sealed(payload) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Return payloads as they were before they were sealed. One that was not, for this scope, cannot be converted
        later.

        Raises WrongSealKey: this process lacks its key.
        """
        return [await self._opened(payload) for payload in payloads]

    def _sealed(self, payload: Payload) -> Payload:
        return self._cipher(self.keys.current).seal(payload)

    async def _opened(self, payload: Payload) -> Payload:
        if payload.metadata.get("encoding") != ENCRYPTED:
            return _refused()
        key_id = key_of(payload)
        if (key := found_key(self.keys.keys, key_id)) is not None:
            return self._cipher(key).open(payload) or _refused()
        if key_id not in (listed := await asyncio.to_thread(self.keys.listed)):
            return _refused()
        problem = f"sealed with the key {key_id} of this installation, which this process lacks: {MEND}"
        if self._leave is not None and key_id == listed[-1]:
            _log.error("this process leaves: %s", problem)
            self._leave()
        raise WrongSealKey(problem)

    def _cipher(self, key: SealKey) -> "_Cipher":
        if key.id not in self._ciphers:
            self._ciphers[key.id] = _Cipher(key, self._scope)
        return self._ciphers[key.id]


class _Cipher:
    """Seals and opens the payloads of one scope by one key.

    Each scope has a separate AES key, so that no key comes near the limit of random nonces.
    """

    def __init__(self, key: SealKey, scope: Scope) -> None:
        self._bound = _framed(key.id.encode(), *(name.encode() for name in scope))
        self._aead = AESGCM(key.derived(_framed(b"payload") + self._bound))
        self._metadata = {"encoding": ENCRYPTED, KEY_ID: key.id.encode(), _SCOPE: json.dumps(scope).encode()}

    def seal(self, payload: Payload) -> Payload:
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._aead.encrypt(nonce, payload.SerializeToString(), self._bound)
        return Payload(metadata=self._metadata, data=nonce + sealed)

    def open(self, payload: Payload) -> Payload | None:
        """Return the decrypted payload; None if it was not sealed by this key for this scope."""
        nonce, sealed = payload.data[:_NONCE_BYTES], payload.data[_NONCE_BYTES:]
        try:
            return Payload.FromString(self._aead.decrypt(nonce, sealed, self._bound))
        except (InvalidTag, ValueError):  # ValueError: it is too short
            return None


def key_of(payload: Payload) -> str:
    """Return the id of the key in a sealed payload's metadata; an empty one for other payloads."""
    return payload.metadata.get(KEY_ID, b"").decode("ascii", "replace")


def unseal(payload: Payload, keys: Sequence[SealKey]) -> Payload | None:
    """Open a payload under the workflow that it names itself, only for reading. None: it cannot be opened."""
    if (key := found_key(keys, key_of(payload))) is None:
        return None
    try:
        return _Cipher(key, tuple(map(str, json.loads(payload.metadata.get(_SCOPE, b""))))).open(payload)
    except (ValueError, TypeError, RecursionError):  # a scope that nobody here has written
        return None


def _framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _id_of(context: converter.WorkflowSerializationContext | converter.ActivitySerializationContext) -> str:
    action = _ACTION.fullmatch(context.workflow_id or "")
    return action[1] if action else context.workflow_id or ""


# What is done with what was refused.


class _Refusal(converter.EncodingPayloadConverter):
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
    """Activate a workflow, and refuse missing inputs: the SDK itself would retry them for ever."""
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


class SealedPayloadConverter(converter.CompositePayloadConverter):
    def __init__(self) -> None:
        super().__init__(_Refusal(), *PydanticPayloadConverter().converters.values())


class BoundedFailures(converter.DefaultFailureConverter):
    """Failures whose words are sealed with the payloads; bounded, as Temporal refuses an activity's long failure, and
    asks for it again until its time is over."""

    def to_failure(
        self, exception: BaseException, payload_converter: converter.PayloadConverter, failure: Failure
    ) -> None:
        super().to_failure(exception, payload_converter, failure)
        words = {"message": bounded(failure.message), "stack_trace": bounded(failure.stack_trace)}
        failure.encoded_attributes.CopyFrom(payload_converter.to_payload(words))
        failure.message, failure.stack_trace = "Encoded failure", ""


def sealed_data_converter(keys: SealKeys, leave: Callable[[], None] | None = None) -> converter.DataConverter:
    """Return the data converter of every client and worker of this installation."""
    return converter.DataConverter(
        payload_converter_class=SealedPayloadConverter,
        payload_codec=Sealing(keys, leave=leave),
        failure_converter_class=BoundedFailures,
    )
