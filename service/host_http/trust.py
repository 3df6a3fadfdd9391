"""Mutual TLS between processes of one installation on different machines.

All of them hold the installation's keys (service/sealing/keys.py). Each process derives the same certificate authority
from each key, and signs its own certificate with the authority of the sealing key. A certificate of one of these
authorities thus proves that its holder has a key; nobody else is served.
"""

import datetime
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from service.sealing.keys import seal_keys
from shared.settings import Settings

# Fixed, so that all derive the same authority. Trust depends on its key, not on its age.
_SINCE, _UNTIL = datetime.datetime(2026, 1, 1), datetime.datetime(2126, 1, 1)


@dataclass(frozen=True)
class Trust:
    """An installation's authorities, by their private keys. The first signs, all are trusted."""

    authorities: tuple[Ed25519PrivateKey, ...]

    @classmethod
    def of(cls, settings: Settings) -> "Trust":
        seeds = (key.derived(b"certificate authority") for key in seal_keys(settings))
        return cls(tuple(map(Ed25519PrivateKey.from_private_bytes, seeds)))

    def server_context(self) -> ssl.SSLContext:
        """Return a server's context: it serves whoever has a certificate of one of the authorities."""
        return self._context(ssl.Purpose.CLIENT_AUTH)

    def client_context(self) -> ssl.SSLContext:
        """Return a client's context: it asks whoever has such a certificate, by whatever name."""
        return self._context(ssl.Purpose.SERVER_AUTH)

    def _context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        trusted = (_certificate("longshore", each, each, number=1) for each in self.authorities)
        pem = "".join(each.public_bytes(Encoding.PEM).decode() for each in trusted)
        context = ssl.create_default_context(purpose, cadata=pem)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        own = Ed25519PrivateKey.generate()
        certificate = _certificate("longshore process", own, self.authorities[0], x509.random_serial_number())
        key = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        with tempfile.NamedTemporaryFile() as file:  # mode 600; the context takes no bytes
            os.write(file.fileno(), certificate.public_bytes(Encoding.PEM) + key)
            context.load_cert_chain(Path(file.name))
        return context


def _certificate(name: str, of: Ed25519PrivateKey, by: Ed25519PrivateKey, number: int) -> x509.Certificate:
    is_authority = of is by
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "longshore")])
    key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        **dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False),
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder(issuer, subject, of.public_key(), number, _SINCE, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(of.public_key()), critical=False)
        .add_extension(key_id, critical=False)
    )
    return builder.sign(by, None)
