"""The one way to Temporal: TLS on both sides."""

import asyncio
import contextlib
import datetime
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from pydantic import SecretStr

from service.temporal import connect_once, connect_temporal
from shared.errors import InvalidInput
from shared.settings import Settings


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.certificate = folder / "ca.pem"
        self._openssl(*("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=authority"))
        (folder / "out.pem").rename(self.certificate)
        (folder / "key.pem").rename(folder / "ca.key")

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate for this name, and its key."""
        signed = ("-CA", str(self.certificate), "-CAkey", str(self._folder / "ca.key"))
        named = (
            "-subj",
            f"/CN={name}",
            "-addext",
            f"subjectAltName=DNS:{name}",
            "-addext",
            "basicConstraints=CA:FALSE",
        )
        self._openssl("req", "-x509", *signed, "-newkey", "rsa:2048", "-nodes", "-days", "1", *named)
        return (
            (self._folder / "out.pem").rename(self._folder / f"{name}.pem"),
            (self._folder / "key.pem").rename(self._folder / f"{name}.key"),
        )

    def expire(self, path: Path) -> None:
        """Issue a certificate again, which has expired an hour ago."""
        old = x509.load_pem_x509_certificate(path.read_bytes())
        key = load_pem_private_key((self._folder / "ca.key").read_bytes(), None)
        hour, now = datetime.timedelta(hours=1), datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            old.issuer, old.subject, old.public_key(), old.serial_number, now - 24 * hour, now - hour
        )
        for each in old.extensions:
            builder = builder.add_extension(each.value, each.critical)
        assert isinstance(key, RSAPrivateKey)
        path.write_bytes(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))

    def _openssl(self, *arguments: str) -> None:
        written = ("-keyout", str(self._folder / "key.pem"), "-out", str(self._folder / "out.pem"))
        subprocess.run(["openssl", *arguments, *written], check=True, capture_output=True)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
async def tls_address(
    authority: Authority, temporal_address: str, request: pytest.FixtureRequest
) -> AsyncIterator[str]:
    """The Temporal server behind mutual TLS: whoever shows no certificate of the authority is hung up on.

    Its own certificate has expired where the parameter says so.
    """
    context, (certificate, key) = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), authority.issue("temporal.test")
    if getattr(request, "param", None) == "the server's":
        authority.expire(certificate)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = temporal_address.partition(":")
        behind, before = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_pipe(reader, before), _pipe(behind, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_hosts_and_service_speak_mutual_tls(tmp_path: Path, authority: Authority, tls_address: str) -> None:
    certificate, key = authority.issue("host")
    settings = Settings(
        root=tmp_path,
        temporal_address=tls_address,
        temporal_tls_ca=authority.certificate,
        temporal_tls_name="temporal.test",
        temporal_tls_cert=certificate,
        temporal_tls_key=key,
    )
    client = await connect_temporal(settings, patience_s=5)
    assert await client.service_client.check_health()
    stranger = Authority(tmp_path / "another").issue("host")
    for changes in (
        {"temporal_tls_ca": None, "temporal_tls_name": None, "temporal_tls_cert": None, "temporal_tls_key": None},
        {"temporal_tls_cert": None, "temporal_tls_key": None},
        {"temporal_tls_cert": stranger[0], "temporal_tls_key": stranger[1]},
        {"temporal_tls_ca": tmp_path / "another" / "ca.pem"},
        {"temporal_tls_name": None},
    ):
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(connect_once(settings.model_copy(update=changes)), 300)


@pytest.mark.parametrize("tls_address", whose := ["the host's", "the server's"], indirect=True, ids=whose)
async def test_an_expired_certificate_is_told_as_that(
    tmp_path: Path, authority: Authority, tls_address: str, request: pytest.FixtureRequest
) -> None:
    certificate, key = authority.issue("host")
    if "the host's" in request.node.name:
        authority.expire(certificate)
    settings = Settings(
        root=tmp_path,
        temporal_address=tls_address,
        temporal_tls_ca=authority.certificate,
        temporal_tls_name="temporal.test",
        temporal_tls_cert=certificate,
        temporal_tls_key=key,
    )
    with pytest.raises(SystemExit) as left:
        await connect_temporal(settings, patience_s=1)
    assert "expired" in str(left.value).lower()


async def test_an_api_key_goes_over_tls_alone(tmp_path: Path, temporal_address: str) -> None:
    """The server here speaks in the clear: it is told no key."""
    settings = Settings(root=tmp_path, temporal_address=temporal_address)
    assert await connect_once(settings)
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(connect_once(settings.model_copy(update={"temporal_api_key": SecretStr("key")})), 300)


async def test_files_of_tls_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.pem: cannot be read"):
        await connect_once(Settings(root=tmp_path, temporal_tls_ca=tmp_path / "nowhere.pem"))
    with pytest.raises(InvalidInput, match="go together"):
        await connect_once(Settings(root=tmp_path, temporal_tls_cert=tmp_path / "nowhere.pem"))
