"""The key that an installation signs statements with (shared/provenance.py), and the check of its signatures."""

import base64
import hashlib
from collections.abc import Iterable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from service.sealing.keys import SealKey, seal_keys
from shared.errors import CorruptArtifact, InvalidInput
from shared.provenance import PAYLOAD_TYPE, Envelope, PublicKey, Signature, Statement
from shared.settings import Settings


class Signer:
    """Signs with a key derived from the sealing key: only holders of that key can sign."""

    def __init__(self, settings: Settings) -> None:
        self._key = _signing_key(seal_keys(settings)[0])

    @property
    def public_key(self) -> PublicKey:
        return _described(self._key.public_key())

    def sign(self, statement: Statement) -> Envelope:
        """Return the envelope of a statement; equal statements have equal ones."""
        envelope = Envelope.around(statement)
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
            return envelope.statement
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
